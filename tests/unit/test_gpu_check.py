"""The checks of a GPU: how calls follow each other, and that a fault in each part is found; all without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
ORDER = [1, 2, 3, 6, 5, 4, 7]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(GPU))
    before = set(sys.modules)
    yield importlib.import_module("check")
    for name in set(sys.modules) - before:
        if name == "check" or name.partition(".")[0] == "checks":
            del sys.modules[name]


@pytest.fixture
def part(check: ModuleType) -> Any:
    """Gives a part's module by name."""
    return lambda name: importlib.import_module(f"checks.{name}")


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return {line["row"]: line for line in lines if "outcome" in line}


def call(check: ModuleType, out: Path, *words: str) -> int:
    return int(check.main(["--device", "cpu", "--quick", "--out", str(out), *words]))


# How calls follow each other


def planned(check: ModuleType, monkeypatch: pytest.MonkeyPatch, **rows: Any) -> None:
    """Have the script make these rows alone."""
    setting = importlib.import_module("checks.setting")
    made = tuple(setting.Row(name, act, 1.0) for name, act in rows.items())
    monkeypatch.setattr(check, "parts", lambda: [setting.Part(1, "planned", made)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_first_row_says_so(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--out", str(tmp_path)]) == 2
    (line,) = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert line["call"] == 1
    assert line["machine"]["torch"] == torch.__version__
    assert line["machine"]["impossible"]
    assert capsys.readouterr().err == f"nothing can be checked: {line['machine']['impossible']}\n"


def test_missing_packages_are_named(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "DEPENDENCIES", ("torch", "no_such_package", "nor_this_one"))
    assert call(check, tmp_path) == 2
    assert "packages are missing: no_such_package, nor_this_one" in capsys.readouterr().err


def test_a_row_that_fails_stops_no_other(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = importlib.import_module("checks.setting")

    def breaks(_: Any) -> dict[str, Any]:
        raise ZeroDivisionError("of all things")

    def dies(_: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def raises(error: Exception, _: Any) -> dict[str, Any]:
        raise error

    planned(
        check,
        monkeypatch,
        breaks=breaks,
        dies=dies,
        wrong=partial(raises, setting.Failed("too slow", {"share": 0.5})),
        absent=partial(raises, setting.NotInstalled("kornia")),
        elsewhere=partial(raises, setting.Skipped("one GPU", {"speed": 2.0})),
        good=lambda _: {"figure": 1.5},
    )
    assert call(check, tmp_path) == 1
    rows = rows_of(tmp_path)
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes == {
        "breaks": "FAILED",
        "dies": "FAILED",
        "wrong": "FAILED",
        "absent": "not installed",
        "elsewhere": "left out",
        "good": "ok",
    }
    assert rows["breaks"]["trace"][-1] == "ZeroDivisionError: of all things"
    assert "died with status -9" in rows["dies"]["why"]
    assert (rows["wrong"]["why"], rows["wrong"]["found"]) == ("too slow", {"share": 0.5})
    assert rows["elsewhere"]["found"] == {"speed": 2.0}
    assert rows["good"]["found"] == {"figure": 1.5}


def test_a_further_call_makes_what_is_left_and_nothing_twice(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"

    def note(name: str, _: Any) -> dict[str, Any]:
        with made.open("a") as file:
            file.write(f"{name} ")
        return {}

    planned(check, monkeypatch, one=partial(note, "one"))
    assert call(check, tmp_path) == 0
    planned(check, monkeypatch, one=partial(note, "one"), two=partial(note, "two"))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"row": "two", "outcome": "o')  # a call was killed while it wrote
    assert call(check, tmp_path) == 0
    assert made.read_text() == "one two "
    assert rows_of_whole_lines(tmp_path)["two"] == "ok"


def rows_of_whole_lines(out: Path) -> dict[str, str]:
    found = {}
    for line in (out / "results.jsonl").read_text().splitlines():
        if line.endswith("}"):
            row = json.loads(line)
            if "outcome" in row:
                found[row["row"]] = row["outcome"]
    return found


def test_a_row_at_the_end_of_a_call_is_made_by_the_next_and_given_up_after_two(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(_: Any) -> dict[str, Any]:
        time.sleep(600)
        raise AssertionError

    monkeypatch.setattr(check, "machine", lambda device: {})
    planned(check, monkeypatch, hangs=hangs, good=lambda _: {})
    for _ in range(2):
        assert call(check, tmp_path, "--seconds", "3") == 3
        assert not rows_of(tmp_path)
    assert call(check, tmp_path, "--seconds", "60") == 1
    rows = rows_of(tmp_path)
    assert rows["hangs"]["why"] == "it was cut off in 2 calls"
    assert rows["good"]["outcome"] == "ok"


def test_failed_rows_are_made_again_when_asked(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> dict[str, Any]:
        raise ValueError

    planned(check, monkeypatch, mended=fails)
    assert call(check, tmp_path) == 1
    planned(check, monkeypatch, mended=lambda _: {})
    assert call(check, tmp_path) == 1
    assert call(check, tmp_path, "--again") == 0


def test_rows_of_another_device_are_not_taken_for_these(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(check, monkeypatch, good=lambda _: {})
    assert call(check, tmp_path) == 0
    assert check.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("name another folder with --out\n")
    assert call(check, tmp_path) == 0


def test_the_order_of_the_parts_and_three_calls(check: ModuleType) -> None:
    parts = check.parts()
    assert [part.number for part in parts] == ORDER
    rows = [row for part in parts for row in part.rows]
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.check.__doc__ or row.check.func.__doc__ for row in rows)
    start_s = 15.0  # of a call, with a look at the machine
    calls, left_s = 1, check.CALL_S - start_s
    for row in rows:
        if row.seconds > left_s:
            calls, left_s = calls + 1, check.CALL_S - start_s
        left_s -= row.seconds
    assert calls <= 3


def test_a_part_that_cannot_be_imported_is_a_row(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MODULES", ("no_such_part", "energy"))
    parts = check.parts()
    with pytest.raises(ModuleNotFoundError):
        parts[0].rows[0].check(None)
    assert parts[1].number == 7


@pytest.mark.timeout(600)  # it starts some 20 runs
def test_each_part_on_the_cpu(check: ModuleType, tmp_path: Path) -> None:
    sample = {
        1: ["pinned copies", "overlap with the backward pass"],
        2: ["resnet50: torch alone", "resnet50: train", "lenet5: torch alone", "lenet5: join"],
        3: ["a GPU rank alone", "two ranks on one GPU: synchronous"],
        6: ["predicted: one worker"],
        5: ["augmentation: crop and flip"],
        4: ["compressed by top_k"],
    }
    names = [name for rows in sample.values() for name in rows]
    words = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--seconds", "550", "--only", *names]
    subprocess.run([sys.executable, check.__file__, *words, "Kornia", "energy of an image"], check=True)
    rows = rows_of(tmp_path)
    assert {name: row["outcome"] for name, row in rows.items() if name in names} == dict.fromkeys(names, "ok")
    assert {row["part"] for row in rows.values()} == set(ORDER)
    assert rows["Kornia"]["outcome"] in ("ok", "not installed")
    assert rows["energy of an image"]["outcome"] == ("ok" if torch.cuda.is_available() else "left out")


def test_processes_below_a_process_are_found(part: Any) -> None:
    code = "import subprocess, sys; run = subprocess.Popen(['sleep', '60']); print(run.pid, flush=True); run.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        below = int(parent.stdout.readline())
        try:
            assert part("setting").descendants(parent.pid) == [below]
            assert {parent.pid, below} <= set(part("setting").descendants(os.getpid()))
        finally:
            os.kill(below, signal.SIGKILL)


def test_the_rate_of_a_run_is_that_of_its_window(part: Any, tmp_path: Path) -> None:
    setting = part("setting")
    reports = setting.Reports(setting.Window(False, from_epoch=1, skip_s=1.0))
    path = tmp_path / "events.jsonl"
    told = [
        (0, 0, 1.0, 99),
        (0, 1, 2.0, 99),
        (0, 1, 3.0, 50),
        (0, 2, 9.0, 70),
        (0, 2, 10.0, 50),
        (1, 1, 2.0, 1),
    ]
    told += [(1, 1, 4.0, 40), (1, 2, 5.0, 20)]
    lines = [
        json.dumps(
            {"event": "WorkerProgress", "worker": worker, "epoch": epoch, "time_s": at_s, "images": images}
        )
        for worker, epoch, at_s, images in told
    ]
    path.write_text("\n".join([*lines, '{"event": "Worker']))
    reports.read(path)
    reports.read(path)
    # Worker 0: 100 images in two seconds within epochs 1 and 2; worker 1: 40 in two seconds. Between epochs: none.
    assert reports.rate == 50 + 20
    assert reports.seconds == 2.0


# A fault in each part


def large(part: Any, tmp_path: Path, earlier: dict[str, Any] | None = None) -> Any:
    """Gives a setting that claims speeds, as on a GPU, for checks whose commands are replaced."""
    return part("setting").Setting("cpu", tmp_path, quick=False, earlier=earlier)


def quick(part: Any, tmp_path: Path) -> Any:
    return part("setting").Setting("cpu", tmp_path, quick=True)


def test_part_1_finds_a_torn_copy(part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = part("correct")
    staging = correct.Staging

    def half(source: torch.Tensor, target: torch.Tensor) -> Any:
        target[: len(target) // 2].copy_(source[: len(source) // 2])
        return lambda: None

    monkeypatch.setattr(correct, "_staging", lambda _: staging(half, correct._in_background, pinned=False))
    with pytest.raises(part("setting").Failed, match="torn"):
        correct.pinned_copies(quick(part, tmp_path))


def test_part_1_finds_a_copy_that_was_made_too_late(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct, waiting = part("correct"), list[tuple[torch.Tensor, torch.Tensor]]()

    def later(source: torch.Tensor, target: torch.Tensor) -> Any:
        for each in waiting:
            each[1].copy_(each[0])
        waiting.append((source, target))
        return lambda: None

    late = correct.Staging(later, correct._in_background, pinned=False)
    monkeypatch.setattr(correct, "_staging", lambda _: late)
    with pytest.raises(part("setting").Failed, match=r"torn|copies hold"):
        correct.pinned_copies(quick(part, tmp_path))


@pytest.mark.parametrize(("together_s", "holds"), [(1.1, True), (1.5, False)])
def test_part_1_finds_copies_for_which_the_backward_pass_waits(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together_s: float, holds: bool
) -> None:
    correct, setting = part("correct"), quick(part, tmp_path)
    monkeypatch.setattr(part("setting").Setting, "is_gpu", True)
    monkeypatch.setattr(
        correct,
        "_staging",
        lambda _: correct.Staging(correct._copy_at_once, correct._in_background, pinned=False),
    )
    taken = iter([1.0, 0.5, together_s])  # the backward pass alone, the copies alone, both
    monkeypatch.setattr(setting, "seconds", lambda act: next(taken))
    if holds:
        assert correct.overlap(setting)["hidden"] == pytest.approx(0.8)
    else:
        with pytest.raises(part("setting").Failed, match="only 0% of the shorter is hidden"):
            correct.overlap(setting)


@pytest.mark.parametrize(
    ("late", "found"), [((10, 21), "1 more bytes are reserved"), ((11, 20), "1 more bytes are")]
)
def test_part_1_finds_memory_that_grows(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: tuple[int, int], found: str
) -> None:
    correct, setting = part("correct"), quick(part, tmp_path)
    monkeypatch.setattr(part("setting").Setting, "is_gpu", True)
    monkeypatch.setattr(setting, "loop", lambda *_, steps: {"memory_bytes": [(10, 20), (10, 20)]})
    correct.memory_of_a_loop(setting)
    monkeypatch.setattr(setting, "loop", lambda *_, steps: {"memory_bytes": [(10, 20), late]})
    with pytest.raises(part("setting").Failed, match=found):
        correct.memory_of_a_loop(setting)


TRAINED = {"test_top1": 0.9, "test_loss": 0.1, "parameters_sha256": "a", "images_not_seen": 0, "same": True}


@pytest.mark.parametrize(
    ("row", "run", "fault", "found"),
    [
        ("same_bits", "two", {"parameters_sha256": "b"}, "other bits"),
        ("two_ranks", "gpu", {"test_top1": 0.7}, "top-1 differs"),
        ("mixed_devices", "servers", {"images_not_seen": 7}, "7 images not seen"),
        ("two_bytes", "bfloat16", {"parameters_sha256": "a"}, "same bits"),
        ("device_cache", "small", {"parameters_sha256": "b"}, "changes bits"),
    ],
)
def test_part_1_finds_a_run_that_went_wrong(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, run: str, fault: Any, found: str
) -> None:
    correct, setting = part("correct"), quick(part, tmp_path)
    own = {"bfloat16": {"parameters_sha256": "b"}} if row == "two_bytes" else {}

    def trained(faults: dict[str, Any], **jobs: Any) -> dict[str, Any]:
        return {name: {**TRAINED, **own.get(name, {}), **faults.get(name, {})} for name in jobs}

    monkeypatch.setattr(setting, "call", lambda *words: dict(TRAINED))
    monkeypatch.setattr(correct, "_difference", lambda one, other: 0.0)
    monkeypatch.setattr(correct, "read_events", lambda path: [SimpleNamespace(kept_bytes=99_000, hits=3)])
    monkeypatch.setattr(setting, "train_all", partial(trained, {}))
    getattr(correct, row)(setting)
    monkeypatch.setattr(setting, "train_all", partial(trained, {run: fault}))
    with pytest.raises(part("setting").Failed, match=found):
        getattr(correct, row)(setting)


def test_part_1_finds_parameters_that_differ(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct, setting = part("correct"), quick(part, tmp_path)
    from safetensors.torch import save_file

    for name, value in (("gpu", 1.0), ("cpu", 1.1), ("compiled", 1.0), ("plain", 1.1)):
        setting.run_folder(name).mkdir(parents=True)
        save_file({"weight": torch.full((4,), value)}, setting.run_folder(name) / "model.safetensors")
    monkeypatch.setattr(setting, "train_all", lambda **jobs: {name: dict(TRAINED) for name in jobs})
    for row in (correct.two_ranks, correct.compiled):
        with pytest.raises(part("setting").Failed, match=r"differ (by|from a CPU's by) 0.091 of their norm"):
            row(setting)


@pytest.mark.parametrize("kind", ["train", "join"])
@pytest.mark.parametrize("rate", [99.0, 97.0])
def test_part_2_finds_a_slow_path(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rate: float
) -> None:
    one_gpu = part("one_gpu")
    setting = large(part, tmp_path, {one_gpu.bare_row("lenet5"): {"images_per_s": 100.0}})
    monkeypatch.setattr(setting, "loop", lambda kind, network: {"images_per_s": rate})
    row = partial(getattr(one_gpu, kind), setting, "lenet5")
    if rate / 100.0 >= one_gpu.LEAST_SHARE:
        assert row()["share"] == pytest.approx(0.99)
    else:
        with pytest.raises(part("setting").Failed, match=r"0\.970 of the bare loop"):
            row()


@pytest.mark.parametrize(
    ("way", "rate", "bottleneck", "found"),
    [
        ("decoded", 90.0, "input", "0.900 of the bare loop's images/s is fed"),
        ("files", 50.0, "compute", "and compute is named"),
        ("files", 50.0, "input", None),
        ("decoded", 96.0, "compute", None),
    ],
)
def test_part_2_finds_a_loader_that_is_slow_or_not_named(
    part: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    rate: float,
    bottleneck: str,
    found: str | None,
) -> None:
    one_gpu = part("one_gpu")
    setting = large(part, tmp_path, {one_gpu.bare_row("resnet50"): {"images_per_s": 100.0}})
    monkeypatch.setattr(setting, "pictures", lambda side, photographs: tmp_path)
    measured = part("setting").Measured(rate, 5.0, bottleneck, None)
    monkeypatch.setattr(setting, "measured", lambda name, *words, **window: measured)
    if found is None:
        assert one_gpu.fed(setting, way)["share"] == rate / 100
    else:
        with pytest.raises(part("setting").Failed, match=found):
            one_gpu.fed(setting, way)


def test_part_3_finds_ranks_that_hold_each_other_back(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = part("ranks")
    alone = {"a GPU rank alone": {"images_per_s": 100.0}, "a CPU rank alone": {"images_per_s": 20.0}}
    setting = large(part, tmp_path, alone)
    monkeypatch.setattr(setting, "pictures", lambda side: tmp_path)
    for rate, holds in ((120.0, True), (70.0, False)):
        measured = part("setting").Measured(rate, 5.0, None, None)
        monkeypatch.setattr(setting, "measured", lambda name, *words, measured=measured, **more: measured)
        for row in (ranks.together, ranks.mixed):
            if holds:
                assert row(setting, "ad_psgd")["share"] >= 0.6
            else:
                with pytest.raises(part("setting").Failed, match="of the sum of the speeds alone"):
                    row(setting, "ad_psgd")


def test_part_3_says_which_row_it_lacks(part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = large(part, tmp_path)
    monkeypatch.setattr(setting, "pictures", lambda side: tmp_path)
    monkeypatch.setattr(
        setting, "measured", lambda name, *words, **more: part("setting").Measured(1.0, 5.0, None, None)
    )
    with pytest.raises(part("setting").Skipped, match="a GPU rank alone") as lacking:
        part("ranks").together(setting, "ad_psgd")
    assert lacking.value.figures["images_per_s"] == 1.0


@pytest.mark.parametrize(("rate", "holds"), [(108.0, True), (115.0, False), (85.0, False)])
def test_part_6_finds_a_wrong_prediction(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, holds: bool
) -> None:
    prediction, ranks = part("prediction"), part("ranks")
    names = [
        ranks.strategy_row(kind, each) for kind in (ranks.TOGETHER, ranks.MIXED) for each in ranks.STRATEGIES
    ]
    setting = large(part, tmp_path, {name: {"images_per_s": 100.0} for name in [*names, "resnet50: train"]})
    monkeypatch.setattr(setting, "pictures", lambda side, **kind: tmp_path)
    monkeypatch.setattr(prediction, "_profiled", lambda *_: {"step_s": 1.0})
    monkeypatch.setattr(prediction, "_cluster", lambda *_: "cluster.yaml")
    monkeypatch.setattr(prediction, "_simulated", lambda *_: rate)
    for row in (prediction.one_worker, prediction.two_ranks, prediction.with_cpu_ranks):
        if holds:
            row(setting)
        else:
            with pytest.raises(part("setting").Failed, match="of what was measured"):
                row(setting)


def test_part_5_finds_pictures_that_change_otherwise(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    augmentation, calls = part("augmentation"), list[int]()
    ours = augmentation.ours

    def other(name: str, images: torch.Tensor) -> Any:
        calls.append(1)
        act = ours(name, images)
        return act if len(calls) != 2 else lambda number: act(number).roll(1, -1)

    monkeypatch.setattr(augmentation, "ours", other)
    monkeypatch.setattr(augmentation, "PEERS", {})
    with pytest.raises(part("setting").Failed, match="differ from a CPU's"):
        augmentation.changed(quick(part, tmp_path), "crop and flip")


def test_part_5_finds_a_slower_chain(part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    augmentation, setting = part("augmentation"), large(part, tmp_path)
    taken = iter([2.0, 1.0])
    monkeypatch.setattr(setting, "seconds", lambda act, times: next(taken))
    monkeypatch.setattr(augmentation, "_batch", lambda setting: torch.zeros(8, 3, 32, 32, dtype=torch.uint8))
    monkeypatch.setattr(augmentation, "PEERS", {"torchvision": lambda name, images: lambda number: None})
    with pytest.raises(part("setting").Failed, match=r"0\.50 of torchvision's images/s"):
        augmentation.changed(setting, "crop and flip")


def test_part_4_finds_a_way_through_another_device(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressors = part("compressors")
    made = compressors.made

    class Elsewhere:
        """Looks at the vector on another device, which `meta` stands for."""

        def __getattr__(self, name: str) -> Any:
            return getattr(made("top_k"), name)

        def encode(self, vector: torch.Tensor, place: Any) -> torch.Tensor:
            vector.to("meta")
            return made("top_k").encode(vector, place)

    monkeypatch.setattr(compressors, "made", lambda name: Elsewhere())
    with pytest.raises(part("setting").Failed, match=r"20\d\d\d bytes go through the host"):
        compressors.compressed(quick(part, tmp_path), "top_k")


def test_part_4_counts_what_moves(part: Any) -> None:
    crossing_bytes = part("compressors").crossing_bytes
    here, there = torch.zeros(1000), torch.zeros(1000, device="meta")
    assert crossing_bytes(lambda: here + here[:1]) == 0
    assert crossing_bytes(lambda: there.copy_(here)) == 4000
    assert crossing_bytes(lambda: here.to("meta", torch.float64)) == 4000
    assert crossing_bytes(lambda: here[3].item()) == 4


def test_part_4_finds_wrong_numbers(part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compressors = part("compressors")
    made, calls = compressors.made, list[int]()

    class Wrong:
        """Decodes the first payload wrongly."""

        def __getattr__(self, name: str) -> Any:
            return getattr(made("one_bit"), name)

        def decode(self, payload: torch.Tensor, place: Any) -> torch.Tensor:
            calls.append(1)
            return made("one_bit").decode(payload, place) * (2.0 if len(calls) == 1 else 1.0)

    monkeypatch.setattr(compressors, "made", lambda name: Wrong())
    with pytest.raises(part("setting").Failed, match="decoded vectors differ"):
        compressors.compressed(quick(part, tmp_path), "one_bit")


@pytest.mark.parametrize(("joules", "holds"), [(0.51, True), (0.6, False)])
def test_part_7_finds_energy_that_is_lost(part: Any, tmp_path: Path, joules: float, holds: bool) -> None:
    energy, one_gpu = part("energy"), part("one_gpu")
    earlier = {
        one_gpu.bare_row("resnet50"): {"joules_per_image": 0.5, "images_per_s": 1000.0},
        "resnet50: train": {"joules_per_image": joules, "images_per_s": 1000.0},
    }
    setting = large(part, tmp_path, earlier)
    if holds:
        assert energy.energy(setting)["train"]["watts"] == pytest.approx(510)
    else:
        with pytest.raises(part("setting").Failed, match=r"train: 1\.20 of the bare loop's joules"):
            energy.energy(setting)


def test_part_7_is_left_out_without_a_counter(part: Any, tmp_path: Path) -> None:
    with pytest.raises(part("setting").Skipped, match="NVML"):
        part("energy").energy(large(part, tmp_path))
