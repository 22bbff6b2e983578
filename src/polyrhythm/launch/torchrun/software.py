"""Software of a rank: all ranks need the same, since they exchange messages and compute the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version

import torch

from polyrhythm.communication.message import MESSAGES
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.errors import RequestError
from polyrhythm.launch.patience import Patience
from polyrhythm.launch.torchrun.report_rank import leader_speaks


def software() -> str:
    """Return the versions of Polyrhythm, of torch without its kind of device, and of the format of messages."""
    return f"{version('polyrhythm')}, torch {torch.__version__.partition('+')[0]}, messages {MESSAGES}"


def check_software(rendezvous: Rendezvous, ranks: Sequence[int], patience: Patience | None = None) -> None:
    """Refuse ranks of different software; every rank that was started must call it.

    Args:
        rendezvous: rendezvous of this rank.
        ranks: ranks that were started.
        patience: time limit; None: the default.

    Raises:
        RequestError: the versions differ; raised on all ranks alike.
    """
    store = rendezvous.store
    store.set(_key(rendezvous.rank), software())
    texts = (patience or Patience()).keys(store, _key, ranks)
    kinds = {text: [rank for rank, its in zip(ranks, texts, strict=True) if its == text] for text in texts}
    if len(kinds) > 1:
        found = "; ".join(
            f"Polyrhythm {text} on ranks {','.join(map(str, its))}" for text, its in sorted(kinds.items())
        )
        # All find the same, except a replacement, which the others do not receive from.
        with nullcontext() if rendezvous.generation else leader_speaks():
            raise RequestError(f"ranks run different software: {found}: install the same on all hosts")


def _key(rank: int) -> str:
    return f"software/{rank}"
