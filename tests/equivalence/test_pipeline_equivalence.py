"""A pipeline with a flush is one rank that does the same microbatches, and one without is its rule, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.jobs import (
    CLASSES,
    SIDE,
    blobs,
    cosine,
    make_job,
    result_of,
    resumed,
    shared_out,
    simulated,
    uneven,
    vector_of,
)
from polyrhythm.data.dataset import TensorSplit
from polyrhythm.data.dealing import epoch_order
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import Event, Restarted
from polyrhythm.launch.children import RankLost, run_restarting
from polyrhythm.partition.chain import Chain
from polyrhythm.roles.job import Job
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import ConstantCluster, simulate_on
from polyrhythm.strategies.pipeline import pipeline
from tolerances import REORDERED
from unit.simulation.clusters import cluster

UNEVEN = ConstantCluster(step_s=uneven)
FLUSHING = ["gpipe", "one_forward_one_backward", "zero_bubble"]
BATCH = 12


def layered() -> nn.Module:
    """Makes a network of ten children, some of them with weights."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * SIDE * SIDE, 9),
        nn.Tanh(),
        nn.Linear(9, 8),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
    )


def drawing() -> nn.Module:
    """Makes a network that normalizes by batch and draws random numbers in two places."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(3 * SIDE * SIDE, 9), nn.Dropout(0.4), nn.ReLU(), nn.Linear(9, CLASSES),
    )  # fmt: skip


class Skipping(nn.Module):
    """A network whose values skip layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1)
        self.third = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3 * SIDE * SIDE, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        first = torch.tanh(self.first(images))
        second = torch.tanh(self.second(first))
        third = torch.tanh(self.third(second)) + first * 0.5
        return self.head(torch.flatten(third + second, 1))


