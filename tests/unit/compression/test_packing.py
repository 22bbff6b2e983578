"""Codes of a few bits, against whole numbers of any length put together in plain Python."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.compression.compressors.qsgd import decode_entries, delta_bits, encode_entries
from polyrhythm.compression.packing import pack, packed_bytes, unpack

AWKWARD = [0, 1, 7, 8, 9, 63, 64, 65, 1000]


def codes(numbers, bits):
    generator = torch.Generator().manual_seed(numbers)
    return torch.randint(0, 2**bits, (numbers,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("numbers", AWKWARD)
def test_bits_lie_without_gaps_lowest_first(numbers, bits):
    chosen = codes(numbers, bits)
    packed = pack(chosen, bits)
    whole = sum(code << (bits * place) for place, code in enumerate(chosen.tolist()))
    assert bytes(packed.tolist()) == whole.to_bytes(packed_bytes(numbers, bits), "little")
    assert torch.equal(unpack(packed, numbers, bits), chosen)


def test_a_slice_that_begins_anywhere_is_packed():
    chosen = codes(100, 3)
    assert torch.equal(pack(chosen[3:91], 3), pack(chosen[3:91].clone(), 3))


def test_a_payload_of_another_length_is_refused():
    with pytest.raises(MalformedMessage, match="2 bytes arrived for 9 codes of 2 bits, which take 3"):
        unpack(torch.zeros(2, dtype=torch.uint8), 9, 2)


def elias_delta(number):
    """Gives the code as text, by the definition."""
    length = number.bit_length()
    of_length = f"{length:b}"
    return "0" * (len(of_length) - 1) + of_length + f"{number:b}"[1:]


def test_deltas_have_the_lengths_of_their_definition():
    numbers = [1, 2, 3, 4, 7, 8, 15, 16, 17, 255, 256, 12345, 2**20, 2**31 - 1]
    assert delta_bits(torch.tensor(numbers)).tolist() == [len(elias_delta(number)) for number in numbers]


@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("numbers", AWKWARD)
def test_streams_are_the_codes_of_the_definition_and_come_back(numbers, density):
    generator = torch.Generator().manual_seed(numbers)
    levels = torch.randint(1, 128, (numbers,), dtype=torch.uint8, generator=generator)
    levels[torch.rand(numbers, generator=generator) >= density] = 0
    negative = torch.rand(numbers, generator=generator) < 0.5
    payload = encode_entries(levels, negative)
    text, last = "", -1
    for place, level in enumerate(levels.tolist()):
        if level:
            text += elias_delta(place - last) + str(int(negative[place])) + elias_delta(level)
            last = place
    entries, bits = payload[:8].clone().view(torch.int32).tolist()
    assert (entries, bits) == (int((levels > 0).sum()), len(text))
    assert "".join(map(str, unpack(payload[8:], bits, 1).tolist())) == text
    found, signs = decode_entries(payload, numbers)
    assert torch.equal(found, levels)
    assert torch.equal(signs, negative & (levels > 0))


def test_a_stream_that_leads_beyond_its_vector_is_refused():
    levels = torch.zeros(50, dtype=torch.uint8)
    levels[40] = 3
    payload = encode_entries(levels, torch.zeros(50, dtype=torch.bool))
    with pytest.raises(MalformedMessage, match="beyond its vector"):
        decode_entries(payload, 30)
    noise = torch.randint(0, 256, (40,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for start in range(20):
        with pytest.raises(MalformedMessage):
            decode_entries(noise[start:], 50)
