"""Execution of a forward pass: memory format, compilation, mixed precision, and batches of one image.

Execution changes how fast a network is and, but for rounding, not its outputs:

    channels_last    images are held as (B, H, W, C) in memory, and so are all outputs of convolutions. Weights
                     stay as they are: the flat vector, checkpoints and messages know nothing of it.
    compiled         full batches go through `torch.compile`; ragged batches, and every test, through the network as it
                     is, since each size would be compiled again. A compiled backward pass hands over all gradients
                     at its end, so nothing of an exchange hides behind it.

Mixed precision: matrix products and convolutions in 16 bits where the device has them; weights stay.

Paper: P. Micikevicius and others, "Mixed precision training", ICLR 2018, arXiv 1710.03740.

float16 has few exponent bits, so small gradients would vanish: the loss is scaled up, and gradients down
again.

    with precision.autocast():
        loss = loss_of(model(images), labels)
    precision.scale(loss).backward()
    if precision.unscale(gradients):        # before they are sent: each rank may have a scale of its own
        optimizer.step()

Batches of a single image, for which batch normalization may have no statistics:

    layer                 sees of one image     normalizes it in training by
    BatchNorm2d, 7 x 7    49 numbers a channel    their mean and variance, as ever
    BatchNorm2d, 1 x 1    one number a channel    its running statistics, which stay as they are
    BatchNorm1d           one number a channel    the same

One number has no variance, and torch refuses it. Such batches arise by themselves: as the ragged last one of
an epoch, or where the share of a lost worker is dealt out among others. Where already the first batch is one,
nothing would ever be normalized, and the run is refused before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.errors import RequestError, unknown
from polyrhythm.training.activation_checkpointing import CheckpointedBlocks

_REASON_LETTERS = 160


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Execution of a network.

    Attributes:
        compiled: whether full batches go through `torch.compile`.
        channels_last: whether images are held with their channels innermost.
        checkpoints_activations: whether activations inside of blocks are computed again in the backward pass.
    """

    compiled: bool = False
    channels_last: bool = False
    checkpoints_activations: bool = False