def job_of(spec: str, workers: int, **options: object) -> Job:
    """Makes a job whose workers have together 12 pictures a step; the last step of an epoch is ragged."""
    return make_job(spec, workers, batch_size=BATCH // workers, **({"model": layered} | options))  # type: ignore[arg-type]


def microbatched(job: Job, microbatches: int) -> nn.Module:
    """Trains one model in plain torch, whose gradients are added up over microbatches."""
    learning, train = job.learning, job.dataset.train
    torch.manual_seed(learning.seed)
    model = job.make_model()
    optimizer = learning.optimizer.create(model.parameters())
    step = 0
    for epoch in range(learning.epochs):
        batches = shared_out(epoch_order(len(train), epoch, learning.seed), BATCH)
        for indices in batches:
            for group in optimizer.param_groups:
                group["lr"] = cosine(job, step, len(batches) * learning.epochs)
            optimizer.zero_grad()
            for part in indices.tensor_split(microbatches):
                images = train.images(part).to(next(model.parameters()).dtype)
                loss = functional.cross_entropy(model(images), train.labels[part])
                (loss * (len(part) / len(indices))).backward()
            optimizer.step()
            step += 1
    return model


@pytest.mark.parametrize(("workers", "optimizer"), [(1, "adam"), (2, "lars"), (4, "sgd(momentum=0.9)")])
@pytest.mark.parametrize("schedule", FLUSHING)
def test_stages_train_as_one_rank_bit_for_bit(workers: int, schedule: str, optimizer: str) -> None:
    job = job_of(f"pipeline(schedule={schedule}, microbatches=4)", workers, optimizer=optimizer)
    found = simulated(job, UNEVEN)
    assert torch.equal(vector_of(found.models[0]), vector_of(microbatched(job, 4)))
    assert found.result["staleness"]["mean"] == 0


@pytest.mark.parametrize("v", [1, 2, 4])
def test_interleaved_stages_train_as_one_rank_bit_for_bit(v: int) -> None:
    job = job_of(f"pipeline(schedule=interleaved(v={v}), microbatches=4)", 2)
    assert torch.equal(vector_of(simulated(job).models[0]), vector_of(microbatched(job, 4)))


def test_values_that_skip_stages_are_carried_on() -> None:
    whole = microbatched(job_of("pipeline", 4, model=Skipping), 4)
    for spec in ("pipeline", "pipeline(cut=[first, second, third])", "pipeline(recompute=True)"):
        assert torch.equal(vector_of(simulated(job_of(spec, 4, model=Skipping)).models[0]), vector_of(whole))


def test_random_numbers_and_normalization_do_not_depend_on_where_the_network_is_cut() -> None:
    """Nor do running statistics, of which the test loss is made."""
    found = {
        (spec, workers): simulated(job_of(spec, workers, model=drawing, optimizer="adam"))
        for spec, workers in [
            ("pipeline", 1),
            ("pipeline", 2),
            ("pipeline(recompute=True)", 3),
            ("pipeline(schedule=zero_bubble)", 3),
            ("pipeline(schedule=interleaved)", 2),
        ]
    }
    assert len({each.sha256 for each in found.values()}) == 1
    assert len({each.result["test_loss"] for each in found.values()}) == 1


# What a worker holds


def real_parameters(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if not value.is_meta}


@pytest.mark.parametrize(
    "spec", ["pipeline(microbatches=4)", "pipeline(schedule=interleaved, microbatches=4)"]
)
def test_a_worker_has_memory_for_its_own_stages_alone(spec: str) -> None:
    found = simulated(job_of(spec, 3, model=drawing))
    held = [real_parameters(model) for model in found.models]
    every = {name for name, _ in drawing().named_parameters()}
    assert held[0] == every  # worker 0 tests and saves the whole
    assert held[1].isdisjoint(held[2])
    assert held[1] | held[2] < every
    for model in found.models[1:]:
        assert not any(value.is_meta for value in model.buffers())
        for name, value in model.named_parameters():
            trained = value.grad is not None and not value.is_meta
            assert trained == (name in real_parameters(model))
    assert torch.equal(
        vector_of(found.models[0]),
        vector_of(simulated(job_of("pipeline(microbatches=4)", 1, model=drawing)).models[0]),
    )


class Looking(nn.Module):
    """A network that looks at numbers while it is made, which it cannot on shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layered()
        self.scale = float(torch.ones(3).sum())
        self.shift = torch.full((1,), 0.25)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images * self.scale) + self.shift


def test_a_network_that_looks_at_numbers_is_made_whole_on_all_workers() -> None:
    job = job_of("pipeline(microbatches=4)", 3, model=Looking)
    assert torch.equal(vector_of(simulated(job).models[0]), vector_of(microbatched(job, 4)))


def test_no_cut_is_made_before_a_view_that_is_overwritten() -> None:
    """As EfficientNet's dropout overwrites the flattened pool; the gradient of what came over a cut would be lost."""

    def overwriting() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.Flatten(), nn.ReLU(inplace=True),
            nn.Linear(3 * SIDE * SIDE, 5), nn.Tanh(), nn.Linear(5, CLASSES),
        )  # fmt: skip

    assert Chain(overwriting(), torch.zeros(1, 1, SIDE, SIDE)).names() == ["2", "3", "4", "5"]
    job = job_of("pipeline(microbatches=4)", 4, model=overwriting)
    assert torch.equal(vector_of(simulated(job).models[0]), vector_of(microbatched(job, 4)))


def test_only_the_first_stage_reads_pictures() -> None:
    read: list[int] = []

    class Counted(TensorSplit):
        def images(self, indices: Tensor) -> Tensor:
            read.append(len(indices))
            return super().images(indices)

    whole = blobs()
    train = Counted(whole.train.images(torch.arange(len(whole.train))), whole.train.labels)
    job = job_of("pipeline(microbatches=4)", 3, dataset=replace(whole, train=train), epochs=1)
    read.clear()
    simulated(job)
    assert sum(read) == len(whole.train)


@pytest.mark.parametrize("stages", [1, 2])
def test_copies_of_stages_are_one_large_batch(stages: int) -> None:
    job = job_of(f"pipeline(replicas=2, stages={stages}, microbatches=2)", 2 * stages, dtype=torch.float64)
    whole = make_job("synchronous", 1, batch_size=BATCH, model=layered, dtype=torch.float64)
    torch.testing.assert_close(
        vector_of(simulated(job, UNEVEN).models[0]),
        vector_of(simulated(whole).models[0]),
        **REORDERED,
    )


