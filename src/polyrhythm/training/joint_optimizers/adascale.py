"""AdaScale SGD: a learning rate that grows with the number of workers as far as their gradients differ.

T. Johnson, P. Agrawal, H. Gu, C. Guestrin, "AdaScale SGD: a user-friendly algorithm for distributed training", ICML
2020, arXiv 2007.05105.

    s2 = S / (S - 1) (mean_i |g_i|^2 - |g|^2),   m2 = |g|^2 - s2 / S      g: mean of the gradients g_i of S workers
    r  = (s2 + m2) / (s2 / S + m2)                                       of the running means of both
    v <- momentum v + g,   w <- w - lr r v

`lr` is that of a single worker: where gradients are all noise, r is S and the rate that of linear scaling; where they
are all alike, r is 1. The running means keep `1 - S/1000` at each step. The mean over workers is weighted with their
images, so that uneven batches count for what they are. Departures: a run is as long as it was planned, and its
schedule follows its own steps, where the paper counts r for each of them; running means begin as the mean of the steps
so far.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.joint_optimizer import Joint, JointOptimizer
from polyrhythm.training.quantities import Decay, Positive

_MEMORY = 1000
_LEAST_NOISE = 1e-6
"""As in the paper's appendix; so that r is 1 where nothing is known."""


class AdaScaleOptimizer(JointOptimizer):
    """AdaScale by the module's rule; the state of the first group has the running means."""

    observes: ClassVar[bool] = False
    compares: ClassVar[bool] = True
    options: ClassVar = {
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "steps": 0,
        "noise": 0.0,
        "signal": 0.0,
    }

    def tie(self, model: nn.Module) -> None:
        self._rates = [group["lr"] for group in self.param_groups]
        self._own = (0.0, 0)

    def begin(self, number: int, seed: int) -> None:
        self._own = (0.0, 0)

    def note_own(self, gradients: Tensor, images: int) -> None:
        self._own = float(gradients.double().square().sum()), images

    @property
    def gain(self) -> float:
        """Factor of the learning rate, for as many workers as had images in the latest step."""
        group = self.param_groups[0]
        count, noise, signal = self._count, max(group["noise"], _LEAST_NOISE), max(group["signal"], 0.0)
        return float((noise + signal) / (noise / count + signal)) if group["steps"] else 1.0

    _count = 1

    def update(self, flat: FlatParameters, rate: float) -> None:
        square, images = self._own
        mean = float(flat.gradients.double().square().sum()) if self.workers.rank == 0 else 0.0
        sent = torch.tensor([images * square, images, float(images > 0), mean], dtype=torch.float64)
        sent = sent.to(flat.vector.device)
        self.workers.all_reduce(sent)
        squares, all_images, count, mean = sent.tolist()
        # From here on nothing can fail any more.
        group = self.param_groups[0]
        if count > 1:
            noise = count / (count - 1) * (squares / all_images - mean)
            signal = mean - noise / count
            kept = min(max(1 - count / _MEMORY, 0.0), 1 - 1 / (group["steps"] + 1))
            group["noise"] = kept * group["noise"] + (1 - kept) * noise
            group["signal"] = kept * group["signal"] + (1 - kept) * signal
            group["steps"] += 1
        self._count = round(count)
        gain = self.gain if count > 1 else 1.0
        for each, usual in zip(self.param_groups, self._rates, strict=True):
            each["lr"] = rate if usual == self._rates[0] else rate * usual / self._rates[0]
            for parameter in each["params"]:
                self._step_one(parameter, each["lr"] * gain, each["momentum"], each["weight_decay"])

    @torch.no_grad()
    def _step_one(self, parameter: nn.Parameter, rate: float, momentum: float, decay: float) -> None:
        direction = parameter.grad
        if direction is None:
            return
        if decay:
            direction = direction.add(parameter, alpha=decay)
        if momentum:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = direction.clone()
            else:
                state["momentum_buffer"].mul_(momentum).add_(direction)
            direction = state["momentum_buffer"]
        parameter.add_(direction, alpha=-rate)


class AdaScale(Joint):
    """Keys of AdaScale SGD.

    Attributes:
        lr: learning rate of a single worker, before any schedule.
        momentum: share of the buffer that is kept at each step.
    """

    kind: ClassVar = AdaScaleOptimizer
    layerwise: ClassVar[bool] = True
    follows_network: ClassVar[bool] = False

    lr: Positive = 0.05
    momentum: Decay = 0.9
