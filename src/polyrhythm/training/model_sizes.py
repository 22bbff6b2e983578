"""Sizes of a model's buckets, and the share of a step's time that passes until each is ready.

The shares follow from the arithmetic that belongs to each parameter, counted in a forward pass on shapes
alone:

    layer            counted                    belongs to
    convolution      2 · C_in · k² · C_out · H · W    its weight and bias, by their numbers
    q kᵀ, a v        2 · tokens² · width              the parameters of the nearest enclosing module that has some
    norm, ReLU       nothing                          no parameter
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polyrhythm.models.architectures.sizes import SizesAlone
from polyrhythm.training.flat_parameters import FlatParameters


@dataclass(frozen=True)
class PieceSize:
    """A piece of a network, between two places where it can be cut.

    Attributes:
        name: name of its last layer.
        parameters: trained numbers in it.
        operations: floating-point operations of the forward pass of one image.
        outputs: numbers of each value that is passed to later pieces, of one image.
        kept: numbers that its backward pass needs, of one image.
        normalizes: whether it has layers that normalize by the statistics of a batch.
    """

    name: str
    parameters: int
    operations: float
    outputs: tuple[int, ...]
    kept: int
    normalizes: bool = False


@dataclass(frozen=True)
class Exchange:
    """Messages between workers that compute layers together, at one point of a pass.

    Attributes:
        kind: owners of the examples. `all`: all workers. `own`: the sender. `others`: the receiver. `fixed`:
            sums over all, of any number. `head`: nothing; the layers at the network's end are computed here.
        numbers: numbers of each example, from worker i to worker j; those from one to itself do not travel.
    """

    kind: Literal["all", "own", "others", "fixed", "head"]
    numbers: tuple[tuple[int, ...], ...]

    def sent(self, source: int, to: int, counts: Sequence[int]) -> int:
        """Return how many numbers travel from one worker to another.

        Args:
            source: the sender.
            to: the receiver.
            counts: number of examples of each worker.
        """
        if self.kind == "head" or source == to:
            return 0
        times = {"all": sum(counts), "own": counts[source], "others": counts[to], "fixed": 1}[self.kind]
        return self.numbers[source][to] * times


@dataclass(frozen=True)
class ModelSizes:
    """All that moving a model's gradients depends on.

    Attributes:
        buckets: trained numbers in each bucket, in the order in which the backward pass fills them.
        shares: shares of a pass's time that each bucket's layers take; they add up to 1.
        dtype: dtype of the parameters.
        head: features that go into the fully connected layers at its end, and the neurons of each; empty
            where these are not cut.
        pieces: pieces between which it can be cut; empty where it is not.
        shapes: shapes of its parameters, in the order of the vector; empty where only their number is known.
        exchanges: exchanges of workers that cut the layers before the head as well, in the order of a pass;
            empty where these are not cut.
        owned: parameters of those layers with rows distributed over workers: the first number, the one past
            the last, and the number of rows.
    """

    buckets: tuple[int, ...]
    shares: tuple[float, ...]
    dtype: torch.dtype = torch.float32
    head: tuple[int, ...] = ()
    pieces: tuple[PieceSize, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    owned: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.buckets) == len(self.shares) > 0, "every bucket has a share"
        assert min(self.buckets) > 0, "a bucket holds at least one number"

    @property
    def parameters(self) -> int:
        """Trained numbers in all."""
        return sum(self.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them: what the papers call M."""
        return self.parameters * self.dtype.itemsize


def shapes_alone(make_model: Callable[[], nn.Module], image_shape: tuple[int, int, int]) -> nn.Module | None:
    """Return a network on the meta device, with shapes but no numbers; None where it looks at numbers.

    Args:
        make_model: function that makes it, with any weights.
        image_shape: (C, H, W) of an image.
    """
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # no effect: weights on the meta device
            model = make_model().to("meta")
        # Tensors that are neither parameters nor buffers would have undefined numbers.
        for module in model.modules():
            if any(isinstance(value, torch.Tensor) and value.is_meta for value in vars(module).values()):
                return None
        training = model.training
        with torch.no_grad():
            model.eval()(torch.empty(2, *image_shape, device="meta"))
        return model.train(training)
    except Exception:  # a network can fail in any way on shapes alone
        return None


