"""Message between two ranks: a kind, a few numbers and at most one flat tensor.

On the wire a message is a fixed header of 64 bytes and one contiguous payload. Nothing is ever unpickled: the
header is numbers, and a payload is raw values of a listed dtype. Text (JSON) and groups of named tensors
(safetensors) travel as payloads of bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from enum import IntEnum, StrEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from polyrhythm.errors import RunError

HEADER_BYTES = 64
MAXIMUM_ELEMENTS = 1 << 34
UNBOUNDED_BYTES = 8 * MAXIMUM_ELEMENTS
"""Size of a payload without a known limit."""
_HEADER = struct.Struct(
    "<4sBBBxIIqqqdd"
)  # magic, kind, dtype, flags, context, tag, elements, version, step, two numbers
_MAGIC = b"pRh1"
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int64,
    torch.int32,
)
_STOP, _EMPTY = 1, 2


MESSAGES = 2
"""Version of the format of messages between ranks; it increases whenever a rank of before would read one wrongly."""


class Kind(IntEnum):
    """Meaning of a message. One list for all strategies, so that a trace is readable without knowing the strategy."""

    VECTOR = 0  # a tensor of a collective or of gossip, or a worker's own parameters
    CONFIGURE = 1  # worker 0 to a server: how to optimize its shard
    PARAMETERS = 2  # initial values to a server, or a server's answer
    PULL = 3  # a worker asks for parameters
    PUSH = 4  # a worker's gradient
    DIFFERENCE = 5  # an elastic difference
    LEAVE = 6  # a worker is done
    STATE = 7  # the state of a server's shard
    CHECKPOINT = 8  # a server is asked for its part
    REPORT = 9  # a server's final report
    EVENT = 10  # a fact for the run's log
    CLOSE = 11  # the last message of this link
    JOIN = 12  # a replacement of a lost worker asks to take part
    BROKEN = 13  # a worker has broken a step off, and waits to be regrouped
    REGROUP = 14  # the next membership view
    REVOKE = 15  # this communicator must not be used any more
    FETCH = 16  # a worker requests parameters and continues
    ANNOUNCE = 17  # a site to others: a large packet follows
    RELAY = 18  # the next message of this rank is for a shard that is kept for another
    LEAD = 19  # a replacement of worker 0 leads from now on
    TAKEN = 20  # in a loop of a user's own: how many batches of its share a worker has taken
    RECORD = 21  # a worker's account and state, to the leader or, where a run is resumed, from it
    ACCOUNT = 22  # the last message of a dry run's worker
    WELCOME = 23  # to a replacement of a lost worker: what no server holds
    INTRODUCTION = 24  # to a new leader: what a worker has that a leader needs
    READY = 25  # the replacement of a lost server has all of its shards
    CALL = 26  # rank 0 regroups: a rank that waits for it elsewhere must join
    REGROUP_AT = 27  # all must regroup before a later step
    FINAL_MODEL = 28  # in a loop of a user's own: the model with which a worker may leave
    HANDOVER = 29  # the newest member of a view to those that are behind: parameters and state
    DRAW = 30  # a worker asks for its next batches
    GRANT = 31  # to a worker: the batches that it has drawn
    COUNTED = 32  # a server to the leader: how many steps of a lost worker count
    PART = 33  # a stretch of a gradient before its PUSH, or of the parameters after their answer
    STATE_AT = 34  # a worker is asked for its state after a step
    DIGEST = 35  # a worker to the leader: digests of the state that all members have in common
    GATHERED = 36  # a worker to the leader: what several workers send at the end of an epoch
    DISMISSED = 37  # a server to a worker: too many of its gradients were not finite
    OVER = 38  # a site to others: the run is over
    LOST = 39  # an entry of a shard's log: the rank of a pusher is lost
    COPY = 40  # a server asks the other one of a shard for its copy


class Reason(StrEnum):
    """Why a message is refused."""

    MALFORMED = "malformed"  # invalid bytes, or a payload that does not match its header
    SENDER = "sender"  # the sender must not send here
    KIND = "kind"  # no rank sends this kind here
    PAYLOAD = "payload"  # a tensor that is missing, too many, or of another length or dtype
    NUMBERS = "numbers"  # a weight, learning rate or version that cannot be
    STEP = "step"  # a step that its sender cannot have reached
    ORDER = "order"  # it precedes a required message, or is repeated
    OVERSIZED = "oversized"  # it announces more than anything in this run takes
    EARLY = "early"  # for a communicator that its receiver has not made, and more than may wait for such


class RefusedMessage(RunError):
    """A message that its receiver ignores; nothing has been changed."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class MalformedMessage(RefusedMessage):
    """The bytes are no message of ours."""

    def __init__(self, text: str, reason: Reason = Reason.MALFORMED) -> None:
        super().__init__(reason, text)


