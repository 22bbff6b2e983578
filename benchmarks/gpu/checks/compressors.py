"""Part 4: compressors on the device, against a copy from the device to itself."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import polyrhythm.compression.compressors as folder
from checks.setting import Figures, Part, Problems, Row, Setting
from polyrhythm.compression.compressor import COMPRESSORS, Compressor, Place
from polyrhythm.specs import build

ON_DEVICE = ("power_sgd", "top_k", "qsgd", "one_bit")
"""That never go through the host."""
OTHERS = tuple(
    sorted(
        {module.name for module in pkgutil.iter_modules(folder.__path__)} - {*ON_DEVICE, "sufficient_factors"}
    )
)
"""Of `sufficient_factors` it is passes, not vectors, that are compressed."""
_FEW_BYTES = 4096
"""Counts and sizes, which a program reads to know how long a payload is, are no vector."""


class Crossings(TorchDispatchMode):
    """Adds up the bytes that operations move between two kinds of device.

    Attributes:
        nbytes: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation; of tensors on two kinds of device, given or made, the smaller side has moved."""
        found = function(*arguments, **(options or {}))
        given = [each for each in tree_leaves((arguments, options)) if isinstance(each, Tensor)]
        sides: dict[str, int] = {}
        for each in (*given, *(leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor))):
            sides[each.device.type] = sides.get(each.device.type, 0) + each.nbytes
        if len(sides) > 1:
            self.nbytes += min(sides.values())
        elif function.overloadpacket.__name__ == "_local_scalar_dense":  # a number for Python
            self.nbytes += sum(each.nbytes for each in given)
        return found


def crossing_bytes(act: Callable[[], object]) -> int:
    """Return the bytes that an act moves between kinds of device."""
    with Crossings() as seen:
        act()
    return seen.nbytes


def made(name: str) -> Compressor:
    """Return a compressor by name."""
    found = build("compressor", name, COMPRESSORS)
    assert isinstance(found, Compressor)
    return found


def place_of(setting: Setting) -> Place:
    """Return the place of a matrix of 25 million numbers, a ResNet-50's; of few where the setting is quick."""
    return Place(64, 80) if setting.quick else Place(2048, 12_512)


def compressed(setting: Setting, name: str) -> Figures:
    """A vector is encoded and decoded where it lies, to what the CPU makes of its payload."""
    compressor, place = made(name), place_of(setting)
    if compressor.shares_scaler:
        place = Place(place.rows, place.columns, scaler=1.0)
    generator = torch.Generator().manual_seed(1)
    vector = torch.randn(place.numbers, generator=generator).to(setting.device)
    target = torch.empty_like(vector)
    problems = Problems()
    payload = compressor.encode(vector, place)
    decoded = compressor.decode(payload, place)
    problems.expect(payload.device.type == setting.device.type, f"payloads lie on {payload.device}")
    problems.expect(decoded.device.type == setting.device.type, f"decoded vectors lie on {decoded.device}")
    by_cpu = compressor.decode(payload.cpu(), place)
    apart = float((decoded.cpu() - by_cpu).norm() / by_cpu.norm().clamp_min(1e-30))
    problems.expect(apart < 1e-5, f"decoded vectors differ from a CPU's by {apart:.2g} of their norm")
    own = compressor.decode(compressor.encode(vector.cpu(), place), place)
    error, cpu_error = (float((each.cpu() - vector.cpu()).norm()) for each in (decoded, own))
    problems.expect(
        error <= 1.05 * cpu_error + 1e-6, f"the error is {error:.4g}, and a CPU's {cpu_error:.4g}"
    )
    # As from the second step on: the first factor is drawn on the CPU, the same for all ranks.
    place = replace(place, factor=compressor.factor_of(payload, place))
    moved = crossing_bytes(lambda: compressor.decode(compressor.encode(vector, place), place))
    problems.expect(moved <= _FEW_BYTES, f"{moved} bytes go through the host")
    times = 2 if setting.quick else 5
    taken = {
        "encoded": setting.seconds(lambda: compressor.encode(vector, place), times),
        "decoded": setting.seconds(lambda: compressor.decode(payload, place), times),
        "copied": setting.seconds(lambda: target.copy_(vector), times),
    }
    figures: Figures = {f"{kind}_GB_per_s": vector.nbytes / each / 1e9 for kind, each in taken.items()}
    figures |= {"payload_share": payload.nbytes / vector.nbytes, "through_host_bytes": moved}
    return problems.conclude(figures)


def others(setting: Setting) -> Figures:
    """Of all other compressors it is measured which ones take a vector of the device, and how fast."""
    found = Figures()
    for name in OTHERS:
        try:
            figures = compressed(setting, name)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:120]
        else:
            found[name] = figures["encoded_GB_per_s"]
    return found


PART = Part(
    4,
    "Compressors on the device",
    (
        *(Row(f"compressed by {name}", partial(compressed, name=name), 4) for name in ON_DEVICE),
        Row("compressed by others", others, 12),
    ),
)
