"""What every strategy must do with every loop: train as stated, or refuse in one line; a new one is found by itself.

Each strategy takes a few of the variations, others for each; `LOOPS=all` takes the whole product (10 minutes), or with
`-k NAME` all variations of one strategy, and writes what came of it to `outcomes.json`, of which the site's table
of loops is made:

    LOOPS=all python -m pytest tests/unit/api/loop/test_every_strategy.py
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.api.join import Group
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RequestError
from polyrhythm.specs import choices
from polyrhythm.strategies import FAMILIES
from unit.api.loop.loops import BATCH_SIZE, Loop, loader
from unit.api.loop.test_faithful_loops import BY_MESSAGES, ON_SLICES
from unit.api.loop.threads import run_in_threads
from unit.api.loop.tricks import EXACT, GRADIENTS, NETWORKS, SCHEDULES, WRITES
from unit.api.loop.tricks import OPTIMIZERS as SLICED
from unit.api.loop.variations import VARIATIONS, made, plain

WORKERS = 2
FAMILY_OF = {name: family.rpartition(".")[2] for family in FAMILIES for name in choices(family)}
FAMILY_OF |= dict.fromkeys(BY_MESSAGES, "parameter_server")
SPECS = [*FAMILY_OF]
ALL = os.environ.get("LOOPS") == "all"
EACH = len(VARIATIONS) if ALL else 2
PAIRS = [
    (spec, [*VARIATIONS][(number * 5 + 11 * turn) % len(VARIATIONS)])
    for number, spec in enumerate(SPECS)
    for turn in range(len(VARIATIONS))
    if turn < EACH
]
OUTCOMES = Path(__file__).parent / "outcomes.json"
ROWS = {
    "gradients clipped by norm, by value, layer by layer": ["clip_norm", "clip_value", "clips_each_layer"],
    "`group.clip_grad_norm_`, `group.clip_grad_value_`": ["group_clips"],
    "gradients scaled, replaced, centered, with noise, their signs, dropped, mixed with the last ones": [
        each for each in GRADIENTS if each != "clips_each_layer"
    ],
    "norms that are logged": ["logs_norms"],
    "gradients accumulated, several passes or losses a step": [
        "accumulates", "accumulates_without_exchange", "two_passes", "several_losses", "retained_graph",
        "gradient_of_a_vector", "siamese", "many_steps_a_batch", "zeroes_first",
    ],
    "gradients made by hand (`autograd.grad`, `torch.func`)": [
        "gradients_by_hand", "functional_call", "functional_gradients", "double_backward", "detached_target",
    ],
    "`GradScaler`, with an overflow on one worker": ["scaler_overflows"],
    "parameters frozen and thawed, unused ones, branches by data, `grad = None`": [
        "freezes", "starts_frozen", "unused", "sets_none", "branches_by_data", "grows",
    ],
    "parameters written after the step": ["clamps", *WRITES],
    "sharpness-aware steps, moving averages, teachers, validation inside": [
        "sharpness_aware", "moving_average", "teacher", "validates",
    ],
    "hooks, checkpoints of activations, `torch.compile` before and after": [
        "hooked_gradients", "reentrant", "checkpoint_sequential", "compiled", "compiled_later",
    ],
    "schedules: one-cycle with decay, restarts, cyclic, chained, on plateaus": [
        "one_cycle", "one_cycle_adam", "plateau", *SCHEDULES,
    ],
    "optimizers: Adam and its kin, RMSprop, Adagrad, Adadelta, param groups": ["adam", *SLICED],
    "an optimizer of one's own, `Muon`": ["own_optimizer", "muon"],
    "a closure; LBFGS": ["closure", "lbfgs"],
    "`nn.SyncBatchNorm`": ["synchronized_norm"],
    "convolutions, LSTM, attention, embeddings, tied weights, parametrizations, several dtypes, frozen norms": [
        each
        for each in NETWORKS
        if each not in ("checkpoint_sequential", "compiled", "synchronized_norm")
    ],
}  # fmt: skip
"""What a line of the table stands for."""
_ran: Counter[str] = Counter()


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, dict[str, str]]]:
    """Takes the line of each refusal, by strategy and variation."""
    if not ALL:
        yield json.loads(OUTCOMES.read_text())["refused"]
        return
    found: dict[str, dict[str, str]] = {spec: {} for spec in SPECS}
    yield found
    told = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {"columns": {}, "refused": {}}
    for spec, times in _ran.items():
        if times == len(VARIATIONS):
            told["columns"][spec] = column(spec)
            told["refused"].pop(spec, None)
            told["refused"] |= {spec: found[spec]} if found[spec] else {}
    OUTCOMES.write_text(json.dumps(told | {"rows": ROWS}, indent=1, sort_keys=True) + "\n")


def in_step(spec: str) -> bool:
    traits = strategy_from(spec).traits(WORKERS)
    return traits.identical and traits.exchange_every == 1 and not traits.skips_steps


def column(spec: str) -> str:
    if strategy_from(spec).traits(WORKERS).cuts_network:
        return "divided networks"
    if in_step(spec):
        return "synchronous"
    return {"averaging": "local updates", "gossip": "gossip"}.get(FAMILY_OF[spec], "servers")


def test_each_variation_has_a_line_of_the_table() -> None:
    told = [each for row in ROWS.values() for each in row]
    assert sorted(told) == sorted(VARIATIONS)


@pytest.mark.parametrize(("strategy", "variation"), PAIRS)
def test_a_loop_trains_as_stated_or_is_refused(
    strategy: str, variation: str, outcomes: dict[str, dict[str, str]]
) -> None:
    networks = [made(variation) for _ in range(WORKERS)]
    _ran[strategy] += 1

    def train(group: Group) -> Tensor:
        with group:
            model, optimizer = group.distribute(*networks[group.rank])
            batches = group.shard(loader(BATCH_SIZE, group.workers))
            VARIATIONS[variation](Loop(model, optimizer, batches, group))
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    try:
        first, *others = run_in_threads(strategy, WORKERS, train)
    except RequestError as error:
        refused = str(error)
    else:
        assert all(torch.equal(first, each) for each in others)
        assert bool(first.isfinite().all())
        if in_step(strategy):
            exact = EXACT.get(variation, 1e-12)
            torch.testing.assert_close(first, plain(variation, WORKERS)[0], rtol=exact, atol=exact)
        assert ALL or variation not in outcomes.get(strategy, {}), "the table says that it is refused"
        return
    assert "\n" not in refused
    assert not in_step(strategy) or variation not in ON_SLICES, refused
    refused = refused.partition(": use one of")[0]  # a list that grows with the optimizers
    if ALL:
        outcomes[strategy][variation] = refused
    else:
        assert outcomes.get(strategy, {}).get(variation) == refused
