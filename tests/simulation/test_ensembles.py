"""Ensembles as one run: members are the runs that they would be alone, and a student learns from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polyrhythm.api.compare import compare_runs
from polyrhythm.api.evaluate import evaluate
from polyrhythm.api.predict import predict
from polyrhythm.api.simulate import simulate
from polyrhythm.config.assemble import strategy_from
from polyrhythm.config.trained import load_trained
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.target import Target
from polyrhythm.events import Event, RunEnded
from polyrhythm.reporting.comparison import time_to
from polyrhythm.simulation.cluster import open_cluster
from polyrhythm.simulation.layout import shared_out

JOB: dict[str, Any] = {"data": "digits", "model": "mlp", "epochs": 2, "batch_size": 32}


class Seen:
    """Keeps all events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    "each", ["synchronous", "parameter_server(servers=1)", "local_sgd(steps=4)", "ad_psgd", "hogwild"]
)
def test_each_member_is_its_own_run_alone_bit_for_bit(each: str, tmp_path: Path) -> None:
    workers = 1 if each == "hogwild" else 2
    found = simulate(
        **JOB,
        cluster="office",
        strategy=f"ensemble(members=2, each={each})",
        workers=2 * workers,
        seed=7,
        out=tmp_path / "all",
    )
    traits = strategy_from(each).traits(workers)
    parts = shared_out(
        open_cluster("office"), 2, workers, traits.servers, traits.placement, draws=traits.draws
    )
    alone = [
        simulate(
            **JOB, cluster=part, strategy=each, workers=workers, seed=7 + number, out=tmp_path / f"{number}"
        )
        for number, (part, _) in enumerate(parts)
    ]
    assert [each["parameters_sha256"] for each in found.figures["members"]] == [
        run.figures["parameters_sha256"] for run in alone
    ]
    assert found.figures["seconds"] == max(run.figures["seconds"] for run in alone)
    assert found.figures["hosts"] == 2 * workers
    assert found.figures["workers"] == 2 * workers
    rates = [run.figures["images_per_s"] for run in alone]
    assert found.figures["images_per_s"] == pytest.approx(sum(rates))


