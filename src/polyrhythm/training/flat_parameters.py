"""A model's parameters and gradients as two contiguous vectors with named views.

    vector     [ conv1.weight | conv1.bias | … | head.bias | tail ]      what optimizers and networks see
    gradients  [     …        |            | … |           | tail ]      autograd adds into these views
                └──── bucket 1 ────┘└──────── bucket 0 ─────────┘

Buckets are numbered in the order in which the backward pass fills them: bucket 0 is the end of the vector. The
tail holds a few numbers that must travel with bucket 0 (how many samples the gradient stands for, and whether
someone wants to stop), so that they cost no message of their own.

Both vectors begin at a 64-byte line in every world: torch aligns memory so, and shared memory begins at a page. BLAS
rounds products with a vector by the addresses of their operands within a line, so a parameter must lie at the same
offset in a real run, its simulation and its replay. What multiplies slices that may lie elsewhere copies them first
(`compression.compressor.aligned`). Parameters are packed, where plain torch aligns each: a pass of a single image,
which multiplies matrices by a vector, may therefore round otherwise than a plain torch loop.

Parameters of a narrower dtype than others, as half-precision convolutions next to float norms, cannot be views. Where
they are allowed they keep their own memory, and the vector, which has the widest dtype, their values: gradients are
gathered before an exchange, and both are spread again after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.training.linear_factors import LinearFactors

TAIL = 2
DEFAULT_BUCKET_BYTES = 4 << 20
FIRST_BUCKET_BYTES = 1 << 20
"""Bucket 0 is smaller if the others are larger: the sooner it sets out, the sooner the network is busy."""


@dataclass(frozen=True)
class Bucket:
    """A run of neighboring parameters.

    Attributes:
        start: start of its first number in the vector.
        stop: end index, exclusive; bucket 0 ends with the tail.
        parameters: positions of its parameters in `FlatParameters.views`.
    """

    start: int
    stop: int
    parameters: range


@dataclass(frozen=True)
class View:
    """One parameter's place in the vector."""

    name: str
    parameter: nn.Parameter
    gradient: Tensor
    start: int
    stop: int

    def holds_gradient(self) -> bool:
        """Return whether the parameter's gradient lies in the vector; one of another dtype never does.

        Its memory counts, not the object: `model.to(…)` and `gradient.data = …` give the same object other memory.
        """
        own = self.parameter.grad
        return own is not None and own.data_ptr() == self.address

    @cached_property
    def address(self) -> int:
        """Address of the gradient in the vector."""
        return self.gradient.data_ptr()

    def place_gradient(self) -> None:
        """Make the parameter's gradient the one in the vector, unless the parameter has a narrower dtype."""
        if self.parameter.dtype is self.gradient.dtype:
            self.parameter.grad = self.gradient.detach()  # an object that no other process relies on


