"""Opens the reception of a run that torchrun has started, for as long as worker 0's loop goes on."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.events import Event
from polyrhythm.launch.joining.address import Address
from polyrhythm.launch.joining.door import Inside
from polyrhythm.launch.joining.entrance import Entrance
from polyrhythm.launch.joining.guests import Guests
from polyrhythm.launch.torchrun.calls import Calls
from polyrhythm.launch.torchrun.gathering import Gathered, starts_hosts_apart
from polyrhythm.launch.torchrun.reception import Reception
from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.cast import Cast


@dataclass(frozen=True)
class Late:
    """How others come late.

    Attributes:
        entrance: for guests; None: they do not.
        silence_s: for which a rank may be silent.
    """

    entrance: Entrance | None
    silence_s: float


@contextmanager
def receiving(
    outside: Rendezvous,
    start: Gathered,
    cast: Cast,
    emit: Callable[[Event], None],
    late: Late,
) -> Iterator[Callable[[Event], None]]:
    """Lets late comers in; gives what takes the run's events instead of `emit`, from any thread.

    Args:
        outside: of this rank, as torchrun has it: where lost ranks call.
        start: of the run, as this rank knows it.
        cast: who does what.
        emit: takes events, one at a time.
        late: how others come late.
    """
    if start.rendezvous.rank != LEADER:
        yield emit
        return
    reception = Reception(start.rendezvous, cast, range(outside.size), emit)
    with ExitStack() as stack:
        if starts_hosts_apart(outside):
            stack.enter_context(Calls(outside, start, reception, late.silence_s))
        if late.entrance is not None:
            guests = reception.open(late.entrance)
            guests.door.open(Inside(_store_address(), cast, start.prefix))
            stack.enter_context(_listening(reception, guests))
        yield reception.on_event


@contextmanager
def _listening(reception: Reception, guests: Guests) -> Iterator[None]:
    """Hears the door on a thread; at the end gives guests a moment to leave."""
    bell, ringing = socket.socketpair()

    def listen() -> None:
        while bell.fileno() not in select.select([guests.door.fileno(), bell.fileno()], [], [])[0]:
            reception.look()

    thread = threading.Thread(target=listen, name="reception", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        _end(thread, ringing)
        raise
    else:
        _end(thread, ringing)
        guests.see_off(wait)
    finally:
        bell.close()
        ringing.close()


def _end(thread: threading.Thread, ringing: socket.socket) -> None:
    ringing.send(b"!")
    thread.join()


def _store_address() -> Address:
    return Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