def sizes_of(
    model: nn.Module, image_shape: tuple[int, int, int], bucket_bytes: int | None = None
) -> ModelSizes:
    """Measure a model that no one trains.

    Args:
        model: model; its parameters become views of one vector; best on the meta device, where that costs no
            memory.
        image_shape: (C, H, W) of an image.
        bucket_bytes: smallest size of a bucket, if it is not the default.

    Raises:
        RequestError: it has nothing to train.
    """
    flat = FlatParameters(model) if bucket_bytes is None else FlatParameters(model, bucket_bytes)
    shares = time_shares(model, flat, image_shape)
    shapes = tuple(tuple(view.parameter.shape) for view in flat.views)
    return ModelSizes(tuple(_numbers(flat)), shares, flat.vector.dtype, shapes=shapes)


def time_shares(
    model: nn.Module, flat: FlatParameters, image_shape: tuple[int, int, int]
) -> tuple[float, ...]:
    """Return each bucket's share of a pass's time: that of the arithmetic in the layers with its parameters.

    See `work_of_parameters` for the counted arithmetic. Where there is none, it is the bucket's share of the
    parameters.

    Args:
        model: model with the parameters of `flat`.
        flat: flat parameters with the buckets.
        image_shape: (C, H, W) of an image.
    """
    if len(flat.buckets) == 1:
        return (1.0,)
    work = work_of_parameters(model, image_shape)
    spent = [
        sum(work[flat.views[position].name] for position in bucket.parameters) for bucket in flat.buckets
    ]
    return _normalized(spent if sum(spent) > 0 else _numbers(flat))


def shares_of_numbers(model: nn.Module, flat: FlatParameters) -> tuple[float, ...]:
    """Return each bucket's share of the parameters."""
    return _normalized(_numbers(flat))


def _numbers(flat: FlatParameters) -> list[int]:
    return [min(bucket.stop, flat.size) - bucket.start for bucket in flat.buckets]


def _normalized(parts: list[float] | list[int]) -> tuple[float, ...]:
    whole = sum(parts)
    return tuple(part / whole for part in parts)


def work_of_parameters(model: nn.Module, image_shape: tuple[int, int, int]) -> dict[str, float]:
    """Count floating-point operations of the forward pass of one image.

    Matrix products and convolutions count, as `torch.utils.flop_counter` has them; whatever else a layer does counts
    nothing. A module's operations belong to the parameters that it owns, by their numbers; to those below it if it
    owns none; to those of the nearest module around it if there are none below either.

    Args:
        model: model on any device; left as it was.
        image_shape: (C, H, W) of an image.

    Returns:
        Operations by the name of each trained parameter. All zero where the network cannot be run on shapes alone.
    """
    if isinstance(model, SizesAlone):
        return dict(model.work)
    trained = {name: value.numel() for name, value in model.named_parameters() if value.requires_grad}
    work = dict.fromkeys(trained, 0.0)
    for module, operations in _own_operations(model, image_shape).items():
        owners = _owners(module, trained)
        numbers = sum(trained[name] for name in owners)
        for name in owners:
            work[name] += operations * trained[name] / numbers
    return work


def _own_operations(model: nn.Module, image_shape: tuple[int, int, int]) -> Counter[str]:
    """Return the operations of every module without those of the modules inside it, by its name."""
    shapes = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    images = torch.empty(1, *image_shape, device="meta")
    training = model.training
    model.eval()  # batch norm refuses a single image in training
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            torch.func.functional_call(model, shapes, (images,))
    except Exception:  # a network can fail in any way on shapes alone
        return Counter()
    finally:
        model.train(training)
    return _without_inner({name: sum(found.values()) for name, found in counter.get_flop_counts().items()})


def _without_inner(counted: dict[str, int]) -> Counter[str]:
    """Subtract the operations of inner modules from the outer ones; names then start below the model's own."""
    own: Counter[str] = Counter()
    for name, operations in counted.items():
        if name == "Global":
            continue
        own[name.partition(".")[2]] += operations
        around = name
        while "." in around:
            around = around.rpartition(".")[0]
            if around in counted:
                own[around.partition(".")[2]] -= operations
                break
    return own


def _owners(module: str, trained: dict[str, int]) -> list[str]:
    own = [name for name in trained if name.rpartition(".")[0] == module]
    if own:
        return own
    while True:
        below = [name for name in trained if name.startswith(f"{module}." if module else "")]
        if below or not module:
            return below
        module = module.rpartition(".")[0]
