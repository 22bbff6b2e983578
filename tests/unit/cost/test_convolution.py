"""Multiply-adds of convolution methods, against loops that count them and Lavin's and Gray's figures."""

from __future__ import annotations

from itertools import product

import pytest

from polyrhythm.cost.convolution import Convolution, direct, fft, im2col, methods, winograd


def counted_by_loops(shape: Convolution) -> int:
    """Count the products of a convolution one by one."""
    images, rows, columns = range(shape.images), range(shape.output_size[0]), range(shape.output_size[1])
    per_group = shape.filters // shape.groups
    count = 0
    for _image, out, _row, _column in product(images, range(shape.filters), rows, columns):
        group = out // per_group
        inputs = [
            channel
            for channel in range(shape.channels)
            if channel // (shape.channels // shape.groups) == group
        ]
        count += len(inputs) * shape.kernel[0] * shape.kernel[1]
    return count


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_direct_and_im2col_are_what_loops_count(groups: int) -> None:
    shape = Convolution(
        images=2,
        channels=4,
        filters=8,
        input_size=(7, 6),
        output_size=(5, 4),
        kernel=(3, 3),
        groups=groups,
    )
    assert direct(shape).multiply_adds == im2col(shape).multiply_adds == counted_by_loops(shape)
    assert im2col(shape).extra_elements == 2 * 5 * 4 * 4 * 9


@pytest.mark.parametrize(("tile", "saving"), [(2, 2.25), (4, 4.0)])
def test_winograd_tends_to_its_published_saving(tile: int, saving: float) -> None:
    """With many channels the transforms vanish beside the products: F(2,3) saves 2.25 times, F(4,3) 4 times."""
    deep = Convolution(
        images=64,
        channels=1 << 14,
        filters=1 << 14,
        input_size=(64, 64),
        output_size=(64, 64),
        kernel=(3, 3),
        padding=(1, 1),
    )
    assert direct(deep).multiply_adds / winograd(deep, tile).multiply_adds == pytest.approx(saving, rel=0.01)


def test_one_tile_by_hand() -> None:
    """F(2,3) on one channel: 16 products, filter 4·3·7, data 2·4³, output 4·2·6."""
    small = Convolution(images=1, channels=1, filters=1, input_size=(4, 4), output_size=(2, 2), kernel=(3, 3))
    assert winograd(small, 2).multiply_adds == 16 + 84 + 128 + 48
    assert fft(small).multiply_adds == 16 * 4 * 3 + 2 * 16


def test_strides_and_single_pixels_leave_direct_methods() -> None:
    strided = Convolution(
        images=1,
        channels=3,
        filters=4,
        input_size=(9, 9),
        output_size=(4, 4),
        kernel=(3, 3),
        stride=(2, 2),
    )
    assert [method.name for method in methods(strided)] == ["direct", "im2col"]
    pointwise = Convolution(
        images=1, channels=3, filters=4, input_size=(9, 9), output_size=(9, 9), kernel=(1, 1)
    )
    assert [method.name for method in methods(pointwise)] == ["direct", "im2col", "fft"]


@pytest.mark.parametrize(("channels", "depth"), [(1, 5), (3, 6), (64, 11)])
def test_a_sum_of_products_is_as_deep_as_a_tree(channels: int, depth: int) -> None:
    """A product, and then pairs are added until one number is left: 9, 27 and 576 products."""
    shape = Convolution(
        images=1, channels=channels, filters=2, input_size=(6, 6), output_size=(4, 4), kernel=(3, 3)
    )
    terms, rounds = channels * 9, 1
    while terms > 1:
        terms, rounds = (terms + 1) // 2, rounds + 1
    assert direct(shape).depth == im2col(shape).depth == rounds == depth
    assert fft(shape).depth > winograd(shape, 2).depth > 0