def test_members_vote_with_their_mean_probabilities(tmp_path: Path) -> None:
    seen = Seen()
    run = simulate(
        **JOB,
        cluster="office",
        strategy="ensemble(members=2)",
        workers=2,
        out=tmp_path / "all",
        observers=[seen],
    )
    assert sum(isinstance(event, RunEnded) for event in seen.events) == 1
    members = [load_trained(tmp_path / "all" / f"member-{number}") for number in range(2)]
    test = members[0].dataset.test
    images = test.images(torch.arange(len(test)))
    with torch.no_grad():
        together = torch.stack([each.model.eval()(images).softmax(1) for each in members]).mean(0)
    right = float((together.argmax(1) == test.labels).double().mean())
    assert run.figures["test_top1"] == run.figures["ensemble"]["test_top1"] == pytest.approx(right)
    loss = float(torch.nn.functional.nll_loss(together.log(), test.labels))
    assert run.figures["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert evaluate(run.folder)["test_top1"] == run.figures["test_top1"]
    assert json.loads((run.folder / "ensemble.json").read_text()) == run.figures
    page = (run.folder / "report.html").read_text()
    assert 'href="member-0/report.html"' in page
    assert "together" in page
    with pytest.raises(RequestError, match="is an ensemble, of several networks: name one"):
        load_trained(run.folder)


def test_the_student_is_the_run_that_has_the_members_as_teachers(tmp_path: Path) -> None:
    run = simulate(
        **JOB,
        cluster="office",
        strategy="ensemble(members=2)",
        workers=2,
        distill="mlp(hidden=[16])",
        temperature=2.0,
        teacher_share=0.5,
        out=tmp_path / "all",
    )
    teachers = "; ".join(str(tmp_path / "all" / f"member-{number}") for number in range(2))
    alone = simulate(
        **{**JOB, "model": "mlp(hidden=[16])"},
        cluster="office",
        workers=2,
        teacher=teachers,
        temperature=2.0,
        teacher_share=0.5,
        out=tmp_path / "alone",
    )
    assert run.figures["parameters_sha256"] == alone.figures["parameters_sha256"]
    assert run.figures["test_top1"] == alone.figures["test_top1"]
    longest = max(member["seconds"] for member in run.figures["members"])
    assert run.figures["seconds"] == pytest.approx(longest + alone.figures["seconds"])
    saved, other = (load_file(folder / "model.safetensors") for folder in (run.folder, alone.folder))
    assert all(torch.equal(saved[name], other[name]) for name in other)
    assert evaluate(run.folder)["test_top1"] == run.figures["test_top1"]
    assert "student" in (run.folder / "report.html").read_text()


def test_the_run_can_be_used_as_a_teacher_and_to_predict(tmp_path: Path) -> None:
    from PIL import Image

    run = simulate(**JOB, cluster="office", strategy="ensemble(members=2)", workers=2, out=tmp_path / "all")
    Image.new("L", (8, 8), 100).save(tmp_path / "gray.png")
    found = predict(tmp_path / "gray.png", run.folder)
    assert len(found["images"][0]["networks"]) == 2
    taught = simulate(**JOB, cluster="office", workers=2, teacher=str(run.folder), out=tmp_path / "taught")
    both = "; ".join(str(run.folder / f"member-{number}") for number in range(2))
    named = simulate(**JOB, cluster="office", workers=2, teacher=both, out=tmp_path / "named")
    assert taught.figures["parameters_sha256"] == named.figures["parameters_sha256"]


def test_a_dry_run_has_members_too(tmp_path: Path) -> None:
    run = simulate(
        cluster="office",
        gradients="none",
        steps=3,
        data="digits",
        model="mlp",
        strategy="ensemble(members=2, each=parameter_server(servers=1))",
        workers=4,
        out=tmp_path / "dry",
    )
    assert run.figures["servers"] == 2
    assert run.figures["ensemble"] == {}
    assert run.figures["seconds"] == max(each["seconds"] for each in run.figures["members"])


def test_hosts_are_shared_out_so_that_nobody_has_a_place_twice() -> None:
    office = open_cluster("office")
    parts = shared_out(office, 2, 2, 1, strategy_from("parameter_server").traits(2).placement)
    assert [hosts for _, hosts in parts] == [(0, 1), (2, 3)]
    assert [machine.name for machine in parts[1][0].machines] == ["desktop", "old-desktop"]
    wide = office.model_copy(
        update={"hosts": (office.hosts[0].model_copy(update={"count": 1, "workers": 4}),)}
    )
    wide = type(office)(**{name: getattr(wide, name) for name in type(office).model_fields})
    halves = shared_out(wide, 2, 2, 0, strategy_from("synchronous").traits(2).placement)
    assert [hosts for _, hosts in halves] == [(0,), (0,)]
    assert [part.machines[0].places for part, _ in halves] == [2, 2]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"strategy": "ensemble(members=4)", "workers": 6}, "6 workers cannot be shared out equally among 4"),
        ({"strategy": "ensemble(members=5)", "workers": 5}, "do not fit on cluster office"),
        ({"strategy": "ensemble(members=2, each=nothing)"}, "unknown strategy 'nothing'"),
        (
            {"strategy": "ensemble(members=2)", "faults": "kill(rank=1, at_s=2)"},
            "faults of cluster office are of one",
        ),
        ({"strategy": "ensemble(members=2)", "distill": "nothing"}, "unknown model 'nothing'"),
        ({"distill": "mlp"}, "--distill is the last stage of an ensemble"),
        (
            {"strategy": "ensemble(members=2)", "distill": "mlp", "gradients": "none"},
            "--distill means nothing",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_and_nothing_is_written(
    options: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    job = {**JOB, "cluster": "office", "workers": 2, **options}
    if job.get("gradients") == "none":
        job = {key: value for key, value in job.items() if key != "batch_size"}
    with pytest.raises(RequestError, match=complaint) as caught:
        simulate(**job, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_ensemble_is_compared_with_a_single_network(tmp_path: Path) -> None:
    """It is tested when all its members have ended; the images that they have seen add up."""
    told = {**JOB, "epochs": 1, "cluster": "office", "workers": 2}
    runs = [
        simulate(**told, strategy=strategy, out=tmp_path / name)
        for name, strategy in (("all", "ensemble(members=2)"), ("one", "synchronous"))
    ]
    found = compare_runs([run.folder for run in runs], "top1=0.1").comparison
    ensemble, single = found.rows
    assert [row.name for row in found.rows] == [f"{run.figures['strategy']}, 2 workers" for run in runs]
    assert ensemble.runs[0].best() == runs[0].figures["test_top1"]
    assert time_to(Target.parse("top1=0.1"))(ensemble.runs[0]) == runs[0].figures["seconds"]
    assert ensemble.runs[0].tests[0].images == 2 * single.runs[0].tests[0].images
