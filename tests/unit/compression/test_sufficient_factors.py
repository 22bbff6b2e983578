"""Sufficient factors: what they rebuild, when they travel, and that training is that of whole gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.jobs import make_job, simulated, strategy, vector_of
from polyrhythm.communication.message import MalformedMessage
from polyrhythm.compression.compressor import COMPRESSORS, Place
from polyrhythm.compression.compressors.sufficient_factors import SufficientFactors, adds_up
from polyrhythm.errors import RequestError
from polyrhythm.specs import build
from polyrhythm.strategies.parameter_server.composition.served import Served
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.linear_factors import LinearFactors
from tolerances import REORDERED

ROWS, COLUMNS = 30, 40
SIDE, CLASSES = 4, 3


def compressor() -> SufficientFactors:
    made = build("compressor", "sufficient_factors(dense_below=0)", COMPRESSORS)
    assert isinstance(made, SufficientFactors)
    return made


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def place(pair: Any = None) -> Place:
    return Place(ROWS, COLUMNS, dtype=torch.float64, pair=pair)


@pytest.mark.parametrize("passes", [1, 3])
def test_factors_rebuild_the_gradient_and_their_errors_add_up_to_that_of_the_bias(passes: int) -> None:
    layers = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Tanh(), nn.Linear(ROWS, 5, bias=False)).double()
    flat = FlatParameters(layers)
    factors = LinearFactors(layers, {id(view.parameter): view.start for view in flat.views})
    with torch.no_grad():
        layers(drawn(7, COLUMNS))  # as a test does: it leaves nothing
    for number in range(passes):
        layers(drawn(4, COLUMNS, seed=number)).square().sum().backward()
    found = factors.take()
    assert factors.take() == {}
    first, second = layers[0], layers[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    left, right = found[0]
    assert left.shape == (4 * passes, ROWS)
    torch.testing.assert_close(left.t() @ right, first.weight.grad, **REORDERED)
    torch.testing.assert_close(left.sum(0), first.bias.grad, **REORDERED)
    left, right = found[ROWS * COLUMNS + ROWS]
    torch.testing.assert_close(left.t() @ right, second.weight.grad, **REORDERED)


def test_rows_of_several_dimensions_and_a_shared_weight_count() -> None:
    one, other = nn.Linear(6, 6, bias=False).double(), nn.Linear(6, 6, bias=False).double()
    other.weight = one.weight
    both = nn.Sequential(one, nn.Tanh(), other)
    factors = LinearFactors(both, {id(one.weight): 0})
    both(drawn(2, 5, 6)).sum().backward()
    [(left, right)] = factors.take().values()
    assert left.shape == (20, 6)
    torch.testing.assert_close(left.t() @ right, one.weight.grad, **REORDERED)


def test_what_travels_is_the_factors_where_they_are_less_and_else_the_gradient() -> None:
    made, pair = compressor(), (drawn(4, ROWS), drawn(4, COLUMNS, seed=1))
    gradient = (pair[0].t() @ pair[1]).view(-1)
    payload = made.encode(gradient, place(pair))
    assert payload.numel() == 4 + 8 * 4 * (ROWS + COLUMNS)
    torch.testing.assert_close(made.decode(payload, place()), gradient, **REORDERED)
    most = ROWS * COLUMNS // (ROWS + COLUMNS)  # 17 rows are 1190 of 1200 numbers, 18 are more
    for rows, numbers in ((most, most * (ROWS + COLUMNS)), (most + 1, ROWS * COLUMNS)):
        pair = drawn(rows, ROWS), drawn(rows, COLUMNS, seed=1)
        payload = made.encode((pair[0].t() @ pair[1]).view(-1), place(pair))
        assert payload.numel() == 4 + 8 * numbers
    assert made.encode(torch.zeros(ROWS * COLUMNS, dtype=torch.float64), place()).numel() == 4


@pytest.mark.parametrize("change", ["scaled", "clipped", "one number", "another layer"])
def test_a_gradient_that_its_factors_do_not_make_travels_as_it_is(change: str) -> None:
    made, pair = compressor(), (drawn(4, ROWS), drawn(4, COLUMNS, seed=1))
    gradient = (pair[0].t() @ pair[1]).view(-1)
    assert adds_up(pair, gradient.view(ROWS, COLUMNS))
    if change == "scaled":
        gradient = gradient * 1024
    elif change == "clipped":
        gradient = gradient.clamp(-1, 1)
    elif change == "one number":
        gradient[77] += 0.1
    else:
        pair = drawn(4, COLUMNS), drawn(4, ROWS)
    payload = made.encode(gradient, place(pair))
    assert payload.numel() == 4 + 8 * ROWS * COLUMNS
    assert torch.equal(made.decode(payload, place()), gradient)


def test_broadcasting_is_chosen_at_the_boundary_of_the_rule() -> None:
    """N K (P + R) < 2 P R: with 30 x 40, of 70 numbers a row, below 34.3 rows of all workers together."""
    made = compressor()
    assert [made.from_rows(rows, place()) for rows in (0, 1, 34, 35)] == [False, True, True, False]
    square = Place(10, 10)
    assert [made.from_rows(rows, square) for rows in (9, 10)] == [True, False]  # equal is no gain


def test_noise_is_refused() -> None:
    made, pair = compressor(), (drawn(4, ROWS), drawn(4, COLUMNS, seed=1))
    payload = made.encode((pair[0].t() @ pair[1]).view(-1), place(pair))
    for bad in (
        payload[:-1],
        payload[:3],
        torch.cat([payload, payload[:1]]),
        torch.full((8,), 255, dtype=torch.uint8),
    ):
        with pytest.raises(MalformedMessage):
            made.decode(bad, place())


def wide() -> nn.Module:
    """Makes a network whose first layer is wide, and another that is not."""
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def with_convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, CLASSES)
    )


SYNCHRONOUS = "synchronous(compress=sufficient_factors(dense_below=0))"
ADAM = "parameter_server(consistency=synchronous, compress=sufficient_factors(dense_below=0))"


@pytest.mark.parametrize("model", [wide, with_convolution])
@pytest.mark.parametrize(
    ("spec", "plain"), [(SYNCHRONOUS, "synchronous"), (ADAM, "parameter_server(consistency=synchronous)")]
)
@pytest.mark.parametrize("workers", [2, 3])
def test_training_is_that_of_whole_gradients_to_rounding(
    spec: str, plain: str, workers: int, model: Any
) -> None:
    options: dict[str, Any] = {
        "model": model,
        "dtype": torch.float64,
        "optimizer": "sgd(lr=0.05, momentum=0.9)",
    }
    one, other = (simulated(make_job(text, workers, **options)) for text in (spec, plain))
    for left, right in zip(one.models, other.models, strict=True):
        torch.testing.assert_close(vector_of(left), vector_of(right), **REORDERED)
    assert torch.equal(vector_of(one.models[0]), vector_of(one.models[-1]))


def test_bytes_are_those_of_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, 4 pictures each: 8 rows of 80 are less than twice 1,024 numbers; 8 of 67 are not less than 384."""
    steps = 6
    from conformance.jobs import blobs

    job = make_job(SYNCHRONOUS, 2, model=wide, dataset=blobs(train=8 * steps), epochs=1)
    result = simulated(job).result
    assert result["steps"] == steps
    numbers, first, layers = 16 * 64 + 64 + 64 * 3 + 3, 16 * 64, 2
    tail = 3 + layers

    def added(count: int) -> int:  # whole to the other one
        return 4 * count + 64

    payload = 16 + 4 + 4 + 4 * 4 * (16 + 64)  # header, one length, the count, and the factors of 4 rows
    whole = added(numbers + tail)
    chosen = added(numbers - first + tail) + payload + 64
    assert result["bytes_sent_per_step"] * steps == pytest.approx(whole + (steps - 1) * chosen)


def test_servers_get_factors_and_send_parameters() -> None:
    numbers = 16 * 64 + 64 + 64 * 3 + 3
    one, other = (
        simulated(make_job(spec, 2, model=wide)).result["bytes_sent_per_step"]
        for spec in (ADAM, "parameter_server(consistency=synchronous)")
    )
    assert other == pytest.approx(2 * (4 * numbers + 64), rel=0.01)
    assert one < 0.75 * other
    assert one > 4 * numbers  # what comes down is whole


def test_what_cannot_have_factors_is_refused() -> None:
    no_linear = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())
    with pytest.raises(RequestError, match="no fully connected layer"):
        simulated(make_job(SYNCHRONOUS, 2, model=lambda: no_linear))
    with pytest.raises(RequestError, match="leave feedback and per out"):
        build("compressor", "sufficient_factors(feedback=True)", COMPRESSORS)
    with pytest.raises(RequestError, match="made for gradients"):
        strategy("local_sgd(compress=sufficient_factors)").check(2)
    served = strategy("parameter_server(servers=2, compress=sufficient_factors(dense_below=0))")
    assert isinstance(served, Served)
