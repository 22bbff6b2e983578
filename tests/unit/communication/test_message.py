from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.communication.message import (
    HEADER_BYTES,
    MAXIMUM_ELEMENTS,
    Kind,
    MalformedMessage,
    Message,
    decode_header,
    encode_header,
    pack_json,
    pack_tensors,
    unpack_json,
    unpack_tensors,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int64,
    torch.int32,
]
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT32 = st.integers(0, 2**32 - 1)
NUMBERS = st.floats(allow_nan=False)
TEXTS = st.text('a "\\/\n\0\x7fé\u2028\ufeff\uffff𝄞')
TENSORS = st.none() | st.builds(
    lambda elements, dtype: torch.zeros(elements, dtype=dtype), st.integers(0, 100), st.sampled_from(DTYPES)
)
MESSAGES = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    tensor=TENSORS,
    version=INT64,
    step=INT64,
    weight=NUMBERS,
    learning_rate=NUMBERS,
    stop=st.booleans(),
    tag=UINT32,
)
FIELDS = ("kind", "version", "step", "weight", "learning_rate", "stop", "tag")


@given(message=MESSAGES, context=UINT32)
@settings(deadline=None, database=None)
def test_a_header_holds_every_field(message: Message, context: int) -> None:
    header = encode_header(message, context)
    assert len(header) == HEADER_BYTES
    found_context, found = decode_header(header)
    assert found_context == context
    for name in FIELDS:
        assert getattr(found, name) == getattr(message, name)
    if message.tensor is None:
        assert found.tensor is None
    else:
        assert found.tensor is not None
        assert (found.tensor.shape, found.tensor.dtype) == (message.tensor.shape, message.tensor.dtype)
    assert found.nbytes == message.nbytes


def test_a_message_counts_its_header_and_its_payload() -> None:
    assert Message(Kind.PULL).nbytes == 64
    assert Message(Kind.PUSH, torch.zeros(3, dtype=torch.float64)).nbytes == 64 + 24
    assert Message(Kind.PUSH, torch.zeros(3, dtype=torch.bfloat16)).nbytes == 64 + 6


def test_a_header_does_not_change_from_version_to_version() -> None:
    message = Message(Kind.PUSH, torch.zeros(3), 4, 5, 0.5, 0.25, True, 6)
    expected = struct.pack("<4sBBBBIIqqqdd8s", b"pRh1", 4, 0, 1, 0, 7, 6, 3, 4, 5, 0.5, 0.25, b"\0" * 8)
    assert encode_header(message, 7) == expected


def test_a_damaged_header_is_read_or_refused() -> None:
    dice = random.Random(0)
    headers = [
        encode_header(Message(kind, torch.zeros(number, dtype=dtype), 4, -5, 0.5, 0.25, number == 2, 6), 1)
        for kind in Kind
        for number, dtype in enumerate(DTYPES)
    ]
    read = 0
    for _ in range(20_000):
        header = bytearray(dice.choice(headers))
        for _ in range(dice.randrange(13)):
            header[dice.randrange(HEADER_BYTES)] = dice.randrange(256)
        length = dice.choice([HEADER_BYTES] * 20 + [0, 1, 55, 63, 65])
        try:
            _, found = decode_header(bytes(header[:length]).ljust(length, b"\0"))
        except MalformedMessage:
            continue
        read += 1
        assert found.kind in Kind
        assert found.tensor is None or found.tensor.numel() <= MAXIMUM_ELEMENTS
    assert 1000 < read < 19_000


def _with_elements(elements: int, dtype: int = 0) -> bytes:
    header = bytearray(encode_header(Message(Kind.PUSH, torch.zeros(1)), 0))
    header[5] = dtype
    header[16:24] = elements.to_bytes(8, "little", signed=True)
    return bytes(header)


def test_the_forged_field_is_the_one_meant() -> None:
    _, found = decode_header(_with_elements(12, dtype=1))
    assert found.tensor is not None
    assert (found.tensor.numel(), found.tensor.dtype) == (12, torch.float64)


@pytest.mark.parametrize("elements", [-1, -(2**63), MAXIMUM_ELEMENTS + 1, 2**63 - 1])
def test_impossible_sizes_are_refused(elements: int) -> None:
    with pytest.raises(MalformedMessage, match=str(elements)):
        decode_header(_with_elements(elements))


