"""The weighted mean of a group's gradients, with compressed messages.

    p_i = b_i g_i + e_i,   c_i = C(p_i),   e_i = p_i - decode(c_i)
    g   = sum_i decode(c_i) / sum_i b_i                    b_i samples of member i's gradient g_i

Six ways, by what is sent, all with the same bits on all members:

    gathered    each sends c_i to all, and all add up in rank order          sparse ones, and any of two members
    two-sided   member j adds up slice j of all, with a residual of its own, compresses the sum, and sends it to all:
                P = sum_i decode(c_i) + E,  E = P - decode(C(P))             those that are as long as the vector
    added       the numbers themselves are all-reduced                       those that all members draw alike
    streamed    sparse ones are merged on their way (`streams`), and what travels as it is is all-reduced
    broadcast   sufficient factors of fully connected layers to all, and the rest is all-reduced: exact
    factored    P = orthonormal(sum_i p_i Q), Q = sum_i p_i^T P, two all-reduces; e_i = p_i - P Q^T / N

The two-sided way is that of 1-bit SGD (Seide et al., Interspeech 2014) with each member as the server of its slice.
With a majority vote the sum is of signs, and the result is its sign.

A step counts for all or for none: residuals change when all members' parts have arrived. A gradient that is not finite
on any member makes all leave the step out, and keep what they had kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.compression.compressor import (
    RESIDUAL,
    Compressor,
    Memory,
    Place,
    Route,
    aligned,
    bytes_of,
    values_of,
)
from polyrhythm.compression.layout import CountedLayout, Layout, Section, factor_name
from polyrhythm.compression.residual_memory import ResidualMemory
from polyrhythm.compression.streams import Stream, route_of
from polyrhythm.errors import RequestError
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.resharding import Held, Resharding
from polyrhythm.strategies.state import State, below, prefixed, without
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import FlatParameters, is_finite, shards
from polyrhythm.training.linear_factors import Pair

_UP, _DOWN, _SCALER = 1, 2, 3
_OWN, _SUM = "own.", "sum."
_ROWS = "rows"
_MOST_COUNTED = 1 << 28
"""Numbers of all members in a dry run: 1 GiB."""


class CompressedMean(GradientMean):
    """`GradientMean` with compressed gradients.

    Args:
        group: communicator of the members.
        flat: flat parameters with the gradients.
        compressor: compressor of the gradients.
        collective: all-reduce algorithm for uncompressed numbers.
    """

    remembers: ClassVar[bool] = True

    def __init__(
        self,
        group: Communicator,
        flat: FlatParameters,
        compressor: Compressor,
        collective: Collective | None = None,
    ) -> None:
        super().__init__(group, flat, collective)
        self._compressor = compressor
        self._layout = Layout.of_model(flat, compressor)
        self._space = group.subgroup("compressed gradients", range(group.size)) if group.size > 1 else group
        self._travels = group.size > 1 or compressor.own_momentum or compressor.votes
        one_sided = compressor.sparse or compressor.factored or compressor.from_passes
        self._rows: list[float] = []
        two_sided = not one_sided and (group.size > 2 or compressor.votes)
        self._slices = shards(flat.size, group.size) if two_sided else [slice(0, flat.size)]
        layouts = [self._layout.part(compressor, part.start, part.stop) for part in self._slices]
        self._own = [
            ResidualMemory(compressor, layout, group.rank * len(layouts) + number)
            for number, layout in enumerate(layouts)
        ]
        self._of_sums = ResidualMemory(compressor, layouts[group.rank], -1) if two_sided else None

    def over(self, group: Communicator) -> CompressedMean:
        """Return the mean over others; what was kept back counts for the same part of a mean as before."""
        made = CompressedMean(group, self._flat, self._compressor, self._sum.passed_on())
        made.load_state(_among(self.state(), self._group.size, group.size))
        return made

    def prepare(self) -> None:
        made = self._compressor
        if self._group.size > 1 and (made.linear or made.factored or made.from_passes or made.stream_route):
            self._sum.prepare()

    def start(self, bucket: int) -> None:
        """Nothing: what is compressed is the whole."""

    def commit(self) -> None:
        for memory in self._memories():
            memory.commit()

    def finish(self, step: Step) -> tuple[float, bool]:
        """Exchange the gradients; see `GradientMean.finish`."""
        self._step = step
        factors = self._flat.factors
        pairs = {} if factors is None else factors.take()
        if not self._travels:
            return step.weight, step.stop
        gradients = self._flat.gradients
        vector = gradients.detach().cpu()
        if step.weight != 1.0:
            vector = vector * step.weight
        if (self._compressor.factored or self._compressor.linear) and isinstance(self._layout, CountedLayout):
            total, weight = self._counted(vector, step)
        elif self._route(step) != "gathered":
            total, weight = self._streamed(vector, step)
        elif self._compressor.from_passes:
            total, weight = self._broadcast(vector, step, pairs)
        elif self._compressor.factored:
            total, weight = self._factored(vector, step)
        elif self._compressor.linear:
            total, weight = self._added(vector, step)
        else:
            total, weight = self._exchanged(vector, step)
        stop = self.words > 0
        if total is None or weight <= 0:
            for memory in self._memories():
                memory.forget()
            gradients.zero_()
            return 0.0, stop
        if self._compressor.votes:
            gradients.copy_(total)
        elif gradients.device == total.device:
            torch.div(total, weight, out=gradients)
        else:
            gradients.copy_(total.div_(weight))
        self.commit()
        return weight, stop

    def state(self) -> State:
        """Return the compression errors, `(size,)` each, with those of the sums that this member computes."""
        tensors: Memory = {}
        states = [memory.state() for memory in self._own]
        for name in states[0]:
            parts = [state[name] for state in states]
            tensors[_OWN + name] = torch.cat(parts) if parts[0].dim() else parts[0]
        if self._of_sums is not None:
            tensors |= prefixed(_SUM, self._of_sums.state())
        if self._rows:
            tensors[_ROWS] = torch.tensor(self._rows, dtype=torch.float64)
        return tensors, {"member": self._group.rank, "members": self._group.size}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned, of as many members."""
        own = below(_OWN, state[0])
        self._rows = state[0][_ROWS].tolist() if _ROWS in state[0] else []
        for memory, part in zip(self._own, self._slices, strict=True):
            whole = len(self._slices) == 1
            memory.load_state(
                {name: value if whole or not value.dim() else value[part] for name, value in own.items()}
            )
        if self._of_sums is not None:
            self._of_sums.load_state(below(_SUM, state[0]))

    def _memories(self) -> list[ResidualMemory]:
        return self._own if self._of_sums is None else [*self._own, self._of_sums]

    def _exchanged(self, vector: Tensor, step: Step) -> tuple[Tensor | None, float]:
        """Return the sum of all members' vectors as far as it traveled, and of their weights; None: not finite."""
        finite = is_finite(vector)
        outgoing = Message(
            Kind.VECTOR,
            version=0 if finite else 1,
            step=step.number,
            weight=step.weight,
            learning_rate=self._own_word,
        )
        incoming = self._gathered(outgoing, self._encoded(vector, step, finite))
        weight = sum(message.weight for message in incoming)
        self.words = sum(message.learning_rate for message in incoming)
        if weight <= 0 or any(message.version for message in incoming):
            return None, weight
        return self._summed(incoming, step), weight

    def _added(self, vector: Tensor, step: Step) -> tuple[Tensor | None, float]:
        """As `_exchanged`, of payloads that are numbers."""
        [memory] = self._own
        payload = memory.encode(vector.nan_to_num(), step.number, self.learning_rate)
        body, weight = self._total([memory.layout.body(payload, vector.dtype)], vector, step)
        if body is None:
            return None, weight
        whole = memory.layout.with_body(payload, body)
        return memory.layout.decode(self._compressor, whole, vector.dtype), weight

    def _factored(self, vector: Tensor, step: Step) -> tuple[Tensor | None, float]:
        """Return the result of `_exchanged` for matrices with jointly computed factors."""
        [memory] = self._own
        compressor, layout, everything = self._compressor, memory.layout, None
        whole, kept = memory.open(vector, self.learning_rate)
        if compressor.is_dense_at(step.number):
            everything, weight = self._total([whole], whole, step)
            if everything is None:
                return None, weight
            memory.close(whole, everything / self._group.size, kept, step.number, self.learning_rate)
            return everything, weight
        places = [
            (section, layout.place(number, whole.dtype, kept))
            for number, section in enumerate(layout.sections)
        ]
        matrices, lefts, dense = [], [], []
        for section, place in places:
            own = _taken(whole, section.ranges)
            if section.dense:
                dense.append(own)
            else:
                matrices.append(aligned(own.float().view(place.rows, place.columns)))
                lefts.append(compressor.left(matrices[-1], place))
        parts = [left.reshape(-1) for left in lefts] + [part.float() for part in dense]
        first, weight = self._total(parts, whole, step)
        if first is None:
            return None, weight
        pieces = first.split([part.numel() for part in parts])
        lefts = [piece.view(left.shape).clone() for piece, left in zip(pieces, lefts, strict=False)]
        rights = [compressor.right(matrix, left) for matrix, left in zip(matrices, lefts, strict=True)]
        second = torch.cat([right.reshape(-1) for right in rights])
        if self._group.size > 1:
            self._sum.run(second)
        found = second.split([right.numel() for right in rights])
        total = torch.empty_like(whole)
        number, plain = 0, iter(pieces[len(lefts) :])
        for section, place in places:
            if section.dense:
                ends = [end - begin for begin, end in section.ranges]
                for (begin, end), values in zip(section.ranges, next(plain).split(ends), strict=True):
                    total[begin:end] = values
                continue
            right = found[number].view(rights[number].shape)
            [(begin, end)] = section.ranges  # of a matrix
            if total.dtype is right.dtype:
                torch.mm(lefts[number], right.t(), out=total[begin:end].view(place.rows, place.columns))
            else:
                total[begin:end] = (lefts[number] @ right.t()).view(-1)
            kept[factor_name(place.section)] = right.t().reshape(-1).clone()
            number += 1
        sent = total / self._group.size
        for begin, end in layout.dense_ranges:  # uncompressed numbers leave no compression error
            sent[begin:end] = whole[begin:end]
        memory.close(whole, sent, kept, step.number, self.learning_rate)
        return total, weight

    def _route(self, step: Step) -> Route:
        """Return how streams are added up at a step, which all members find alike."""
        route = self._compressor.stream_route
        if route is None:
            return "gathered"
        payload = self._layout.nbytes(self._compressor, self._flat.vector.dtype, step.number)
        if payload is None or self._group.size < 3 or self._flat.size < self._group.size:
            return "gathered"
        whole = self._flat.nbytes * self._flat.stands_for
        return route_of(route, self._group.size, payload, whole)

    def _streamed(self, vector: Tensor, step: Step) -> tuple[Tensor | None, float]:
        """As `_exchanged`, of entries that are merged on their way."""
        [memory] = self._own
        layout, dense = memory.layout, memory.layout.dense_ranges
        payload = memory.encode(vector.nan_to_num(), step.number, self.learning_rate)
        if isinstance(layout, CountedLayout):
            weighed = Step(step.number, ceil(step.weight), step.stop)
            numbers = sum(stop - start for start, stop in layout.true.dense_ranges)
            rest, weight = self._total([torch.zeros(numbers, dtype=torch.int32)], vector, weighed)
        else:
            parts = [memory.decoded[start:stop] for start, stop in dense]
            rest, weight = self._total(parts or [vector[:0]], vector, step)
        if rest is None:
            return None, weight
        own = layout.stream(self._compressor, payload, vector.dtype)
        total = self._doubled(own) if self._route(step) == "doubling" else self._split(own)
        for (start, stop), part in zip(
            dense, rest.split([stop - start for start, stop in dense]) if dense else (), strict=True
        ):
            total[start:stop] = part
        return total, weight

    def _doubled(self, own: Stream) -> Tensor:
        """Return the sum, `(size,)`, of all members' streams, by recursive doubling; beyond a power of two by proxy."""
        rank, size, space = self._group.rank, self._group.size, self._space
        inner = 1 << (size.bit_length() - 1)
        if rank >= inner:
            space.send(rank - inner, Message(Kind.VECTOR, own.encode(), tag=_UP))
            return own.decoded(_bytes_in(space.receive(rank - inner, _DOWN)[1])).dense().clone()
        proxied = rank + inner < size
        if proxied:
            own = own.merged(own.decoded(_bytes_in(space.receive(rank + inner, _UP)[1])))
        apart = 1
        while apart < inner:
            peer = rank ^ apart
            send = space.start_send(peer, Message(Kind.VECTOR, own.encode(), tag=_UP))
            other = own.decoded(_bytes_in(space.receive(peer, _UP)[1]))
            send.wait()
            own, apart = own.merged(other), 2 * apart
        if proxied:
            space.send(rank + inner, Message(Kind.VECTOR, own.encode(), tag=_DOWN))
        return own.dense().clone()

    def _split(self, own: Stream) -> Tensor:
        """Return the sum, `(size,)`, of all members' streams: each merges a slice, and sends it to all."""
        slices = shards(own.size, self._group.size)
        parts = [own.part(place.start, place.stop) for place in slices]
        outgoing = self._to_all(Message(Kind.VECTOR, tag=_UP), [part.encode() for part in parts])
        mine = parts[self._group.rank]
        merged, *others = (mine.decoded(_bytes_in(message)) for message in outgoing)
        for other in others:
            merged = merged.merged(other)
        down = self._to_all(Message(Kind.VECTOR, tag=_DOWN), [merged.encode()] * self._group.size)
        whole = torch.zeros(own.size, dtype=own.values.dtype)
        for place, part, message in zip(slices, parts, down, strict=True):
            found = part.decoded(_bytes_in(message))
            if found.indices is None:
                whole[place] = found.values
            else:
                whole[place][found.indices] = found.values
        return whole

    def _broadcast(
        self, vector: Tensor, step: Step, pairs: Mapping[int, Pair]
    ) -> tuple[Tensor | None, float]:
        """Return the result of `_exchanged` from sufficient factors, for layers where they are smaller.

        Args:
            vector: `(size,)`.
            step: step of this member.
            pairs: sufficient factors, by the start of the layer in the vector.
        """
        compressor, layout = self._compressor, self._layout
        layers = [section for section in layout.sections if not section.dense]
        starts = [section.ranges[0][0] for section in layers]
        known = self._rows or [0.0] * len(layers)
        places = [Place(section.rows, section.numbers // section.rows) for section in layers]
        chosen = [number for number, place in enumerate(places) if compressor.from_rows(known[number], place)]
        taken = [layers[number].ranges[0] for number in chosen]
        left = _others(taken, vector.numel())
        own = [float(len(pairs[start][0])) if start in pairs else 0.0 for start in starts]
        wrong = float(not is_finite(vector))
        tail = vector.new_tensor([step.weight, self._own_word, wrong, *own])
        rest = torch.cat([*(vector[start:stop].nan_to_num() for start, stop in left), tail])
        self._sum.run(rest)
        weight, self.words, wrong, *self._rows = rest[-tail.numel() :].tolist()
        if wrong:
            return None, weight
        total = torch.empty_like(vector)
        for (start, stop), part in zip(
            left, rest.split([*(b - a for a, b in left), len(tail)]), strict=False
        ):
            total[start:stop] = part
        if chosen:
            ends = [0, *accumulate(stop - start for start, stop in taken)]
            sections = tuple(
                Section((span,), layers[number].rows)
                for number, span in zip(chosen, pairwise(ends), strict=True)
            )
            inside = Layout(ends[-1], sections)
            scaled = {
                begin: (pairs[start][0] * step.weight, pairs[start][1])
                for begin, (start, _) in zip(ends, taken, strict=False)
                if start in pairs
            }
            payload = inside.encode(compressor, _taken(vector, taken), step=step.number, pairs=scaled)
            incoming = self._to_all(Message(Kind.VECTOR, tag=_UP), [payload] * self._group.size)
            sums = torch.zeros(inside.size, dtype=vector.dtype)
            for message in incoming:
                assert message.tensor is not None, "all members have chosen the same layers"
                inside.add_to(compressor, sums, message.tensor)
            for (start, stop), (first, last) in zip(taken, pairwise(ends), strict=True):
                total[start:stop] = sums[first:last]
        return total, weight

    def _counted(self, vector: Tensor, step: Step) -> tuple[Tensor | None, float]:
        """As `_exchanged`, in a dry run, of numbers that are added up; whole numbers count as they are.

        Raises:
            RequestError: they would not fit into memory.
        """
        if self._compressor.is_dense_at(step.number):
            return self._total([vector], vector, step)
        step = Step(step.number, ceil(step.weight), step.stop)
        first, *more = self._layout.sums(self._compressor, vector.dtype, step.number)
        if first * self._group.size > _MOST_COUNTED:
            raise RequestError(
                f"{self._compressor} adds up {first:,} numbers of each of {self._group.size} workers, more than a dry "
                "run holds: take fewer workers, or a compressor that gathers, such as top_k"
            )
        whole = torch.int32 if vector.element_size() == torch.int32.itemsize else torch.int64
        total, weight = self._total([torch.zeros(first, dtype=whole)], vector, step)
        for numbers in more if self._group.size > 1 else ():
            self._sum.run(torch.zeros(numbers, dtype=whole))
        return (None if total is None else vector), weight

    def _total(self, parts: Sequence[Tensor], like: Tensor, step: Step) -> tuple[Tensor | None, float]:
        """Sum numbers over all members, with their weights and flags.

        Args:
            parts: one-dimensional, all of one dtype.
            like: source vector of the numbers; if it is not finite on any member, there is no sum.
            step: step of this member.

        Returns:
            All parts' sums, one after the other, and the sum of the weights.
        """
        finite = float(not is_finite(like))
        tail = parts[0].new_tensor([step.weight, self._own_word, finite])
        whole = torch.cat([*(part.nan_to_num() for part in parts), tail])
        if self._group.size > 1:
            self._sum.run(whole)
        weight, self.words, wrong = whole[-3:].tolist()
        return (whole[:-3] if wrong == 0 else None), weight

    def _encoded(self, vector: Tensor, step: Step, finite: bool) -> list[Tensor | None]:
        """Return this member's payloads, one per part; None where it sends nothing."""
        compressor, rate = self._compressor, self.learning_rate
        nothing = not finite or (step.weight == 0 and not compressor.feedback)
        scalers = self._scalers(vector, nothing) if compressor.shares_scaler else [()] * len(self._slices)
        if nothing:
            return [None] * len(self._slices)
        return [
            memory.encode(vector[part], step.number, rate, of_sections)
            for memory, part, of_sections in zip(self._own, self._slices, scalers, strict=True)
        ]

    def _scalers(self, vector: Tensor, nothing: bool) -> list[Sequence[float]]:
        """Return, for each part, the largest proposals of all members for its sections."""
        proposals = [
            memory.layout.scalers(
                self._compressor, torch.zeros_like(vector[part]) if nothing else vector[part]
            )
            for memory, part in zip(self._own, self._slices, strict=True)
        ]
        own = bytes_of(torch.tensor(list(chain.from_iterable(proposals))))
        incoming = self._to_all(Message(Kind.VECTOR, own, tag=_SCALER), [own] * self._group.size)
        outgoing = [
            values_of(message.tensor, torch.float32) for message in incoming if message.tensor is not None
        ]
        largest = torch.stack(outgoing).amax(0)
        return [part.tolist() for part in largest.split([len(part) for part in proposals])]

    def _gathered(self, message: Message, payloads: Sequence[Tensor | None]) -> list[Message]:
        """Return all members' messages to this one, in the order of their ranks."""
        each = list(payloads) if len(payloads) > 1 else list(payloads) * self._group.size
        return self._to_all(message._replace(tag=_UP), each)

    def _to_all(self, message: Message, payloads: Sequence[Tensor | None]) -> list[Message]:
        rank, size, space = self._group.rank, self._group.size, self._space
        # Each begins with the one after it, so that not all send to the same one at once.
        others = [(rank + offset) % size for offset in range(1, size)]
        sends = [space.start_send(to, message._replace(tensor=payloads[to])) for to in others]
        incoming = {source: space.receive(source, message.tag)[1] for source in others}
        incoming[rank] = message._replace(tensor=payloads[rank])
        for send in sends:
            send.wait()
        return [incoming[source] for source in range(size)]

    def _summed(self, received: Sequence[Message], step: Step) -> Tensor:
        """Return the sum, `(size,)`, of all members' vectors as far as it traveled."""
        compressor, parts = self._compressor, len(self._slices)
        number = self._group.rank if self._of_sums is not None else 0
        layout = self._own[number].layout
        total = torch.zeros(layout.size, dtype=self._flat.vector.dtype)
        for rank, message in enumerate(received):  # in their order, so that all find the same bits
            if message.tensor is not None:
                layout.add_to(compressor, total, message.tensor, rank * parts + number)
        if self._of_sums is None:
            return total
        payload = self._of_sums.encode(total, step.number, self.learning_rate)
        down = self._to_all(Message(Kind.VECTOR, tag=_DOWN), [payload] * self._group.size)
        whole = torch.zeros(self._flat.size, dtype=total.dtype)
        for memory, part, message in zip(self._own, self._slices, down, strict=True):
            assert message.tensor is not None, "every member has a slice"
            memory.layout.add_to(compressor, whole[part], message.tensor, -1)
        return whole


def _taken(vector: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Return the numbers of some ranges, one after the other; of one, where they lie."""
    if len(ranges) == 1:
        [(start, stop)] = ranges
        return vector[start:stop]
    return torch.cat([vector[start:stop] for start, stop in ranges])


def _bytes_in(message: Message) -> Tensor:
    assert message.tensor is not None, "streams have bytes"
    return message.tensor


def _others(taken: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return the ranges of a vector that are not in `taken`."""
    ends = [0, *chain.from_iterable(taken), size]
    return [(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop]


def _among(state: State, before: int, after: int) -> State:
    """Return the state of a member of another number of members.

    Sums of residuals over the number of members are conserved: each is multiplied by the new number over the
    old one, and the residual of the member's slice of the sum is added to its own residual.
    """
    tensors, facts = dict(state[0]), dict(state[1])
    own, of_sum = tensors.get(_OWN + RESIDUAL), tensors.get(_SUM + RESIDUAL)
    if of_sum is not None and own is not None:
        part = shards(own.numel(), facts["members"])[facts["member"]]
        own = own.clone()
        own[part] += of_sum
    if own is not None:
        tensors[_OWN + RESIDUAL] = own * (after / before)
    # The rows of others' steps are unknown, so the first step of a new group is summed without them.
    kept = {name: value for name, value in tensors.items() if not name.startswith(_SUM) and name != _ROWS}
    return kept, facts


def merged_over(states: Sequence[State], before: int) -> State:
    """Return the initial state of each member of a new group from the states of the old one.

    Each receives the mean of all residuals, so their sum over the number of members is conserved. Momenta are
    averaged; equal values are kept.

    Args:
        states: states of all former members, in the order of their ranks.
        before: number of former members.
    """
    folded = [_among(state, before, before)[0] for state in states]
    tensors: Memory = {}
    for name, like in folded[0].items():
        values = [state[name] for state in folded if name in state]
        vector = like.dim() > 0 and not name.startswith(_OWN + "factor.")
        tensors[name] = torch.stack(values).sum(0) / before if vector else like
    return tensors, {}


_MEAN = "mean."


def of_compressed(before: int, after: int) -> Resharding:
    """Return the resharding of workers with residuals and equal optimizer states.

    Args:
        before: number of workers that wrote the checkpoint.
        after: number of workers that resume from it.
    """

    def workers(held: Held, step: int) -> dict[int, State]:
        tensors, facts = held.workers[0]
        states = [
            (below(_MEAN, held.workers[index][0]), held.workers[index][1]["mean"])
            for index in sorted(held.workers)
        ]
        kept, _ = merged_over(states, before)
        common = without(_MEAN, tensors)
        common |= prefixed(_MEAN, kept)
        return {
            index: (common, facts | {"mean": {"member": index, "members": after}}) for index in range(after)
        }

    text = (
        "all continue from worker 0's parameters and optimizer, each with an equal part of what {states} workers' "
        "compression had kept back"
    )
    return Resharding(after=after, text=text, workers=workers)
