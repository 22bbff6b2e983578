"""Groups of mixed mode that take rounds of steps by themselves: resumed anywhere, and refused what cannot be."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.jobs import blobs, make_job, resumed, simulated, stop_at, strategy, uneven
from polyrhythm.errors import RequestError
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.strategies.parameter_server.mixed import Models
from sample import failures_of
from simulation.trying import trial

UNEVEN = ConstantCluster(step_s=uneven)


@pytest.mark.parametrize("steps", [2, 3])
def test_in_lock_step_a_resumed_run_has_the_same_bits_also_in_the_middle_of_a_round(
    steps: int, tmp_path: Path
) -> None:
    spec = f"mixed(replicas=2, consistency=synchronous, inside=local_sgd(steps={steps}))"
    job = make_job(spec, 3, optimizer="sgd(lr=0.05, momentum=0.9)")
    whole = simulated(job, UNEVEN)
    stopped_at = set()
    for number, stop_s in enumerate((0.03, 0.06, 0.1, 0.14)):
        folder = tmp_path / str(number)
        folder.mkdir()
        kept = replace(job, checkpointing=replace(job.checkpointing, folder=folder))
        first = simulated(kept, stop_at(stop_s))
        stopped_at.add(first.checkpoint_steps[-1])
        if first.events[-1].outcome == "done":  # type: ignore[attr-defined]
            continue
        assert simulated(resumed(kept), UNEVEN).sha256 == whole.sha256
    assert len(stopped_at) > 1


def test_a_checkpoint_in_the_middle_of_a_round_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 steps an epoch and rounds of 3: the checkpoint after the first epoch holds models that are apart."""
    job = make_job("mixed(replicas=2, consistency=synchronous, inside=local_sgd(steps=3))", 4)
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path, checkpoints=9))
    whole = simulated(kept, UNEVEN)
    first, *later = sorted((tmp_path / FOLDER).iterdir())
    for path in later:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    gone_on: list[tuple[int, bool]] = []
    inner = Models.start

    def start(self: Models, step: int) -> int:
        begun = inner(self, step)
        gone_on.append((begun, self.apart))
        return begun

    monkeypatch.setattr(Models, "start", start)
    assert simulated(resumed(kept), UNEVEN).sha256 == whole.sha256
    assert gone_on == [(4, True)] * 4, first


@pytest.mark.parametrize("stop_s", [0.02, 0.05])
def test_free_running_groups_lose_and_double_nothing_when_they_are_resumed(
    stop_s: float, tmp_path: Path
) -> None:
    job = make_job("mixed(replicas=2, inside=local_sgd(steps=2))", 4, dataset=blobs(train=96), epochs=3)
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path))
    first = simulated(kept, stop_at(stop_s))
    assert first.events[-1].outcome == "interrupted"  # type: ignore[attr-defined]
    second = simulated(resumed(kept), UNEVEN)
    rounds = job.steps_per_epoch * job.learning.epochs // 2
    assert sum(second.result["staleness"]["histogram"].values()) == 2 * rounds
    assert second.result["test_top1"] > 0.8


REFUSED = {
    "lazy_synchronous": "gradients travel while the next forward pass runs",
    "parallel_sgd": "its workers meet in the end only",
    "bmuf": "its rounds begin at points, or at times, of their own",
    "post_local_sgd": "its rounds begin at points, or at times, of their own",
    "d_psgd": "its workers never hold the same model",
    "ad_psgd": "its workers never hold the same model",
    "parameter_server": "it has servers of its own",
}


@pytest.mark.parametrize("inside", REFUSED)
def test_what_cannot_go_on_inside_a_group_is_refused_with_the_reason(inside: str) -> None:
    with pytest.raises(
        RequestError, match=rf"mixed\(inside={inside}\): .*{REFUSED[inside]}.*: use synchronous"
    ):
        strategy(f"mixed(inside={inside})").check(4)


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ("consistency=backup(spare=1)", "a late group would lose a whole round: use another consistency"),
        ("merge=delay_compensated", "a round of several steps is none: use merge=staleness_aware"),
    ],
)
def test_what_rounds_cannot_be_combined_with_is_refused(other: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        strategy(f"mixed(inside=local_sgd, {other})").check(6)


@pytest.mark.parametrize(
    ("spec", "workers"),
    [
        ("mixed(replicas=2, inside=local_sgd(steps=3))", 5),
        ("mixed(servers=2, consistency=bounded_staleness(s=1), inside=local_sgd(steps=2))", 5),
        ("mixed(replicas=5, inside=synchronous(transfer=bfloat16))", 10),
    ],
)
def test_what_is_declared_holds_under_faults(spec: str, workers: int) -> None:
    """7 steps are no whole number of rounds; gradients of ten workers are larger than bfloat16 can tell apart."""
    assert failures_of(trial(spec, workers=workers, steps=7), range(10)) == ()
