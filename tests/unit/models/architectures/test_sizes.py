"""A network of sizes alone: as many parameters as given, refused where numbers are needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm.api.simulate import simulate
from polyrhythm.config.model import shapes_of
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.training.model_sizes import sizes_of
from unit.simulation.clusters import cluster

MEASURED = """
step_of:
  batch_size: 4
  multiply_adds: 800
  layers:
    - {name: first, parameters: 1000, seconds: 0.3}
    - {name: last, parameters: 3000, seconds: 0.1}
"""


def test_parameters_are_divided_over_the_layers() -> None:
    found = shapes_of("sizes(parameters=1.1e3, layers=3)", 10, (3, 1, 1))
    assert [each.numel() for each in found.parameters()] == [366, 367, 367]


def test_measured_layers_decide_when_their_gradients_are_ready(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(MEASURED)
    model = shapes_of(f"sizes(file='{tmp_path / 'profile.yaml'}')", 1, (3, 1, 1))
    sizes = sizes_of(model, (3, 1, 1), bucket_bytes=1)
    assert sizes.buckets == (3000, 1000)  # from the last layer on, as in a backward pass
    assert sizes.shares == pytest.approx((0.25, 0.75))


def test_a_dry_run_moves_as_many_bytes_as_the_formula_has(tmp_path: Path) -> None:
    """4 workers, 1 s steps, one bucket of M bytes over links of B: 1 + 2 (N-1)/N M/B seconds a step."""
    links = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e6}
    made = cluster({"count": 4}, step_time="constant(seconds=1)", nic=links)
    run = simulate(
        cluster=made,
        gradients="none",
        steps=5,
        model="sizes(parameters=1000000, layers=1)",
        strategy="synchronous(bucket_bytes=1e9, collective=ring)",
        workers=4,
        batch_size=8,
        out=tmp_path / "run",
    )
    assert run.figures["images_per_s"] == pytest.approx(4 * 8 / (1 + 2 * 3 / 4 * 4.0), rel=2e-3)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("sizes()", "give either parameters"),
        ("sizes(parameters=5, file='a.yaml')", "give either parameters"),
        ("sizes(file='none.yaml')", "none.yaml"),
    ],
)
def test_sizes_that_say_nothing_are_refused(spec: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        shapes_of(spec, 10, (3, 1, 1))


def test_a_cluster_file_without_layers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("name: plain\n")
    with pytest.raises(RequestError, match="has no layers of a step"):
        shapes_of(f"sizes(file='{tmp_path / 'plain.yaml'}')", 10, (3, 1, 1))


def test_training_is_refused() -> None:
    with pytest.raises(RequestError, match="simulated with --gradients none"):
        create_model("sizes(parameters=10)", classes=10, image_shape=(3, 8, 8))
