"""What `channels_last` and `compile` bring to a step of one worker.

    python benchmarks/execution/measure.py [--models lenet5 resnet18] [--rounds 9] [--json]

A step is the forward and the backward pass over one batch in memory, on one thread. All forms of a network take turns
in one process; counted are the processor's seconds of that thread, so that other work on the machine changes little.
Printed are the medians, the medians and ranges of the rounds' ratios of speeds to the plain form, and how long the
first step took, in which a compiled form is compiled (with torch's caches as they were found).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from polyrhythm.models.create import create_model
from polyrhythm.training.forward_pass import Execution, forward_pass

_SHAPES = {"mlp": ((1, 28, 28), 64), "lenet5": ((1, 28, 28), 64), "resnet18": ((3, 64, 64), 32)}
_CLASSES = 10
_ROUND_S = 0.3
"""About so long each form steps in a round."""

FORMS = {
    "plain": Execution(),
    "channels_last": Execution(channels_last=True),
    "compile": Execution(compiled=True),
    "both": Execution(compiled=True, channels_last=True),
}


@dataclass(frozen=True)
class Figures:
    """One line of the table."""

    model: str
    form: str
    step_ms: float
    speed: tuple[float, float, float]
    first_s: float


class Steps:
    """A form of a network, with a batch."""

    def __init__(self, name: str, execution: Execution) -> None:
        shape, size = _SHAPES[name]
        torch.manual_seed(0)
        self._model = create_model(name, classes=_CLASSES, image_shape=shape)
        self._forward = forward_pass(self._model, execution)
        self._images, self._labels = torch.randn(size, *shape), torch.randint(_CLASSES, (size,))
        began = time.perf_counter()
        self.take()
        self.first_s = time.perf_counter() - began
        self.take()
        self.count = max(1, round(_ROUND_S / self.seconds(1)))

    def take(self) -> Tensor:
        """Takes a step; gives the loss."""
        loss: Tensor = nn.functional.cross_entropy(self._forward(self._images, True), self._labels)
        loss.backward()
        return loss

    def seconds(self, count: int) -> float:
        """Return the processor's seconds of a step, over so many."""
        began = time.thread_time()
        for _ in range(count):
            self.take()
        return (time.thread_time() - began) / count


def measure(model: str, rounds: int) -> list[Figures]:
    """Lets all forms of a model take turns."""
    forms = {name: Steps(model, execution) for name, execution in FORMS.items()}
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            times[name].append(form.seconds(form.count))
    found = []
    for name, form in forms.items():
        ratios = [plain / own for plain, own in zip(times["plain"], times[name], strict=True)]
        speed = statistics.median(ratios), min(ratios), max(ratios)
        found.append(Figures(model, name, 1e3 * statistics.median(times[name]), speed, form.first_s))
    return found


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--models", nargs="+", choices=sorted(_SHAPES), default=["lenet5", "resnet18"])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    table = [line for model in chosen.models for line in measure(model, chosen.rounds)]
    if chosen.json:
        print(json.dumps([asdict(line) for line in table]))
        return
    print("| model | form | step | speed to plain (range) | first step |")
    print("|---|---|---|---|---|")
    for line in table:
        middle, low, high = line.speed
        print(
            f"| {line.model} | {line.form} | {line.step_ms:.2f} ms | {middle:.2f} ({low:.2f} to {high:.2f}) "
            f"| {line.first_s:.1f} s |"
        )


if __name__ == "__main__":
    main()
