"""Compressors of vectors on a GPU: nothing is made on another device than the vector's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyrhythm.compression.compressor import COMPRESSORS, Place
from polyrhythm.specs import build

SPECS = [
    "top_k",
    "top_k(density=1.0)",
    "qsgd",
    "qsgd(norm=two)",
    "one_bit",
    "power_sgd",
    "power_sgd(rank=4)",
    "terngrad",
]


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_made_on_the_default_device(spec: str) -> None:
    """Whatever is made without a device lies on `meta` here, as it would on the CPU beside a vector on a GPU."""
    compressor = build("compressor", spec, COMPRESSORS)
    place, vector = Place(64, 80), torch.randn(64 * 80, generator=torch.Generator().manual_seed(1))
    payload = compressor.encode(vector, place)
    vector_again = compressor.decode(payload, place)
    with torch.device("meta"):
        elsewhere = compressor.encode(vector, place)
        total = torch.zeros(vector.numel(), device="cpu")
        compressor.add_to(total, elsewhere, place)
        assert torch.equal(elsewhere, payload)
        assert torch.equal(compressor.decode(elsewhere, place), vector_again)
        assert torch.equal(total, vector_again)


@pytest.mark.parametrize("spec", ["one_bit", "power_sgd"])
def test_no_number_is_looked_at(spec: str) -> None:
    """A tensor without data has the shape and the device of a payload, so a GPU need not be waited for."""
    compressor = build("compressor", spec, COMPRESSORS)
    place, vector = Place(64, 80), torch.empty(64 * 80, device="meta")
    factor = compressor.factor_of(
        torch.empty(compressor.nbytes(place), dtype=torch.uint8, device="meta"), place
    )
    payload = compressor.encode(vector, replace(place, factor=factor))
    assert payload.is_meta
    assert payload.shape == (compressor.nbytes(place),)
    assert compressor.decode(payload, place).is_meta
