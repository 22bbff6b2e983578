"""What is written is what the safetensors library would have written, and what it reads."""

import io

import pytest
import safetensors.torch
import torch

from polyrhythm.safetensors_file import raw_bytes, write_safetensors

TENSORS = {
    "truth": torch.tensor([True, False, True]),
    "b": torch.arange(5.0),
    "a": torch.ones(2, 3, dtype=torch.float64),
    "half": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 2),
}


def written(tensors, metadata):
    file = io.BytesIO()
    write_safetensors(file, tensors, metadata)
    return file.getvalue()


def test_the_library_reads_it():
    read = safetensors.torch.load(written(TENSORS, {"x": "ü"}))
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_the_tensors_lie_where_the_library_puts_them():
    ours, theirs = written(TENSORS, {"x": "y"}), safetensors.torch.save(TENSORS, {"x": "y"})
    size = sum(tensor.nbytes for tensor in TENSORS.values())
    assert ours[-size:] == theirs[-size:]
    assert (len(ours) - size) % 8 == 0


def test_tensors_that_share_memory_are_written_twice():
    whole = torch.arange(4.0)
    read = safetensors.torch.load(written({"whole": whole, "part": whole[1:3], "again": whole}, {}))
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        "whole": [0, 1, 2, 3],
        "part": [1, 2],
        "again": [0, 1, 2, 3],
    }


def test_refuses_a_dtype_that_the_format_lacks():
    with pytest.raises(ValueError, match=r"cannot store w: safetensors has no torch\.complex128"):
        written({"w": torch.zeros(1, dtype=torch.complex128)}, {})


def test_raw_bytes_are_no_copy():
    tensor = torch.zeros(2, dtype=torch.int16)
    memory = raw_bytes(tensor)
    tensor[1] = 0x0102
    assert bytes(memory) == b"\x00\x00\x02\x01"
