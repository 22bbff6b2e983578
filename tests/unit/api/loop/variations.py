"""Loops of a user's own in many variations, each for plain torch and for several workers.

`plain` is the same loop, without any distribution, on batches as large as all workers' together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from unit.api.loop import tricks
from unit.api.loop.loops import BATCH_SIZE, EPOCHS, Loop, Network, loader


def clip_norm(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        loop.loss(x, y).backward()
        loop.seen.append(float(nn.utils.clip_grad_norm_(loop.parameters(), 0.2)))
        loop.update()


def clip_value(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        loop.loss(x, y).backward()
        nn.utils.clip_grad_value_(loop.parameters(), 0.02)
        loop.update()


def group_clips(loop: Loop) -> None:
    """As `clip_norm` and `clip_value`, by the group."""
    for epoch, _, x, y in loop.steps():
        loop.loss(x, y).backward()
        if loop.group is None:
            if epoch:
                nn.utils.clip_grad_value_(loop.parameters(), 0.02)
            else:
                loop.seen.append(float(nn.utils.clip_grad_norm_(loop.parameters(), 0.2)))
        elif epoch:
            loop.group.clip_grad_value_(0.02)
        else:
            loop.seen.append(float(loop.group.clip_grad_norm_(0.2)))
        loop.update()


def logs_norms(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        loop.loss(x, y).backward()
        loop.seen += [float(each.grad.norm()) for each in loop.parameters() if each.grad is not None]
        loop.update()


def accumulates(loop: Loop) -> None:
    """Two passes a step, both averaged; clipped."""
    for _, step, x, y in loop.steps():
        (loop.loss(x, y) / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(loop.parameters(), 0.2)
            loop.update()


def accumulates_without_exchange(loop: Loop) -> None:
    """As `accumulates`; a ragged batch is averaged by itself."""
    for _, step, x, y in loop.steps():
        with nullcontext() if step else loop.accumulate():
            (loop.loss(x, y) / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(loop.parameters(), 0.2)
            loop.update()


def scaler_overflows(loop: Loop) -> None:
    """An overflow on one worker skips the step on all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for epoch, step, x, y in loop.steps():
        loss = loop.loss(x, y)
        if (epoch, step) == (1, 1) and (loop.group is None or loop.group.rank == loop.group.workers - 1):
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.parameters(), 0.2)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        loop.seen.append(scaler.get_scale())


def freezes(loop: Loop) -> None:
    """Freezes in epoch 1 and thaws in epoch 2; momentum and decay must rest meanwhile."""
    for epoch, _, x, y in loop.steps():
        loop.model.trunk.requires_grad_(epoch != 1)
        loop.loss(x, y).backward()
        loop.update()


def starts_frozen(loop: Loop) -> None:
    """The optimizer was given frozen parameters, which are thawed later."""
    for epoch, _, x, y in loop.steps():
        if epoch == 2:
            loop.model.trunk.requires_grad_(True)
        loop.loss(x, y).backward()
        loop.update()


def unused(loop: Loop) -> None:
    """A branch has no part in every second step."""
    for _, step, x, y in loop.steps():
        loop.loss(x, y, branch=bool(step % 2)).backward()
        loop.update()


def sets_none(loop: Loop) -> None:
    """Drops gradients by hand, and zeroes with `set_to_none=False`."""
    for epoch, step, x, y in loop.steps():
        loop.loss(x, y).backward()
        if step == 1:
            loop.model.branch.weight.grad = None
        loop.optimizer.step()
        if epoch == 1:
            loop.optimizer.zero_grad(set_to_none=False)
        else:
            loop.model.zero_grad()


def clamps(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        loop.loss(x, y).backward()
        loop.update()
        with torch.no_grad():
            for each in loop.parameters():
                each.clamp_(-0.1, 0.1)
            loop.model.head.weight.data = loop.model.head.weight.detach() * 0.99


def one_cycle(loop: Loop) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 0.1, epochs=EPOCHS, steps_per_epoch=4)
    for _, step, x, y in loop.steps():
        loop.optimizer.param_groups[0]["weight_decay"] = 0.01 * (step + 1)
        loop.loss(x, y).backward()
        loop.update()
        scheduler.step()


def two_passes(loop: Loop) -> None:
    """Two backward passes of one batch, one of them through checkpoints of activations."""
    for _, _, x, y in loop.steps():
        loop.loss(x, y).backward()
        loop.loss(x * 0.5, y, saves=False).backward()
        nn.utils.clip_grad_norm_(loop.parameters(), 0.2)
        loop.update()


def reentrant(loop: Loop) -> None:
    """Checkpoints that run backward passes within the backward pass."""
    for _, _, x, y in loop.steps():
        loop.loss(x, y, saves=True).backward()
        nn.utils.clip_grad_norm_(loop.parameters(), 0.2)
        loop.update()


def gradients_by_hand(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        found = torch.autograd.grad(loop.loss(x, y), loop.parameters())
        for parameter, gradient in zip(loop.parameters(), found, strict=True):
            parameter.grad = gradient
        loop.update()


def closure(loop: Loop) -> None:
    """The loss, by which LBFGS decides, is that of all."""
    for _, _, x, y in loop.steps():

        def evaluate(x: Tensor = x, y: Tensor = y) -> Any:
            loop.optimizer.zero_grad()
            loss = loop.loss(x, y)
            loss.backward()
            return loss.item() if loop.group is None else loop.group.average(loss.detach(), weight=len(x))

        loop.seen.append(loop.optimizer.step(evaluate))


class SignMomentum(torch.optim.Optimizer):
    """An optimizer that nobody knows, which looks at whole layers."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    kept = self.state[each].setdefault("kept", torch.zeros_like(each))
                    kept.mul_(0.9).add_(each.grad)
                    each.sub_(group["lr"] * kept / (1 + kept.norm()))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in model.parameters() if each.ndim == 2], lr=0.02)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = tricks.OPTIMIZERS | {
    "own_optimizer": lambda model: SignMomentum(model.parameters(), 0.1),
    "muon": _muon,
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    "one_cycle_adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}
LOOPS: dict[str, Callable[[Loop], None]] = {
    each.__name__: each
    for each in (
        clip_norm, clip_value, group_clips, logs_norms, accumulates, accumulates_without_exchange, scaler_overflows,
        freezes, starts_frozen, unused, sets_none, clamps, one_cycle, two_passes, reentrant, gradients_by_hand, closure,
    )
}  # fmt: skip
VARIATIONS = LOOPS | {
    "own_optimizer": clip_norm,
    "muon": clip_norm,
    "adam": unused,
    "lbfgs": closure,
    "one_cycle_adam": one_cycle,
    **tricks.TRICKS,
}


def made(variation: str) -> tuple[Network, torch.optim.Optimizer]:
    model = tricks.NETWORKS.get(variation, Network)()
    if variation == "starts_frozen":
        model.trunk.requires_grad_(False)
    return model, OPTIMIZERS.get(variation, _sgd)(model)


def plain(variation: str, workers: int) -> tuple[Tensor, list[float]]:
    """Return the parameters, `(n,)`, and what was seen, without any distribution."""
    model, optimizer = made(variation)
    loop = Loop(model, optimizer, loader(BATCH_SIZE * workers, workers))
    VARIATIONS[variation](loop)
    return nn.utils.parameters_to_vector(model.parameters()).detach(), loop.seen
