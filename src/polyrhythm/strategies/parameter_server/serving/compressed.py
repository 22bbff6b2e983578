"""Servers and workers with compressed pushes and pulls, with error feedback in both directions.

    push    worker i:   c = C(g + e),  e = g + e - decode(c)            the server's rule sees decode(c)
    pull    server:     c = C(w - k_i),  k_i <- k_i + decode(c)         k_i: what worker i holds, on both sides
            worker i:   k_i <- k_i + decode(c)

The gap w - k_i is the residual of the way down: the compression error is in the next difference. Momenta of a
compressor count on the way up alone. Changes that would make the gap grow (see `Compressor.loud`) are sent
uncompressed, and so are parameters to workers that push sufficient factors, which parameters do not have.

Whole parameters are sent in answer to a pull: at a start, after an epoch where workers are not in lockstep,
and in the end. In lockstep a worker that pulls gets k_i, which a checkpoint holds, so that a resumed run has
the bits of one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, pack_json, unpack_json
from polyrhythm.compression.compressor import Compressor, Memory
from polyrhythm.compression.layout import Layout, factor_name
from polyrhythm.compression.residual_memory import ResidualMemory
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.parameter_server.serving.own_model import FreeLink
from polyrhythm.strategies.parameter_server.serving.parts import reply_in_parts
from polyrhythm.strategies.parameter_server.serving.push_pull import OverlappedPushPull, PushPull, ServerLink
from polyrhythm.strategies.parameter_server.serving.rule import Reply, Rule
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.resharding import Held
from polyrhythm.strategies.state import State, Stateful, below, without
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import is_finite
from polyrhythm.training.linear_factors import Pair

_LAYOUT, _KNOWN, _PUSHED, _FACTOR = "layout", "known.", "compression.", "factor."
_EMPTY, _NOT_FINITE = 0, 1
"""Bytes of a push of an empty batch, and of one that is not finite: no payload is as short."""
_MOST_STRETCHES = 4096
"""Number of kept layouts."""


@dataclass(frozen=True)
class Stretch:
    """Adjacent numbers of a shard that are sent in one payload.

    Attributes:
        start: start of its first number in the shard.
        stop: end index, exclusive.
        layout: layout of its numbers.
        memory: memory of what is kept back of them on the way up.
    """

    start: int
    stop: int
    layout: Layout
    memory: ResidualMemory


class CompressedLink(ServerLink, Stateful):
    """Part of a link that pushes compressed gradients, and takes compressed differences of parameters.

    Args:
        setting: the worker's.
        compressor: compressor of both.
        cuts: cuts of the flat vector, at which shards are cut into stretches; between layers.
        more: arguments of the link.
    """

    def __init__(
        self, setting: WorkerSetting, *more: Any, compressor: Compressor, cuts: Sequence[int] = ()
    ) -> None:
        super().__init__(setting, *more)
        self._compressor = compressor
        layout = Layout.of_model(setting.flat, compressor)
        self._layouts = [layout.part(compressor, shard.start, shard.stop) for shard in self._shards]
        self._stretches: list[dict[int, Stretch]] = []
        for shard, own in zip(self._shards, self._layouts, strict=True):
            inside = [cut - shard.start for cut in cuts if shard.start < cut < shard.stop]
            ends = sorted({0, *inside, shard.stop - shard.start})
            self._stretches.append({})
            for start, stop in pairwise(ends) if inside else [(0, own.size)]:
                part = own.stretch(compressor, start, stop) if inside else own
                memory = ResidualMemory(compressor, part, setting.workers.rank)
                self._stretches[-1][start] = Stretch(start, stop, part, memory)
        self._pairs: dict[int, Pair] = {}
        self._not_finite: set[int] = set()
        """Shards with a part of the gradient that was not finite in this step."""

    def _held(self, position: int) -> Tensor:
        """Return what this worker was given last of a shard, `(n,)`, as its server knows it."""
        raise NotImplementedError

    def _confirm(self, position: int) -> None:
        """Take note that a push has arrived."""
        for stretch in self._stretches[position].values():
            if position in self._not_finite:
                stretch.memory.forget()
            stretch.memory.commit()
        self._not_finite.discard(position)

    def state(self) -> State:
        """Return the compression errors, by shard."""
        tensors = {
            f"{_PUSHED}{number}.{name}": value
            for number, stretches in enumerate(self._stretches)
            for name, value in _joined([each.memory.state() for each in stretches.values()]).items()
        }
        return tensors, {"shards": len(self._stretches)}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned, of any number of shards."""
        tensors, facts = state
        if "shards" not in facts:
            return
        found = [below(f"{_PUSHED}{number}.", tensors) for number in range(int(facts["shards"]))]
        if len(found) != len(self._stretches):
            found = _recut(found, self._shards)
        for stretches, kept in zip(self._stretches, found, strict=True):
            for each in stretches.values():
                each.memory.load_state(_within(kept, each))

    def _beginning(self, position: int) -> list[Message]:
        configure, values = super()._beginning(position)
        stated = unpack_json(payload(configure)) | {_LAYOUT: self._layouts[position].to_json()}
        return [configure._replace(tensor=pack_json(stated)), values]

    def _ask(self, position: int, message: Message) -> Handle:
        if message.kind is Kind.PUSH:
            message = message._replace(tensor=self._pushed(position, message, message.learning_rate))
        return super()._ask(position, message)

    def _pushed(self, position: int, message: Message, rate: float, start: int = 0) -> Tensor:
        """Return the payload of a push, or of a part of one, that begins at a place of the shard."""
        gradient = payload(message).detach().cpu()
        if message.weight == 0 or not gradient.numel():
            return torch.zeros(_EMPTY, dtype=torch.uint8)
        if not is_finite(gradient):
            self._not_finite.add(position)
            return torch.zeros(_NOT_FINITE, dtype=torch.uint8)
        first = self._shards[position].start
        pairs = {begin - first: pair for begin, pair in self._pairs.items()}
        memory = self._stretches[position][start].memory
        return memory.encode(gradient, message.step, rate, pairs=pairs)

    def _answer(self, position: int) -> Message:
        answer = super()._answer(position)
        tensor = answer.tensor
        if tensor is None or tensor.dtype is not torch.uint8 or not tensor.numel():
            return answer
        held, layout = self._held(position), self._layouts[position]
        if answer.kind is Kind.PART:
            stretch = self._stretches[position][answer.version]
            held, layout = held[stretch.start : stretch.stop], stretch.layout
        change = layout.decode(self._compressor, tensor, held.dtype)
        return answer._replace(tensor=(held.detach().cpu() + change).to(held.device))


