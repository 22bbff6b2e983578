"""Cost of a convolution by method: multiply-adds, depth, and elements of extra memory.

Ben-Nun, Hoefler, "Demystifying Parallel and Distributed Deep Learning", ACM CSUR 2019, table 6, with constants; Lavin,
Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016; Mathieu et al., "Fast Training of Convolutional
Networks through FFTs", ICLR 2014.

    direct            N·Cout·H'·W'·Cin·Ky·Kx
    im2col            the same, with a buffer of N·H'·W'·Cin·Ky·Kx elements
    FFT of P pixels   P log2 P (Cin·Cout + N·Cin + N·Cout) + 2 P·N·Cin·Cout
    Winograd F(m, r)  Cin·Cout·α r (r+α) + T·Cin·2α³ + T·Cout·α m (α+m) + T·Cin·Cout·α²,  α = m + r - 1

depth: steps that follow each other however many processors there are; a sum of n products takes 1 + log2 n, rounded up

    direct, im2col    1 + log2(Cin·Ky·Kx)
    FFT               2 (1 + log2 P) + 1 + log2 Cin           transform, sum over channels, inverse transform
    Winograd          2 (1 + log2 α) twice, + 1 + log2 Cin    a transform is a product of matrices from both sides

P = (H + 2 padding)·(W + 2 padding), T = N⌈H'/m⌉⌈W'/m⌉ tiles. A transform of P real pixels is counted as P log2 P
multiply-adds (half of a complex one's), a product in frequency as four for each of the half spectrum. Winograd's
transforms are counted as dense products, an upper bound: most of their entries are 0 or ±1. Transforms hold
`P (N·Cin + Cin·Cout + N·Cout)` and `α² (T·Cin + Cin·Cout + T·Cout)` elements. Cin counts the channels of one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2, prod


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """Shapes of a two-dimensional convolution.

    Attributes:
        images: N.
        channels: channels of the input, of all groups.
        filters: channels of the output, of all groups.
        input_size: (H, W).
        output_size: (H', W').
        kernel: (Ky, Kx).
        stride: vertical, horizontal.
        padding: vertical, horizontal.
        dilation: vertical, horizontal.
        groups: number of groups of channels and filters; each is a convolution of its own.
    """

    images: int
    channels: int
    filters: int
    input_size: tuple[int, int]
    output_size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


@dataclass(frozen=True, kw_only=True)
class Method:
    """Cost of a method for one forward pass.

    Attributes:
        name: `direct`, `im2col`, `fft`, or `winograd` with its tile.
        multiply_adds: multiply-add operations of all images.
        depth: steps that follow each other however many processors there are.
        extra_elements: elements that it holds in addition to input, weights and output.
    """

    name: str
    multiply_adds: int
    depth: int
    extra_elements: int


def methods(shape: Convolution) -> list[Method]:
    """Return the methods that can compute a convolution: FFT and Winograd only those without stride or dilation."""
    found = [direct(shape), im2col(shape)]
    if shape.stride == shape.dilation == (1, 1):
        found.append(fft(shape))
        if shape.kernel[0] == shape.kernel[1] > 1:
            found.append(min((winograd(shape, m) for m in (2, 4)), key=lambda method: method.multiply_adds))
    return found


def direct(shape: Convolution) -> Method:
    """One sum of products for each output."""
    outputs = shape.images * shape.filters * prod(shape.output_size)
    terms = shape.channels // shape.groups * prod(shape.kernel)
    return Method(name="direct", multiply_adds=outputs * terms, depth=_depth(terms), extra_elements=0)


def im2col(shape: Convolution) -> Method:
    """One product of matrices, the input's patches copied out side by side."""
    buffer = shape.images * prod(shape.output_size) * shape.channels * prod(shape.kernel)
    plain = direct(shape)
    return Method(name="im2col", multiply_adds=plain.multiply_adds, depth=plain.depth, extra_elements=buffer)


def fft(shape: Convolution) -> Method:
    """Products of spectra."""
    pixels = prod(side + 2 * pad for side, pad in zip(shape.input_size, shape.padding, strict=True))
    each_in, each_out = shape.channels // shape.groups, shape.filters // shape.groups
    pairs, planes = each_in * each_out, shape.images * (each_in + each_out)
    transforms = ceil(pixels * log2(max(pixels, 2))) * (pairs + planes)
    products = 2 * pixels * shape.images * pairs
    return Method(
        name="fft",
        multiply_adds=shape.groups * (transforms + products),
        depth=2 * _depth(pixels) + _depth(each_in),
        extra_elements=shape.groups * pixels * (pairs + planes),
    )


def winograd(shape: Convolution, outputs: int) -> Method:
    """Minimal filtering of tiles, `F(m, r)`.

    Args:
        shape: a square kernel without stride.
        outputs: m, a side of the tile of outputs.
    """
    m, r = outputs, shape.kernel[0]
    side = m + r - 1
    tiles = shape.images * ceil(shape.output_size[0] / m) * ceil(shape.output_size[1] / m)
    each_in, each_out = shape.channels // shape.groups, shape.filters // shape.groups
    pairs = each_in * each_out
    work = pairs * side * r * (r + side) + tiles * each_in * 2 * side**3
    work += tiles * each_out * side * m * (side + m) + tiles * pairs * side**2
    held = side**2 * (tiles * each_in + pairs + tiles * each_out)
    name = f"winograd F({m},{r})"
    return Method(
        name=name,
        multiply_adds=shape.groups * work,
        depth=4 * _depth(side) + _depth(each_in),
        extra_elements=shape.groups * held,
    )


def _depth(terms: int) -> int:
    """Return the depth of a sum of products."""
    return 1 + ceil(log2(terms))
