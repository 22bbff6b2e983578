"""Figures of several runs, from logs whose figures are known."""

from __future__ import annotations

import csv
import io
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy import stats

from polyrhythm.errors import RequestError
from polyrhythm.evaluation.target import Target
from polyrhythm.events import Evaluated, RunEnded, RunStarted, WorkerProgress
from polyrhythm.reporting.comparison import Comparison, differ, read_run
from polyrhythm.reporting.event_log import EventLog

ACCURACIES = (0.5, 0.8, 0.9)


def written(
    folder: Path,
    strategy: str = "synchronous",
    workers: int = 1,
    seed: int = 0,
    epoch_s: float = 10.0,
    accuracies: tuple[float, ...] = ACCURACIES,
    outcome: str | None = "done",
    price: float | None = None,
    **config: Any,
) -> Path:
    """Write a run of 100 images an epoch and worker."""
    folder.mkdir(parents=True)
    options = {
        "strategy": strategy,
        "workers": workers,
        "seed": seed,
        "data": "digits",
        "model": "mlp",
        **config,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(options))
    log = EventLog(folder / "events.jsonl")
    log.on_event(
        RunStarted(
            time_s=0.0,
            strategy=strategy,
            data="digits",
            model="mlp",
            workers=workers,
            servers=0,
            epochs=len(accuracies),
            steps_per_epoch=1,
        )
    )
    for epoch, top1 in enumerate(accuracies, start=1):
        for worker in range(workers):
            log.on_event(
                WorkerProgress(
                    time_s=epoch * epoch_s,
                    worker=worker,
                    epoch=epoch - 1,
                    step=epoch,
                    steps=1,
                    images=100,
                    loss=1 / epoch,
                    learning_rate=0.1,
                )
            )
        log.on_event(
            Evaluated(time_s=epoch * epoch_s, epoch=epoch, test_loss=1 - top1, test_top1=top1, test_top5=1.0)
        )
    if outcome is not None:
        result = {} if price is None else {"price": price, "cluster": "office"}
        log.on_event(RunEnded(time_s=len(accuracies) * epoch_s, outcome=outcome, result=result))
    log.close()
    return folder


def compared(*folders: Path, target: str | None = None) -> Comparison:
    return Comparison.of([read_run(each) for each in folders], Target.parse(target) if target else None)


def test_speed_up_and_efficiency_are_told_against_one_worker(tmp_path: Path) -> None:
    found = compared(
        written(tmp_path / "a"),
        written(tmp_path / "b", workers=4, epoch_s=12.5),
        written(tmp_path / "c", "local_sgd(steps=4)", workers=4, epoch_s=10.0),
    )
    alone, four, local = found.rows
    assert [found.speed_up(row) for row in (alone, four, local)] == pytest.approx([1.0, 3.2, 4.0])
    assert [found.efficiency(row) for row in (alone, four, local)] == pytest.approx([1.0, 0.8, 1.0])


def test_a_strategy_that_never_ran_alone_is_told_against_its_own_fewest_workers(tmp_path: Path) -> None:
    found = compared(written(tmp_path / "a", workers=2), written(tmp_path / "b", workers=4, epoch_s=20.0))
    assert found.speed_up(found.rows[1]) == pytest.approx(1.0)
    assert found.efficiency(found.rows[1]) == pytest.approx(0.5)


def test_time_images_and_price_to_a_target_are_those_of_the_first_test_that_reaches_it(
    tmp_path: Path,
) -> None:
    found = compared(
        written(tmp_path / "a", price=3.0), written(tmp_path / "b", seed=1, price=6.0), target="top1=0.75"
    ).to_json()
    (row,) = found["rows"]
    assert row["seconds_to_target"]["of_each"] == [20.0, 20.0]
    assert row["images_to_target"]["mean"] == 200
    assert row["price_to_target"]["of_each"] == pytest.approx([2.0, 4.0])
    assert row["price_to_target"]["deviation"] == pytest.approx(statistics.stdev([2.0, 4.0]))


def test_a_target_that_nothing_reaches_is_told_with_the_best_there_was(tmp_path: Path) -> None:
    found = compared(written(tmp_path / "a"), written(tmp_path / "b", "easgd"), target="top1=0.99")
    assert found.verdict()[0] == (
        "No row reached top-1 99.0 % with all its seeds: the best was 90.0 % by synchronous, 1 worker."
    )
    heads, rows = found.table()
    assert {row[heads.index("time to top-1 99.0 %")] for row in rows} == {"not reached"}


