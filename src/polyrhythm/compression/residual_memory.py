"""Residual memory: what one sender has kept back, and takes into account with its next vector.

    step t     g ─▶ before ─▶ p ─▶ encode ─▶ c ─▶ sent            nothing is forgotten yet
               all have it:  commit       e = p - decode(c)
               it broke:     the next `encode` starts from the same e as if nothing had been

With another learning rate a residual in units of gradients counts for what it was worth: it is multiplied by the old
rate over the new one (Zheng, Huang, Kwok, "Communication-efficient distributed blockwise momentum SGD with error
feedback", NeurIPS 2019, arXiv 1905.10936). At a rate of 0 nothing is sent that counts, and it stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyrhythm.compression.compressor import RESIDUAL, Compressor, Memory
from polyrhythm.compression.layout import Layout
from polyrhythm.errors import RunError
from polyrhythm.training.linear_factors import Pair


class ResidualMemory:
    """One direction of compressed vectors.

    Args:
        compressor: compressor of the vectors.
        layout: layout of the vectors.
        rank: rank of the sender; draws differ by rank.

    Attributes:
        decoded: `(size,)`, what receivers see of the vector that was encoded last.
    """

    def __init__(self, compressor: Compressor, layout: Layout, rank: int = 0) -> None:
        self.compressor = compressor
        self.layout = layout
        self.decoded = torch.empty(0)
        self._rank = rank
        self._memory: Memory = {}
        self._rate = 0.0
        self._pending: tuple[Memory, float] | None = None

    def encode(
        self,
        vector: Tensor,
        step: int = 0,
        rate: float = 0.0,
        scalers: Sequence[float] = (),
        pairs: Mapping[int, Pair] | None = None,
    ) -> Tensor:
        """Return a vector, with what was kept back of earlier ones, as a payload; `commit` when it has arrived.

        Args:
            vector: `(size,)`, finite, on the processor; not changed.
            step: step of the sender.
            rate: the learning rate that it counts with; 0: whatever it was.
            scalers: scalers of the sections, that all ranks have agreed on.
            pairs: sufficient factors of sections, by where these begin.
        """
        compressor = self.compressor
        whole, memory = self.open(vector, rate)
        payload = self.layout.encode(
            compressor,
            whole,
            step=step,
            rank=self._rank,
            newest=compressor.newest(vector),
            scalers=scalers,
            factors=memory,
            pairs=pairs,
        )
        self.close(
            whole, self.layout.decode(compressor, payload, whole.dtype, self._rank), memory, step, rate
        )
        return payload

    def open(self, vector: Tensor, rate: float = 0.0) -> tuple[Tensor, Memory]:
        """Return the vector to send, with errors added, and the memory to give to `close`."""
        memory = dict(self._memory)
        if RESIDUAL in memory and rate > 0 and self._rate > 0 and rate != self._rate:
            memory[RESIDUAL] = memory[RESIDUAL] * (self._rate / rate)
        return self.compressor.before(vector, memory), memory

    def close(self, whole: Tensor, decoded: Tensor, memory: Memory, step: int = 0, rate: float = 0.0) -> None:
        """Record the decoded form of the vector that `open` returned; call `commit` when it has arrived."""
        self.decoded = decoded
        dense = None if self.compressor.is_dense_at(step) else self.layout.dense
        self.compressor.after(whole, decoded, memory, dense)
        self._pending = memory, rate or self._rate

    def commit(self) -> None:
        """Take note that the vector encoded last has arrived."""
        if self._pending is not None:
            self._memory, self._rate = self._pending
            self._pending = None

    def forget(self) -> None:
        """The vector encoded last has not arrived, and will be encoded again."""
        self._pending = None

    def rescale(self, factor: float) -> None:
        """Multiply what is kept back, where a mean is over another number of senders."""
        if RESIDUAL in self._memory:
            self._memory = self._memory | {RESIDUAL: self._memory[RESIDUAL] * factor}

    @property
    def residual(self) -> Tensor | None:
        """`(size,)`, what is kept back of the vectors that have arrived; None: nothing was sent yet."""
        return self._memory.get(RESIDUAL)

    def state(self) -> Memory:
        """Return all that a resumed sender needs."""
        rate = {"rate": torch.tensor(self._rate, dtype=torch.float64)} if self._memory else {}
        return self._memory | rate

    def load_state(self, tensors: Memory) -> None:
        """Restore what `state` returned."""
        memory = {name: value.cpu().clone() for name, value in tensors.items()}
        self._rate = float(memory.pop("rate", torch.zeros(())))
        for name, value in memory.items():
            if value.numel() != self.layout.size and not name.startswith("factor."):
                raise RunError(
                    f"a checkpoint's {name} of {value.numel()} numbers does not fit {self.layout.size} parameters"
                )
        self._memory, self._pending = memory, None
