"""Servers and workers whose pushes and pulls carry little, with feedback in both directions.

    push    worker i:   c = C(g + e),  e = g + e - decode(c)            the server's rule sees decode(c)
    pull    server:     c = C(w - k_i),  k_i <- k_i + decode(c)         k_i: what worker i holds, on both sides
            worker i:   k_i <- k_i + decode(c)

The gap w - k_i is the residual of the way down: what did not fit is in the next difference. Momenta of a compressor
count on the way up alone. What would make the gap grow (see `Compressor.loud`) travels down as it is, and so do
parameters to workers that push sufficient factors, of which they have none.

Whole parameters come in answer to a pull: at a start, after an epoch where workers do not go in lockstep, and in the
end. In lockstep a worker that pulls gets k_i, which a checkpoint holds, so that a resumed run has the bits of one that
was never interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, pack_json, unpack_json
from polyrhythm.compression.compressor import Compressor, Memory
from polyrhythm.compression.layout import Layout
from polyrhythm.compression.residual_memory import ResidualMemory
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull, ServedWorker
from polyrhythm.strategies.parameter_server.serving.rule import Reply, Rule
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.state import Held, State, below
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import is_finite
from polyrhythm.training.linear_factors import Pair

_LAYOUT, _KNOWN = "layout", "known."
_EMPTY, _NOT_FINITE = 0, 1
"""Bytes of a push of an empty batch, and of one that is not finite: no payload is as short."""


class CompressedPushPull(PushPull):
    """Pushes compressed gradients, and takes compressed differences of parameters.

    Args:
        setting: the worker's.
        compressor: of both.
    """

    def __init__(self, setting: WorkerSetting, compressor: Compressor) -> None:
        super().__init__(setting)
        self._compressor = compressor
        layout = Layout.of_model(setting.flat, compressor)
        self._layouts = [layout.part(compressor, shard.start, shard.stop) for shard in self._shards]
        self._memories = [ResidualMemory(compressor, part, setting.workers.rank) for part in self._layouts]
        self._pairs: dict[int, Pair] = {}

    def push(self, step: Step, weight: float, learning_rate: float) -> None:
        factors = self._flat.factors
        self._pairs = {} if factors is None else factors.take()
        super().push(step, weight, learning_rate)

    def take(self) -> bool:
        stops = super().take()
        for memory in self._memories:  # an answer says that the server has the push
            memory.commit()
        return stops

    def state(self) -> State:
        """Return what is kept back, by shard."""
        tensors = {
            f"{number}.{name}": value
            for number, memory in enumerate(self._memories)
            for name, value in memory.state().items()
        }
        return tensors, {"shards": len(self._memories)}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned, of any number of shards."""
        tensors, facts = state
        found = [below(f"{number}.", tensors) for number in range(int(facts["shards"]))]
        if len(found) != len(self._memories):
            found = _recut(found, self._shards)
        for memory, kept in zip(self._memories, found, strict=True):
            memory.load_state(kept)

    def _beginning(self, position: int) -> list[Message]:
        configure, values = super()._beginning(position)
        told = unpack_json(payload(configure)) | {_LAYOUT: self._layouts[position].to_json()}
        return [configure._replace(tensor=pack_json(told)), values]

    def _ask(self, position: int, message: Message) -> Handle:
        if message.kind is Kind.PUSH:
            message = message._replace(tensor=self._pushed(position, message))
        return super()._ask(position, message)

    def _pushed(self, position: int, message: Message) -> Tensor:
        gradient = payload(message).detach().cpu()
        if message.weight == 0:
            return torch.zeros(_EMPTY, dtype=torch.uint8)
        if not is_finite(gradient):
            return torch.zeros(_NOT_FINITE, dtype=torch.uint8)
        start = self._shards[position].start
        pairs = {begin - start: pair for begin, pair in self._pairs.items()}
        return self._memories[position].encode(gradient, message.step, message.learning_rate, pairs=pairs)

    def _answer(self, position: int) -> Message:
        answer = super()._answer(position)
        tensor = answer.tensor
        if tensor is None or tensor.dtype is not torch.uint8:
            return answer
        held = self._parameters[position].detach().cpu()
        change = self._layouts[position].decode(self._compressor, tensor, held.dtype)
        return answer._replace(tensor=(held + change).to(self._parameters[position].device))


