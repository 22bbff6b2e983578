from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.training.forward_pass import Execution, channels_innermost, check_execution, forward_pass

CPU = torch.device("cpu")


class Seen(nn.Module):
    """A network of one convolution that notes what it was shown, and that a compiler must not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.batches: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.batches.append(images)
        return self.convolution(images).flatten(1)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_innermost_are_the_same_numbers_in_another_order(channels: int) -> None:
    images = torch.randn(2, channels, 6, 5)
    found = channels_innermost(images)
    assert torch.equal(found, images)
    assert found.stride() == (channels * 30, 1, channels * 5, channels)
    out = nn.Conv2d(channels, 8, 3)(found)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not out.is_contiguous()


def test_channels_last_changes_no_more_than_rounding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 3)
    )
    images = torch.randn(4, 1, 8, 8)
    plain = model(images)
    plain.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    found = forward_pass(model, Execution(channels_last=True))(images, False)
    found.sum().backward()
    torch.testing.assert_close(found, plain)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.is_contiguous()
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_without_options_the_network_sees_what_was_given() -> None:
    model, images = Seen(), torch.randn(2, 3, 5, 5)
    forward_pass(model, Execution())(images, True)
    assert model.batches[0] is images


def test_a_network_that_needs_channels_first_is_refused() -> None:
    class Views(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.view(len(images), -1)

    with pytest.raises(
        RequestError, match=r"cannot be run with channels_last \(view size .*use reshape for view"
    ):
        check_execution(Execution(channels_last=True), Views, (3, 4, 4), CPU)
    check_execution(Execution(channels_last=True), nn.Flatten, (3, 4, 4), CPU)


def test_trying_out_draws_no_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_execution(Execution(channels_last=True), Seen, (3, 8, 8), CPU)
    assert torch.equal(torch.rand(1), expected)


@pytest.fixture
def compiling() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiling")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_full_batches_are_compiled_and_ragged_ones_are_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    images = torch.randn(4, 1, 2, 3)
    wanted = model(images)
    wanted.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    forward = forward_pass(model, Execution(compiled=True))
    before = torch._dynamo.utils.counters["frames"]["total"]
    assert torch.equal(forward(images[:3], False), model(images[:3]))
    assert torch._dynamo.utils.counters["frames"]["total"] == before
    found = forward(images, True)
    assert torch._dynamo.utils.counters["frames"]["total"] == before + 1
    found.sum().backward()
    torch.testing.assert_close(found, wanted)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.usefixtures("compiling")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_missing_compiler_is_one_line() -> None:
    from torch._inductor import config

    with (
        config.patch({"cpp.cxx": ("/nowhere/g++",), "fx_graph_cache": False}),
        pytest.raises(
            RequestError, match=r"^compile does not work here: .*\(it needs a C\+\+ compiler"
        ) as raised,
    ):
        check_execution(Execution(compiled=True), Seen, (3, 8, 8), CPU)
    assert "\n" not in str(raised.value)