class CompressedPushPull(CompressedLink, PushPull):
    """Pushes compressed gradients, and continues with compressed differences of parameters."""

    def push(self, step: Step, weight: float, learning_rate: float) -> None:
        factors = self._flat.factors
        self._pairs = {} if factors is None else factors.take()
        super().push(step, weight, learning_rate)

    def take(self) -> bool:
        stops = super().take()
        for position in range(len(self._shards)):  # an answer confirms the push
            self._confirm(position)
        return stops

    def _held(self, position: int) -> Tensor:
        return self._parameters[position]


class CompressedFreeLink(CompressedLink, FreeLink):
    """As `FreeLink`, compressed: a fetch brings the difference to the parameters that were fetched before."""

    def __init__(self, setting: WorkerSetting, *more: Any, compressor: Compressor) -> None:
        super().__init__(setting, *more, compressor=compressor)
        self._fetched = [setting.flat.vector[shard].clone() for shard in self._shards]

    def wait_for_push(self, position: int) -> None:
        super().wait_for_push(position)
        self._confirm(position)

    def _held(self, position: int) -> Tensor:
        return self._fetched[position]

    def _answer(self, position: int) -> Message:
        answer = super()._answer(position)
        if answer.tensor is not None:
            self._fetched[position] = answer.tensor
        return answer