def test_a_row_of_which_some_seeds_reach_the_target_says_how_many(tmp_path: Path) -> None:
    found = compared(
        written(tmp_path / "a"),
        written(tmp_path / "b", seed=1, accuracies=(0.5, 0.6)),
        written(tmp_path / "c", "easgd", epoch_s=100.0),
        target="loss=0.15",
    )
    heads, rows = found.table()
    assert [row[heads.index("time to loss 0.15")] for row in rows] == ["0:05:00", "30.0 s (1 of 2)"]
    fastest = found.fastest()
    assert fastest is not None
    assert fastest.strategy == "easgd"  # the other row's second seed never arrives
    assert "synchronous" not in found.verdict()[0]  # nor is it next, by the mean of those that do


def test_without_a_target_it_is_what_all_have_reached(tmp_path: Path) -> None:
    found = compared(written(tmp_path / "a"), written(tmp_path / "b", "easgd", accuracies=(0.4, 0.876)))
    assert found.target == Target("top1", 0.87)
    assert "(which all have reached)" in found.verdict()[0]


def test_a_price_that_is_not_known_is_no_zero(tmp_path: Path) -> None:
    found = compared(written(tmp_path / "a"), written(tmp_path / "b", seed=1))
    assert "price" not in found.table()[0]
    assert found.to_json()["rows"][0]["price_to_target"]["mean"] is None


@pytest.mark.parametrize("pairs", [2, 3, 5, 12, 31])
def test_differences_are_those_of_a_paired_t_test(pairs: int) -> None:
    drawn = random.Random(pairs)
    verdicts = set()
    for shift in (0.0, 0.3, 1.0, 3.0):
        for _ in range(20):
            first = [drawn.gauss(0, 1) for _ in range(pairs)]
            second = [a + shift + drawn.gauss(0, 0.3) for a in first]
            reference = stats.ttest_rel(first, second).pvalue
            if abs(reference - 0.05) > 0.002:  # our quantiles have three digits
                assert differ(first, second) == (reference < 0.05)
                verdicts.add(reference < 0.05)
    assert verdicts == {True, False}


def test_one_pair_tells_nothing() -> None:
    assert differ([1.0, None], [2.0, 3.0]) is None
    assert differ([1.0, 2.0], [math.inf, 3.0]) is None


def test_rows_are_paired_by_seed(tmp_path: Path) -> None:
    folders = []
    for seed, offset in enumerate((0.0, 0.1, 0.2)):
        folders.append(written(tmp_path / f"a{seed}", seed=seed, accuracies=(0.6 + offset,)))
        folders.append(
            written(tmp_path / f"b{seed}", "easgd", seed=seed, accuracies=(0.61 + offset + seed / 1e3,))
        )
    said = compared(*reversed(folders)).verdict()[1]
    assert said == (
        "Most accurate in the end: easgd, 1 worker (71.1 %); next synchronous, 1 worker (70.0 %)."
    )


def test_options_that_differ_tell_rows_apart(tmp_path: Path) -> None:
    found = compared(written(tmp_path / "a", batch_size=32), written(tmp_path / "b", batch_size=64))
    assert [row.name for row in found.rows] == [
        "synchronous, 1 worker, batch_size=32",
        "synchronous, 1 worker, batch_size=64",
    ]


def test_runs_of_other_data_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be compared: .*a has data digits and .*b has photos"):
        compared(written(tmp_path / "a"), written(tmp_path / "b", data="photos"))


def test_what_a_reader_should_know_first(tmp_path: Path) -> None:
    found = compared(
        written(tmp_path / "a"),
        written(tmp_path / "b", "easgd", outcome="failed", model="lenet5"),
        written(tmp_path / "c", "easgd", outcome=None, seed=1, model="lenet5", price=1.0),
    )
    said = "\n".join(found.warnings)
    assert "different networks are compared: lenet5, mlp" in said
    assert "b was cut short (failed)" in said
    assert "c was cut short (unfinished)" in said
    assert "all strategies had the same learning rate" in said
    heads, rows = found.table()
    assert sorted(row[heads.index("seeds")] for row in rows) == ["0 of 2", "1"]