def test_what_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", out_of_memory)
    with pytest.raises(MalformedMessage, match=f"{MAXIMUM_ELEMENTS} elements"):
        decode_header(_with_elements(MAXIMUM_ELEMENTS, dtype=1))


def test_more_than_a_run_can_need_is_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = decode_header(_with_elements(125, dtype=1), most_bytes=1000)
    assert found.nbytes == HEADER_BYTES + 1000
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was taken"))
    with pytest.raises(
        MalformedMessage, match="1,008 bytes was announced, where 1,000 are the most"
    ) as refusal:
        decode_header(_with_elements(126, dtype=1), most_bytes=1000)
    assert refusal.value.reason == "oversized"


@pytest.mark.parametrize(
    ("position", "value"), [(0, 0), (3, ord("2")), (4, len(Kind)), (4, 255), (5, len(DTYPES))]
)
def test_another_magic_kind_or_dtype_is_refused(position: int, value: int) -> None:
    header = bytearray(encode_header(Message(Kind.PUSH, torch.zeros(1)), 0))
    header[position] = value
    with pytest.raises(MalformedMessage, match="another program"):
        decode_header(bytes(header))


def test_a_received_message_shares_no_memory() -> None:
    tensor = torch.ones(3, requires_grad=True)
    copy = Message(Kind.PUSH, tensor, version=3).received()
    with torch.no_grad():
        tensor.zero_()
    assert copy.tensor is not None
    assert copy.tensor.tolist() == [1, 1, 1]
    assert not copy.tensor.requires_grad
    assert copy.version == 3
    assert Message(Kind.PULL).received() == Message(Kind.PULL)


@given(
    value=st.recursive(
        st.none() | st.booleans() | INT64 | NUMBERS | TEXTS,
        lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
        max_leaves=10,
    )
)
@settings(deadline=None, database=None)
def test_json_comes_back(value: Any) -> None:
    payload = pack_json(value)
    assert (payload.dtype, payload.dim()) == (torch.uint8, 1)
    assert unpack_json(payload) == value


@pytest.mark.parametrize(
    "payload",
    [
        torch.empty(0, dtype=torch.uint8),
        torch.frombuffer(bytearray(b'{"a": 1'), dtype=torch.uint8),
        torch.frombuffer(bytearray(b"\xff\xfe\xfd"), dtype=torch.uint8),
        torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8),
        torch.frombuffer(bytearray(b"9" * 5000), dtype=torch.uint8),
        torch.zeros(3),
        torch.zeros(3, dtype=torch.bfloat16),
    ],
    ids=["empty", "cut", "no text", "deep", "a long number", "floats", "half floats"],
)
def test_what_is_no_json_is_malformed(payload: torch.Tensor) -> None:
    with pytest.raises(MalformedMessage):
        unpack_json(payload)


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(4, 3, generator=generator)
    return {
        "matrix": shared,
        "transposed": shared.t(),
        "row": shared[1],
        "count": torch.tensor(5),
        "none": torch.empty(0),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "trained": torch.ones(2, requires_grad=True),
    }


def test_tensors_come_back() -> None:
    facts = {"steps": [1, 2], "name": "é"}
    tensors, found = unpack_tensors(pack_tensors(_tensors(), facts))
    assert found == facts
    assert tensors.keys() == _tensors().keys()
    for name, expected in _tensors().items():
        assert tensors[name].dtype is expected.dtype
        assert torch.equal(tensors[name], expected)
    assert unpack_tensors(pack_tensors({}, None)) == ({}, None)


def test_damaged_tensors_are_read_or_malformed() -> None:
    raw = pack_tensors(_tensors(), {"step": 1}).numpy().tobytes()
    dice = random.Random(0)
    refused = 0
    for _ in range(500):
        damaged = bytearray(raw[: dice.choice([len(raw), dice.randrange(len(raw))])])
        for _ in range(dice.randrange(1, 6)):
            if damaged:
                damaged[dice.randrange(min(len(damaged), 600))] = dice.randrange(256)
        try:
            unpack_tensors(torch.tensor(list(damaged), dtype=torch.uint8))
        except MalformedMessage:
            refused += 1
    assert refused > 250  # every cut one, and most others: the first 600 bytes are their header


@pytest.mark.parametrize("payload", [torch.zeros(8), torch.empty(0, dtype=torch.uint8), pack_json({"a": 1})])
def test_what_holds_no_tensors_is_malformed(payload: torch.Tensor) -> None:
    with pytest.raises(MalformedMessage):
        unpack_tensors(payload)
