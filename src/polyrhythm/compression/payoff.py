"""Does compression pay? The time to compress, against the time that it saves on the link.

    compress_s = encodings * encode_s + decodings * decode_s          measured, on a vector of the model's shapes
    saved_s    = (whole_bytes - sent_bytes) / bandwidth               through the busiest port
    it pays where  compress_s < saved_s,  that is below  (whole_bytes - sent_bytes) / compress_s  bytes a second

Latencies are about the same with and without, and left out. Transfers that hide behind computing cost less than they
take, so that what is saved is at most this.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from polyrhythm.compression.compressor import Compressor

if TYPE_CHECKING:
    from polyrhythm.compression.layout import Layout

_MOST_NUMBERS, _TRIES, _LONG_S = 1 << 22, 3, 0.2
_MEGABIT, _GIGABIT = 1e6, 1e9


@dataclass(frozen=True)
class Exchange:
    """Bytes and computation of one exchange on its critical path.

    Attributes:
        whole_bytes: bytes through the busiest port, each way, without compression.
        sent_bytes: bytes through the busiest port, each way, with compression.
        encodings: encodings of whole vectors, one after the other.
        decodings: decodings of whole vectors, one after the other.
    """

    whole_bytes: float
    sent_bytes: float
    encodings: float
    decodings: float


_LEAST_S = 1e-6
"""Lower bound of reported seconds: a ping-pong on one host may take no longer with many bytes than with few."""


@dataclass(frozen=True)
class Payoff:
    """Cost and saving of compression in one exchange.

    Attributes:
        compressor: compressor in words.
        compress_s: seconds of compression and decompression.
        whole_bytes: bytes sent without compression, through the busiest port.
        sent_bytes: bytes sent with compression.
        bandwidth_bytes_per_s: bandwidth in bytes/s of the link.
    """

    compressor: str
    compress_s: float
    whole_bytes: float
    sent_bytes: float
    bandwidth_bytes_per_s: float

    @property
    def saved_s(self) -> float:
        """Seconds that less takes on the link; below 0 where it is more."""
        return (self.whole_bytes - self.sent_bytes) / self.bandwidth_bytes_per_s

    @property
    def gain_s(self) -> float:
        """Seconds that an exchange is shorter; below 0 where it is longer."""
        return self.saved_s - self.compress_s

    @property
    def pays_below_bytes_per_s(self) -> float:
        """The bandwidth below which it pays; 0 where it never does."""
        return max(0.0, self.whole_bytes - self.sent_bytes) / self.compress_s

    @property
    def text(self) -> str:
        """All of it as a line."""
        if self.sent_bytes >= self.whole_bytes:
            return (
                f"{self.compressor}: sends {self.sent_bytes / self.whole_bytes:.2g} times the bytes of whole vectors "
                "here: it pays on no link"
            )
        verdict = "faster" if self.gain_s > 0 else "slower"
        saved = _milliseconds(self.saved_s) if self.saved_s > _LEAST_S else "nothing that can be measured"
        return (
            f"{self.compressor}: {_milliseconds(self.compress_s)} to compress saves {saved} on "
            f"this link: {verdict} by {_milliseconds(abs(self.gain_s))}; it pays below "
            f"{_bits(self.pays_below_bytes_per_s)}"
        )


def measured_payoff(
    compressor: Compressor,
    layout: Layout,
    exchange: Exchange,
    dtype: torch.dtype,
    bandwidth_bytes_per_s: float,
) -> Payoff:
    """Measure the time of compression on this machine, and return its cost and saving.

    Args:
        compressor: compressor with a number of bytes that does not depend on values.
        layout: layout of the model.
        exchange: bytes and computation of the strategy's exchange.
        dtype: dtype of the vector.
        bandwidth_bytes_per_s: bandwidth in bytes/s of the link.
    """
    encode_s, decode_s = coding_seconds(compressor, layout, dtype)
    compress_s = exchange.encodings * encode_s + exchange.decodings * decode_s
    return Payoff(
        str(compressor), compress_s, exchange.whole_bytes, exchange.sent_bytes, bandwidth_bytes_per_s
    )


def coding_seconds(compressor: Compressor, layout: Layout, dtype: torch.dtype) -> tuple[float, float]:
    """Measure how long encoding, with what feedback takes, and decoding a vector take; the quickest of three counts.

    Of a large model its first layers are measured, and the rest counts in proportion.
    """
    from polyrhythm.compression.residual_memory import ResidualMemory  # no other run pays for it

    size, kept = 0, list[tuple[int, int]]()
    for section in layout.sections:
        if size < _MOST_NUMBERS and not section.dense and len(section.ranges) == 1:
            columns = section.numbers // section.rows
            kept.append((min(section.rows, max(1, _MOST_NUMBERS // columns)), columns))
            size += kept[-1][0] * columns
    small = layout.of(kept, compressor) if kept else layout
    vector = torch.randn(small.size, generator=torch.Generator().manual_seed(0)).to(dtype)
    memory, total = ResidualMemory(compressor, small), torch.zeros(small.size, dtype=dtype)
    step = compressor.warm_up
    encodes, decodes = [], []
    scalers = small.scalers(compressor, vector) if compressor.shares_scaler else ()
    for _ in range(_TRIES):
        began = perf_counter()
        payload = memory.encode(vector, step, scalers=scalers)
        memory.commit()
        encoded = perf_counter()
        small.add_to(compressor, total, payload)
        encodes.append(encoded - began)
        decodes.append(perf_counter() - encoded)
        if encodes[-1] > _LONG_S:
            break
    scale = layout.size / small.size
    return min(encodes) * scale, min(decodes) * scale


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{1000 * seconds:,.0f} ms"


def _bits(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / _GIGABIT:.2g} Gb/s" if bits >= _GIGABIT else f"{bits / _MEGABIT:.3g} Mb/s"
