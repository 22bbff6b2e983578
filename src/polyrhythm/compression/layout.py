"""Division of a flat vector into sections that are compressed one by one, and the layout of their joint payload.

    header      codec u32 │ version u8 │ dtype u8 │ sections u16 │ step u64          16 bytes, little endian
    lengths     u32 a section: bytes of what it was encoded to
    sections    one after the other, each followed by zeros up to a multiple of 4 bytes

Vectors (biases, batch norm) and small tensors lie together in the last section, and travel as they are. Which numbers
belong to which section is known to both sides beforehand (`Layout`), so it does not travel.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from polyrhythm.communication.message import MalformedMessage, bare_payload
from polyrhythm.compression.compressor import (
    SCALAR_BYTES,
    Compressor,
    Memory,
    Place,
    bytes_of,
    values_of,
)
from polyrhythm.compression.streams import CountedStream, Stream
from polyrhythm.errors import RequestError
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.linear_factors import Pair

_HEADER = struct.Struct("<IBBHQ")
_VERSION = 1
_LENGTH_BYTES, _ALIGNED_BYTES = 4, 4
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Section:
    """Ranges of the vector that are compressed together.

    Attributes:
        ranges: ranges of the vector, `(start, stop)` each, in their order.
        rows: rows of the matrix that it is; 1 where it is none.
        dense: whether it travels as it is.
    """

    ranges: tuple[tuple[int, int], ...]
    rows: int = 1
    dense: bool = False

    @property
    def numbers(self) -> int:
        """In all ranges."""
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class Layout:
    """The sections of a vector.

    Attributes:
        size: numbers of the vector.
        sections: sections; every number is in one.
        first: the number of its first section, where it is a stretch of a larger layout.
    """

    size: int
    sections: tuple[Section, ...]
    first: int = field(default=0, kw_only=True)

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], compressor: Compressor) -> Layout:
        """Return the layout of tensors that lie one after the other.

        Args:
            shapes: shapes of the tensors.
            compressor: compressor; decides which tensors stay uncompressed, and whether layers are compressed
                by themselves.

        Raises:
            RequestError: nothing would be compressed.
        """
        compressed: list[Section] = []
        dense: list[tuple[int, int]] = []
        start = 0
        for shape in shapes:
            stop = start + _product(shape)
            rows = shape[0] if len(shape) > 1 else 1
            small = len(shape) < 2 or stop - start < compressor.dense_below
            if small or not compressor.fits(rows, (stop - start) // max(1, rows)):
                dense.append((start, stop))
            else:
                compressed.append(Section(((start, stop),), rows))
            start = stop
        if not compressed:
            raise RequestError(
                f"{compressor} compresses no tensor of this model: all travel as they are; choose another "
                "compressor, or leave compress out"
            )
        if compressor.per == "whole" and compressed:
            compressed = [Section(tuple(section.ranges[0] for section in compressed))]
        if dense:
            compressed.append(Section(tuple(dense), dense=True))
        return cls(start, tuple(compressed))

    @classmethod
    def of_model(cls, flat: FlatParameters, compressor: Compressor) -> Layout:
        """Return the layout of a model's vector, or of its proxy in a dry run.

        Raises:
            RequestError: nothing in it would be compressed; or the payload size depends on values, which a
                dry run does not have.
        """
        if flat.shapes is None:
            return cls.of([tuple(view.parameter.shape) for view in flat.views], compressor)
        if compressor.by_value:
            raise RequestError(
                f"messages of {compressor} depend on gradients or batches, and a dry run has none: leave "
                "--gradients none out, or take a compressor with known sizes, such as top_k"
            )
        true = cls.of(flat.shapes, compressor)
        if flat.stands_for == 1:
            return true
        return CountedLayout(flat.size, (Section(((0, flat.size),)),), true)

    def scalers(self, compressor: Compressor, vector: Tensor) -> list[float]:
        """Return a sender's proposals for the numbers that all agree on, one a section; 0 of those that are dense."""
        return [
            0.0 if section.dense else compressor.scaler(_gathered(vector, section))
            for section in self.sections
        ]

    def sums(self, compressor: Compressor, dtype: torch.dtype, step: int) -> tuple[int, ...]:
        """Return how many numbers each all-reduce of a step adds up, where not all numbers do.

        Args:
            compressor: `linear` or `factored`.
            dtype: dtype of the vector.
            step: step of the sender.
        """
        if compressor.factored:
            inside = [section for section in self.sections if not section.dense]
            places = [_place(section, 0, dtype, step, 0) for section in inside]
            lefts = sum(compressor.left_numbers(place) for place in places)
            rights = sum(compressor.nbytes(place) or 0 for place in places) // SCALAR_BYTES - lefts
            dense = self.size - sum(section.numbers for section in inside)
            return lefts + dense, rights
        whole = self.nbytes(compressor, dtype, step)
        assert whole is not None, "the number of bytes determines the number of elements"
        return ((whole - _HEADER.size - _LENGTH_BYTES * len(self.sections)) // dtype.itemsize,)

    def part(self, compressor: Compressor, start: int, stop: int) -> Layout:
        """Return the layout of a slice of the vector; a matrix that it cuts is none any more."""
        sections = []
        for section in self.sections:
            inside = tuple(
                (max(first, start) - start, min(last, stop) - start)
                for first, last in section.ranges
                if first < stop and last > start
            )
            if inside:
                whole = all(start <= first and last <= stop for first, last in section.ranges)
                rows = section.rows if whole else 1
                columns = sum(last - first for first, last in inside) // rows
                dense = section.dense or not compressor.fits(rows, columns)
                sections.append(Section(inside, rows, dense))
        return Layout(stop - start, tuple(sections))

    def stretch(self, compressor: Compressor, start: int, stop: int) -> Layout:
        """Return the layout of a slice that cuts no section but the dense one; sections keep their numbers.

        So what they are encoded to is the same as in the whole, where each layer is compressed by itself.
        """
        before = [section.ranges[-1][1] <= start for section in self.sections]
        number = before.index(False) if False in before else 0
        return replace(self.part(compressor, start, stop), first=self.first + number)

    @property
    def compresses(self) -> bool:
        """Whether anything in it is compressed."""
        return any(not section.dense for section in self.sections)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value for `from_json`."""
        return {
            "size": self.size,
            "sections": [[section.ranges, section.rows, section.dense] for section in self.sections],
        }

    @classmethod
    def from_json(cls, record: Any) -> Layout:
        """Rebuild a layout; raise `MalformedMessage` if it is none."""
        try:
            size = int(record["size"])
            sections = tuple(
                Section(tuple((int(start), int(stop)) for start, stop in ranges), int(rows), bool(dense))
                for ranges, rows, dense in record["sections"]
            )
            true = record.get("true")
            spans = sorted(span for section in sections for span in section.ranges)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise MalformedMessage("a layout of sections is none") from None
        end = 0
        for start, stop in spans:
            if start != end or stop < start:
                raise MalformedMessage("a layout of sections has gaps, or numbers twice")
            end = stop
        if end != size or any(section.rows < 1 or section.numbers % section.rows for section in sections):
            raise MalformedMessage("a layout of sections does not fit its vector")
        return Layout(size, sections) if true is None else CountedLayout(size, sections, cls.from_json(true))

    @cached_property
    def dense(self) -> Tensor | None:
        """`(size,)` bool, the numbers that travel as they are; None: none do."""
        places = self.dense_ranges
        if not places:
            return None
        mask = torch.zeros(self.size, dtype=torch.bool)
        for start, stop in places:
            mask[start:stop] = True
        return mask

    def nbytes(self, compressor: Compressor, dtype: torch.dtype, step: int = 0) -> int | None:
        """Return the bytes of a payload, as the formulas have it; None where they depend on values."""
        total = _HEADER.size + _LENGTH_BYTES * len(self.sections)
        all_dense = compressor.is_dense_at(step)
        for number, section in enumerate(self.sections, self.first):
            place = _place(section, number, dtype, step, 0)
            own = place.numbers * dtype.itemsize if section.dense or all_dense else compressor.nbytes(place)
            if own is None:
                return None
            total += _aligned(own)
        return total

    def encode(
        self,
        compressor: Compressor,
        vector: Tensor,
        *,
        step: int = 0,
        rank: int = 0,
        newest: Tensor | None = None,
        scalers: Sequence[float] = (),
        factors: Memory | None = None,
        pairs: Mapping[int, Pair] | None = None,
    ) -> Tensor:
        """Return a vector as one payload, `(b,)` uint8.

        Args:
            compressor: compressor of the sections that are not dense.
            vector: `(size,)`, finite.
            step: step of the sender.
            rank: rank of the sender.
            newest: `(size,)`, the part of the vector that is new; None: all.
            scalers: scalers of the sections, that all ranks have agreed on.
            factors: starting points of the sections' encodings, by `factor_name`; replaced by those of the
                next encodings.
            pairs: sufficient factors of sections, by where these begin.
        """
        vector = vector.detach().cpu()
        all_dense, parts = compressor.is_dense_at(step), []
        for number, section in enumerate(self.sections, self.first):
            own = _gathered(vector, section)
            if section.dense or all_dense:
                parts.append(bytes_of(own))
                continue
            scaler = scalers[number - self.first] if scalers else None
            factor = None if factors is None else factors.get(factor_name(number))
            place = _place(section, number, vector.dtype, step, rank, scaler, factor)
            if pairs is not None:
                place = replace(place, pair=pairs.get(section.ranges[0][0]))
            part = None if newest is None else _gathered(newest.detach().cpu(), section)
            parts.append(compressor.encode(own, place, part))
            if factors is not None and (left := compressor.factor_of(parts[-1], place)) is not None:
                factors[factor_name(number)] = left
        dtype = _DTYPES.index(vector.dtype)
        header = _HEADER.pack(codec_of(compressor), _VERSION, dtype, len(parts), step)
        lengths = struct.pack(f"<{len(parts)}I", *(part.numel() for part in parts))
        pieces = [torch.frombuffer(bytearray(header + lengths), dtype=torch.uint8)]
        for part in parts:
            pieces.append(part)
            if part.numel() % _ALIGNED_BYTES:
                pieces.append(part.new_zeros(-part.numel() % _ALIGNED_BYTES))
        return torch.cat(pieces)

    def add_to(self, compressor: Compressor, total: Tensor, payload: Tensor, rank: int = 0) -> None:
        """Decode a payload and add the result to a vector, `(size,)`, in place.

        Args:
            compressor: compressor of the sender.
            total: vector that is added to, on the CPU.
            payload: result of `encode`.
            rank: rank of the sender.

        Raises:
            MalformedMessage: it is no payload of this layout and compressor.
        """
        step, parts = self._taken_apart(compressor, payload, total.dtype)
        all_dense = compressor.is_dense_at(step)
        for number, (section, part) in enumerate(zip(self.sections, parts, strict=True), self.first):
            place = _place(section, number, total.dtype, step, rank)
            dense = section.dense or all_dense
            if dense and part.numel() != place.numbers * total.element_size():
                raise MalformedMessage(
                    f"{part.numel()} bytes arrived for {place.numbers} numbers as they are"
                )
            if len(section.ranges) == 1:
                [(start, stop)] = section.ranges
                own = total[start:stop]
                if dense:
                    own.add_(values_of(part, total.dtype))
                else:
                    compressor.add_to(own, part, place)
                continue
            values = values_of(part, total.dtype) if dense else compressor.decode(part, place)
            for (start, stop), piece in zip(section.ranges, _split(values, section), strict=True):
                total[start:stop].add_(piece)

    def stream(self, compressor: Compressor, payload: Tensor, dtype: torch.dtype) -> Stream:
        """Return the numbers of a payload that do not travel as they are, with their indices in the vector.

        Args:
            compressor: compressor that has a `stream_route`.
            payload: result of `encode`.
            dtype: dtype of the vector.
        """
        step, parts = self._taken_apart(compressor, payload, dtype)
        indices, values = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=dtype)]
        for number, (section, part) in enumerate(zip(self.sections, parts, strict=True)):
            if section.dense:
                continue
            inside, found = compressor.entries(part, _place(section, number, dtype, step, 0))
            starts = torch.tensor([start for start, _ in section.ranges])
            lengths = torch.tensor([stop - start for start, stop in section.ranges])
            before = lengths.cumsum(0) - lengths
            which = torch.searchsorted(before, inside, right=True) - 1
            indices.append(inside + (starts - before)[which])
            values.append(found)
        return Stream(self.size, torch.cat(values), torch.cat(indices))

    @property
    def dense_ranges(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the uncompressed numbers, `(start, stop)` each."""
        return tuple(span for section in self.sections if section.dense for span in section.ranges)

    def decode(self, compressor: Compressor, payload: Tensor, dtype: torch.dtype, rank: int = 0) -> Tensor:
        """Return the vector, `(size,)`, that a payload stands for; raise as `add_to`."""
        total = torch.zeros(self.size, dtype=dtype)
        self.add_to(compressor, total, payload, rank)
        return total

    def place(self, number: int, dtype: torch.dtype, memory: Memory) -> Place:
        """Return the place of a section, with what its sender knows of it."""
        return _place(self.sections[number], number, dtype, 0, 0, None, memory.get(factor_name(number)))

    def body(self, payload: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers of a payload that holds nothing else, in memory of their own."""
        return values_of(payload[_HEADER.size + _LENGTH_BYTES * len(self.sections) :], dtype)

    def with_body(self, payload: Tensor, body: Tensor) -> Tensor:
        """Return a payload with other numbers."""
        return torch.cat([payload[: _HEADER.size + _LENGTH_BYTES * len(self.sections)], bytes_of(body)])

    def _taken_apart(
        self, compressor: Compressor, payload: Tensor, dtype: torch.dtype
    ) -> tuple[int, list[Tensor]]:
        first = _HEADER.size + _LENGTH_BYTES * len(self.sections)
        if payload.dtype is not torch.uint8 or payload.numel() < first:
            raise MalformedMessage("a compressed vector is too short to be one")
        raw = payload[:first].numpy().tobytes()
        codec, version, number, sections, step = _HEADER.unpack_from(raw)
        wanted = (codec_of(compressor), _VERSION, _DTYPES.index(dtype), len(self.sections))
        if (codec, version, number, sections) != wanted:
            raise MalformedMessage(
                f"a vector arrived that {compressor} has not compressed, or of another layout"
            )
        lengths = struct.unpack_from(f"<{sections}I", raw, _HEADER.size)
        if first + sum(map(_aligned, lengths)) != payload.numel():
            raise MalformedMessage("a compressed vector has the wrong length")
        parts, start = [], first
        for length in lengths:
            parts.append(payload[start : start + length])
            start += _aligned(length)
        return step, parts


@dataclass(frozen=True)
class CountedLayout(Layout):
    """The layout of a proxy vector, as in a dry run.

    A payload has the size of the true one; its bytes are never read.

    Attributes:
        true: the layout of all numbers.
    """

    true: Layout

    def part(self, compressor: Compressor, start: int, stop: int) -> CountedLayout:
        # As the whole vector would be cut: the stand-in divides evenly.
        first, last = (end * self.true.size // self.size for end in (start, stop))
        true = self.true.part(compressor, first, last)
        return CountedLayout(stop - start, (Section(((0, stop - start),)),), true)

    def stretch(self, compressor: Compressor, start: int, stop: int) -> CountedLayout:
        ends = {
            0,
            self.true.size,
            *(end for section in self.true.sections for span in section.ranges for end in span),
        }
        # The buckets of the stand-in end nearly where layers do.
        first, last = (
            min(ends, key=lambda end: abs(end - place))
            for place in (end * self.true.size / self.size for end in (start, stop))
        )
        true = self.true.stretch(compressor, first, last)
        return CountedLayout(stop - start, (Section(((0, stop - start),)),), true)

    @property
    def compresses(self) -> bool:
        return self.true.compresses

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"true": self.true.to_json()}

    def nbytes(self, compressor: Compressor, dtype: torch.dtype, step: int = 0) -> int | None:
        return self.true.nbytes(compressor, dtype, step)

    def scalers(self, compressor: Compressor, vector: Tensor) -> list[float]:
        return [0.0] * len(self.true.sections)

    def sums(self, compressor: Compressor, dtype: torch.dtype, step: int) -> tuple[int, ...]:
        return self.true.sums(compressor, dtype, step)

    def encode(self, compressor: Compressor, vector: Tensor, *, step: int = 0, **more: Any) -> Tensor:
        """Return a payload without contents; see `Layout.encode`."""
        whole = self.nbytes(compressor, vector.dtype, step)
        assert whole is not None, "a dry run supports only compressors with known sizes"
        return bare_payload(whole)

    def add_to(self, compressor: Compressor, total: Tensor, payload: Tensor, rank: int = 0) -> None:
        """Add nothing."""

    def stream(self, compressor: Compressor, payload: Tensor, dtype: torch.dtype) -> Stream:
        """Return a stream that counts its entries."""
        dense = sum(stop - start for start, stop in self.true.dense_ranges)
        entries = (payload.numel() - dense * dtype.itemsize) // (SCALAR_BYTES + dtype.itemsize)
        return CountedStream(self.size, torch.zeros(self.size, dtype=dtype), None, self.true.size, entries)


def factor_name(section: int) -> str:
    """Return the name, in a memory, of what a section's next encoding starts from."""
    return f"factor.{section}"


def codec_of(compressor: Compressor) -> int:
    """Return the number that a payload's header has for a compressor's rule and keys."""
    return crc32(str(compressor).encode())


def _place(
    section: Section,
    number: int,
    dtype: torch.dtype,
    step: int,
    rank: int,
    scaler: float | None = None,
    factor: Tensor | None = None,
) -> Place:
    rows = section.rows
    return Place(rows, section.numbers // rows, dtype, number, step, rank, scaler, factor)


def _gathered(vector: Tensor, section: Section) -> Tensor:
    if len(section.ranges) == 1:
        [(start, stop)] = section.ranges
        return vector[start:stop]
    return torch.cat([vector[start:stop] for start, stop in section.ranges])


def _split(values: Tensor, section: Section) -> tuple[Tensor, ...]:
    return torch.split(values, [stop - start for start, stop in section.ranges])


def _aligned(length: int) -> int:
    return length + -length % _ALIGNED_BYTES


def _product(shape: Sequence[int]) -> int:
    total = 1
    for side in shape:
        total *= side
    return total
