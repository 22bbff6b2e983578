"""A server's end of pushes and answers that travel in parts.

    worker    backward ── PART(end) ─▶ … ── PART ─▶ … ── PUSH(the rest) ─────▶        forward
    server                 joins them: one gradient, of this PUSH ─▶ gate ─▶ update
    worker                       ◀─ PARAMETERS(no numbers) ── PART(beginning) ── … ── PART(end)

The backward pass has the end of the vector first, so each part is just before the previous one, and the push
has the beginning, with all facts about the whole: version, weight, rate. Nothing is done until then, so a
push that breaks off leaves nothing behind, and sums, versions and stalenesses are those of a push in one
piece. The answer is cut like the push, and is sent in the order in which a forward pass needs it.

`version` of a PART is the place of its first number in the server's shard, `step` that of its push.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.parameter_server.serving.rule import Reply


@dataclass
class PartialPush:
    """A gradient that has arrived in part.

    Attributes:
        numbers: `(n,)`, of the whole shard; those from `start` on are there.
        step: step of its pusher.
        start: index of the first number that has arrived.
        weight: weight of its pusher, in full batches.
        cuts: starts of its parts.
    """

    numbers: Tensor
    step: int
    start: int
    weight: float = 1.0
    cuts: list[int] = field(default_factory=list)


class PushParts:
    """Parts of pushes at one server, by the pushers' ranks."""

    def __init__(self) -> None:
        self._coming: dict[int, PartialPush] = {}
        self._cuts: dict[int, list[int]] = {}
        """Cuts of the answer to a complete push."""

    def take(self, source: int, message: Message, values: Tensor) -> None:
        """Take a part of a push to a shard of these parameters, `(n,)`.

        Raises:
            RefusedMessage: it does not lie before the last part.
        """
        tensor, start, step = payload(message), message.version, message.step
        if tensor.dtype is not values.dtype:
            raise RefusedMessage(Reason.PAYLOAD, f"a part of {tensor.dtype} arrived for {values.dtype}")
        coming, size = self._coming.get(source), len(tensor)
        stop = start + size
        if coming is None or coming.step != step:
            if stop != len(values):
                raise RefusedMessage(
                    Reason.ORDER,
                    f"the first part of a gradient ends at {stop:,}, where {len(values):,} parameters are",
                )
            coming = self._coming[source] = PartialPush(torch.empty_like(values), step, stop, message.weight)
        if not (size > 0 and start >= 0 and stop == coming.start):
            raise RefusedMessage(
                Reason.ORDER,
                f"numbers {start:,} to {stop:,} of a gradient arrived, where those before {coming.start:,} were next",
            )
        coming.numbers[start:stop] = tensor
        coming.start = start
        coming.cuts.append(start)

    def join(self, source: int, message: Message) -> Message:
        """Return a push joined with all of its earlier parts.

        Raises:
            RefusedMessage: some are missing.
        """
        coming = self._coming.pop(source, None)
        self._cuts.pop(source, None)
        if coming is None or coming.step != message.step:
            return message
        rest = payload(message)
        if len(rest) == len(coming.numbers) > coming.start:  # its pusher has begun again
            return message
        if len(rest) != coming.start or rest.dtype is not coming.numbers.dtype:
            raise RefusedMessage(
                Reason.PAYLOAD,
                f"{len(rest):,} numbers, {rest.dtype}, arrived with a push that lacked {coming.start:,}",
            )
        coming.numbers[: coming.start] = rest
        self._cuts[source] = sorted(cut for cut in coming.cuts if cut > 0)
        return message._replace(tensor=coming.numbers)

    def coming(self, source: int) -> PartialPush | None:
        """Return the arrived numbers of an incomplete push."""
        return self._coming.get(source)

    def forget(self, source: int) -> None:
        """Forget the parts of a pusher that begins again or is lost."""
        self._coming.pop(source, None)
        self._cuts.pop(source, None)

    def forget_unfinished(self) -> None:
        """Forget the parts of incomplete pushes: all pushers in progress begin again."""
        self._coming.clear()

    def cuts_of(self, to: int) -> list[int] | None:
        """Return where to cut the answer to a pusher, which is answered now; None: nowhere."""
        return self._cuts.pop(to, None)

    def cut(self, replies: Sequence[Reply]) -> list[Reply]:
        """Return replies; those to pushes in parts are cut as these were."""
        found: list[Reply] = []
        for to, reply in replies:
            is_answer = reply.kind is Kind.PARAMETERS and reply.tensor is not None
            found += reply_in_parts(to, reply, self.cuts_of(to)) if is_answer else [(to, reply)]
        return found


def reply_in_parts(
    to: int, reply: Message, cuts: Sequence[int] | None, pieces: Sequence[Tensor] = ()
) -> list[Reply]:
    """Return an answer cut at some places of its shard.

    Args:
        to: the pusher.
        reply: reply with all numbers.
        cuts: cuts in ascending order; None: in one piece.
        pieces: payloads to be sent instead of those before, between and behind the cuts; default: themselves.
    """
    whole = payload(reply)
    places = [0, *(cuts or ()), len(whole)]
    pieces = pieces or [whole[start:stop] for start, stop in pairwise(places)]
    if cuts is None:
        return [(to, reply._replace(tensor=pieces[0]))]
    parts = [
        (to, Message(Kind.PART, piece, version=start, step=reply.step))
        for start, piece in zip(places, pieces, strict=False)
    ]
    return [(to, reply._replace(tensor=pieces[0][:0])), *parts]


def whole_replies(replies: Sequence[Reply]) -> list[Reply]:
    """Return replies with the parts of each joined, as `PushParts.cut` was given; other parts as they are."""
    found: list[Reply] = []
    for to, reply in replies:
        if reply.kind is not Kind.PART or not found or found[-1][0] != to or found[-1][1].kind is Kind.PART:
            found.append((to, reply))
            continue
        _, before = found[-1]
        joined = torch.cat([payload(before), payload(reply)])
        found[-1] = to, before._replace(tensor=joined)
    return found