def normalizing() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1), nn.BatchNorm2d(2),
        nn.Flatten(), nn.Linear(2 * SIDE * SIDE, CLASSES),
    )  # fmt: skip


def test_one_microbatch_is_normalized_by_the_whole_batch_and_several_each_by_its_own() -> None:
    """Running statistics, too, are then those that torch keeps of whole batches; outputs of several are not."""
    whole = microbatched(job_of("pipeline", 3, model=normalizing), 1)
    found = simulated(job_of("pipeline(microbatches=1)", 3, model=normalizing)).models[0]
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    several = simulated(job_of("pipeline(microbatches=4)", 3, model=normalizing)).models[0]
    assert torch.equal(
        vector_of(several), vector_of(microbatched(job_of("pipeline", 3, model=normalizing), 4))
    )
    assert not torch.allclose(vector_of(several), vector_of(whole), rtol=1e-3)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("microbatches", [4, 5])
def test_several_microbatches_are_normalized_by_the_whole_batch_by_choice(
    microbatches: int, recompute: bool
) -> None:
    """Stages with such layers wait for all microbatches: outputs and running statistics are those of plain torch."""
    spec = f"pipeline(schedule=gpipe, normalize=batch, microbatches={microbatches}, recompute={recompute})"
    job = job_of(spec, 3, model=normalizing, dtype=torch.float64)
    whole = microbatched(job, 1)
    found = simulated(job, UNEVEN).models[0]
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, **REORDERED)
    each = simulated(
        job_of(
            f"pipeline(schedule=gpipe, microbatches={microbatches})",
            3,
            model=normalizing,
            dtype=torch.float64,
        )
    )
    assert not torch.allclose(vector_of(each.models[0]), vector_of(whole), rtol=1e-3)


@pytest.mark.parametrize(("replicas", "workers"), [("[2, 1]", 3), ("[1, 3]", 4), ("[1, 2, 1]", 4)])
@pytest.mark.parametrize("schedule", ["gpipe", "one_forward_one_backward"])
def test_copies_among_which_microbatches_are_dealt_out_are_one_rank(
    replicas: str, workers: int, schedule: str
) -> None:
    """To rounding, also in the ragged last step of an epoch, whose microbatches differ in size; loss and all."""
    spec = f"pipeline(replicas={replicas}, microbatches=4, schedule={schedule})"
    job = job_of(spec, workers, dtype=torch.float64, optimizer="adam")
    found = simulated(job, UNEVEN)
    torch.testing.assert_close(vector_of(found.models[0]), vector_of(microbatched(job, 4)), **REORDERED)


def test_dealt_microbatches_whose_worker_is_asked_to_stop_end_the_run_for_all() -> None:
    job = job_of("pipeline(replicas=[1, 2], microbatches=2)", 3, epochs=3)
    found = simulated(job, replace(UNEVEN, stop_at_s=0.1))
    assert 0 < found.result["steps"] < job.calendar.total_steps


# Without a flush: the rules, by hand

STAGES = [slice(0, 4), slice(4, 7), slice(7, 10)]
CUT = "cut=['3', '6']"


def stream(job: Job, microbatches: int) -> list[tuple[list[Tensor], float]]:
    """Gives the pictures' numbers in microbatches of each batch of the first epoch, and its learning rate."""
    batches = shared_out(epoch_order(len(job.dataset.train), 0, job.learning.seed), BATCH)
    return [
        (list(indices.tensor_split(microbatches)), cosine(job, step, len(batches)))
        for step, indices in enumerate(batches)
    ]