def check_execution(
    execution: Execution,
    make_model: Callable[[], nn.Module],
    image_shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Try out a way to run a network.

    Args:
        execution: execution to try.
        make_model: function that makes the network, on the CPU.
        image_shape: (C, H, W).
        device: device where it will be trained.

    Raises:
        RequestError: it is not available here, or not with this network.
    """
    if execution.channels_last:
        with torch.random.fork_rng(devices=[]):
            _check_channels_last(make_model().eval(), torch.zeros(2, *image_shape))
    if execution.checkpoints_activations:
        with torch.random.fork_rng(devices=[]):
            CheckpointedBlocks(make_model(), by_running_statistics)
    if execution.compiled:
        _check_compiler(device)


Forward = Callable[[Tensor, bool], Tensor]
"""Returns a network's outputs for images (B, C, H, W), and whether B is that of most batches: others are not compiled.

Raises `RequestError` where the network cannot be compiled.
"""


def forward_pass(model: nn.Module, execution: Execution) -> Forward:
    """Return how a network is run in training.

    Args:
        model: model on its device; compiled at the first full batch, or not at all.
        execution: execution of the network.
    """
    compiled = _compiled(model) if execution.compiled else model
    blocks = CheckpointedBlocks(model, by_running_statistics) if execution.checkpoints_activations else None

    def forward(images: Tensor, full: bool) -> Tensor:
        if execution.channels_last:
            images = channels_innermost(images)
        with nullcontext() if blocks is None else blocks.on():
            outputs: Tensor = (compiled if full else model)(images)
        return outputs

    return forward


def channels_innermost(images: Tensor) -> Tensor:
    """Return the same (B, C, H, W) with channels innermost in memory, as far as torch is concerned also for C = 1.

    An image of one channel lies in memory the same both ways. torch goes by the strides, and takes those of a
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
    """Compile something small, which finds a missing compiler whatever it is that is missing."""
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
    """Return a compiled form, which raises `RequestError` where it cannot be compiled."""
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


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """In what precision the forward pass computes; made by `choose`.

    Args:
        dtype: dtype of matrix products and convolutions; float32 means: whatever the model has.
        device: device where the model is.

    Attributes:
        dtype: the argument of that name.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type) if dtype == torch.float16 else None

    @classmethod
    def choose(cls, name: str, device: torch.device) -> Precision:
        """Choose by name.

        Args:
            name: `float32`, `bfloat16`, `float16`, or `auto`: the best that the device is fast in.
            device: device where the model is.

        Raises:
            RequestError: no such name, or the device cannot do it.
        """
        if name == "auto":
            return cls(_fastest(device), device)
        if name not in _DTYPES:
            raise unknown("precision", name, [*_DTYPES, "auto"])
        able = _able(device)
        if _DTYPES[name] not in able:
            names = " or ".join(known for known, dtype in _DTYPES.items() if dtype in able)
            raise RequestError(f"precision {name} is not possible on {device.type}: choose {names}")
        return cls(_DTYPES[name], device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for the forward pass and the loss."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss for `backward`, scaled if gradients will be scaled back."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, gradients: Tensor) -> bool:
        """Scale gradients back, in place, and adapt the scale.

        Args:
            gradients: `(n,)`, of one backward pass, in float32 or float64.

        Returns:
            Whether they may be used. Only a scaled loss can overflow by itself: then they are not finite, the
            scale is lowered, and this step should be left out. Where nothing is scaled, nothing is looked at:
            always true.
        """
        if self._scaler is None:
            return True
        probe = _Probe(gradients)
        self._scaler.unscale_(probe)
        self._scaler.step(probe)
        self._scaler.update()
        return probe.stepped

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its history, JSON-able; empty where nothing is scaled."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; a state from another precision leaves the scale as it is."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


class _Probe(torch.optim.Optimizer):
    """Shows gradients to `GradScaler`, which steps only optimizers with finite gradients."""

    def __init__(self, gradients: Tensor) -> None:
        parameter = nn.Parameter(gradients)
        parameter.grad = gradients
        super().__init__([parameter], {})
        self.stepped = False

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Note that the gradients are finite."""
        self.stepped = True


def use_repeatable_convolutions(device: torch.device, dtype: torch.dtype) -> None:
    """Restrict cuDNN in this process to algorithms with the same bits in each run, on a GPU in float32.

    Others add in the order in which threads finish. In 16 bits speed has precedence.
    """
    if device.type == "cuda" and dtype == torch.float32:
        torch.backends.cudnn.deterministic = True


def _able(device: torch.device) -> set[torch.dtype]:
    able = {torch.float32}
    if device.type == "cpu":
        able.add(torch.bfloat16)
    elif device.type == "cuda":
        able.add(torch.float16)
        if torch.cuda.is_bf16_supported(including_emulation=False):
            able.add(torch.bfloat16)
    return able


def _fastest(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        # most CPUs only imitate bfloat16, several times slower than float32
        return torch.float32
    return torch.bfloat16 if torch.bfloat16 in _able(device) else torch.float16


@contextmanager
def by_running_statistics(model: nn.Module) -> Iterator[None]:
    """Let layers that see one number a channel normalize by their running statistics, if they have some.

    Args:
        model: model in training; changed only in the meantime.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.training]
    handles = [layer.register_forward_pre_hook(_as_tested) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers:
            layer.train()


def check_learns_alone(make_model: Callable[[], nn.Module], image_shape: tuple[int, ...]) -> None:
    """Refuse a network that takes statistics of a batch of one image, and finds one number a channel.

    Args:
        make_model: function that makes it, on the CPU.
        image_shape: (C, H, W).

    Raises:
        RequestError: the network cannot be trained on single images.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = make_model().train()
        try:
            model(torch.zeros(1, *image_shape))
        except ValueError as error:
            model(torch.zeros(2, *image_shape))
            raise RequestError(
                f"a worker's batches have a single image, which has no batch-norm statistics ({error}): "
                "ask for a larger batch_size, or for fewer workers"
            ) from None


def _as_tested(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    values = inputs[0]
    if values.numel() == values.shape[1]:
        layer.eval()
