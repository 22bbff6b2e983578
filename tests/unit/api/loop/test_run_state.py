"""A run that loads what another has saved goes on as if that one had never ended, with as many workers or others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader, Dataset

from polyrhythm.api import join
from polyrhythm.api.join import Group, LoopStage, stage_of
from polyrhythm.api.loop.loop_storage import INDEX, read_folder, write_folder
from polyrhythm.config.stages import Stages
from polyrhythm.errors import RequestError
from polyrhythm.launch.script import STAGE_VARIABLE
from tolerances import REORDERED
from unit.api.loop.threads import run_in_threads

IMAGES, BATCH_SIZE, EPOCHS = 29, 4, 3
MIDDLE = (1, 1)
"""Epoch and step of it after which a run is saved."""


class Points(Dataset[Any]):
    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(5, generator=generator, dtype=torch.float64), index % 3

    def __len__(self) -> int:
        return IMAGES


class Running(nn.Module):
    """Keeps a running mean of what it sees, each worker its own, as batch normalization does."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return torch.tanh(x) + 0.01 * self.mean


class Run:
    """What one worker's loop leaves behind."""

    def __init__(self, noisy: bool = False) -> None:
        torch.manual_seed(3)
        noise = [nn.Dropout(0.3)] if noisy else []
        self.model = nn.Sequential(nn.Linear(5, 6), Running(), *noise, nn.Linear(6, 3)).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.noisy = noisy
        self.seen: list[tuple[int, int]] = []
        self.rates: list[float] = []
        self.saved: dict[str, dict[str, Any]] = {}

    def vector(self) -> Tensor:
        return torch.cat([each.reshape(-1).double() for each in self.model.state_dict().values()])


def train(group: Group, run: Run, state: dict[str, Any] | None = None, folder: Path | None = None) -> Run:
    with group:
        model, optimizer = group.distribute(run.model, run.optimizer)
        generator = None if run.noisy else torch.Generator().manual_seed(9 + group.rank)
        shard = group.shard(DataLoader(Points(), BATCH_SIZE, shuffle=True, generator=generator))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        if state is not None:
            group.load_state_dict(state, scaler)
        if folder is not None and folder.exists():
            group.load(folder, scaler)
        for epoch in group.epochs(EPOCHS, scheduler):
            for step, (indices, x, y) in enumerate(shard):
                run.seen += [(epoch, int(each)) for each in indices]
                scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                run.rates.append(optimizer.param_groups[0]["lr"])
                if state is None and (epoch, step) == MIDDLE:
                    run.saved["middle"] = group.state_dict(scaler)
                    if folder is not None:
                        group.save(folder, scaler)
            if state is None:
                run.saved[f"after {epoch}"] = group.state_dict(scaler)
    return run


def straight(strategy: str, workers: int, *, noisy: bool = False) -> list[Run]:
    runs = [Run(noisy) for _ in range(workers)]
    return run_in_threads(strategy, workers, lambda group: train(group, runs[group.rank]))


def resumed(strategy: str, workers: int, state: dict[str, Any], *, noisy: bool = False) -> list[Run]:
    runs = [Run(noisy) for _ in range(workers)]
    return run_in_threads(strategy, workers, lambda group: train(group, runs[group.rank], state))


EXACT = [
    "synchronous",
    "parameter_server(servers=2, consistency=synchronous)",
    "mixed(replicas=1, consistency=synchronous)",
    "local_sgd(steps=3)",
    "diloco(steps=2)",
    "d_psgd",
]


@pytest.mark.parametrize("point", ["middle", "after 1"])
@pytest.mark.parametrize("strategy", EXACT)
def test_who_goes_in_step_goes_on_to_the_same_bits(strategy: str, point: str) -> None:
    whole = straight(strategy, 2)
    assert whole[1].saved[point] == {}
    for before, after in zip(whole, resumed(strategy, 2, whole[0].saved[point]), strict=True):
        assert after.rates == before.rates[-len(after.rates) :]
        assert after.seen == before.seen[-len(after.seen) :]
        assert torch.equal(before.vector(), after.vector())