def by_hand(job: Job, units: Sequence[tuple[list[Tensor], float]], delays: Sequence[int]) -> Tensor:
    """Trains by w(t+1) = w(t) - lr grad f(w_0(t - d_0), w_1(t - d_1), …), each unit t the mean over its parts."""
    train = job.dataset.train
    torch.manual_seed(job.learning.seed)
    model = job.make_model()
    layers = [list(model[place].parameters()) for place in STAGES]
    history = [[[value.detach().clone() for value in stage] for stage in layers]]
    for number, (parts, rate) in enumerate(units):
        for stage, (layer, delay) in enumerate(zip(layers, delays, strict=True)):
            for parameter, value in zip(layer, history[max(0, number - delay)][stage], strict=True):
                parameter.data = value.clone()
        model.zero_grad()
        whole = sum(map(len, parts))
        for part in parts:
            loss = functional.cross_entropy(model(train.images(part).double()), train.labels[part])
            (loss if len(parts) == 1 else loss * (len(part) / whole)).backward()
        history.append(
            [
                [value - rate * parameter.grad for value, parameter in zip(values, stage, strict=True)]  # type: ignore[operator]
                for values, stage in zip(history[-1], layers, strict=True)
            ]
        )
    return torch.cat([value.reshape(-1) for stage in history[-1] for value in stage])


@pytest.mark.parametrize(
    ("spec", "delays", "microbatches"),
    [
        ("weight_stashing", (2, 1, 0), 1),
        ("weight_stashing", (2, 1, 0), 3),
        ("weight_stashing(vertical=True)", (2, 2, 2), 1),
        ("weight_stashing(vertical=True)", (2, 2, 2), 2),
        ("double_buffered", (1, 1, 1), 3),
        ("double_buffered", (1, 1, 1), 4),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_pipeline_without_a_flush_keeps_to_its_rule(
    spec: str, delays: tuple[int, ...], microbatches: int, recompute: bool
) -> None:
    text = f"pipeline(schedule={spec}, microbatches={microbatches}, {CUT}, recompute={recompute})"
    job = job_of(text, 3, epochs=1, dtype=torch.float64, optimizer="sgd(momentum=0.0)")
    batches = stream(job, microbatches)
    units = batches
    if spec.startswith("weight_stashing"):
        units = [([part], rate) for parts, rate in batches for part in parts]
    found = simulated(job, UNEVEN)
    torch.testing.assert_close(
        vector_of(found.models[0]), by_hand(job, units, delays), rtol=1e-12, atol=1e-14
    )
    count = len(units)
    histogram = {int(key): value for key, value in found.result["staleness"]["histogram"].items()}
    expected: dict[int, int] = {}
    for delay in delays:
        for number in range(count):
            expected[min(number, delay)] = expected.get(min(number, delay), 0) + 1
    assert histogram == expected


# Checkpoints, and what is refused


def test_it_resumes_with_the_bits_of_a_run_without_a_break_also_in_other_stages(tmp_path: Path) -> None:
    job = job_of("pipeline(microbatches=4)", 4, optimizer="adam", epochs=3)
    whole = simulated(job, UNEVEN)
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path))
    first = simulated(kept, replace(UNEVEN, stop_at_s=0.1))
    assert 0 < first.checkpoint_steps[-1] < whole.result["steps"]
    second = simulated(resumed(kept), UNEVEN)
    assert second.sha256 == whole.sha256


def test_it_resumes_where_layers_are_measured_otherwise_and_the_cut_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("pipeline(microbatches=4, balance=auto)", 3, optimizer="adam", epochs=3)
    whole = simulated(job, UNEVEN)
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path))
    cuts = iter([(0, 1, 3), (0, 4, 6)])
    for session, stop_s in ((kept, 0.1), (resumed(kept), None)):
        start = next(cuts)
        monkeypatch.setattr(pipeline, "fastest", lambda pieces, *_, start=start: (*start, len(pieces)))
        found = simulated(session, replace(UNEVEN, stop_at_s=stop_s))
    assert found.sha256 == whole.sha256