def _recut(found: list[Memory], shards: list[slice]) -> list[Memory]:
    """Return what is kept back of other shards; what belongs to a whole layer begins anew."""
    names = [name for name, value in found[0].items() if value.dim() and not name.startswith("factor.")]
    wholes = {name: torch.cat([kept[name] for kept in found]) for name in names}
    rate = {"rate": found[0]["rate"]} if "rate" in found[0] else {}
    return [{name: whole[shard] for name, whole in wholes.items()} | rate for shard in shards]


_PUSHED = "compression."


class CompressedServedWorker(ServedWorker):
    """As `ServedWorker`, with what its compression keeps back in its state."""

    def __init__(
        self,
        setting: WorkerSetting,
        servers: CompressedPushPull,
        *,
        dropped_late: bool = False,
        scales_parts: bool = False,
    ) -> None:
        super().__init__(setting, servers, dropped_late=dropped_late, scales_parts=scales_parts)
        self._link = servers

    def state(self) -> State:
        tensors, facts = self._link.state()
        return {_PUSHED + name: value for name, value in tensors.items()}, facts

    def load_state(self, state: State) -> None:
        if "shards" in state[1]:
            self._link.load_state((below(_PUSHED, state[0]), state[1]))


def shared_out(held: Held, workers: int, *, together: bool) -> dict[int, State]:
    """Return the states of another number of workers: each has an equal part of what all had kept back.

    Args:
        held: by the checkpoint.
        workers: how many there are now.
        together: whether an update is of all workers, so that the sum over their number stays; else the sum does.
    """
    states = [held.workers[index] for index in sorted(held.workers) if held.workers[index][1]]
    if not states:
        return {}
    divisor = len(held.steps) if together else workers
    tensors: Memory = {}
    for name, like in states[0][0].items():
        values = [own[name] for own, _ in states if name in own]
        alike = not like.dim() or ".factor." in name
        tensors[name] = like if alike else torch.stack(values).sum(0) / divisor
    return dict.fromkeys(range(workers), (tensors, states[0][1]))