class OverlappedCompressedPushPull(OverlappedPushPull, CompressedPushPull):
    """As `CompressedPushPull`, in parts: each bucket is compressed as soon as the backward pass has it."""

    def __init__(self, setting: WorkerSetting, compressor: Compressor) -> None:
        buckets = setting.flat.buckets
        super().__init__(setting, compressor=compressor, cuts=[bucket.start for bucket in buckets])
        self._places = [(bucket.start, min(bucket.stop, setting.flat.size)) for bucket in buckets]
        self._rate = 0.0

    def push_bucket(self, start: int, stop: int, step: Step) -> None:
        if (
            step.weight > 0 and step.learning_rate is not None
        ):  # else the compression errors cannot be counted yet
            self._rate = step.learning_rate
            super().push_bucket(start, stop, step)

    def push(self, step: Step, weight: float, learning_rate: float) -> None:
        if not self._leaving and weight > 0:
            stated = replace(step, weight=weight, learning_rate=learning_rate)
            for start, stop in self._places[:-1]:
                self.push_bucket(start, stop, stated)
        super().push(step, weight, learning_rate)

    def _ask(self, position: int, message: Message) -> Handle:
        if message.kind is Kind.PART:
            message = message._replace(tensor=self._pushed(position, message, self._rate, message.version))
        return super()._ask(position, message)


def _joined(kept: Sequence[Memory]) -> Memory:
    """Return the compression errors of a shard, from those of its stretches."""
    if len(kept) == 1:
        return dict(kept[0])
    found: Memory = {}
    for name in dict.fromkeys(name for each in kept for name in each):
        values = [each[name] for each in kept if name in each]
        along = values[0].dim() > 0 and not name.startswith(_FACTOR)
        found[name] = torch.cat(values) if along else values[0]
    return found


def _within(kept: Memory, stretch: Stretch) -> Memory:
    """Return the compression errors of a stretch, from those of its shard."""
    first, sections = stretch.layout.first, len(stretch.layout.sections)
    own = {factor_name(number) for number in range(first, first + sections)}
    return {
        name: value[stretch.start : stretch.stop] if value.dim() and not name.startswith(_FACTOR) else value
        for name, value in kept.items()
        if not name.startswith(_FACTOR) or name in own
    }


def _recut(found: list[Memory], shards: list[slice]) -> list[Memory]:
    """Return the compression errors for other shards; factors of whole layers are reset."""
    names = [name for name, value in found[0].items() if value.dim() and not name.startswith("factor.")]
    wholes = {name: torch.cat([kept[name] for kept in found]) for name in names}
    rate = {"rate": found[0]["rate"]} if "rate" in found[0] else {}
    return [{name: whole[shard] for name, whole in wholes.items()} | rate for shard in shards]


