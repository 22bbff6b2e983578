"""What `analyze` tells of strategies and model parallelism, against formulas."""

from __future__ import annotations

import pytest

from polyrhythm.api.analyze import analyze
from polyrhythm.errors import RequestError


def test_bytes_of_strategies_follow_their_formulas() -> None:
    found = analyze(model="mlp", classes=10, image_size=8, channels=1, batch_size=16, workers=4)
    size = 4 * found["parameters"]
    sent = {each["name"]: each.get("bytes_sent_per_step") for each in found["strategies"]}
    assert len(sent) >= 29
    header = 64
    # A push and its answer; the first parameters and the goodbyes besides.
    assert sent["parameter_server"] == pytest.approx(2 * size, rel=0.2)
    assert sent["synchronous"] == pytest.approx(2 * (size + 8) * 3 / 4, rel=0.05)
    assert sent["hogwild"] == 0
    assert sent["local_sgd"] < sent["synchronous"] / 2 + header
    assert sent["gaia"] is None  # sends what is significant, which depends on values


def test_cutting_large_layers_pays_below_a_batch_that_is_told() -> None:
    asked = {"model": "alexnet", "classes": 1000, "image_size": 224, "workers": 4}
    found = analyze(batch_size=32, **asked)["model_parallelism"]
    assert found["layers"] == [9216, 4096, 4096, 1000]
    assert found["data_parallel_bytes"] == 2 * 4 * (9216 * 4096 + 4096 * 4096 + 4096 * 1000) * 3 / 4
    assert found["pays"]
    limit = found["pays_below_batch_size"]
    assert (
        analyze(batch_size=limit, **asked)["model_parallelism"]["cut_bytes"] <= found["data_parallel_bytes"]
    )
    assert not analyze(batch_size=limit + 1, **asked)["model_parallelism"]["pays"]


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(RequestError, match="batch-size must be at least 1"):
        analyze(model="mlp", classes=10, image_size=8, batch_size=0)
    with pytest.raises(RequestError, match="classes must be at least 1"):
        analyze(model="mlp", classes=0, image_size=8)
