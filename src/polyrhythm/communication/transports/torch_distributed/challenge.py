"""The challenge that a link over gloo begins with: both sides prove that they know the run's key.

receiver                        sender
  nonce r ───────────────────▶
  ◀──────── nonce s, proof("sender", link, r, s)
  proof("receiver", link, s, r) ▶
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from polyrhythm.communication.message import Reason, RefusedMessage
from polyrhythm.communication.secret import NONCE_BYTES, PROOF_BYTES, nonce, prove, proves

_SENDER, _RECEIVER = 0, 1
_TAG = 4
_FROM_SENDER, _FROM_RECEIVER = "link, sender", "link, receiver"


def challenge(group: Any, key: bytes, link: str, patience: timedelta) -> None:
    """The receiver's side.

    Args:
        group: of the two.
        key: of the run.
        link: its name, which no other link has.
        patience: with the sender.

    Raises:
        RefusedMessage: the sender does not know the key.
        RuntimeError: the link broke.
    """
    ours = nonce()
    _send(group, ours, _SENDER, patience)
    reply = _receive(group, NONCE_BYTES + PROOF_BYTES, _SENDER, patience)
    theirs, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
    if not proves(proof, key, _FROM_SENDER, link.encode(), ours, theirs):
        raise RefusedMessage(Reason.SENDER, "it does not know the key of this run")
    _send(group, prove(key, _FROM_RECEIVER, link.encode(), theirs, ours), _SENDER, patience)


def answer(group: Any, key: bytes, link: str, patience: timedelta) -> None:
    """The sender's side; see `challenge`."""
    theirs = _receive(group, NONCE_BYTES, _RECEIVER, patience)
    ours = nonce()
    _send(group, ours + prove(key, _FROM_SENDER, link.encode(), theirs, ours), _RECEIVER, patience)
    proof = _receive(group, PROOF_BYTES, _RECEIVER, patience)
    if not proves(proof, key, _FROM_RECEIVER, link.encode(), ours, theirs):
        raise RefusedMessage(Reason.SENDER, "it does not know the key of this run")


def _send(group: Any, content: bytes, to: int, patience: timedelta) -> None:
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    group.send([tensor], to, _TAG).wait(patience)


def _receive(group: Any, length: int, source: int, patience: timedelta) -> bytes:
    tensor = torch.empty(length, dtype=torch.uint8)
    group.recv([tensor], source, _TAG).wait(patience)
    return tensor.numpy().tobytes()
