"""What is said of a pipeline before it runs is what comes of it, and it is cut where a step takes least."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn

from polyrhythm.api.simulate import simulate
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.errors import RequestError
from polyrhythm.partition import outlook
from polyrhythm.partition.chain import Chain
from polyrhythm.partition.outlook import Pace, Work, even_pace, fastest, measured_pieces, stage_times, step_of
from polyrhythm.partition.schedule import SCHEDULES, Schedule
from polyrhythm.partition.stage_memory import RankBytes
from polyrhythm.simulation.cluster import Cluster, HostKind, Link
from polyrhythm.simulation.step_times.constant import Constant
from polyrhythm.specs import build
from polyrhythm.training.model_sizes import PieceSize

MEBI = 1 << 20


def pictures(side: int) -> Dataset:
    images, labels = torch.zeros(1, 3, 1, 1).expand(64, 3, side, side), torch.arange(64) % 4
    split = TensorSplit(images, labels)
    return Dataset("plain", split, split, tuple("abcd"), (3, side, side), default_epochs=1)


def cluster(memory_bytes: float | None = None, bytes_per_s: float = 1.25e9) -> Cluster:
    return Cluster(
        name="four",
        hosts=(HostKind(name="host", count=4, memory_bytes=memory_bytes),),
        nic=Link(latency_s=5e-5, bandwidth_bytes_per_s=bytes_per_s),
        inside=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e10),
        step_time=Constant(seconds=0.8),
    )


def drawn(seed: int) -> tuple[list[PieceSize], Pace]:
    draw = random.Random(seed)
    count, ranks = draw.randint(5, 9), draw.randint(2, 4)
    pieces = [
        PieceSize(str(number), 10, draw.uniform(0.1, 4), (draw.randint(1, 200_000),), 1)
        for number in range(count)
    ]
    speeds = tuple(draw.uniform(0.5, 2) for _ in range(ranks))
    return pieces, Pace(speeds, (1e-4,) * ranks, (draw.choice([1e6, 1e8, 1e12]),) * ranks)


def work_of(spec: str) -> Work:
    made = build("schedule", spec, SCHEDULES)
    assert isinstance(made, Schedule)
    return Work(made, 4, 32)


@pytest.mark.parametrize("spec", ["gpipe", "one_forward_one_backward", "weight_stashing"])
def test_it_is_cut_where_a_step_takes_least(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all cuts, where they are few; else within a fiftieth of the best on average, and never a third above."""
    work, excess = work_of(spec), []
    for seed in range(25):
        pieces, pace = drawn(seed)
        stages = len(pace.step_s)

        def seconds(bounds: tuple[int, ...], pieces: list[PieceSize] = pieces, pace: Pace = pace) -> float:
            return step_of(work, stage_times(work, pieces, bounds, pace), len(pace.step_s))[0]

        every = [seconds((0, *cuts, len(pieces))) for cuts in combinations(range(1, len(pieces)), stages - 1)]
        found = fastest(pieces, stages, work, pace)
        assert found is not None
        assert seconds(found) == pytest.approx(min(every))
        with monkeypatch.context() as patch:
            patch.setattr(outlook, "EXHAUSTIVE", 0)
            climbed = fastest(pieces, stages, work, pace)
        assert climbed is not None
        excess.append(seconds(climbed) / min(every) - 1)
    assert sum(excess) / len(excess) < 0.02
    assert max(excess) < 1 / 3


def test_a_cut_that_does_not_fit_is_not_taken() -> None:
    pieces, pace = drawn(3)
    best = fastest(pieces, len(pace.step_s), work_of("gpipe"), pace)
    other = fastest(pieces, len(pace.step_s), work_of("gpipe"), pace, lambda bounds: bounds != best)
    assert other not in (None, best)
    assert fastest(pieces, len(pace.step_s), work_of("gpipe"), pace, lambda bounds: False) is None


@pytest.mark.parametrize("model", ["vgg16", "resnet18"])
@pytest.mark.parametrize(
    ("keys", "bytes_per_s"),
    [
        ("schedule=gpipe", 1.25e9),
        ("balance=auto", 1.25e9),
        ("balance=auto", 1.25e8),
        ("schedule=weight_stashing", 1.25e9),
    ],
)
def test_the_predicted_step_is_the_simulated_one(
    model: str, keys: str, bytes_per_s: float, tmp_path: Path
) -> None:
    steps = 6

    def seconds(count: int) -> float:
        run = simulate(
            data=pictures(224),
            model=model,
            strategy=f"pipeline(microbatches=8, {keys})",
            workers=4,
            batch_size=8,
            cluster=cluster(bytes_per_s=bytes_per_s),
            gradients="none",
            steps=count,
            out=tmp_path / str(count),
        )
        said.append(run.figures["pipeline"]["predicted_step_s"])
        return float(run.figures["seconds"])

    said: list[float] = []
    # Of a step in the middle: the first one may fill the pipeline, and the network is put together after the last.
    simulated = (seconds(2 * steps) - seconds(steps)) / steps
    assert said[0] == said[1] == pytest.approx(simulated, rel=0.1)