class FlatParameters:
    """Moves a model's trained parameters into one vector; the model keeps working, on views of it.

    Args:
        model: model, changed in place: its parameters that require a gradient become views. All must have one device,
            and unless `mixed` one dtype.
        bucket_bytes: smallest size of a bucket, of the first one `FIRST_BUCKET_BYTES` if that is less; a parameter is
            never cut.
        stands_for: number of true numbers for each number; more than 1 in dry runs only.
        shapes: shapes of the parameters that these stand for, in the order of the vector; in dry runs only.
        also: frozen parameters of the model that may be trained later, and so have a place in the vector.
        mixed: whether parameters may be of several floating-point dtypes.
        elsewhere: whether their gradients are: then `gradients` is empty.

    Attributes:
        size: number of parameters, tail excluded.
        vector: `(size,)`, the parameters.
        gradients: `(size,)`, their gradients.
        vector_and_tail: `(size + 2,)`, the parameters and the numbers that travel with them.
        gradients_and_tail: `(size + 2,)`, the same for gradients.
        views: the parameters in the model's order.
        buckets: buckets in the order in which the backward pass fills them.
        stands_for: the argument of that name.
        shapes: the argument of that name; None where each parameter stands for itself.
        without_gradient: positions of the parameters with gradient None in the present step; the vector has zeros
            there. Kept by loops that users write.
        change: `(size,)`, movement of the parameters by such a loop since the last update; None: there is
            none.
        still: whether all stay zeros, so that they need not be written.
        apart: views of parameters that have memory of their own, of a narrower dtype.
        factors: collector of the factors of gradients of fully connected layers; None: not requested.

    Raises:
        RequestError: nothing to train, or parameters of several dtypes.
    """

    still: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        stands_for: float = 1.0,
        also: Collection[Tensor] = (),
        *,
        mixed: bool = False,
        shapes: tuple[tuple[int, ...], ...] | None = None,
        elsewhere: bool = False,
    ) -> None:
        later = set(map(id, also))
        named = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad or id(parameter) in later
        ]
        self.without_gradient: tuple[int, ...] = ()
        self.change: Tensor | None = None
        self.factors: LinearFactors | None = None
        if not any(parameter.requires_grad for _, parameter in named):
            raise RequestError("the model has no parameter to train: let at least one require a gradient")
        dtypes = {parameter.dtype for _, parameter in named}
        if len(dtypes) > 1 and not (mixed and all(dtype.is_floating_point for dtype in dtypes)):
            names = " and ".join(sorted(map(str, dtypes)))
            raise RequestError(f"the model mixes {names}: convert it to one dtype")
        first = named[0][1]
        dtype = reduce(torch.promote_types, dtypes)
        self.stands_for = stands_for
        self.shapes = shapes
        self._bucket_bytes = bucket_bytes
        self.size = sum(parameter.numel() for _, parameter in named)
        # No `zeros_like`: of the meta device, it costs the import of torch's symbolic shapes.
        trained = 0 if elsewhere else self.size
        self.vector_and_tail = torch.empty(self.size + TAIL, dtype=dtype, device=first.device)
        self.gradients_and_tail = torch.zeros(trained + TAIL, dtype=dtype, device=first.device)
        self.vector_and_tail[self.size :].zero_()
        self.vector = self.vector_and_tail[: self.size]
        self.gradients = self.gradients_and_tail[:trained]
        self._tail = self.gradients_and_tail[trained:]
        self._tail_first = self._tail[0]
        self._last_tail: tuple[tuple[float, float], Tensor] | None = None
        self._freed: list[tuple[View, torch.Size]] = []
        self._device: torch.device | None = None
        self.views = list(self._move(named))
        self.apart = [view for view in self.views if view.parameter.dtype is not dtype]
        number_bytes = self.vector.element_size()
        self.buckets = _buckets(
            self.views, bucket_bytes // number_bytes, FIRST_BUCKET_BYTES // number_bytes, self.size + TAIL
        )

    def grow(self, model: nn.Module, also: Collection[Tensor]) -> None:
        """Give the parameters of a model that are trained from now on a place too; gradients are zero then.

        Args:
            model: model with these parameters.
            also: further parameters that may be trained, as at the start.
        """
        self.__dict__.update(FlatParameters(model, self._bucket_bytes, also=also, mixed=True).__dict__)

    def collect_factors(self, model: nn.Module) -> None:
        """Collect the factors of gradients of a model's fully connected layers; the model has these parameters."""
        self.factors = LinearFactors(model, {id(view.parameter): view.start for view in self.views})

    def another(self) -> FlatParameters:
        """Return one for other parameters of the same shapes, all zero: a third of the cost of making a model."""
        made = copy(self)
        made.vector_and_tail = torch.zeros_like(self.vector_and_tail)
        made.vector = made.vector_and_tail[: self.size]
        made.views = [
            replace(
                view,
                parameter=nn.Parameter(made.vector[view.start : view.stop].view(view.parameter.shape)),
            )
            for view in self.views
        ]
        made.renew_gradients()
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the vector: what the papers call M."""
        return self.size * self.vector.element_size()

    def gradients_of(self, parts: Sequence[slice]) -> list[Tensor]:
        """Return views of parts of the gradients."""
        return [self.gradients[part] for part in parts]

    def overwrite(self, part: Tensor, values: Tensor) -> None:
        """Overwrite a part of the vector, given as a view of it, with other values."""
        part.copy_(values)

    def add_gradients_to(self, total: Tensor, weight: float) -> None:
        """Add the gradients, times a weight, to a vector of their shape in place."""
        total.add_(self.gradients, alpha=weight)

    def take_gradients_of(self, total: Tensor, weight: float) -> None:
        """Overwrite the gradients with a vector of their shape, divided by a weight."""
        torch.div(total, weight, out=self.gradients)

    def set_tail(self, first: float, second: float) -> None:
        """Write the two numbers that travel with the gradients."""
        if self._last_tail is None or self._last_tail[0] != (first, second):  # nearly always the same ones
            self._last_tail = (first, second), self._tail.new_tensor([first, second])
        self._tail.copy_(self._last_tail[1])

    def tail(self) -> tuple[float, float]:
        """Read the two numbers that traveled with the gradients."""
        # One read for both: on a GPU each would wait for the stream.
        first, second = self._tail.tolist()
        return first, second

    def divide_by_tail(self, part: Tensor | None = None) -> None:
        """Divide the gradients by the first of the two numbers that traveled with them.

        Args:
            part: part of the gradients to be divided; None: all.
        """
        gradients = self.gradients if part is None else part
        gradients.div_(self._tail_first)  # a tensor already, which torch would make of a number first

    def renew_gradients(self, memory: Tensor | None = None) -> None:
        """Move the gradients, zero, to other memory: what still writes into the old one does no harm.

        Args:
            memory: `(size + 2,)` zeros that begin at a 64-byte line; None: new memory.
        """
        assert memory is None or memory.data_ptr() % 64 == 0, "bits depend on the alignment"
        self.gradients_and_tail = torch.zeros_like(self.gradients_and_tail) if memory is None else memory
        self.gradients = self.gradients_and_tail[: self.size]
        self._tail = self.gradients_and_tail[self.size :]
        self._tail_first = self._tail[0]
        renewed = []
        for view in self.views:
            gradient = self.gradients[view.start : view.stop].view(view.parameter.shape)
            renewed.append(replace(view, gradient=gradient))
            renewed[-1].place_gradient()
        self.views = renewed
        self.apart = [view for view in renewed if view.parameter.dtype is not self.vector.dtype]

    def zero_gradients(self) -> None:
        """Set all gradients to zero, in place."""
        self.gradients_and_tail.zero_()

    def release(self) -> None:
        """Free the memory of the vector, and of the parameters that are views of it, until `allocate`."""
        first, number_bytes, device = self.vector.data_ptr(), self.vector.element_size(), self.vector.device
        if device.type == "meta":
            return
        empty = self.vector.new_empty(0)
        self._freed = []
        for view in self.views:
            if view.parameter.data_ptr() == first + view.start * number_bytes and view.start < view.stop:
                self._freed.append((view, view.parameter.shape))
                view.parameter.data = empty
        self._device = device
        self._place(torch.empty_like(self.vector_and_tail, device="meta"))

    def allocate(self) -> None:
        """Get memory for the vector again, of any content; parameters are views of it as before."""
        if self._device is None:
            return
        self._place(torch.empty_like(self.vector_and_tail, device=self._device))
        for view, shape in self._freed:
            view.parameter.data = self.vector[view.start : view.stop].view(shape)
        self._freed, self._device = [], None

    def _place(self, memory: Tensor) -> None:
        self.vector_and_tail = memory
        self.vector = memory[: self.size]

    def gather_gradients(self) -> None:
        """Copy gradients that were replaced back into the vector: `model.zero_grad()` drops our views, for instance."""
        for view in self.views:
            own = view.parameter.grad
            # Nearly always: autograd adds into the views, so that nothing has to be copied.
            if own is not None and own.data_ptr() == view.address:
                continue
            if own is None:
                view.gradient.zero_()
            else:
                view.gradient.copy_(own)
            view.place_gradient()

    def spread_gradients(self) -> None:
        """Copy the gradients of parameters that have memory of their own to them."""
        for view in self.apart:
            if view.parameter.grad is not None:
                view.parameter.grad.copy_(view.gradient)

    def spread_parameters(self) -> None:
        """Copy parameters that have memory of their own out of the vector; what of them it holds already stays."""
        with torch.no_grad():
            for view in self.apart:
                view.parameter.copy_(self.vector[view.start : view.stop].view(view.parameter.shape))

    def gather_parameters(self) -> None:
        """Copy parameters that were given other memory back into the vector: by `parameter.data = …`, for instance."""
        first, number_bytes = self.vector.data_ptr(), self.vector.element_size()
        for view in self.apart:  # unless it holds more of their digits
            place, own = (
                self.vector[view.start : view.stop].view(view.parameter.shape),
                view.parameter.detach(),
            )
            if not torch.equal(place.to(own.dtype), own):
                place.copy_(own)
        for view in self.views:
            parameter = view.parameter
            if parameter.dtype is not self.vector.dtype:
                continue
            if parameter.data_ptr() != first + view.start * number_bytes and view.start < view.stop:
                place = self.vector[view.start : view.stop].view(parameter.shape)
                place.copy_(parameter.detach())
                parameter.data = place

    def _move(self, named: list[tuple[str, nn.Parameter]]) -> Iterator[View]:
        ends = accumulate((parameter.numel() for _, parameter in named), initial=0)
        placed = [(*each, *place) for each, place in zip(named, pairwise(ends), strict=True)]
        # The largest first: it is in memory twice for a moment, and the C library keeps the memory of small ones.
        for _, parameter, start, stop in sorted(placed, key=lambda each: each[2] - each[3]):
            place = self.vector[start:stop].view(parameter.shape)
            place.copy_(parameter.detach())
            if parameter.dtype is place.dtype:
                parameter.data = place
        for name, parameter, start, stop in placed:
            gradient = self.gradients[start:stop]
            if len(self.gradients):
                gradient = gradient.view(parameter.shape)
            view = View(name, parameter, gradient, start, stop)
            if len(self.gradients):
                view.place_gradient()
            yield view


class WeightlessParameters(FlatParameters):
    """Zeros that stay zeros, as in a dry run in which nothing is computed: arithmetic on them takes no time."""

    still: ClassVar[bool] = True

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._alike: dict[tuple[int, ...], list[Tensor]] = {}

    def gradients_of(self, parts: Sequence[slice]) -> list[Tensor]:
        """Return zeros as long as these parts: the same for all workers, so the receiver has seen them before."""
        lengths = tuple(part.stop - part.start for part in parts)
        if lengths not in self._alike:
            self._alike[lengths] = [torch.zeros_like(self.gradients[part]) for part in parts]
        return self._alike[lengths]

    def another(self) -> FlatParameters:
        """Return one for another worker. It has the same views, into zeros of this one: there is no model to fill."""
        made = copy(self)
        made.vector_and_tail = torch.zeros_like(self.vector_and_tail)
        made.vector = made.vector_and_tail[: self.size]
        made.renew_gradients()
        return made

    def renew_gradients(self, memory: Tensor | None = None) -> None:
        """Move the gradients to other memory."""
        self.gradients_and_tail = torch.zeros_like(self.gradients_and_tail) if memory is None else memory
        self.gradients = self.gradients_and_tail[: self.size]
        self._tail = self.gradients_and_tail[self.size :]
        self._tail_first = self._tail[0]

    def overwrite(self, part: Tensor, values: Tensor) -> None:
        """Do nothing: both are zeros."""

    def zero_gradients(self) -> None:
        """Do nothing: they are zeros."""

    def add_gradients_to(self, total: Tensor, weight: float) -> None:
        """Do nothing: both are zeros."""

    def take_gradients_of(self, total: Tensor, weight: float) -> None:
        """Do nothing: both are zeros."""


def _buckets(views: list[View], smallest: int, first: int, end: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    last = len(views)
    stop = end
    for position in reversed(range(len(views))):
        start = views[position].start
        enough = smallest if buckets else min(smallest, first)
        if stop - start >= enough or position == 0:
            buckets.append(Bucket(start, stop, range(position, last)))
            last, stop = position, start
    return buckets


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite."""
    # One pass and no memory: only where the sum of finite numbers overflows must they be looked at one by one.
    return isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


def shards(size: int, servers: int) -> list[slice]:
    """Cut a vector of `size` numbers into `servers` neighboring slices with lengths that differ by at most one.

    Raises:
        RequestError: more servers than numbers.
    """
    if servers > size:
        raise RequestError(
            f"{servers} servers cannot share a model of {size} parameters: ask for at most {size}"
        )
    cuts = [size * server // servers for server in range(servers + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]
