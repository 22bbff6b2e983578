"""Averages of models whose movements are compressed."""

from __future__ import annotations

import pytest
import torch

from conformance.jobs import make_job, simulated, strategy, vector_of
from polyrhythm.config.dry_run import assemble_dry_run
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError
from polyrhythm.strategies.averaging.rounds.rounds_worker import RoundsWorker
from polyrhythm.strategies.resharding import Held, by_fields

FAMILY = ["local_sgd(steps=2", "diloco(steps=2"]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("spec", FAMILY)
def test_at_full_density_models_are_those_of_whole_means(spec, workers):
    plain = simulated(make_job(f"{spec})", workers)).models[0]
    full = simulated(make_job(f"{spec}, compress=top_k(density=1.0, dense_below=0))", workers)).models[0]
    torch.testing.assert_close(vector_of(full), vector_of(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compressor", ["top_k(density=0.1", "one_bit(bucket=1024", "power_sgd(rank=1"])
@pytest.mark.parametrize("spec", FAMILY)
def test_all_begin_the_next_round_at_the_same_bits(spec, compressor):
    trained = simulated(make_job(f"{spec}, compress={compressor}, dense_below=0))", 3))
    vectors = [vector_of(model) for model in trained.models]
    assert all(torch.equal(vector, vectors[0]) for vector in vectors)
    whole = simulated(make_job(f"{spec})", 3))
    assert trained.result["bytes_sent_per_step"] < whole.result["bytes_sent_per_step"]
    assert not torch.equal(vectors[0], vector_of(whole.models[0]))


def test_another_number_of_workers_shares_what_was_kept_back():
    kept = [torch.full((4,), float(worker + 1)) for worker in range(3)]
    states = {
        worker: (
            {"vector": torch.zeros(4), "kept.own.residual": kept[worker]},
            {
                "weight": 1.0,
                "optimizer": {"state": {}, "groups": [], "shapes": [], "optimizer": "SGD"},
                "kept.": {"member": worker, "members": 3},
            },
        )
        for worker in range(3)
    }
    found = by_fields(RoundsWorker.fields, 2).worker_states(Held(torch.zeros(4), (2, 2, 2), states, []), 2)
    for tensors, _ in found.values():  # a sum of 6 over 3 is a sum of 4 over 2
        assert torch.equal(tensors["kept.own.residual"], torch.full((4,), 2.0))


def test_a_dry_run_takes_what_has_its_bytes_by_shapes_and_refuses_what_has_them_by_values():
    told = {"strategy": "local_sgd", "data": "digits", "model": "mlp"}
    dry_run, _ = assemble_dry_run(configure(told | {"compress": "top_k"}), steps=2)
    assert not dry_run.traits.sends_by_value
    for compressor in ("threshold", "adacomp", "qsgd(code=elias)"):
        with pytest.raises(RequestError, match="depend on gradients or batches, and a dry run has none"):
            assemble_dry_run(configure(told | {"compress": compressor}), steps=2)


@pytest.mark.parametrize("compressor", ["sign_sgd", "signum", "dgc"])
def test_what_is_made_for_gradients_is_refused(compressor):
    with pytest.raises(RequestError, match="is made for gradients") as refused:
        strategy(f"local_sgd(compress={compressor})").check(2)
    assert "\n" not in str(refused.value)