def shared_out(held: Held, workers: int, *, together: bool) -> dict[int, State]:
    """Return the states of another number of workers: each has an equal part of all residuals.

    Args:
        held: states in the checkpoint.
        workers: new number of workers.
        together: whether an update is the mean over all workers, so that the sum over their number stays;
            else the sum does.
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


@dataclass(frozen=True)
class _Change:
    """Answer for all pushers that hold the same parameters.

    Attributes:
        held: parameters that they hold.
        values: values of the server.
        cuts: cuts of the answer.
        payloads: payloads of its stretches.
        now: parameters that they hold with it.
        factors: starting points of the next encoding.
    """

    held: Tensor
    values: Tensor
    cuts: list[int] | None
    payloads: list[Tensor]
    now: Tensor
    factors: Memory


class CompressedSession(ServerSession):
    """As `ServerSession`, of compressed pushes and answers.

    Args:
        compressor: compressor of both.
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
        self._stretches: dict[tuple[int, int], Layout] = {}
        self._held_by: dict[int, Tensor] = {}
        self._factors: dict[int, Memory] = {}
        self._asking: set[int] = set()
        self._latest: _Change | None = None

    def on_message(self, source: int, message: Message) -> list[Reply]:
        if message.kind is Kind.CONFIGURE and message.tensor is not None:
            stated = unpack_json(message.tensor)
            if not isinstance(stated, dict) or _LAYOUT not in stated:
                raise RefusedMessage(
                    Reason.MALFORMED, "an optimizer's plan arrived without the layout of its vector"
                )
            layout = Layout.from_json(stated.pop(_LAYOUT))
            replies = super().on_message(source, message._replace(tensor=pack_json(stated)))
            self._layout = layout
            return self._answered(replies)
        if message.kind is Kind.PULL:
            self._asking.add(source)
        elif message.kind is Kind.FETCH:
            self._asking.discard(source)
        elif message.kind in (Kind.PUSH, Kind.PART):
            message = self._unpacked(source, message)
            self._asking.discard(source)
        return self._answered(super().on_message(source, message))

    def answer_again(self, source: int) -> list[Reply]:
        self._asking.add(source)  # whole: the pusher may have the difference, or not
        return self._answered(super().answer_again(source))

    def on_loss(self, rank: int) -> list[Reply]:
        self._held_by.pop(rank, None)
        self._factors.pop(rank, None)
        self._asking.discard(rank)
        return self._answered(super().on_loss(rank))

    def state(self) -> State:
        return self._with_known(super().state())

    def load_state(self, state: State) -> None:
        super().load_state(self._take_known(state))

    def exact_state(self) -> State:
        tensors, facts = self._with_known(super().exact_state(), apart=True)
        return tensors, facts | {"whole": sorted(self._asking)}

    def load_exact_state(self, state: State) -> None:
        super().load_exact_state(self._take_known(state))
        self._asking = set(state[1]["whole"])

    def _with_known(self, state: State, *, apart: bool = False) -> State:
        """Return a state, and what pushers hold: the same vector once, or `apart`, that of every rank."""
        tensors, facts = state
        first: dict[int, int] = {}
        held_by = self._held_by.items()
        places = {str(rank): rank if apart else first.setdefault(id(held), rank) for rank, held in held_by}
        kept = {f"{_KNOWN}{rank}": self._held_by[rank] for rank in places.values()}
        for rank, factors in self._factors.items():
            kept |= {f"{_KNOWN}of.{rank}.{name}": value for name, value in factors.items()}
        layout = None if self._layout is None else self._layout.to_json()
        return tensors | kept, facts | {"compression": {"places": places, _LAYOUT: layout}}

    def _take_known(self, state: State) -> State:
        """Restore what pushers hold of a state of `_with_known`; return the rest of it."""
        tensors, facts = state
        stated = facts.get("compression")
        if stated is not None and stated[_LAYOUT] is not None:
            self._layout = Layout.from_json(stated[_LAYOUT])
            if self._layout.size == len(tensors["values"]):  # else the shards were others
                found = {number: tensors[f"{_KNOWN}{number}"] for number in set(stated["places"].values())}
                copies = {id(held): held.clone() for held in found.values()}
                vectors = {number: copies[id(held)] for number, held in found.items()}
                self._held_by = {int(rank): vectors[number] for rank, number in stated["places"].items()}
                self._factors = {
                    rank: factors
                    for rank in self._held_by
                    if (factors := below(f"{_KNOWN}of.{rank}.", tensors))
                }
        rest = without(_KNOWN, tensors)
        return rest, {name: value for name, value in facts.items() if name != "compression"}

    def _unpacked(self, source: int, message: Message) -> Message:
        """Return a push, or a part of one, with the numbers that its bytes stand for."""
        values, tensor = self.values, message.tensor
        if tensor is None or tensor.dtype is not torch.uint8:
            raise RefusedMessage(Reason.PAYLOAD, f"rank {source} pushed what is not compressed")
        if self._layout is None or not len(values):
            raise RefusedMessage(Reason.ORDER, "a gradient arrived before the parameters")
        coming = None if self._parts is None else self._parts.coming(source)
        before = None if coming is None or coming.step != message.step else coming.start
        part = message.kind is Kind.PART
        start, stop = message.version if part else 0, len(values) if before is None else before
        if part and not 0 <= start < stop:
            raise RefusedMessage(
                Reason.ORDER,
                f"a part arrived that begins at {start:,}, before {stop:,} of {len(values):,} numbers",
            )
        if tensor.numel() == _EMPTY:
            if before is None:
                return message._replace(tensor=torch.zeros_like(values), weight=0.0)
            return message._replace(tensor=values[:0].clone())
        if tensor.numel() == _NOT_FINITE:
            return message._replace(tensor=torch.full_like(values[start:stop], float("nan")))
        row = self._of_rank.get(source)
        layout, number = self._stretch(start, stop), 0 if row is None else row.number
        return message._replace(tensor=layout.decode(self._compressor, tensor, values.dtype, number))

    def _stretch(self, start: int, stop: int) -> Layout:
        assert self._layout is not None, "there are parameters"
        if (start, stop) == (0, self._layout.size):
            return self._layout
        found = self._stretches.get((start, stop))
        if found is None:
            if len(self._stretches) >= _MOST_STRETCHES:
                self._stretches.clear()
            found = self._stretches[start, stop] = self._layout.stretch(self._compressor, start, stop)
        return found

    def _completed(self, replies: list[Reply]) -> list[Reply]:
        return replies  # cut as they are packed

    def _answered(self, replies: list[Reply]) -> list[Reply]:
        return [packed for to, reply in replies for packed in self._packed(to, reply)]

    def _packed(self, to: int, reply: Message) -> list[Reply]:
        """Return an answer as it travels: a difference to one that pushed, whole parameters to one that pulled."""
        values = reply.tensor
        if reply.kind is not Kind.PARAMETERS or values is None or to not in self._of_rank:
            return [(to, reply)]
        cuts = None if self._parts is None else self._parts.cuts_of(to)
        held = self._held_by.get(to)
        whole = self._compressor.loud or self._compressor.from_passes
        if to in self._asking or held is None or whole or self._layout is None:
            if self._rounds is not None and held is not None and to in self._asking and to != self.final:
                return [(to, reply._replace(tensor=held))]
            self._held_by[to] = values
            return reply_in_parts(to, reply, cuts)
        latest = self._latest
        if latest is None or latest.held is not held or latest.values is not values or latest.cuts != cuts:
            latest = self._latest = self._change(held, values, cuts, reply.version, self._factors.get(to, {}))
        self._held_by[to] = latest.now
        if latest.factors:
            self._factors[to] = latest.factors
        return reply_in_parts(to, reply, cuts, latest.payloads)

    def _change(
        self, held: Tensor, values: Tensor, cuts: list[int] | None, version: int, before: Memory
    ) -> _Change:
        """Return the compressed change from a worker's parameters to approximately the server's."""
        factors, payloads, now = dict(before), [], torch.empty_like(held)
        for start, stop in pairwise([0, *(cuts or ()), len(values)]):
            layout = self._stretch(start, stop)
            gap = values[start:stop] - held[start:stop]
            payloads.append(layout.encode(self._compressor, gap, step=version, factors=factors))
            decoded = layout.decode(self._compressor, payloads[-1], values.dtype)
            torch.add(held[start:stop], decoded, out=now[start:stop])
        return _Change(held, values, cuts, payloads, now, factors)


def compressed_session(compressor: Compressor) -> Callable[..., ServerSession]:
    """Return the constructor of sessions with compressed pushes."""

    def make(*args: Any) -> ServerSession:
        return CompressedSession(*args, compressor=compressor)

    return make
