"""Cost of messages and sums on equal ranks with equal links: α, β and γ, with α split as in LogGP.

Culler et al., "LogP: Towards a Realistic Model of Parallel Computation", PPoPP 1993; Alexandrov et al., "LogGP",
SPAA 1995.

    a message of m bytes    occupies its sender's port for  o + β (m + H)  and arrives L later
    alone                   α + β (m + H),  α = o + L

o = overhead_s, L = latency_s, β = seconds_per_byte, γ = reduce_seconds_per_byte, H = header_bytes. Consecutive
messages overlap L but not o. The textbooks' "α per message" is `o = α, L = 0`; the simulator's links are
`o = 0, L = α`, and sums take no time there (γ = 0).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal ranks and links; every rank sends one message at a time, and receives in the meantime.

    Attributes:
        latency_s: latency in seconds from the departure of a message to its arrival.
        overhead_s: overhead in seconds for the sender of every message, whatever its size.
        seconds_per_byte: one over the bandwidth.
        reduce_seconds_per_byte: seconds to add one vector to another, per byte of one of them.
        header_bytes: bytes of every message.
        shared_receiver: whether messages that arrive at a rank at the same time share its port, as at a NIC;
            otherwise it receives any number at once, as in the simulator's `ConstantNetwork`.
    """

    latency_s: float = 0.0
    overhead_s: float = 0.0
    seconds_per_byte: float = 0.0
    reduce_seconds_per_byte: float = 0.0
    header_bytes: int = 0
    shared_receiver: bool = True

    def port_s(self, nbytes: float) -> float:
        """Seconds for which a message with `nbytes` of payload occupies a port."""
        return self.overhead_s + self.seconds_per_byte * (nbytes + self.header_bytes)

    def message_s(self, nbytes: float) -> float:
        """Seconds from the start of a message to its arrival, on idle ports."""
        return self.latency_s + self.port_s(nbytes)

    def reduce_s(self, nbytes: float) -> float:
        """Seconds for adding `nbytes` to others."""
        return self.reduce_seconds_per_byte * nbytes


@dataclass(frozen=True)
class Payload:
    """A vector to be summed over ranks.

    Attributes:
        elements: number of elements.
        element_bytes: bytes of each.
    """

    elements: int
    element_bytes: int = 4

    @property
    def nbytes(self) -> int:
        """Size in bytes: the papers' M."""
        return self.elements * self.element_bytes

    def first_bytes(self, slices: int, of: int) -> int:
        """Bytes of the first `slices` of `of` slices, the longer ones first (as `tensor_split` cuts)."""
        share, longer = divmod(self.elements, of)
        return (slices * share + min(slices, longer)) * self.element_bytes

    def slice_bytes(self, of: int) -> list[int]:
        """Bytes of each of `of` slices."""
        return [self.first_bytes(k + 1, of) - self.first_bytes(k, of) for k in range(of)]
