"""How fast compressors run: bytes of vector a second against a copy of the same vector, measured in turn.

python benchmarks/compression/speed.py
python benchmarks/compression/speed.py --numbers 1000000 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from polyrhythm.compression.compressor import COMPRESSORS, Compressor, Place
from polyrhythm.compression.packing import pack, unpack
from polyrhythm.compression.streams import Stream
from polyrhythm.launch.process import keep_freed_memory
from polyrhythm.specs import build

SPECS = [
    "float16",
    "bfloat16",
    "fp8",
    "int8",
    "one_bit",
    "ef_sign_sgd",
    "sign_sgd",
    "qsgd",
    "terngrad",
    "dorefa",
    "top_k(density=0.01)",
    "dgc(density=0.001)",
    "random_k(density=0.01)",
    "threshold(size=2.5)",
    "adacomp",
    "power_sgd(rank=2)",
]


def seconds(work: Callable[[], object]) -> float:
    """Returns the time of one call."""
    began = time.thread_time()  # of the processor, so that others on the machine count for little
    work()
    return time.thread_time() - began


def ratio(work: Callable[[], object], copy: Callable[[], object], turns: int) -> float:
    """Returns the median of a call's time over that of the copy before it, of calls in turn."""
    work()
    pairs = []
    for _ in range(turns):
        of_copy = seconds(copy)
        pairs.append(seconds(work) / of_copy)
    return statistics.median(pairs)


def drawn(numbers: int, entries: int, seed: int) -> Stream:
    """Returns a stream of so many entries at drawn places; they are compared with a copy of their own bytes."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(numbers, generator=generator)[:entries].sort().values
    return Stream(numbers, torch.randn(entries, generator=generator), indices)


def main() -> None:
    """Prints a row for each compressor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numbers", type=int, default=4_000_000)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every worker does
    vector = torch.randn(given.numbers, generator=torch.Generator().manual_seed(0))
    other, total = torch.empty_like(vector), torch.zeros_like(vector)
    rows = 1000
    place = Place(rows, given.numbers // rows)
    codes = (vector.abs() * 4).clamp(max=15).to(torch.uint8)

    def copy() -> None:
        other.copy_(vector)

    table = []
    for name, bits in (("packing of 1 bit", 1), ("packing of 4 bits", 4)):
        packed = pack(codes % 2**bits, bits)
        chosen = codes % 2**bits
        there = ratio(lambda chosen=chosen, bits=bits: pack(chosen, bits), copy, given.turns)
        back = ratio(lambda packed=packed, bits=bits: unpack(packed, given.numbers, bits), copy, given.turns)
        table.append((name, there, back, packed.numel() / (4 * given.numbers)))
    one, another = (drawn(given.numbers, given.numbers // 20, seed) for seed in (1, 2))
    payload = one.encode()
    bytes_of_both = torch.cat([payload, another.encode()])
    both = torch.empty_like(bytes_of_both)
    there = ratio(lambda: one.merged(another), lambda: both.copy_(bytes_of_both), given.turns)
    back = ratio(lambda: one.decoded(payload), lambda: both.copy_(bytes_of_both), given.turns)
    table.append(("merging, and reading, streams of 5 %", there, back, payload.numel() / (4 * given.numbers)))
    for spec in SPECS:
        made = build("compressor", spec, COMPRESSORS)
        assert isinstance(made, Compressor)
        payload = made.encode(vector, place)
        there = ratio(lambda made=made: made.encode(vector, place), copy, given.turns)
        back = ratio(lambda made=made, payload=payload: made.add_to(total, payload, place), copy, given.turns)
        table.append((spec, there, back, payload.numel() / (4 * given.numbers)))
    if given.json:
        keys = ("what", "encode_over_copy", "add_over_copy", "bytes_over_whole")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in table]))
        return
    print("| | encode / copy | decode and add / copy | bytes / whole |\n|---|---|---|---|")
    for name, there, back, share in table:
        print(f"| `{name}` | {there:.1f} | {back:.1f} | {share:.4f} |")


if __name__ == "__main__":
    main()