def test_tables_for_spreadsheets_and_papers(tmp_path: Path) -> None:
    found = compared(
        written(tmp_path / "a"),
        written(tmp_path / "b", seed=1),
        written(tmp_path / "c", "local_sgd(steps=4)"),
    )
    lines = list(csv.DictReader(io.StringIO(found.csv())))
    assert [(line["seed"], line["images_per_s"], line["price_to_target"]) for line in lines] == [
        ("0", "10.0", ""),
        ("1", "10.0", ""),
        ("0", "10.0", ""),
    ]
    heads, *_, last = found.markdown().split("\n\n")[0].splitlines()
    assert heads.count("|") == last.count("|")
    latex = found.latex()
    assert r"90.0 $\pm$ 0.0 \%" in latex
    assert r"local\_sgd(steps=4)" in latex


@pytest.mark.parametrize("text", ["top1", "top1=", "top1=90", "top1=0", "speed=3", "loss=-1", "loss=nan", ""])
def test_targets_that_cannot_be(text: str) -> None:
    with pytest.raises(RequestError, match="cannot read the target"):
        Target.parse(text)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="give the folder of a run"):
        read_run(tmp_path)


def test_the_best_come_first_and_share_a_rank_that_do_not_differ_by_more_than_their_seeds(
    tmp_path: Path,
) -> None:
    folders = []
    # Against the first the second differs by 0 ± 2 s, the third by 9 to 11 s; the last one misses the target.
    ways = {"easgd": (20, 22, 21), "synchronous": (10, 11, 12), "ssp": (11, 10, 12), "mixed": (9, 9, 9)}
    for strategy, times in ways.items():
        for seed, epoch_s in enumerate(times):
            accuracies = (0.5, 0.6) if strategy == "mixed" else (0.5, 0.9)
            folders.append(
                written(
                    tmp_path / f"{strategy}{seed}",
                    strategy,
                    seed=seed,
                    epoch_s=epoch_s,
                    accuracies=accuracies,
                )
            )
    found = compared(*folders, target="top1=0.8")
    assert [(rank, row.strategy) for rank, row in found.ranking()] == [
        (1, "synchronous"),
        (1, "ssp"),
        (3, "easgd"),
        (0, "mixed"),
    ]
    heads, rows = found.table(short=True)
    assert [(row[0], row[1]) for row in rows] == [
        ("1", "synchronous"),
        ("1", "ssp"),
        ("3", "easgd"),
        ("–", "mixed"),
    ]
    assert heads[0] == "rank"
    assert found.verdict()[0] == (
        "Fastest to top-1 80.0 %: no difference beyond that of seeds between synchronous, 1 worker (22.0 s) and ssp, "
        "1 worker (22.0 s)."
    )
    assert {row["strategy"]: row["rank"] for row in found.to_json()["rows"]} == {
        "easgd": 3,
        "synchronous": 1,
        "ssp": 1,
        "mixed": None,
    }


def test_one_seed_names_the_faster_and_says_that_it_may_be_chance(tmp_path: Path) -> None:
    found = compared(written(tmp_path / "a"), written(tmp_path / "b", "easgd", epoch_s=9.0))
    assert [row.strategy for _, row in found.ranking()] == ["easgd", "synchronous"]
    assert found.verdict()[0] == (
        "Fastest to top-1 90.0 % (which all have reached): easgd, 1 worker (27.0 s); next synchronous, 1 worker "
        "(30.0 s), with too few seeds to separate them."
    )


def test_seconds_of_simulated_runs_are_marked_as_virtual(tmp_path: Path) -> None:
    found = compared(written(tmp_path / "a", price=1.0), written(tmp_path / "b", "easgd", price=1.0))
    assert {"virtual time", "virtual time to top-1 90.0 %"} < set(found.table()[0])
    assert "30.0 s of virtual time" in found.verdict()[0]
    assert found.to_json()["virtual"]
    real = compared(written(tmp_path / "c"), written(tmp_path / "d", "easgd"))
    assert not [text for text in (*real.table()[0], *real.verdict()) if "virtual" in text]


def test_a_run_that_was_cut_short_neither_sets_the_target_nor_wins(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole")
    short = written(tmp_path / "short", "easgd", epoch_s=1.0, accuracies=(0.5,), outcome="interrupted")
    found = Comparison.of([read_run(whole), read_run(short)])
    assert str(found.target) == "top-1 90.0 %"
    assert [(rank, row.strategy) for rank, row in found.ranking()] == [(1, "synchronous"), (0, "easgd")]
