"""Pictures that are not what a camera makes: each has a stated outcome (docs/images.md)."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyrhythm.data.images import UnreadableImage, check, read_pixels, read_whole


def _corners(path: Path) -> list[list[int]]:
    pixels = read_pixels(path, 8).astype(int)
    return [pixels[0, 0].tolist(), pixels[-1, -1].tolist()]


@pytest.mark.parametrize("suffix", ["jpg", "tiff"])
def test_inks_become_light(tmp_path: Path, suffix: str) -> None:
    inks = np.zeros((32, 32, 4), np.uint8)
    inks[:16] = (0, 255, 255, 0)  # magenta and yellow: red
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(inks, "CMYK").save(path)
    first, last = _corners(path)
    assert np.abs(np.subtract(first, (255, 0, 0))).max() < 12
    assert np.abs(np.subtract(last, (255, 255, 255))).max() < 12


@pytest.mark.parametrize("suffix", ["gif", "png", "webp"])
def test_of_a_moving_picture_the_first_frame_counts(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue", "lime")]
    path = tmp_path / f"a.{suffix}"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=50)
    assert np.abs(np.subtract(_corners(path)[0], (255, 0, 0))).max() < 6
    assert check(path, whole=True) is None


@pytest.mark.parametrize(("kind", "suffix"), [(np.uint16, "png"), (np.uint16, "tiff"), (np.int32, "tiff")])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, kind: type, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(np.full((16, 16), 200 * 257, kind)).save(path)
    assert _corners(path)[0] == [200, 200, 200]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparency_is_dropped_and_color_stays(tmp_path: Path, mode: str) -> None:
    pixels = np.full((16, 16, 4), 200, np.uint8)
    pixels[..., 3] = 0
    path = tmp_path / ("a.tiff" if mode == "PA" else "a.png")
    image = Image.fromarray(pixels, "RGBA")
    (image if mode != "LA" else image.convert("LA")).save(path)
    assert _corners(path)[0] == [200, 200, 200]


def test_black_and_white_bits_are_black_and_white(tmp_path: Path) -> None:
    pixels = np.zeros((16, 16), np.uint8)
    pixels[8:] = 255
    path = tmp_path / "a.png"
    Image.fromarray(pixels).convert("1").save(path)
    assert _corners(path) == [[0, 0, 0], [255, 255, 255]]


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (2, 1)])
def test_a_tiny_picture_is_enlarged(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", size, (9, 99, 199)).save(path)
    assert (read_pixels(path, 24) == (9, 99, 199)).all()
    assert min(read_whole(path, 24).shape[:2]) == 24


@pytest.mark.parametrize(("kind", "name"), [("PNG", "a.jpg"), ("JPEG", "a.png"), ("WEBP", "a.bmp")])
def test_the_content_counts_not_the_name(tmp_path: Path, kind: str, name: str) -> None:
    Image.new("RGB", (16, 16), "red").save(tmp_path / name, kind)
    assert np.abs(np.subtract(_corners(tmp_path / name)[0], (255, 0, 0))).max() < 6
    assert check(tmp_path / name, whole=True) is None


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    side = 20_000  # a few kB that would fill more than a gigabyte
    rows = zlib.compress(bytes(side * (side // 8 + 1)), 9)
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    path = tmp_path / "bomb.png"
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")
    )
    assert path.stat().st_size < 100_000
    for whole in (True, False):
        assert check(path, whole=whole) == "too many pixels"
    with pytest.raises(UnreadableImage, match="too many pixels"):
        read_pixels(path, 32)


@pytest.mark.parametrize(("width", "height"), [(300, 200), (200, 300), (64, 64)])
def test_a_whole_picture_keeps_its_proportions(tmp_path: Path, width: int, height: int) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (width, height), "red").save(path)
    shape = read_whole(path, 128).shape[:2]
    assert min(shape) == 128
    assert shape[1] / shape[0] == pytest.approx(width / height, rel=0.01)
