"""What messages and sums cost on equal ranks with equal links: α, β and γ, with α split as in LogGP.

Culler et al., "LogP: Towards a Realistic Model of Parallel Computation", PPoPP 1993; Alexandrov et al., "LogGP",
SPAA 1995.

    a message of m bytes    keeps its sender's port for  o + β (m + H)  and is there L later
    alone                   α + β (m + H),  α = o + L

o = overhead_s, L = latency_s, β = seconds_per_byte, γ = reduce_seconds_per_byte, H = header_bytes. Messages that
follow one another overlap L but not o. Textbooks' "α a message" is `o = α, L = 0`; the simulator's links are
`o = 0, L = α`, and sums take no time there (γ = 0).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal ranks and links; every rank sends one message at a time, and receives meanwhile.

    Attributes:
        latency_s: between a message's leaving and its arrival, seconds.
        overhead_s: of its sender for every message, whatever its size, seconds.
        seconds_per_byte: one over the bandwidth.
        reduce_seconds_per_byte: for adding one vector to another, by the bytes of one.
        header_bytes: that go with every message.
        shared_receiver: whether messages that come to a rank at the same time share its port, as at a NIC; else
            it takes any number at once, as in the simulator's `ConstantNetwork`.
    """

    latency_s: float = 0.0
    overhead_s: float = 0.0
    seconds_per_byte: float = 0.0
    reduce_seconds_per_byte: float = 0.0
    header_bytes: int = 0
    shared_receiver: bool = True

    def port_s(self, nbytes: float) -> float:
        """Seconds for which a message with so many bytes of payload keeps a port."""
        return self.overhead_s + self.seconds_per_byte * (nbytes + self.header_bytes)

    def message_s(self, nbytes: float) -> float:
        """Seconds from the start of a message to its arrival, on idle ports."""
        return self.latency_s + self.port_s(nbytes)

    def reduce_s(self, nbytes: float) -> float:
        """Seconds for adding so many bytes to others."""
        return self.reduce_seconds_per_byte * nbytes


@dataclass(frozen=True)
class Payload:
    """A vector that is to be added up.

    Attributes:
        elements: how many numbers it has.
        element_bytes: of each.
    """

    elements: int
    element_bytes: int = 4

    @property
    def nbytes(self) -> int:
        """Bytes of the whole: what the papers call M."""
        return self.elements * self.element_bytes

    def first_bytes(self, slices: int, of: int) -> int:
        """Bytes of the first `slices` slices, when it is cut into `of`, the longer ones first (`tensor_split`)."""
        share, longer = divmod(self.elements, of)
        return (slices * share + min(slices, longer)) * self.element_bytes

    def slice_bytes(self, of: int) -> list[int]:
        """Bytes of each of `of` slices."""
        return [self.first_bytes(k + 1, of) - self.first_bytes(k, of) for k in range(of)]
