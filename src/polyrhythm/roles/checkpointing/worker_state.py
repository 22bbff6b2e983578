"""State that a worker sends at the end of every epoch, and receives when a run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.control_message import ControlMessage, checked
from polyrhythm.communication.message import Kind
from polyrhythm.roles.control_messages import Account as Account
from polyrhythm.roles.replica import Replica
from polyrhythm.strategies.resharding import Held
from polyrhythm.strategies.state import State, below, prefixed
from polyrhythm.training.checkpoint import restoring

_BUFFER, _PART, _ANCHOR = "buffer.", "part.", "anchor."


@dataclass(frozen=True)
class WorkerState(ControlMessage):
    """An account, and the tensors that a resumed worker needs.

    Attributes:
        account: account of its work.
        buffers: batch-norm statistics.
        part: tensors of its strategy part.
        part_facts: the rest of its strategy part.
        loss_scale: scale of float16 losses; empty where nothing is scaled.
        tested: own part of the test at an epoch's end, as `PartialEvaluation` packs it; else empty.
        begun: progress of others in epochs, as `Begun` writes it; set in states that the coordinator sends.
        behind: whether the worker has done fewer steps than the coordinator; set in states that the
            coordinator sends.
        loop: position of a user's own loop on this worker, JSON-able; empty elsewhere.
        anchor: tensors of its anchor, inside an epoch with SVRG; else empty.
        anchored: batches of that anchor; see `Anchor.share`.
    """

    KIND = Kind.RECORD
    account: Account
    buffers: dict[str, Tensor]
    part: dict[str, Tensor]
    part_facts: dict[str, Any]
    loss_scale: dict[str, Any] = field(default_factory=dict)
    tested: dict[str, Tensor] = field(default_factory=dict)
    begun: dict[str, Any] = field(default_factory=dict)
    behind: bool = False
    loop: dict[str, Any] = field(default_factory=dict)
    anchor: dict[str, Tensor] = field(default_factory=dict)
    anchored: str = ""

    @classmethod
    def of(
        cls, replica: Replica, account: Account, loss_scale: dict[str, Any], *, to_resume: bool = True
    ) -> WorkerState:
        """Return a replica's state; parts that are equal on all workers are taken from worker 0 only.

        Args:
            replica: replica of the worker.
            account: account of its work.
            loss_scale: scale of float16 losses.
            to_resume: whether the state of its strategy part, which may be larger than the model, is wanted.
        """
        elsewhere = replica.part.replicated and account.worker > 0
        tensors, facts = replica.part.state() if to_resume and not elsewhere else ({}, {})
        buffers = {name: value.detach().to("cpu", copy=True) for name, value in replica.buffers.items()}
        return cls(
            account,
            buffers,
            {name: value.to("cpu", copy=True) for name, value in tensors.items()},
            facts,
            loss_scale,
        )

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> WorkerState:
        """Return the state with these `tensors` and `facts`."""
        account = Account(**facts["account"])  # older ones lack fields with a default
        account = checked(asdict(account), Account)
        for name, value in vars(account).items():
            if type(value) is int:
                counted(value, name)
        objects = (facts["part"], facts["loss_scale"], facts.get("begun", {}), facts.get("loop", {}))
        part, scale, begun, loop = (checked(each, dict[str, Any]) for each in objects)
        return cls(
            account,
            below(_BUFFER, tensors),
            below(_PART, tensors),
            part,
            scale,
            begun=begun,
            loop=loop,
            anchor=below(_ANCHOR, tensors),
            anchored=checked(facts.get("anchored", ""), str),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, as a checkpoint holds them."""
        return {
            **prefixed(_BUFFER, self.buffers),
            **prefixed(_PART, self.part),
            **prefixed(_ANCHOR, self.anchor),
        }

    def facts(self) -> dict[str, Any]:
        """Return all that is not a tensor, JSON-able, as a checkpoint holds it."""
        stated: dict[str, Any] = {"account": asdict(self.account), "part": self.part_facts}
        stated["loss_scale"] = self.loss_scale
        stated |= {"begun": self.begun} if self.begun else {}
        stated |= {"anchored": self.anchored} if self.anchored else {}
        return stated | ({"loop": self.loop} if self.loop else {})

    def return_batches(self, replica: Replica) -> None:
        """Put the state into a replica that has not started yet."""
        with restoring("the saved state of this worker"):
            for name, value in replica.buffers.items():
                if name in self.buffers:
                    value.copy_(self.buffers[name])
            replica.part.staleness.update({int(key): count for key, count in self.account.staleness.items()})
            if self.part_facts or self.part:
                replica.part.load_state((self.part, self.part_facts))


_OF_SERVERS: dict[str, Any] = {
    "clock": int,
    "clocks": tuple[int, ...],
    "credits": tuple[int, ...],
    "dropped": int,
    "left_out": dict[int, tuple[tuple[int, int], ...]],
    "staleness": dict[int, int],
    "steps": tuple[int, ...],
    "version": int,
}
"""Types of facts that are used only after a run has begun, by name: what has another type would end the run then."""
_NESTED = ("gate", "post")
_PER_PUSHER = ("clocks", "credits", "steps")
_NEVER_NEGATIVE = ("dropped", "left_out", "staleness", "steps", "version")


def _check_facts(facts: dict[str, Any], kinds: dict[str, Any]) -> None:
    for name, value in facts.items():
        if name in kinds:
            checked(value, kinds[name])
        elif name in _NESTED and isinstance(value, dict):
            _check_facts(value, kinds)


def server_facts(entry: Any) -> dict[str, Any]:
    """Return the facts of a server.

    Raises:
        ValueError: they are no object, a count in them is none, or they are of different numbers of pushers.
    """
    facts: dict[str, Any] = checked(entry, dict[str, Any])
    _check_facts(facts, _OF_SERVERS)
    lists = [
        each
        for known in (facts, facts.get("gate", {}))
        for name, each in known.items()
        if name in _PER_PUSHER
    ]
    if len({*map(len, lists)}) > 1:
        raise ValueError("it counts the steps of different numbers of workers")
    for name in facts.keys() & set(_NEVER_NEGATIVE):
        _check_counts(name, facts[name])
    return facts


def _check_counts(name: str, value: Any) -> None:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_counts(name, part)
    else:
        counted(value, name)


def counted(value: Any, name: str = "a count") -> int:
    """Return a value out of JSON that counts something.

    Raises:
        ValueError: it is no integer, or below 0.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r:.40}")
    return value


def mean_buffers(states: list[WorkerState]) -> dict[str, Tensor]:
    """Average batch-norm statistics over workers; counters are worker 0's.

    The variance between the workers' means is omitted on purpose: all workers sample the same images, so each
    (unbiased) variance already estimates that of all images, and the differences of the means are noise.
    """
    first = states[0].buffers
    return {
        name: torch.stack([state.buffers[name] for state in states]).mean(0)
        if value.is_floating_point()
        else value
        for name, value in first.items()
    }


def held_by(
    states: Mapping[int, WorkerState], workers: int, parameters: Tensor, servers: list[State]
) -> Held:
    """Return a strategy's state from the states of its workers; some may be missing.

    Args:
        states: states by the workers' indices.
        workers: number of workers, missing ones included.
        parameters: `(n,)`, worker 0's flat vector.
        servers: the states of all servers.
    """
    steps = tuple(states[index].account.step if index in states else 0 for index in range(workers))
    parts = {index: (state.part, state.part_facts) for index, state in states.items()}
    return Held(parameters, steps, parts, servers)