@pytest.mark.parametrize("lost", [0, 2])
def test_a_run_that_loses_a_stage_starts_again_from_its_last_checkpoint(lost: int, tmp_path: Path) -> None:
    """By itself, and to the bits of a run without a death."""
    job = job_of("pipeline(microbatches=4)", 3, optimizer="adam", epochs=3)
    whole = simulated(job)
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path))
    ends: list[Event] = []
    said: list[str] = []

    def play(session: Job, emit: Callable[[Event], None]) -> bool:
        faults = [] if said else [f"kill(rank={lost}, at_s=15.5)"]
        where = cluster({"count": 3}, faults=faults)
        layout = lay_out(where, 3, 0, session.traits.placement)
        try:
            simulate_on(layout, session, emit)
        except RunError as error:
            said.append(str(error))
            raise RankLost(str(error), "") from None
        return False

    assert run_restarting(kept, play, ends.append, restarts=1) is False
    assert f"worker {lost} was killed at 15.5 s, and the run needs it" in said[0]
    (again,) = [event for event in ends if isinstance(event, Restarted)]
    assert "from its last checkpoint, epoch 1, step 5" in again.text
    assert result_of(ends)["parameters_sha256"] == whole.sha256


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_stages_goes_on_where_a_checkpoint_ends(workers: int, tmp_path: Path) -> None:
    """As data parallel workers do who go on as so many, optimizer and all."""

    def gone_on(spec: str, stop_s: float) -> Tensor:
        options = {"model": layered, "batch_size": 2, "optimizer": "adam", "dtype": torch.float64}
        folder = tmp_path / spec[:4]
        folder.mkdir()
        job = make_job(spec, 4, folder=folder, **options)  # type: ignore[arg-type]
        assert simulated(job, ConstantCluster(stop_at_s=stop_s)).checkpoint_steps == [5]
        others = make_job(spec, workers, folder=folder, **options)  # type: ignore[arg-type]
        return vector_of(simulated(resumed(others)).models[0])

    expected = gone_on("synchronous", 0.035)
    torch.testing.assert_close(gone_on("pipeline(microbatches=2)", 0.11), expected, **REORDERED)


def test_what_it_cannot_do_is_refused_in_a_line() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(SIDE * SIDE, CLASSES)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(images.flatten(1) if float(images.sum()) > 0 else -images.flatten(1))

    refused = [
        (
            job_of("pipeline", 2, model=Asking),
            r"Asking cannot be cut into stages: .* at test_pipeline_equiv.*py:\d+",
        ),
        (job_of("pipeline(cut=['9'])", 2), "cannot be cut behind '9'; it can behind 0, 1, 2"),
        (job_of("pipeline(cut=['3', '6'])", 2), "cuts behind 2 layers, which makes 3 stages of 2"),
        (make_job("pipeline", 12, model=layered), "asks for 12 stages, and the network can be cut into"),
        (job_of("pipeline", 2, precision="bfloat16"), "runs a network in parts, in full precision"),
    ]
    for job, words in refused:
        with pytest.raises(RequestError, match=words) as caught:
            simulated(job)
        assert "\n" not in str(caught.value)
    for spec, workers, words in [
        ("pipeline(stages=2)", 3, "needs 2 times 1 workers .given 3.: ask for --workers 2"),
        ("pipeline(schedule=interleaved, microbatches=5)", 2, "ask for a multiple of 2 microbatches"),
        ("pipeline(replicas=[2, 1])", 4, r"needs 3 workers, a copy each .given 4.: ask for --workers 3"),
        ("pipeline(normalize=batch)", 2, "use schedule=gpipe, and one number of replicas"),
        (
            "pipeline(normalize=batch, schedule=gpipe, replicas=[2, 1])",
            3,
            "use schedule=gpipe, and one number",
        ),
        ("pipeline(replicas=auto)", 3, "give balance=auto with it, and neither stages nor cut"),
        ("pipeline(replicas=auto, balance=auto, schedule=zero_bubble)", 3, "or give replicas"),
        ("pipeline(replicas=[2, 1], stages=3)", 3, "give one number for each stage"),
        ("pipeline(replicas=[2, 1], schedule=zero_bubble)", 3, "use gpipe or one_forward_one_backward"),
        ("pipeline(replicas=[3, 1], microbatches=2)", 4, "ask for microbatches=3 at least"),
        ("pipeline(replicas=[2, 1], inside=local_sgd)", 3, "use inside=synchronous"),
        ("pipeline(replicas=2, inside=hybrid)", 4, "copies of a stage must be synchronous"),
        ("pipeline(replicas=2, inside=local_sgd, schedule=double_buffered)", 4, "use inside=synchronous"),
    ]:
        with pytest.raises(RequestError, match=words):
            make_job(spec, workers).strategy.check(workers)
