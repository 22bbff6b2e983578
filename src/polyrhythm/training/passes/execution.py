"""How a network is run: what changes how fast it is and, but for rounding, not what comes out.

channels_last    pictures are held as (B, H, W, C) in memory, and so is all that convolutions make of them. Weights
                 stay as they are: the flat vector, checkpoints and what travels know nothing of it.
compiled         full batches go through `torch.compile`; what is ragged, and every test, through the network as it
                 is, since each size would be compiled anew. A compiled backward pass hands over all gradients
                 at its end, so nothing of an exchange hides behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError

_REASON_LETTERS = 160


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a network is run.

    Attributes:
        compiled: whether full batches go through `torch.compile`.
        channels_last: whether pictures are held with their channels innermost.
    """

    compiled: bool = False
    channels_last: bool = False

    def check(
        self, make_model: Callable[[], nn.Module], image_shape: tuple[int, ...], device: torch.device
    ) -> None:
        """Tries both out, as far as they are asked for.

        Args:
            make_model: makes the network, on the CPU.
            image_shape: (C, H, W).
            device: where it will be trained.

        Raises:
            RequestError: one cannot be had here, or not with this network.
        """
        if self.channels_last:
            with torch.random.fork_rng(devices=[]):
                _check_channels_last(make_model().eval(), torch.zeros(2, *image_shape))
        if self.compiled:
            _check_compiler(device)


class ForwardPass:
    """A network as it is run in training.

    Args:
        model: on its device; compiled at the first full batch, or not at all.
        execution: how.
    """

    def __init__(self, model: nn.Module, execution: Execution) -> None:
        self._model = model
        self._channels_last = execution.channels_last
        self._compiled = _compiled(model) if execution.compiled else model

    def __call__(self, images: Tensor, *, full: bool) -> Tensor:
        """Gives what the network makes of (B, C, H, W); `full` if B is that of most batches.

        Raises:
            RequestError: the network cannot be compiled.
        """
        if self._channels_last:
            images = channels_innermost(images)
        outputs: Tensor = (self._compiled if full else self._model)(images)
        return outputs


def channels_innermost(images: Tensor) -> Tensor:
    """Gives the same (B, C, H, W) with channels innermost in memory, as far as torch is concerned also for C = 1.

    A picture of one channel lies in memory the same both ways. torch goes by the strides, and takes those of a
    contiguous one for channels first, so that all layers behind it would be so as well.
    """
    if images.shape[1] != 1 or not images.is_contiguous():
        return images.to(memory_format=torch.channels_last)
    _, _, height, width = images.shape
    return images.as_strided(images.shape, (height * width, 1, width, 1))


def _check_channels_last(model: nn.Module, images: Tensor) -> None:
    try:
        with torch.no_grad():
            model(channels_innermost(images))
    except RuntimeError as error:
        raise RequestError(
            f"the network cannot be run with channels_last ({_reason(error)}): leave it out, or use reshape for view"
        ) from None


def _check_compiler(device: torch.device) -> None:
    """Compiles something small, which finds a missing compiler in whatever way it is missing."""
    numbers = torch.zeros(64, device=device)
    try:
        found = _compiled(_double)(numbers + 1)
    except RequestError as error:
        raise RequestError(
            f"compile does not work here: {error.args[0]} (it needs a C++ compiler, on a GPU also triton)"
        ) from None
    assert bool((found == 2).all())


def _double(numbers: Tensor) -> Tensor:
    return numbers * 2


def _compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Gives a compiled form, whose failure to compile is a request that was wrong."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor import config as inductor
    from torch._inductor.exc import InductorError

    # A pool of compiling processes has threads, which the ranks that are forked from this process would be without.
    inductor.compile_threads = 1
    # With `dynamic`, a batch of another size would change the code of all.
    made = torch.compile(function, dynamic=False)

    def call(images: Tensor) -> Tensor:
        try:
            outputs: Tensor = made(images)
        except (TorchDynamoException, InductorError) as error:
            raise RequestError(
                f"the network cannot be compiled ({_reason(error)}): leave compile out"
            ) from None
        return outputs

    return call


def _reason(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text.strip()[:_REASON_LETTERS]