class CompressedSession(ServerSession):
    """As `ServerSession`, of compressed pushes and answers.

    Args:
        compressor: of both.
    """

    def __init__(
        self,
        pushers: tuple[int, ...],
        rule: Rule,
        spares: int = 0,
        spared_by: str = "",
        eject_after: int = 0,
        *,
        compressor: Compressor,
    ) -> None:
        super().__init__(pushers, rule, spares, spared_by, eject_after)
        self._compressor = compressor
        self._layout: Layout | None = None
        self._held_by: dict[int, Tensor] = {}
        self._factors: dict[int, Memory] = {}
        self._asking: set[int] = set()
        self._latest: tuple[Tensor, Tensor, Tensor, Tensor, Memory] | None = None

    def on_message(self, source: int, message: Message) -> list[Reply]:
        if message.kind is Kind.CONFIGURE and message.tensor is not None:
            told = unpack_json(message.tensor)
            if not isinstance(told, dict) or _LAYOUT not in told:
                raise RefusedMessage(
                    Reason.MALFORMED, "an optimiser's plan came without the layout of its vector"
                )
            layout = Layout.from_json(told.pop(_LAYOUT))
            replies = super().on_message(source, message._replace(tensor=pack_json(told)))
            self._layout = layout
            return self._answered(replies)
        if message.kind is Kind.PULL:
            self._asking.add(source)
        elif message.kind is Kind.PUSH:
            message = self._unpacked(source, message)
            self._asking.discard(source)
        return self._answered(super().on_message(source, message))

    def on_loss(self, rank: int) -> list[Reply]:
        self._held_by.pop(rank, None)
        self._factors.pop(rank, None)
        self._asking.discard(rank)
        return self._answered(super().on_loss(rank))

    def state(self) -> State:
        tensors, facts = super().state()
        vectors: list[Tensor] = []
        places = {}
        for rank, held in self._held_by.items():
            same = next((number for number, other in enumerate(vectors) if other is held), len(vectors))
            if same == len(vectors):
                vectors.append(held)
            places[str(rank)] = same
        kept = {f"{_KNOWN}{number}": held for number, held in enumerate(vectors)}
        for rank, factors in self._factors.items():
            kept |= {f"{_KNOWN}of.{rank}.{name}": value for name, value in factors.items()}
        layout = None if self._layout is None else self._layout.to_json()
        return tensors | kept, facts | {"compression": {"places": places, _LAYOUT: layout}}

    def load_state(self, state: State) -> None:
        tensors, facts = state
        told = facts.get("compression")
        if told is not None and told[_LAYOUT] is not None:
            self._layout = Layout.from_json(told[_LAYOUT])
            if self._layout.size == len(tensors["values"]):  # else the shards were others
                vectors = {
                    number: tensors[f"{_KNOWN}{number}"].clone() for number in set(told["places"].values())
                }
                self._held_by = {int(rank): vectors[number] for rank, number in told["places"].items()}
                self._factors = {
                    rank: found for rank in self._held_by if (found := below(f"{_KNOWN}of.{rank}.", tensors))
                }
        rest = {name: value for name, value in tensors.items() if not name.startswith(_KNOWN)}
        super().load_state((rest, {name: value for name, value in facts.items() if name != "compression"}))

    def _unpacked(self, source: int, message: Message) -> Message:
        """Return a push with the gradient that its bytes stand for."""
        values, tensor = self.values, message.tensor
        if tensor is None or tensor.dtype is not torch.uint8:
            raise RefusedMessage(Reason.PAYLOAD, f"rank {source} pushed what is not compressed")
        if self._layout is None or not len(values):
            raise RefusedMessage(Reason.ORDER, "a gradient came before the parameters")
        if tensor.numel() == _EMPTY:
            return message._replace(tensor=torch.zeros_like(values), weight=0.0)
        if tensor.numel() == _NOT_FINITE:
            return message._replace(tensor=torch.full_like(values, float("nan")))
        rank = self._registry.numbers.get(source, 0)
        return message._replace(tensor=self._layout.decode(self._compressor, tensor, values.dtype, rank))

    def _answered(self, replies: list[Reply]) -> list[Reply]:
        return [(to, self._packed(to, reply)) for to, reply in replies]

    def _packed(self, to: int, reply: Message) -> Message:
        """Return an answer as it travels: a difference to one that pushed, whole parameters to one that pulled."""
        values = reply.tensor
        if reply.kind is not Kind.PARAMETERS or values is None or to not in self._registry.numbers:
            return reply
        held = self._held_by.get(to)
        whole = self._compressor.loud or self._compressor.from_passes
        if to in self._asking or held is None or whole or self._layout is None:
            if self._rounds is not None and held is not None and to in self._asking and to != self.final:
                return reply._replace(tensor=held)
            self._held_by[to] = values
            return reply
        if self._latest is None or self._latest[0] is not held or self._latest[1] is not values:
            factors = dict(self._factors.get(to, {}))
            change = self._layout.encode(self._compressor, values - held, step=reply.version, factors=factors)
            decoded = self._layout.decode(self._compressor, change, values.dtype)
            self._latest = held, values, change, held + decoded, factors
        _, _, change, self._held_by[to], factors = self._latest
        if factors:
            self._factors[to] = factors
        return reply._replace(tensor=change)


def compressed_session(compressor: Compressor) -> Callable[..., ServerSession]:
    """Return what makes a session of compressed pushes, as the class makes one of plain pushes."""

    def make(*args: Any) -> ServerSession:
        return CompressedSession(*args, compressor=compressor)

    return make
