"""Memory that each rank of a pipeline needs, from shapes alone, before anything is allocated.

    rank       parameters (1 + further versions) + gradients + state of the optimizer
               + the most at any time of: what is kept of microbatches that are in progress, and what a unit
               needs in addition
    worker 0   between epochs: its parameters and state as before, and the whole network, copied for a checkpoint,
               and what testing it needs
    others     between epochs, where checkpoints are written: the state that they hand in, copied and packed

One microbatch goes forward and backward through each stage on the meta device, where operations allocate
nothing but have output sizes; the bytes that stay, and the peak, are counted by storage. Chen, Xu, Zhang,
Guestrin, 2016, arXiv 1604.06174, for the memory with recomputation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyrhythm.partition.chain import Chain, Stage
from polyrhythm.partition.schedule import Schedule, Unit
from polyrhythm.partition.stage import DeferredWeights
from polyrhythm.training.optimizer_plan import OptimizerPlan


class AllocatedBytes(TorchDispatchMode):
    """Counts, inside, the bytes of tensors that operations make, as long as they live.

    Attributes:
        now: bytes alive now.
        most: peak of the bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.now
        result = func(*args, **(kwargs or {}))
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                self._known.add(given.untyped_storage()._cdata)
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._note(made.untyped_storage())
        self.most = max(self.most, before + _copied(func, args, result))
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, name: int, nbytes: int) -> None:
        self._known.discard(name)
        self.now -= nbytes


