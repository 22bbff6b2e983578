"""What a copy of a shard is handed over as: one message with all that the other copy holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from polyrhythm.communication.message import Reason, RefusedMessage, pack_tensors, unpack_tensors
from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.replication.entry import Log


def packed(log: Log, requests: Any, losses: Counter[int]) -> Tensor:
    """Packs a copy.

    Args:
        log: of the shard.
        requests: `Requests.facts`.
        losses: of each pusher that have been entered in the log.

    Returns:
        A payload of bytes, `(n,)`, uint8. What several pushers have read, though it is one vector, is there once.
    """
    tensors, facts = log.part.exact_state()
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    same = {name: known for name, known in names.items() if known != name}
    once = {name: tensor for name, tensor in tensors.items() if name not in same}
    told = {str(pusher): count for pusher, count in losses.items()}
    record = {"server": facts, "same": same, "requests": requests, "losses": told, "entries": log.length}
    return pack_tensors(once, record)


def unpacked(log: Log, payload: Tensor) -> tuple[Any, Counter[int]]:
    """Puts what `packed` gave into the log of a copy that has nothing; gives `requests` and `losses`.

    Raises:
        RefusedMessage: the payload is something else.
    """
    tensors, facts = unpack_tensors(payload)
    try:
        tensors |= {name: tensors[known] for name, known in facts["same"].items()}
        log.part.load_exact_state((tensors, facts["server"]))
        log.length = facts["entries"]
        return facts["requests"], Counter({int(key): count for key, count in facts["losses"].items()})
    except (KeyError, TypeError, ValueError, AttributeError, RequestError) as error:
        raise RefusedMessage(Reason.MALFORMED, f"a shard that was handed over is none: {error!r}") from None
