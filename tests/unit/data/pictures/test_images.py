import warnings

import numpy as np
import pytest
from PIL import Image

from polyrhythm.data.images import UnreadableImage, bomb_warnings_are_errors, check, read_pixels, suffixes


def smooth(width, height, channels=3):
    """A picture of gentle waves, different in every corner."""
    y, x = np.mgrid[:height, :width]
    waves = [127 + 60 * np.sin(x / (9 + c)) + 60 * np.cos(y / (13 + c) + x / 50) for c in range(channels)]
    return np.stack(waves, -1).astype(np.uint8)


def saved(path, pixels, **options):
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.mark.parametrize(("width", "height"), [(512, 768), (768, 512), (512, 512), (256, 400)])
def test_equals_scaling_the_shorter_side_and_cropping_the_center(tmp_path, width, height):
    pixels = smooth(width, height)
    result = read_pixels(saved(tmp_path / "a.png", pixels), 224)

    scale = 256 / min(width, height)
    size = (round(width * scale), round(height * scale))
    whole = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)
    left, top = (size[0] - 224) // 2, (size[1] - 224) // 2
    reference = np.asarray(whole.crop((left, top, left + 224, top + 224)))
    assert result.shape == (224, 224, 3)
    assert result.dtype == np.uint8
    inner = np.s_[1:-1, 1:-1]
    np.testing.assert_allclose(result[inner].astype(int), reference[inner].astype(int), atol=1)
    np.testing.assert_allclose(result.astype(int), reference.astype(int), atol=8)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "gif", "tiff", "ppm"])
def test_every_usual_format_is_read(tmp_path, suffix):
    assert f".{suffix}" in suffixes()
    pixels = smooth(64, 48)
    path = saved(tmp_path / f"a.{suffix}", pixels)
    exact = read_pixels(saved(tmp_path / "exact.png", pixels), 24).astype(int)
    assert np.abs(read_pixels(path, 24).astype(int) - exact).mean() < 6
    assert check(path, whole=True) is None
    assert check(path, whole=False) is None


def test_a_large_jpeg_decoded_at_a_smaller_size_looks_the_same(tmp_path):
    pixels = smooth(1200, 900)
    small = read_pixels(saved(tmp_path / "a.jpg", pixels, quality=95), 64).astype(int)
    assert np.abs(small - read_pixels(saved(tmp_path / "a.png", pixels), 64)).mean() < 2


@pytest.mark.parametrize(
    ("orientation", "stored"),
    [
        (1, lambda upright: upright),
        (3, lambda upright: upright[::-1, ::-1]),
        (6, lambda upright: np.rot90(upright)),
        (8, lambda upright: np.rot90(upright, -1)),
    ],
)
def test_images_are_turned_upright(tmp_path, orientation, stored):
    upright = smooth(60, 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = np.ascontiguousarray(stored(upright))
    result = read_pixels(saved(tmp_path / "turned.png", turned, exif=exif), 20)
    np.testing.assert_array_equal(result, read_pixels(saved(tmp_path / "upright.png", upright), 20))


def test_grey_palette_and_transparent_images_become_rgb(tmp_path):
    flat = np.full((30, 30), 200, np.uint8)
    gray = read_pixels(saved(tmp_path / "gray.png", flat), 8)
    deep = read_pixels(saved(tmp_path / "deep.png", flat.astype(np.uint16) * 257), 8)
    rgba = read_pixels(saved(tmp_path / "rgba.png", np.dstack([flat, flat, flat, flat // 2])), 8)
    palette = Image.fromarray(flat).convert("P")
    palette.save(tmp_path / "palette.png", transparency=b"\x00" * 200)
    for result in (gray, deep, rgba, read_pixels(tmp_path / "palette.png", 8)):
        np.testing.assert_array_equal(result, np.full((8, 8, 3), 200))


def test_a_needle_of_an_image_stays_small(tmp_path):
    assert read_pixels(saved(tmp_path / "needle.png", smooth(1, 5000)), 32).shape == (32, 32, 3)


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    return path


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "gif", "webp"])
def test_a_file_cut_short_is_found_by_decoding(tmp_path, suffix):
    path = truncated(
        saved(tmp_path / f"a.{suffix}", np.random.default_rng(0).integers(0, 255, (90, 90, 3), np.uint8))
    )
    assert check(path, whole=True)
    with pytest.raises(UnreadableImage):
        read_pixels(path, 32)


def test_a_progressive_jpeg_cut_short_is_found(tmp_path):
    assert check(truncated(saved(tmp_path / "a.jpg", smooth(300, 300), progressive=True)), whole=True)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an image"),
        (b"hello", "not an image"),
        # Pillow would hand this one to Ghostscript.
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not an image"),
    ],
)
def test_what_is_no_image_is_found_by_its_header(tmp_path, content, reason, whole):
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    assert check(path, whole=whole) == reason


def test_a_missing_file_is_a_reason(tmp_path):
    assert check(tmp_path / "a.jpg", whole=True) == "No such file or directory"


@pytest.mark.parametrize("limit", [2000, 4000, 9999])
def test_images_with_too_many_pixels_are_refused(tmp_path, monkeypatch, limit):
    path = saved(tmp_path / "bomb.png", smooth(100, 100))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with warnings.catch_warnings():
        bomb_warnings_are_errors()
        assert "pixels" in check(path, whole=False)
        with pytest.raises(UnreadableImage, match="pixels"):
            read_pixels(path, 32)


def test_the_limit_holds_without_pillows_warning(tmp_path, monkeypatch):
    path = saved(tmp_path / "bomb.png", smooth(100, 100))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9999)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        assert check(path, whole=True) == "100 by 100 pixels, and more than 9999 are refused"


def test_floating_point_pixels_are_refused(tmp_path):
    assert "floating-point" in check(saved(tmp_path / "a.tiff", np.zeros((9, 9), np.float32)), whole=True)


def test_documents_and_programs_are_no_images():
    assert not {".eps", ".pdf", ".mpg", ".txt", ".py", ""} & suffixes()