def _copied(func: Any, args: Any, result: Any) -> int:
    """Return the bytes that the largest kernels take for themselves, next to what they give.

    On the CPU, oneDNN computes convolutions on values with channels in blocks of 16 (`_BLOCK`): it copies the
    outputs, and in the backward pass the incoming gradient, the outgoing one, and weights. Values in
    channels-last layout are not copied. Batch normalization has one more gradient.
    """
    if func is torch.ops.aten.convolution.default:
        return int(result.nbytes * (1 if _channels_innermost(args[0]) else 2))
    if func is torch.ops.aten.convolution_backward.default:
        gradient, inputs, weight = args[:3]
        if _channels_innermost(inputs):
            return int(inputs.nbytes + 2 * weight.nbytes)
        blocked = inputs.nbytes * -(-inputs.shape[1] // _BLOCK) * _BLOCK // inputs.shape[1]
        given = inputs.nbytes if args[-1][0] else 0
        return int(gradient.nbytes + blocked + given + 2 * weight.nbytes)
    if func is torch.ops.aten.native_batch_norm_backward.default:
        return int(2 * args[0].nbytes)
    return 0


_BLOCK = 16


def _channels_innermost(values: Tensor) -> bool:
    return (
        values.ndim == 4
        and not values.is_contiguous()
        and values.is_contiguous(memory_format=torch.channels_last)
    )


@dataclass(frozen=True)
class UnitBytes:
    """Memory of one microbatch in a stage, in bytes.

    Attributes:
        forward: maximum during unit F.
        kept: bytes kept from F to B.
        backward: maximum during unit B, kept bytes included.
        left: bytes kept from B to W, where the backward pass is split.
        weights: maximum during unit W, kept bytes included.
    """

    forward: int
    kept: int
    backward: int
    left: int = 0
    weights: int = 0


def unit_bytes(
    chain: Chain, stage: Stage, rows: int, *, recomputes: bool = False, splits: bool = False
) -> UnitBytes:
    """Return the memory of a microbatch in a stage.

    Args:
        chain: the network, which must not run at the same time.
        stage: stage of it; in training.
        rows: images of the microbatch.
        recomputes: whether activations are computed again for the backward pass.
        splits: whether gradients of weights are computed in a unit W.
    """
    module = stage.module
    shapes: dict[str, Tensor] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        shapes[name] = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        if tensor.requires_grad:
            shapes[name].grad = torch.empty_like(tensor, device="meta")
    if stage.before is None:
        values, received = [torch.empty(rows, *chain.image_shape, dtype=chain.dtype, device="meta")], 0
    else:
        values = [
            torch.empty(rows, *shape, dtype=dtype, device="meta", requires_grad=True)
            for shape, dtype in zip(stage.before.shapes, stage.before.dtypes, strict=True)
        ]
        received = sum(each.nbytes for each in values)
    counted, deferred = AllocatedBytes(), DeferredWeights()

    def forward() -> list[Tensor]:
        if not splits:
            return list(torch.func.functional_call(module, shapes, tuple(values)))
        with deferred:
            return list(torch.func.functional_call(module, shapes, tuple(values)))

    with torch.enable_grad(), counted:
        outputs = forward()
        if stage.after is None:
            outputs = [outputs[0].flatten(1).log_softmax(1).sum()]
        computed, kept = counted.most, counted.now
        counted.most = counted.now
        trained = [each for each in outputs if each.requires_grad]
        gradients = [torch.empty_like(each) for each in trained]  # received from the next stage
        if trained:
            torch.autograd.backward(trained, gradients)
        del outputs, trained, gradients
        most, left = counted.most, counted.now - sum(each.nbytes for each in values if each.grad is not None)
        deferred.finish()
    if recomputes:
        sent = 0 if stage.after is None else rows * sum(stage.after.numbers) * chain.dtype.itemsize
        return UnitBytes(received + computed, received, received + max(most, computed + sent), left, most)
    return UnitBytes(
        received + computed,
        received + kept,
        received + most,
        received + left if splits else 0,
        received + most if splits else 0,
    )


def most_at_once(units: Iterable[Unit], of_chunk: Sequence[UnitBytes], *, splits: bool) -> int:
    """Return the bytes of activations that a rank has at most, from what one microbatch takes in each of its chunks.

    Args:
        units: units of the rank, in its order.
        of_chunk: bytes of each of its chunks.
        splits: whether there are units W.
    """
    now = most = 0
    for unit in units:
        own = of_chunk[unit.chunk]
        if unit.kind == "F":
            most = max(most, now + own.forward)
            now += own.kept
        elif unit.kind == "B":
            most = max(most, now - own.kept + own.backward)
            now += (own.left if splits else 0) - own.kept
        else:
            most = max(most, now - own.left + own.weights)
            now -= own.left
    return most


_TRIED = 1 << 12


@dataclass(frozen=True)
class OptimizerBytes:
    """Memory of an optimizer, in vectors of the size of the updated one.

    Attributes:
        state: size of its state.
        step: size of temporary memory during a step, in addition to the state.
    """

    state: float
    step: float


def optimizer_bytes(plan: OptimizerPlan) -> OptimizerBytes:
    """Return the bytes of an optimizer, measured by two steps of a small vector."""
    if not plan.spans:
        return OptimizerBytes(0.0, 0.0)
    plan = replace(plan, clip_norm=None)
    like = plan.part(plan.spans[0].start, min(plan.spans[0].stop, plan.spans[0].start + _TRIED))
    size = like.spans[0].stop
    vector, gradient = torch.zeros(size), torch.ones(size)
    counted = AllocatedBytes()
    with torch.no_grad(), counted:
        optimizer = like.build(vector)
        optimizer.step(gradient, plan.rate)
        kept = counted.now
        counted.most = kept
        optimizer.step(gradient, plan.rate)
    return OptimizerBytes(round(kept / vector.nbytes), (counted.most - kept) / vector.nbytes)


@dataclass(frozen=True)
class RankBytes:
    """Memory that a rank needs.

    Attributes:
        parameters: parameters of its stages, once.
        versions: further versions of them.
        gradients: gradients of its stages.
        optimizer: state of the optimizer.
        activations: the most at once; or what the optimizer needs for a step, where that is more.
        pictures: images of its batches.
        whole: bytes needed between epochs beyond its own parameters and state: on rank 0 for the whole
            network, on others for the state that they send.
        start: bytes that rank 0 needs while it makes the network and moves it into one vector, a layer at a
            time.
    """

    parameters: int
    versions: int
    gradients: int
    optimizer: int
    activations: int
    pictures: int = 0
    whole: int = 0
    start: int = 0

    @property
    def training(self) -> int:
        """At most while it trains."""
        held = self.parameters + self.versions + self.gradients + self.optimizer
        return held + self.activations + self.pictures

    @property
    def most(self) -> int:
        """At most in a run."""
        between = self.parameters + self.gradients + self.optimizer + self.whole
        return max(self.training, between, self.start)


def versions_at_once(schedule: Schedule, rank: int, ranks: int, microbatches: int) -> int:
    """Return how many copies of its weights a rank keeps in addition to those it trains, as `WeightVersions` does."""
    if schedule.flushes:
        return 0
    late, newest, most = rank + 1 < ranks, 0, 0
    kept: set[int] = set()
    under_way: dict[int, int] = {}
    every = schedule.updates_every(microbatches)
    for unit in islice(schedule.units(rank, ranks, 1 << 62), 8 * ranks * microbatches):
        if unit.kind == "F":
            version = schedule.version(unit.microbatch, rank, ranks, microbatches)
            under_way[unit.microbatch] = version
            if version == newest and late:
                kept.add(version)
        else:
            under_way.pop(unit.microbatch)
            if (unit.microbatch + 1) % every == 0:
                following = max(under_way, default=unit.microbatch) + 1
                oldest = min([schedule.version(following, rank, ranks, microbatches), *under_way.values()])
                if oldest <= newest:
                    kept.add(newest)
                most = max(most, len(kept))
                newest += 1
                kept = {version for version in kept if version >= oldest}
        most = max(most, len(kept))
    return most


def rank_bytes(
    chain: Chain,
    stages: Sequence[Stage],
    schedule: Schedule,
    rank: int,
    ranks: int,
    microbatches: int,
    images: int,
    optimizer: OptimizerBytes,
    *,
    recomputes: bool = False,
    copies: tuple[int, ...] = (),
) -> RankBytes:
    """Return the bytes of a rank in training.

    Args:
        chain: the network.
        stages: stages of all ranks.
        schedule: the order of units.
        rank: k.
        ranks: K.
        microbatches: M.
        images: images that a step sends through the pipeline.
        optimizer: memory of the optimizer.
        recomputes: whether activations are computed again.
        copies: copies of every rank's stage, where microbatches are dealt out among them.
    """
    own = stages[rank::ranks]
    rows, size = -(-images // microbatches), chain.dtype.itemsize
    trained = {
        id(each): each.numel() for stage in own for each in stage.module.parameters() if each.requires_grad
    }
    frozen = {
        id(each): each.nbytes for stage in own for each in stage.module.parameters() if not each.requires_grad
    }
    parameters = sum(trained.values()) * size
    splits = schedule.splits_backward
    uses = [unit_bytes(chain, stage, rows, recomputes=recomputes, splits=splits) for stage in own]
    # The next microbatch's values may have arrived, and the last one's gradients not have left.
    beside = sum(
        rows * sum(cut.numbers) * size
        for stage in own
        for cut in (stage.before, stage.after)
        if cut is not None
    )
    count = microbatches if schedule.flushes else 1 << 62
    units = islice(schedule.units(rank, ranks, count), 12 * ranks * microbatches * len(own))
    if copies:
        units = islice(schedule.units_of_copy(copies, rank, 0, count), None)
    passing = most_at_once(units, uses, splits=splits) + beside
    if schedule.flushes:
        activations = max(passing, round(optimizer.step * parameters))
    else:
        activations = passing + round(optimizer.step * parameters)
    return RankBytes(
        parameters + sum(frozen.values()),
        versions_at_once(schedule, rank, ranks, microbatches) * parameters,
        parameters,
        round(optimizer.state * parameters),
        activations,
        images * torch.Size(chain.image_shape).numel() * size if rank == 0 else 0,
    )


def testing_bytes(model: nn.Module, image_shape: Sequence[int], rows: int) -> int:
    """Return the peak bytes of testing a network, in addition to its parameters.

    Args:
        model: model on any device; left as it was.
        image_shape: (C, H, W).
        rows: images that are tested at once.
    """
    modes = {module: module.training for module in model.modules()}
    shapes = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    dtype = next(model.parameters()).dtype
    counted = AllocatedBytes()
    model.eval()
    try:
        with torch.no_grad(), counted:
            torch.func.functional_call(
                model, shapes, (torch.empty(rows, *image_shape, dtype=dtype, device="meta"),)
            )
    finally:
        for module, training in modes.items():
            module.training = training
    return counted.most
