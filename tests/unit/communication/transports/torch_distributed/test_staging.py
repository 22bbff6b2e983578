import threading
from collections.abc import Callable
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
        return self.tensor


def copy(source: Tensor, target: Tensor) -> Callable[[], None]:
    target.copy_(source)
    return lambda: None


def staging() -> Staging:
    """Makes buffers whose copies are complete at once."""
    return Staging(copy, lambda act: act(), pinned=False)


def sent(made: Staging, tensor: Tensor) -> Leaving:
    """Sends a tensor, and gives the copy that leaves."""
    found: list[Leaving] = []

    def start(staged: Tensor) -> Leaving:
        found.append(Leaving(staged))
        return found[0]

    made.send(tensor, start)
    return found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64])
def test_what_leaves_is_a_copy_of_the_same_shape_and_dtype(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).to(dtype).view(3, 4)
    leaving = sent(staging(), tensor)
    expected = tensor.clone()
    tensor.zero_()
    assert leaving.tensor.dtype == dtype
    assert torch.equal(leaving.tensor, expected)


def test_a_buffer_is_used_again_only_after_what_is_in_it_has_left() -> None:
    made = staging()
    first = sent(made, torch.full((8,), 1.0))
    second = sent(made, torch.full((8,), 2.0))
    assert made.nbytes == 64
    assert torch.equal(first.tensor, torch.full((8,), 1.0))
    second.wait()
    third = sent(made, torch.full((6,), 3.0))
    assert third.tensor.data_ptr() == second.tensor.data_ptr()
    assert torch.equal(first.tensor, torch.full((8,), 1.0))
    assert made.nbytes == 64


def test_the_smallest_buffer_that_fits_is_taken_and_too_small_ones_go() -> None:
    made = staging()
    large, small = (sent(made, torch.zeros(size)) for size in (100, 10))
    large.wait()
    small.wait()
    third = sent(made, torch.zeros(9))
    assert third.tensor.data_ptr() == small.tensor.data_ptr()
    third.wait()
    assert made.nbytes == 400 + 40
    sent(made, torch.zeros(200))
    assert made.nbytes == 800


def test_a_buffer_is_free_again_where_sending_fails() -> None:
    made = staging()

    def refuse(tensor: Tensor) -> Leaving:
        raise ConnectionError

    for _ in range(3):
        handle = made.send(torch.zeros(4), refuse)
        with pytest.raises(ConnectionError):
            handle.wait()
    assert made.nbytes == 16


class SlowCopies:
    """Copies that are complete when the test says so, and the threads of a rank."""

    def __init__(self) -> None:
        self.complete: list[threading.Event] = []
        self.threads: list[threading.Thread] = []

    def copy(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        complete = threading.Event()
        self.complete.append(complete)

        def wait() -> None:
            complete.wait()
            target.copy_(source)

        return wait

    def submit(self, act: Callable[[], None]) -> None:
        self.threads.append(threading.Thread(target=act))
        self.threads[-1].start()


def test_the_sender_does_not_wait_for_copies_and_messages_leave_in_their_order() -> None:
    slow, started = SlowCopies(), list[str]()
    made = Staging(slow.copy, slow.submit, pinned=False)

    def start(name: str, staged: Tensor | None = None) -> Leaving:
        started.append(name)
        return Leaving(torch.zeros(0) if staged is None else staged)

    handles = [
        made.send(torch.full((2,), 1.0), lambda staged: start("first", staged)),
        made.send(torch.full((2,), 2.0), lambda staged: start("second", staged)),
        made.send_after(lambda: start("no tensor")),
    ]
    assert started == []
    assert not any(handle.done() for handle in handles)
    slow.complete[1].set()  # the later copy is complete first
    slow.complete[0].set()
    assert handles[0].wait().tolist() == [1.0, 1.0]
    assert handles[1].wait().tolist() == [2.0, 2.0]
    handles[2].wait()
    assert started == ["first", "second", "no tensor"]
    for thread in slow.threads:
        thread.join()
    made.send_after(lambda: start("at once"))
    assert started[-1] == "at once"


def test_a_message_that_cannot_be_sent_holds_up_none_behind_it() -> None:
    slow = SlowCopies()
    made = Staging(slow.copy, slow.submit, pinned=False)

    def refuse(tensor: Tensor) -> Leaving:
        raise ConnectionError

    broken, good = made.send(torch.zeros(2), refuse), made.send(torch.ones(2), Leaving)
    for complete in slow.complete:
        complete.set()
    with pytest.raises(ConnectionError):
        broken.wait()
    assert broken.done()
    assert good.wait().tolist() == [1.0, 1.0]
    for thread in slow.threads:
        thread.join()
