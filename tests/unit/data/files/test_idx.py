import struct

import numpy as np
import pytest

from polyrhythm.data.sources.fashion_mnist import parse_idx


def test_reads_the_numbers_in_the_shape_of_the_head():
    numbers = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    content = b"\x00\x00\x08\x03" + struct.pack(">3I", 2, 3, 4) + numbers.tobytes()
    np.testing.assert_array_equal(parse_idx(content).numpy(), numbers)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an idx file"),
        (b"\x89PNG", "not an idx file"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x00", "not an idx file"),
        (b"\x00\x00\x08\x02\x00\x00\x00\x01", "cut short in its head"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x03ab", "of 2 numbers with the header"),
    ],
)
def test_what_is_no_whole_idx_file_is_refused(content, reason):
    with pytest.raises(ValueError, match=reason):
        parse_idx(content)
