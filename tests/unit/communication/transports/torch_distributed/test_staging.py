from typing import Any

import pytest
import torch
from torch import Tensor

from polyrhythm.communication.transports.torch_distributed.communicator import Staging


class Leaving:
    """A tensor that leaves when the test says so."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.gone = False

    def done(self) -> bool:
        return self.gone

    def wait(self) -> Any:
        self.gone = True


def copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def staging() -> Staging:
    return Staging(copy, pinned=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64])
def test_what_leaves_is_a_copy_of_the_same_shape_and_dtype(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).to(dtype).view(3, 4)
    leaving = staging().send(tensor, Leaving)
    assert isinstance(leaving, Leaving)
    expected = tensor.clone()
    tensor.zero_()
    assert leaving.tensor.dtype == dtype
    assert torch.equal(leaving.tensor, expected)


def test_a_buffer_is_used_again_only_after_what_is_in_it_has_left() -> None:
    made = staging()
    first = made.send(torch.full((8,), 1.0), Leaving)
    second = made.send(torch.full((8,), 2.0), Leaving)
    assert isinstance(first, Leaving)
    assert isinstance(second, Leaving)
    assert made.nbytes == 64
    assert torch.equal(first.tensor, torch.full((8,), 1.0))
    second.wait()
    third = made.send(torch.full((6,), 3.0), Leaving)
    assert isinstance(third, Leaving)
    assert third.tensor.data_ptr() == second.tensor.data_ptr()
    assert torch.equal(first.tensor, torch.full((8,), 1.0))
    assert made.nbytes == 64


def test_the_smallest_buffer_that_fits_is_taken_and_too_small_ones_go() -> None:
    made = staging()
    large, small = (made.send(torch.zeros(size), Leaving) for size in (100, 10))
    assert isinstance(large, Leaving)
    assert isinstance(small, Leaving)
    large.wait()
    small.wait()
    third = made.send(torch.zeros(9), Leaving)
    assert isinstance(third, Leaving)
    assert third.tensor.data_ptr() == small.tensor.data_ptr()
    third.wait()
    assert made.nbytes == 400 + 40
    made.send(torch.zeros(200), Leaving)
    assert made.nbytes == 800


def test_a_buffer_is_free_again_where_sending_fails() -> None:
    made = staging()

    def refuse(tensor: Tensor) -> Leaving:
        raise ConnectionError

    for _ in range(3):
        with pytest.raises(ConnectionError):
            made.send(torch.zeros(4), refuse)
    assert made.nbytes == 16
