"""Flip: one bit in a worker's memory changes, in its parameters or in the state of its optimizer."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Literal

import torch
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.simulation.injection.fault import Fault, FaultTarget, FaultyRun, check_rank
from polyrhythm.training.quantities import Count


class Flip(Fault):
    """A random bit of a worker's memory is flipped.

    Attributes:
        rank: rank of the worker.
        after_step: number of this worker's steps before the flip, including those of its replacements.
        where: memory with the bit: parameters, or optimizer, which is all other state that is no worker's own;
            nothing is flipped where there is no such state yet.
    """

    rank: int
    after_step: Count
    where: Literal["parameters", "optimizer"] = "parameters"

    def check(self, ground: FaultTarget) -> None:
        check_rank(self, ground, self.rank)
        if self.rank not in ground.roles.workers:
            raise RequestError(f"fault {self}: rank {self.rank} is a server, which takes no steps")

    def begin(self, run: FaultyRun, random: Random) -> None:
        run.when_done(self.rank, self.after_step, partial(self._flip, run, random))

    def _flip(self, run: FaultyRun, random: Random) -> None:
        part, flat = run.states[self.rank]
        if self.where == "parameters":
            _flip_bit([flat.vector], random)
            return
        fields = [
            field
            for field in part.fields
            if field.conversion.per == "run" and not field.at.startswith("_flat.")
        ]
        tensors, facts = part.save_fields(fields)
        copies = {name: tensor.clone() for name, tensor in sorted(tensors.items())}
        if _flip_bit(list(copies.values()), random):
            part.load_fields(fields, (copies, facts))


def _flip_bit(tensors: list[Tensor], random: Random) -> bool:
    """Flip a bit of any of these tensors, in place; return whether they have any."""
    views = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    bits = [8 * view.numel() for view in views]
    if not views:
        return False
    [view] = random.choices(views, bits)
    bit = random.randrange(8 * view.numel())
    view[bit // 8] ^= 1 << bit % 8
    return True
