"""The way into a run, as it is asked for: where it is, who may come in, and what they are told."""

from __future__ import annotations

import socket
from typing import Any

from polyrhythm.launch.joining.address import Address, listener_at
from polyrhythm.launch.joining.door import Door
from polyrhythm.launch.joining.event_loop import DESCRIPTORS
from polyrhythm.launch.joining.places import Places
from polyrhythm.launch.joining.token import door_key, link_key


class Entrance:
    """Listens from the start, so that a port that is taken is known before anything is written.

    Args:
        address: of this host, as others reach it.
        token: that they must know.

    Attributes:
        address: with the port that was found.
        link_key: key of the run's links.
        offer: what visitors are told of the job.
        how: in words, for people who want to come in.

    Raises:
        RequestError: the address cannot be used.
    """

    def __init__(self, address: Address, token: str) -> None:
        self._listener: socket.socket | None = listener_at(address)
        DESCRIPTORS.add(self._listener.fileno())
        self.address = Address(*self._listener.getsockname()[:2])
        self.link_key = link_key(token)
        self.offer: dict[str, Any] = {}
        self.how = ""
        self._door_key = door_key(token)
        self._door: Door | None = None

    def open(self, places: Places | None = None) -> Door:
        """Makes the door; once.

        Args:
            places: of workers, that may be taken; None: there are none yet.
        """
        assert self._listener is not None, "a door is made once"
        self._door = Door(self._listener, self._door_key, self.offer, places or Places())
        self._listener = None  # it is the door's
        return self._door

    def ask_to_stop(self) -> None:
        """Tells all who have come in that the run is asked to stop."""
        if self._door is not None:
            self._door.ask_to_stop()

    def close(self) -> None:
        """Shuts the door, or stops listening if it was never made."""
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._listener is not None:
            DESCRIPTORS.remove(self._listener.fileno())
            self._listener.close()
            self._listener = None
