"""The challenge over a real gloo group of two, on two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from polyrhythm.communication.message import RefusedMessage
from polyrhythm.communication.transports.torch_distributed.challenge import answer, challenge
from polyrhythm.communication.transports.torch_distributed.groups import Groups
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous

KEY, LINK = b"k" * 32, "link/1-0/7"
PATIENCE = timedelta(seconds=20)
Outcome = str


def outcome(act: Callable[[], None]) -> Outcome:
    try:
        act()
    except (RefusedMessage, RuntimeError) as error:
        return str(getattr(error, "reason", "broken"))
    return "fine"


def meet(sender: tuple[bytes, str], receiver: tuple[bytes, str]) -> list[Outcome]:
    """Lets two meet over a group of their own; gives how the sender fared, and the receiver."""
    store = dist.HashStore()
    found: list[Outcome] = ["", ""]

    def side(number: int, act: Callable[..., None], key: bytes, link: str) -> None:
        group = Groups(Rendezvous(store, number, 2, "127.0.0.1")).gloo("pair", number, 2, PATIENCE)
        patience = PATIENCE if number else timedelta(seconds=2)  # nobody answers a sender that was refused
        found[number] = outcome(lambda: act(group, key, link, patience))

    sides = [
        threading.Thread(target=side, args=(0, answer, *sender)),
        threading.Thread(target=side, args=(1, challenge, *receiver)),
    ]
    for thread in sides:
        thread.start()
    for thread in sides:
        thread.join()
    return found


def test_both_who_know_the_key_go_on() -> None:
    assert meet((KEY, LINK), (KEY, LINK)) == ["fine", "fine"]


@pytest.mark.parametrize("sender", [(b"x" * 32, LINK), (KEY, "link/1-0/8")])
def test_another_key_or_link_is_refused(sender: tuple[bytes, str]) -> None:
    told, refused = meet(sender, (KEY, LINK))
    assert refused == "sender"
    assert told != "fine"
