"""A training loop of one process; prints one JSON object.

    python loop.py '{"kind": "bare", "model": "lenet5", …}'

    bare    torch alone, with a batch that stays on the device
    join    the same loop, distributed by `polyrhythm.join`; in the environment of one process of torchrun's
    train   `polyrhythm.train` with as many batches in memory, fed by its loader; rates by its own reports

`images_per_s` is that of the measured steps. `join` with `steps` tells `memory_bytes` instead: torch's allocated and
reserved bytes at a tenth and at the end of these steps; on a CPU, the resident ones.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]

from checks.setting import CLASSES, Network, Reports, Window  # noqa: E402 (found by the line above)

WARM_UP_S, MEASURED_S = 2.0, 4.0


class Loop:
    """What all kinds of loop share.

    Args:
        options: of `Network`, and `kind`, `device`, `quick`, `steps` (0: by time).
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.kind, self.quick = options.pop("kind"), options.pop("quick")
        self.device = torch.device(options.pop("device"))
        self.steps = options.pop("steps", 0)
        self.network = Network(**options)
        shape = (self.network.batch, self.network.channels, self.network.side, self.network.side)
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(shape, generator=generator)
        self.labels = torch.randint(0, CLASSES, shape[:1], generator=generator)

    def model(self) -> nn.Module:
        """Return the network on the device, in training."""
        from polyrhythm.models.create import create_model

        torch.manual_seed(1)
        network = self.network
        made = create_model(
            network.model, classes=CLASSES, image_shape=(network.channels, network.side, network.side)
        )
        return made.to(self.device).train()

    def finish(self) -> None:
        """Wait for all work of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def rate(self, step: Callable[[], object]) -> dict[str, Any]:
        """Return the images a second of steps, after some that warm up, and the energy of an image by NVML."""
        from polyrhythm.launch.energy import EnergyCounter

        few = 2 if self.quick else 5
        for _ in range(few):  # the first choose algorithms and compile
            step()
        self.finish()
        counter, warm_s, long_s = EnergyCounter(), *((0.0, 0.2) if self.quick else (WARM_UP_S, MEASURED_S))
        self._steps_for(step, warm_s)
        joules, began_s = counter.gpu_joules, time.perf_counter()
        steps = self._steps_for(step, long_s)
        taken_s = time.perf_counter() - began_s
        found = {"images_per_s": steps * self.network.batch / taken_s, "steps": steps}
        if joules is not None and (now := counter.gpu_joules) is not None:
            found["joules_per_image"] = (now - joules) / (steps * self.network.batch)
        return found

    def _steps_for(self, step: Callable[[], object], seconds: float) -> int:
        """Take steps for some seconds, a few between two looks at the clock, as each look waits for the device."""
        end_s, steps, at_once = time.perf_counter() + seconds, 0, 1
        while time.perf_counter() < end_s:
            began_s = time.perf_counter()
            for _ in range(at_once):
                step()
            self.finish()
            steps += at_once
            if time.perf_counter() - began_s < seconds / 20:
                at_once *= 2
        return steps

    def memory(self, step: Callable[[], object]) -> list[list[int]]:
        """Return the allocated and reserved bytes at a tenth and at the end of the steps."""
        seen = []
        for number in range(1, self.steps + 1):
            step()
            if number in (self.steps // 10, self.steps):
                self.finish()
                if self.device.type == "cuda":
                    seen.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
                else:
                    resident = int(Path("/proc/self/statm").read_text().split()[1])
                    seen.append([resident * os.sysconf("SC_PAGE_SIZE")] * 2)
        return seen

    def step_of(
        self, model: Callable[[Tensor], Tensor], optimizer: Any, zero: Callable[[], object]
    ) -> Callable[[], object]:
        """Return a step of a loop as users write it."""
        images, labels = self.images.to(self.device), self.labels.to(self.device)
        if self.network.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        dtype = getattr(torch, self.network.precision)
        mixed = dtype is not torch.float32

        def step() -> None:
            zero()
            with torch.autocast(self.device.type, dtype=dtype, enabled=mixed):
                loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

        return step

    def compiled(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the network, compiled where that is asked for."""
        made: Callable[[Tensor], Tensor] = torch.compile(model) if self.network.compiled else model
        return made


def bare(loop: Loop) -> dict[str, Any]:
    """Measure a loop of torch alone, its weights with channels innermost where its pictures are."""
    model = loop.model()
    if loop.network.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return loop.rate(loop.step_of(loop.compiled(model), optimizer, optimizer.zero_grad))


def join(loop: Loop) -> dict[str, Any]:
    """Measure the same loop, distributed."""
    import polyrhythm

    model = loop.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with polyrhythm.join("synchronous") as group:
        ours, updates = group.distribute(model, optimizer)
        step = loop.step_of(loop.compiled(ours), updates, updates.zero_grad)
        if loop.steps:
            return {"images_per_s": 0.0, "memory_bytes": loop.memory(step)}
        return loop.rate(step)


def train(loop: Loop) -> dict[str, Any]:
    """Measure `polyrhythm.train` with data in memory."""
    import polyrhythm

    network = loop.network
    times = 2 if loop.quick else max(1, 131_072 // network.batch)
    repeated = (loop.images.repeat(times, 1, 1, 1), loop.labels.repeat(times))
    with tempfile.TemporaryDirectory() as folder:
        polyrhythm.train(
            out=Path(folder, "run"),
            data=(repeated, (loop.images, loop.labels)),
            model=network.model,
            workers=1,
            batch_size=network.batch,
            epochs=3 if loop.quick else 6,
            precision=network.precision,
            channels_last=network.channels_last,
            compile=network.compiled,
            device=loop.device.type,
            optimizer="sgd(lr=0.01)",
            keep_checkpoints=0,
        )
        reports = Reports(Window(loop.quick))
        reports.read(Path(folder, "run", "events.jsonl"))
    return {"images_per_s": reports.rate, "seconds": reports.seconds}


def main() -> None:
    """Run the loop that is asked for."""
    loop = Loop(json.loads(sys.argv[1]))
    if loop.device.type == "cuda":
        torch.cuda.set_device(0)
    print(json.dumps({"bare": bare, "join": join, "train": train}[loop.kind](loop)), flush=True)


if __name__ == "__main__":
    main()
