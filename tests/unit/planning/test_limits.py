"""Networks whose steps do not follow from their shapes are named, in place of a figure where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.api.calibrate import calibrate
from polyrhythm.api.profile import profile
from polyrhythm.api.simulate import simulate
from polyrhythm.errors import RequestError
from polyrhythm.planning.limits import limits_of
from polyrhythm.planning.step import LayerClocks
from polyrhythm.simulation.cluster import cluster_text, open_cluster
from unit.simulation.clusters import cluster

DRY: dict[str, Any] = {
    "gradients": "none",
    "steps": 2,
    "workers": 1,
    "data": "digits",
    "strategy": "synchronous",
}


class Experts(nn.Module):
    """Each image passes one of four layers, by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 10) for _ in range(4))

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        chosen = self.gate(flat).argmax(1)
        logits = flat.new_zeros(len(flat), 10)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            logits = logits.index_add(0, rows, expert(flat[rows]))
        return logits


class Skipping(nn.Module):
    """A layer is left out in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        if torch.rand(1) < 0.5:
            flat = self.first(flat)
        return self.last(flat)


class Masked(nn.Module):
    """Only some numbers count; indices that are not masks have a known number."""

    def __init__(self, *, by_mask: bool) -> None:
        super().__init__()
        self.last = nn.Linear(1, 10)
        self.by_mask = by_mask

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        kept = flat[flat > 0] if self.by_mask else flat[:, torch.arange(5, device=flat.device)]
        return self.last(kept.sum().expand(len(flat), 1))


class Looked(nn.Module):
    """Numbers are looked up in a table."""

    def __init__(self, *, rows: int, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 4, sparse=sparse)
        self.last = nn.Linear(4 * 64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.table(images.flatten(1).long().clamp(0, 16)).flatten(1))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Experts(), "depend on the values of their inputs (nonzero)"),
        (Skipping(), "depend on the values of their inputs (item)"),
        (Masked(by_mask=True), "depend on the values of their inputs (a mask)"),
        (Masked(by_mask=False), ""),
        (Looked(rows=10_000, sparse=False), "embeddings (table) have 94 % of the parameters"),
        (Looked(rows=17, sparse=True), "embeddings (table) have 3 % of the parameters"),
        (Looked(rows=17, sparse=False), ""),
        (nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 10)), ""),
    ],
)
def test_a_network_whose_steps_do_not_follow_from_its_shapes_is_named(model: nn.Module, reason: str) -> None:
    found = limits_of(model.to("meta"), (1, 8, 8))
    assert len(found) == bool(reason)
    assert reason in "".join(found)


def test_a_layer_that_steps_use_differently_is_named() -> None:
    """At other shapes of the network's inputs, other shapes of a layer's say nothing."""
    model = Skipping()
    clocks = LayerClocks(model, lambda: 0.0)
    clocks.watch()
    for images in (4, 4, 2, 2):
        model(torch.ones(images, 64)).sum().backward()
        clocks.end_step()
    assert set(clocks.varied) <= {"first"}
    for _ in range(40):
        model(torch.ones(4, 64)).sum().backward()
        clocks.end_step()
    assert clocks.varied == ("first",)


def test_a_figure_is_given_for_the_measured_step_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = str(tmp_path / "own.yaml")
    experts = Experts()
    profile(out=own, steps=5, start_method="fork", model=experts, data="digits", batch_size=32)
    assert "Experts: its layers depend on the values of their inputs (nonzero)" in caplog.text
    caplog.clear()
    run = simulate(cluster=own, model=experts, batch_size=32, out=tmp_path / "run", **DRY)
    assert run.figures["images_per_s"] > 0
    assert "Experts: its layers depend on the values" in caplog.text
    for batch, where in ((16, own), (32, "bsc"), (32, "deep_image")):
        with pytest.raises(RequestError, match="does not give that of Experts at a batch of"):
            simulate(cluster=where, model=experts, batch_size=batch, out=tmp_path / "other", **DRY)
    with pytest.raises(RequestError, match="does not give that of mlp at a batch of 32"):
        simulate(cluster=own, model="mlp", batch_size=32, out=tmp_path / "other", **DRY)


def test_a_fit_of_such_a_network_names_it(caplog: pytest.LogCaptureFixture) -> None:
    fitted = calibrate(
        cluster="office", model=Experts(), data="digits", throughput=["1 worker: 500"], unknowns=["step_time"]
    )
    assert fitted["measurements"][0]["predicted"] == pytest.approx(500, rel=0.01)
    assert "Experts: its layers depend on the values" in caplog.text


def test_accelerators_of_unknown_speed_give_no_figure(tmp_path: Path) -> None:
    """Beside workers on cores; alone, the cluster's step time is theirs, and so it is with a given speed."""

    def run(workers: int, **card: Any) -> Any:
        where = cluster({"name": "card", "accelerators": 2, **card}, {"name": "box"})
        return simulate(
            cluster=where, model="mlp", out=tmp_path / f"{workers}{len(card)}", **{**DRY, "workers": workers}
        )

    run(2)
    with pytest.raises(RequestError, match="the speed of card's accelerators is unknown"):
        run(3)
    run(3, speed=1.0)
    where = cluster({"name": "card", "accelerators": 2, "speed": 1.0}, {"name": "box"})
    (tmp_path / "again.yaml").write_text(cluster_text(where))
    assert "speed" in open_cluster(tmp_path / "again.yaml").hosts[0].model_fields_set


def test_a_given_step_time_in_another_unit_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"cluster": "office", "model": "mlp", **DRY}
    simulate(step_time="constant(seconds=5)", out=tmp_path / "usual", **given)
    assert not caplog.messages
    simulate(step_time="constant(seconds=50000)", out=tmp_path / "long", **given)
    assert caplog.messages == ["step time: a step of 5e+04 s on the fastest host: is it in ms?"]
