"""A network given by its sizes alone, for dry runs of networks that cannot be built by name.

    simulate --gradients none --model "sizes(parameters=1.1e8)" --step-time "constant(seconds=0.2)"
    simulate --gradients none --model "sizes(file='profile.yaml')" --cluster profile.yaml       of `profile SCRIPT`

Time to compute is that of the cluster's step. A layer's share of it decides when its gradients are ready.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config
from polyrhythm.user_files import parse_yaml, read_text

_PASSES = 3
"""Multiply-adds of an example per parameter of a dense layer: one forward, two backward."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Sizes(Config):
    """Numbers of parameters, without layers that compute.

    Attributes:
        parameters: number of trained parameters, divided evenly over the layers.
        layers: number of layers.
        multiply_adds: multiply-adds of one example, forward and backward; None: those of dense layers.
        file: cluster file of `polyrhythm profile SCRIPT`, with measured layers, instead of the above.
    """

    parameters: Annotated[int, Field(ge=1), BeforeValidator(_whole)] | None = None
    layers: int = Field(32, ge=1)
    multiply_adds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    file: str = ""

    @model_validator(mode="after")
    def _check(self) -> Sizes:
        if (self.parameters is None) == (not self.file):
            raise RequestError("model sizes: give either parameters, as sizes(parameters=1.1e8), or a file")
        return self

    def create(self, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Return the network on the meta device.

        Raises:
            RequestError: numbers are requested, or the file has no layers.
        """
        if torch.get_default_device().type != "meta":
            raise RequestError(
                "model sizes has no layers that compute: it can be simulated with --gradients none, or planned with "
                "--target images=…"
            )
        if self.file:
            return _measured(self.file)
        assert self.parameters is not None
        count = min(self.layers, self.parameters)
        ends = [self.parameters * place // count for place in range(count + 1)]
        numbers = [stop - start for start, stop in pairwise(ends)]
        return SizesAlone(numbers, numbers, self.multiply_adds or _PASSES * self.parameters)


class SizesAlone(nn.Module):
    """Layers of given sizes that compute nothing.

    Args:
        numbers: parameters of each layer, in the order of the forward pass.
        work: time of each layer, in any unit.
        multiply_adds: multiply-adds of one example, forward and backward.
        limits: reasons why measured times do not hold for other inputs.

    Attributes:
        multiply_adds: see above.
        limits: see above.
        work: time of each layer, by the name of its parameters.
    """

    def __init__(
        self,
        numbers: list[int],
        work: list[float] | list[int],
        multiply_adds: float,
        limits: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.sizes = nn.ParameterList(nn.Parameter(torch.empty(count)) for count in numbers)
        self.multiply_adds = multiply_adds
        self.limits = limits
        self.work = {f"sizes.{place}": float(each) for place, each in enumerate(work)}

    def forward(self, images: Tensor) -> NoReturn:
        """Raise an error: nothing is known of the layers but their sizes."""
        raise RequestError("model sizes has no layers that compute")


def is_sizes(model: Any) -> bool:
    """Whether a model is the text of a spec of sizes alone."""
    return isinstance(model, str) and model.partition("(")[0].strip() == "sizes"


def _measured(file: str) -> SizesAlone:
    try:
        values = parse_yaml(read_text(Path(file), "cluster file"), file)
        step = values["step_of"]
        numbers = [int(layer["parameters"]) for layer in step["layers"]]
        work = [float(layer["seconds"]) for layer in step["layers"]]
        multiply_adds = float(step["multiply_adds"]) / int(step["batch_size"])
        return SizesAlone(numbers, work, multiply_adds, tuple(map(str, step.get("limits", ()))))
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"{file} has no layers of a step: write it with `polyrhythm profile SCRIPT` ({error})"
        ) from None