def test_a_host_without_memory_for_its_stage_is_refused_before_the_run(tmp_path: Path) -> None:
    def run(memory_bytes: float) -> object:
        return simulate(
            data=pictures(32),
            model="vgg11",
            strategy="pipeline(microbatches=4)",
            workers=4,
            batch_size=8,
            cluster=cluster(memory_bytes),
            gradients="none",
            steps=1,
            out=tmp_path / "run",
        )

    with pytest.raises(
        RequestError,
        match=r"worker 2 needs 1[.]65 GB for its stage .avgpool to classifier.* and has 315 MB: ask",
    ) as caught:
        run(300 * MEBI)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    run(1e12)


def test_layers_are_measured_without_a_trace() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ticks = iter(range(1000))
    found = measured_pieces(Chain(model, torch.zeros(1, 1, 4, 4)), 5, lambda: float(next(ticks)))
    assert found == [1.0] * 5
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_times_and_shares_are_told_as_in_reports() -> None:
    said = outlook.PipelineForecast(
        (("a", "b"), ("c", "c")), 0.000804, 0.2541, (RankBytes(1, 0, 1, 0, 4),) * 2
    )
    assert said.text.endswith("; 0.8 ms a step, 25 % of it idle, by prediction")
    assert replace(said, step_s=1.234).text.endswith("; 1.2 s a step, 25 % of it idle, by prediction")
    assert replace(said, step_s=None).text.endswith("kB); 25 % of it idle, by prediction")


def compositions(workers: int, most: int) -> list[tuple[int, ...]]:
    if workers == 0:
        return [()]
    ways = [(first, *rest) for first in range(1, workers + 1) for rest in compositions(workers - first, most)]
    return [way for way in ways if len(way) <= most]


@pytest.mark.parametrize("spec", ["gpipe", "one_forward_one_backward"])
def test_copies_are_those_of_the_shortest_step(spec: str) -> None:
    """Beside every way to share workers out and every cut: equal for a slow stage, and rarely far from the best."""
    schedule = work_of(spec).schedule
    excess = []
    for seed in range(12):
        pieces, _ = drawn(seed)
        workers = 2 + seed % 4

        def work(copies: tuple[int, ...]) -> Work:
            return Work(schedule, 6, 48, copies=copies)

        def pace(copies: tuple[int, ...]) -> Pace:
            return even_pace(len(copies))

        def seconds(
            copies: tuple[int, ...], bounds: tuple[int, ...], pieces: list[PieceSize] = pieces
        ) -> float:
            return step_of(
                work(copies), stage_times(work(copies), pieces, bounds, pace(copies)), len(copies)
            )[0]

        every = [
            seconds(copies, (0, *cuts, len(pieces)))
            for copies in compositions(workers, len(pieces))
            if len(copies) > 1
            for cuts in combinations(range(1, len(pieces)), len(copies) - 1)
        ]
        found = outlook.best_copies(pieces, workers, work, pace)
        assert sum(found) == workers
        cuts = combinations(range(1, len(pieces)), len(found) - 1)
        best = min(seconds(found, (0, *each, len(pieces))) for each in cuts)
        excess.append(best / min(every) - 1)
    assert sum(excess) / len(excess) < 0.03
    assert max(excess) < 0.2


def test_a_slow_stage_gets_more_copies_and_a_slow_link_fewer() -> None:
    pieces = [PieceSize("a", 10, 3.0, (1,), 1), PieceSize("b", 10, 1.0, (), 1)]

    def chosen(parameters: int, workers: int = 4) -> tuple[int, ...]:
        own = [replace(piece, parameters=parameters) for piece in pieces]
        return outlook.best_copies(
            own,
            workers,
            lambda copies: Work(work_of("gpipe").schedule, 12, 24, copies=copies),
            lambda copies: Pace((1.0,) * len(copies), (0.0,) * len(copies), (1e6,) * len(copies)),
        )

    assert chosen(10) == (3, 1)
    assert chosen(10, 16) == (12, 4)  # too many ways to try all
    four = [replace(pieces[0], operations=1.0, parameters=10_000_000, outputs=(1,)) for _ in range(4)]
    work = Work(work_of("gpipe").schedule, 6, 24)
    slow = outlook.best_copies(
        four,
        4,
        lambda copies: replace(work, copies=copies),
        lambda copies: Pace((1.0,) * len(copies), (0.0,) * len(copies), (1e6,) * len(copies)),
    )
    assert slow == (1, 1, 1, 1)  # copies would exchange their gradients


def test_a_simulated_run_chooses_copies_by_its_links(tmp_path: Path) -> None:
    run = simulate(
        data=pictures(32),
        model="vgg11",
        strategy="pipeline(microbatches=6, balance=auto, replicas=auto)",
        workers=4,
        batch_size=6,
        cluster=cluster(bytes_per_s=1.25e8),
        gradients="none",
        steps=1,
        out=tmp_path / "run",
    )
    told = run.figures["pipeline"]
    assert len(told["stages"]) >= 2
    with pytest.raises(RequestError, match="give balance=auto with it"):
        simulate(
            data=pictures(32), model="vgg11", strategy="pipeline(replicas=auto)", workers=4, steps=1,
            gradients="none", cluster=cluster(), out=tmp_path / "other",
        )  # fmt: skip