class Message(NamedTuple):
    """A message. A named tuple, since a frozen dataclass takes longer than all else that a small message costs.

    Attributes:
        kind: meaning of the message.
        tensor: payload, one-dimensional and contiguous, or None.
        version: updates applied to the parameters that the payload is, or was computed from.
        step: the sender's step.
        weight: samples that a gradient is the mean of, in units of a full batch; in push-sum the mass.
        learning_rate: the one that an update must use; 0 where it means nothing.
        stop: whether the sender has been asked to stop.
        tag: identifier among concurrent messages of the same two ranks.
    """

    kind: Kind
    tensor: Tensor | None = None
    version: int = 0
    step: int = 0
    weight: float = 1.0
    learning_rate: float = 0.0
    stop: bool = False
    tag: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included."""
        return HEADER_BYTES + (
            self.tensor.numel() * self.tensor.element_size() if self.tensor is not None else 0
        )

    def received(self) -> Message:
        """Return a copy that shares no memory with the sender's."""
        tensor = self.tensor
        if tensor is None:
            return self
        copy = (tensor.detach() if tensor.requires_grad else tensor).clone()
        return Message(self.kind, copy, *self[2:])


def bare_payload(nbytes: int) -> Tensor:
    """Return an unread payload of `nbytes` bytes for a dry run, `(n,)` uint8: it takes no memory."""
    return torch.zeros(1, dtype=torch.uint8).expand(nbytes)


def is_bare(payload: Tensor | None) -> bool:
    """Return whether `bare_payload` has made a payload."""
    return payload is not None and payload.dtype is torch.uint8 and payload.stride(0) == 0


message_of: Callable[[tuple[Kind, Tensor | None, int, int, float, float, bool, int]], Message]
message_of = partial(tuple.__new__, Message)
"""Makes a message of all its fields, in a quarter of the time that calling the class takes."""


def _new(elements: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(elements, dtype=dtype)


def encode_header(message: Message, context: int) -> bytes:
    """Pack all but the payload into `HEADER_BYTES` bytes.

    Args:
        message: the message.
        context: communicator of the link that the message belongs to.
    """
    tensor = message.tensor
    flags = (_STOP if message.stop else 0) | (_EMPTY if tensor is None else 0)
    dtype = 0 if tensor is None else _DTYPES.index(tensor.dtype)
    elements = 0 if tensor is None else tensor.numel()
    packed = _HEADER.pack(
        _MAGIC, message.kind, dtype, flags, context, message.tag,
        elements, message.version, message.step, message.weight, message.learning_rate,
    )  # fmt: skip
    return packed.ljust(HEADER_BYTES, b"\0")


def decode_header(
    header: bytes,
    find: Callable[[int, torch.dtype], Tensor] = _new,
    most_bytes: int = UNBOUNDED_BYTES,
) -> tuple[int, Message]:
    """Unpack a header into its context and a message.

    Args:
        header: the packed header.
        find: returns the tensor, given its number of elements and dtype; default: a new one to be filled.
        most_bytes: largest size of a payload; no memory is allocated for a larger one.

    Raises:
        MalformedMessage: wrong length, magic, kind, dtype or size.
    """
    if len(header) != HEADER_BYTES:
        raise MalformedMessage(f"a header has {HEADER_BYTES} bytes, not {len(header)}")
    magic, kind, dtype, flags, context, tag, elements, version, step, weight, rate = _HEADER.unpack(
        header[: _HEADER.size]
    )
    if magic != _MAGIC or kind not in Kind.__members__.values() or dtype >= len(_DTYPES):
        raise MalformedMessage("a header of something else arrived; is another program using this port?")
    if not 0 <= elements <= MAXIMUM_ELEMENTS:
        raise MalformedMessage(f"a payload of {elements} elements was announced")
    if not flags & _EMPTY and elements * _DTYPES[dtype].itemsize > most_bytes:
        raise MalformedMessage(
            f"a payload of {elements * _DTYPES[dtype].itemsize:,} bytes was announced, where {most_bytes:,} are the "
            "most in this run",
            Reason.OVERSIZED,
        )
    try:
        tensor = None if flags & _EMPTY else find(elements, _DTYPES[dtype])
    except MalformedMessage:
        raise
    except RuntimeError:  # a true header announces nothing that its sender could hold and we cannot
        raise MalformedMessage(f"a payload of {elements} elements was announced: no memory for it") from None
    return context, Message(Kind(kind), tensor, version, step, weight, rate, bool(flags & _STOP), tag)


def pack_json(value: Any) -> Tensor:
    """Return a JSON-able value as a payload of bytes, shape `(n,)`, uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def unpack_json(payload: Tensor) -> Any:
    """Unpack the result of `pack_json`; raise `MalformedMessage` if the payload is not JSON."""
    try:
        return json.loads(str(_raw(payload), "utf-8"))  # json would guess the encoding of bytes
    except (ValueError, RecursionError):
        raise MalformedMessage("a payload that should be JSON is not") from None


def pack_tensors(tensors: dict[str, Tensor], facts: Any) -> Tensor:
    """Return named tensors and a JSON-able value as one payload of bytes, shape `(n,)`, uint8."""
    contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    packed = save_tensors(contiguous, metadata={"facts": json.dumps(facts)})
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def unpack_tensors(payload: Tensor) -> tuple[dict[str, Tensor], Any]:
    """Unpack the result of `pack_tensors`; raise `MalformedMessage` if the payload is malformed."""
    raw = _raw(payload)
    try:
        length = int.from_bytes(raw[:8], "little")
        facts = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["facts"])
        return load_tensors(raw), facts
    except Exception as error:
        raise MalformedMessage(f"a payload that should hold tensors does not: {error}") from None


def _raw(payload: Tensor) -> bytes:
    if payload.dtype != torch.uint8:
        raise MalformedMessage(f"a payload that should be bytes is {payload.dtype}")
    return payload.numpy().tobytes()