@pytest.mark.parametrize("point", ["middle", "after 0"])
def test_what_one_worker_draws_from_is_part_of_the_state(point: str) -> None:
    """Its loader shuffles, and its network drops out, by torch's global generator."""
    torch.manual_seed(4)
    (before,) = straight("synchronous", 1, noisy=True)
    torch.manual_seed(5)
    (after,) = resumed("synchronous", 1, before.saved[point], noisy=True)
    assert after.seen == before.seen[-len(after.seen) :]
    assert torch.equal(before.vector(), after.vector())


@pytest.mark.parametrize("strategy", ["parameter_server(servers=2)", "easgd", "ad_psgd"])
def test_free_runners_go_on_and_see_what_is_left(strategy: str) -> None:
    whole = straight(strategy, 2)
    later = resumed(strategy, 2, whole[0].saved["middle"])
    for before, after in zip(whole, later, strict=True):
        assert after.seen == before.seen[-len(after.seen) :]
        assert after.rates == before.rates[-len(after.rates) :]
    assert torch.equal(later[0].vector(), later[1].vector())


@pytest.mark.parametrize(
    ("before", "after", "point"),
    [(2, 3, "middle"), (3, 2, "after 0"), (1, 2, "after 0"), (2, 1, "middle")],
)
@pytest.mark.parametrize(
    "strategy", ["synchronous", "local_sgd(steps=3)", "parameter_server(servers=2)", "easgd"]
)
def test_other_workers_see_each_image_that_is_left_once(
    strategy: str, point: str, before: int, after: int
) -> None:
    first = straight(strategy, before)
    later = resumed(strategy, after, first[0].saved[point])
    cut = MIDDLE if point == "middle" else (0, IMAGES)
    seen: Counter[tuple[int, int]] = Counter()
    for run in first:
        of_epoch: Counter[int] = Counter()
        for epoch, index in run.seen:
            if (epoch, of_epoch[epoch] // BATCH_SIZE) <= cut:
                seen[epoch, index] += 1
            of_epoch[epoch] += 1
    for run in later:
        seen.update(run.seen)
    missing = [(epoch, index) for epoch in range(EPOCHS) for index in range(IMAGES) if not seen[epoch, index]]
    assert missing == []
    # Who has nothing left in a last step sees one of the others' again, which does not count.
    assert sum(seen.values()) - EPOCHS * IMAGES <= EPOCHS * (max(before, after) - 1)
    assert all(torch.equal(later[0].vector(), run.vector()) for run in later)


def test_other_workers_with_equal_steps_train_the_same() -> None:
    """One worker with the whole batch is what two are together, so it goes on to what they come to."""

    def loop(group: Group, size: int, state: dict[str, Any] | None) -> tuple[Tensor, dict[str, Any]]:
        torch.manual_seed(1)
        network = nn.Linear(5, 3).double()
        with group:
            model, optimizer = group.distribute(
                network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
            )
            shard = group.shard(DataLoader(Points(), size))
            if state is not None:
                group.load_state_dict(state)
            kept: dict[str, Any] = {}
            for epoch in group.epochs(2):
                for step, (_, x, y) in enumerate(shard):
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    if (epoch, step) == (0, 1) and state is None:
                        kept = group.state_dict()
        return nn.utils.parameters_to_vector(model.parameters()).detach(), kept

    (whole, state), _ = run_in_threads("synchronous", 2, lambda group: loop(group, 4, None))
    ((alone, _),) = run_in_threads("synchronous", 1, lambda group: loop(group, 8, state))
    torch.testing.assert_close(alone, whole, **REORDERED)


def test_servers_may_be_others_than_before() -> None:
    whole = straight("parameter_server(servers=2, consistency=synchronous)", 2)
    later = resumed("parameter_server(servers=3, consistency=synchronous)", 2, whole[0].saved["middle"])
    assert torch.equal(later[0].vector(), whole[0].vector())


SERVED = "parameter_server(servers=2, consistency=synchronous)"


@pytest.mark.parametrize("point", ["middle", "after 0"])
@pytest.mark.parametrize(("first", "second"), [("synchronous", SERVED), (SERVED, "synchronous")])
def test_another_strategy_goes_on_with_model_optimizer_and_schedule(
    first: str, second: str, point: str
) -> None:
    """Both compute the same, so that who changes between them comes to what the first alone would have come to."""
    whole = straight(first, 2)
    later = resumed(second, 2, whole[0].saved[point])
    for before, after in zip(whole, later, strict=True):
        assert after.rates == before.rates[-len(after.rates) :]
        assert after.seen == before.seen[-len(after.seen) :]
        torch.testing.assert_close(after.vector(), before.vector(), **REORDERED)


@pytest.mark.parametrize(
    ("first", "second", "workers"),
    [
        ("synchronous", "easgd", 2),
        ("local_sgd(steps=3)", "parameter_server(servers=1)", 3),
        ("easgd", "synchronous", 1),
    ],
)
def test_another_strategy_sees_what_is_left(first: str, second: str, workers: int) -> None:
    whole = straight(first, 2)
    state = whole[0].saved["after 0"]
    later = resumed(second, workers, state)
    seen = Counter(each for run in later for each in run.seen)
    assert set(seen) == {(epoch, index) for epoch in range(1, EPOCHS) for index in range(IMAGES)}
    assert all(torch.equal(later[0].vector(), run.vector()) for run in later)
    assert not torch.equal(later[0].vector(), whole[0].vector())


@pytest.mark.parametrize("anew", [False, True], ids=["launcher", "torchrun"])
@pytest.mark.parametrize("second", [SERVED, "easgd"])
def test_a_stage_ends_its_process_and_the_next_goes_on(
    second: str, anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both reports are one run's; where both stages compute the same, so do they and one strategy alone.

    Ranks that begin anew by themselves have the state from worker 0, whose folder of it no other knows.
    """
    stages = Stages.parse(f'stages("synchronous until 1 epochs; {second}")')
    assert stages is not None
    seen: list[Counter[tuple[int, int]]] = []
    stated: list[str] = []
    monkeypatch.setattr(join, "begin_again_at_exit", stated.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def part(number: int, folders: list[Path | None]) -> list[Run | None]:
        runs = [Run() for _ in range(2)]

        def loop(group: Group) -> Run | None:
            with suppress(SystemExit):
                return train(group, runs[group.rank])
            return None

        def stage(worker: int) -> LoopStage:
            return LoopStage(stages, number, folders[worker], anew=anew)

        found = run_in_threads(stage(0).strategy, 2, loop, tmp_path / "report", stage)
        seen.append(Counter(each for run in runs for each in run.seen))
        return found

    folders: list[Path | None] = [None, None] if anew else [tmp_path / "stages"] * 2
    (tmp_path / "stages").mkdir()
    assert part(0, folders) == [None, None]
    if anew:
        folders = [
            Path(text.removeprefix("1:")) if text != "1:" else None for text in sorted(stated, reverse=True)
        ]
        assert [folder is None for folder in folders] == [False, True]
    last = part(1, folders)
    assert list(tmp_path.glob("polyrhythm-stages-*")) == []
    assert sum(seen, Counter()).keys() == {
        (epoch, index) for epoch in range(EPOCHS) for index in range(IMAGES)
    }
    assert {epoch for epoch, _ in seen[0]} == {0}
    assert {epoch for epoch, _ in seen[1]} == {1, 2}
    if second == SERVED:
        for after, before in zip(last, straight("synchronous", 2), strict=True):
            assert after is not None
            torch.testing.assert_close(after.vector(), before.vector(), **REORDERED)


RUN = {"POLYRHYTHM_WORKERS": "2"}
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize(
    ("spec", "started", "line"),
    [
        ("synchronous until 0.5; easgd", {}, "with polyrhythm run or torchrun"),
        ("synchronous until top1=0.9; easgd", RUN, "write until 0.1, or until 3 epochs"),
        ("synchronous until 0.5; easdg", RUN, "did you mean easgd"),
        ("synchronous until 0.5; mixed(replicas=3)", RUN, "replicas"),
        ("synchronous until 0.5; parameter_server(servers=2)", TORCHRUN, "2 servers and a worker"),
        (
            "synchronous until 0.5; local_sgd",
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            "the store in which ranks meet would end",
        ),
    ],
)
def test_stages_that_cannot_be_in_a_loop_are_refused(
    spec: str, started: dict[str, str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(STAGE_VARIABLE, f"0:{tmp_path}" if started is RUN else "")
    with pytest.raises(RequestError, match=line):
        stage_of(f'stages("{spec}")')


def test_ranks_of_torchrun_count_their_stages_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    first = stage_of('stages("synchronous until 0.5; parameter_server(servers=1)")')
    assert first is not None
    assert (first.strategy, first.folder, first.anew) == ("synchronous", None, True)
    monkeypatch.setenv(STAGE_VARIABLE, first.following(Path("/there")))
    second = stage_of('stages("synchronous until 0.5; parameter_server(servers=1)")')
    assert second is not None
    assert (second.strategy, second.folder) == ("parameter_server(servers=1)", Path("/there"))


def test_a_loop_that_does_not_count_its_epochs_does_not_end_in_its_first_stage(tmp_path: Path) -> None:
    stages = Stages.parse('stages("synchronous until 1 epochs; easgd")')
    assert stages is not None

    def loop(group: Group) -> None:
        run = Run()
        with group:
            model, optimizer = group.distribute(run.model, run.optimizer)
            model(torch.zeros(1, 5, dtype=torch.float64)).sum().backward()
            optimizer.step()

    with pytest.raises(RequestError, match=r"group\.epochs counts, so go through them"):
        run_in_threads("synchronous", 1, loop, stage=lambda _: LoopStage(stages, 0, tmp_path))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_is_one_of_torchs_distributed_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    runs = [Run() for _ in range(2)]
    whole = run_in_threads("synchronous", 2, lambda group: train(group, runs[group.rank], folder=folder))
    state = whole[0].saved["middle"]
    expected = {name: value.clone() for name, value in state["model"].items()}

    other = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    dcp.load(other, checkpoint_id=folder, no_dist=True)
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    flat = torch.load(tmp_path / "one.pt", weights_only=True)
    for name, value in expected.items():
        assert torch.equal(other["model"][name], value)
        assert torch.equal(flat[f"model.{name}"], value)

    again = [Run() for _ in range(2)]
    later = run_in_threads("synchronous", 2, lambda group: train(group, again[group.rank], folder=folder))
    assert all(torch.equal(a.vector(), b.vector()) for a, b in zip(whole, later, strict=True))


def test_a_saved_state_is_read_without_executing_anything(tmp_path: Path) -> None:
    (run,) = straight("synchronous", 1)
    torch.save(run.saved["middle"], tmp_path / "run.pt")
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    (after,) = resumed("synchronous", 1, state)
    assert torch.equal(after.vector(), run.vector())


def refused(loop: Callable[[Group], object], strategy: str = "synchronous") -> str:
    """Return the line with which a worker's loop is refused; caught on its thread, so that all is closed in order."""

    def caught(group: Group) -> str:
        with pytest.raises(RequestError) as error:
            loop(group)
        return str(error.value)

    (line,) = run_in_threads(strategy, 1, caught)
    assert "\n" not in line
    return line


def test_what_is_of_something_else_is_refused_in_one_line(tmp_path: Path) -> None:
    (run,) = straight("synchronous", 1)
    state = run.saved["middle"]

    def loads(state: dict[str, Any]) -> Callable[[Group], object]:
        return lambda group: train(group, Run(), state)

    assert "the state is empty" in refused(loads({}))
    assert "no state of a run" in refused(loads({"model": {}}))
    assert "did you mean synchronous" in refused(loads({**state, "strategy": "synchronos"}))
    assert "0 objects were given to group.state_dict, and 1 here" in refused(loads({**state, "kept": []}))
    other = {**state["model"], "0.weight": torch.zeros(2, 2)}
    line = refused(loads({**state, "model": other}))
    assert "0.weight is of shape (2, 2) in the state and of shape (6, 5)" in line

    folder = tmp_path / "saved"
    folder.mkdir()
    with pytest.raises(RequestError, match=r"holds no polyrhythm\.json"):
        read_folder(folder)
    with pytest.raises(RequestError, match="holds no saved state"):
        write_folder(state, folder)
    folder.rmdir()
    write_folder(state, folder)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index)[:-20])
    with pytest.raises(RequestError, match="is damaged"):
        read_folder(folder)


def test_gradients_that_wait_for_a_step_are_not_lost_in_silence() -> None:
    def loop(group: Group) -> None:
        run = Run()
        with group:
            model, _ = group.distribute(run.model, run.optimizer)
            model(torch.randn(4, 5).double()).sum().backward()
            group.state_dict()

    assert "call group.state_dict after optimizer.step()" in refused(loop)
