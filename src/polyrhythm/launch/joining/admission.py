"""How others join a run that torchrun has started: what every rank must know of that."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from ipaddress import ip_address

from polyrhythm.communication.secret import nonce, prove, proves
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous, own_address
from polyrhythm.errors import RequestError
from polyrhythm.launch.joining.address import Address
from polyrhythm.launch.joining.entrance import Entrance
from polyrhythm.launch.joining.token import TOKEN_VARIABLE, link_key
from polyrhythm.launch.patience import Patience

_PROOF, _PURPOSE = "run token", "polyrhythm, the same token"
_LEADER = 0


@dataclass(frozen=True)
class Admission:
    """One rank's part in it.

    Attributes:
        address: of the door.
        token: gives the run token; asked once rank 0 has drawn it, if it does. None: this rank has none.
        entrance: the door's; rank 0's alone.
    """

    address: Address
    token: Callable[[], str | None]
    entrance: Entrance | None = None

    def of(self, rendezvous: Rendezvous) -> Rendezvous:
        """Gives a rank's rendezvous with the key of links, and an address that guests reach; all ranks call it.

        Args:
            rendezvous: of this rank, with the keys of this start in its store.

        Raises:
            RequestError: this rank has another token than rank 0, or none; or guests would not reach it.
        """
        token = self.token()
        if token is None:
            raise RequestError(
                f"rank {rendezvous.rank} has no run token, which all ranks of a run need that others may join: name "
                f"its file with --token-file, or set {TOKEN_VARIABLE}, on every host"
            )
        key = link_key(token)
        _agree(rendezvous, key)
        return replace(rendezvous, key=key, address=self._address_of(rendezvous))

    def _address_of(self, rendezvous: Rendezvous) -> str:
        address = own_address(self.address.host, self.address.port or 1)
        several_hosts = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
        if several_hosts and _is_loopback(address) and not _is_loopback(rendezvous.address):
            raise RequestError(
                f"--listen {self.address} is reached from this host alone, and the run has several: give an address "
                "of worker 0's host that all of them reach"
            )
        return address


def _agree(rendezvous: Rendezvous, key: bytes) -> None:
    """Finds out whether this rank has the token of rank 0, without telling the store which it is."""
    store = rendezvous.store
    if rendezvous.rank == _LEADER:
        drawn = nonce()
        store.set(_PROOF, f"{drawn.hex()} {prove(key, _PURPOSE, drawn).hex()}")
        return
    told = Patience().key(store, _PROOF, _LEADER).split()
    drawn, proof = (bytes.fromhex(each) for each in told)
    if not proves(proof, key, _PURPOSE, drawn):
        raise RequestError(
            f"rank {rendezvous.rank} has another run token than rank 0: give all hosts the same --token-file, or the "
            f"same {TOKEN_VARIABLE}"
        )


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback
