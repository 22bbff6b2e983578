"""More loops of a user's own, beside those of `variations.py`: what torch's tests of DDP and training recipes do.

Each is generated with what differs of it: a network, an optimizer, a scheduler, or what is done between the passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint_sequential

from unit.api.loop.loops import EPOCHS, Loop, Network

_Loop = Callable[[Loop], None]


# What is done with gradients between the backward pass and the step.


def _with_gradients(act: Callable[[Loop], object]) -> _Loop:
    def run(loop: Loop) -> None:
        for _, _, x, y in loop.steps():
            loop.loss(x, y).backward()
            loop.mean()
            act(loop)
            loop.update()

    return run


def _scaled(loop: Loop) -> None:
    for each in loop.with_gradients():
        each.grad.mul_(2.0)


def _replaced(loop: Loop) -> None:
    for each in loop.with_gradients():
        each.grad = each.grad * 0.5


def _signs(loop: Loop) -> None:
    for each in loop.with_gradients():
        each.grad.copy_(torch.where(each.grad.abs() > 1e-9, each.grad.sign(), each.grad) * 0.01)


def _centered(loop: Loop) -> None:
    for each in loop.with_gradients():
        if each.ndim > 1:
            each.grad.sub_(each.grad.mean(1, keepdim=True))


def _noisy(loop: Loop) -> None:
    generator = torch.Generator().manual_seed(len(loop.seen))
    loop.seen.append(0.0)
    for each in loop.with_gradients():
        each.grad.add_(torch.randn(each.shape, generator=generator, dtype=each.dtype), alpha=1e-3)


def _by_layer(loop: Loop) -> None:
    for each in loop.with_gradients():
        nn.utils.clip_grad_norm_([each], 0.05)


def _mixed_with_last(loop: Loop) -> None:
    """Optimistic gradients: twice this one less the last."""
    last = loop.kept.setdefault("last", {})
    for number, each in enumerate(loop.parameters()):
        if each.grad is not None:
            now = each.grad.clone()
            each.grad.mul_(2.0).sub_(last.get(number, now))
            last[number] = now


def _dropped_sometimes(loop: Loop) -> None:
    loop.seen.append(0.0)
    if len(loop.seen) % 3 == 0:
        loop.model.zero_grad(set_to_none=True)


GRADIENTS = {
    "scales_gradients": _scaled,
    "replaces_gradients": _replaced,
    "takes_signs": _signs,
    "centers_gradients": _centered,
    "adds_noise": _noisy,
    "clips_each_layer": _by_layer,
    "optimistic_gradients": _mixed_with_last,
    "drops_gradients": _dropped_sometimes,
}


# What is written to parameters after the step.


def _after_steps(act: Callable[[Loop, int, int], object]) -> _Loop:
    def run(loop: Loop) -> None:
        for epoch, step, x, y in loop.steps():
            loop.loss(x, y).backward()
            loop.update()
            with torch.no_grad():
                act(loop, epoch, step)

    return run


def _max_norm(loop: Loop, epoch: int, step: int) -> None:
    loop.model.head.weight.copy_(torch.renorm(loop.model.head.weight, 2, 0, 0.5))


def _pruned(loop: Loop, epoch: int, step: int) -> None:
    weight = loop.model.trunk.weight
    weight.mul_((torch.arange(weight.numel()) % 3 > 0).view_as(weight))


def _lookahead(loop: Loop, epoch: int, step: int) -> None:
    slow = loop.kept.setdefault("slow", [each.clone() for each in loop.parameters()])
    if step % 2:
        for each, kept in zip(loop.parameters(), slow, strict=True):
            kept.lerp_(each, 0.5)
            each.copy_(kept)


def _reset(loop: Loop, epoch: int, step: int) -> None:
    if (epoch, step) == (1, 0):
        for each in loop.model.head.parameters():
            each.copy_(torch.linspace(-0.1, 0.1, each.numel()).view_as(each))


def _restored(loop: Loop, epoch: int, step: int) -> None:
    if (epoch, step) == (0, 2):
        loop.kept["best"] = copy.deepcopy(loop.model.state_dict())
    if (epoch, step) == (2, 0):
        loop.model.load_state_dict(loop.kept["best"])


def _from_vector(loop: Loop, epoch: int, step: int) -> None:
    vector = nn.utils.parameters_to_vector(loop.parameters())
    nn.utils.vector_to_parameters(vector * 0.99, loop.parameters())


WRITES = {
    "max_norm": _max_norm,
    "prunes": _pruned,
    "lookahead": _lookahead,
    "resets_a_layer": _reset,
    "restores_weights": _restored,
    "writes_a_vector": _from_vector,
}


# How losses and passes are made.


def double_backward(loop: Loop) -> None:
    """A penalty on the gradient with respect to the inputs."""
    for _, _, x, y in loop.steps():
        x = x.clone().requires_grad_(True)
        loss = loop.loss(x, y)
        (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
        (loss + 0.1 * slope.square().sum(1).mean()).backward()
        loop.update()


def several_losses(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        torch.autograd.backward([loop.loss(x, y), 0.3 * loop.model(x).square().mean()])
        loop.update()


def retained_graph(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        loss = loop.loss(x, y)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        loop.update()


def gradient_of_a_vector(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        losses = nn.functional.cross_entropy(loop.model(x), y, reduction="none")
        losses.backward(torch.full_like(losses, 1 / len(losses)))
        loop.update()


def detached_target(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        target = loop.model(x).softmax(1)
        target.detach_()
        (loop.loss(x, y) + 0.1 * (loop.model(x).softmax(1) - target.flip(1)).square().mean()).backward()
        loop.update()


def branches_by_data(loop: Loop) -> None:
    """Which layers a pass runs through depends on its data, and so differs between workers."""
    for _, _, x, y in loop.steps():
        some = x[:, 0] > 0.6
        parts = [(x[~some], y[~some], False)] + ([(x[some], y[some], True)] if some.any() else [])
        losses = [
            nn.functional.cross_entropy(loop.model(inputs, branch=branch), labels, reduction="sum")
            for inputs, labels, branch in parts
            if len(inputs)
        ]
        (sum(losses, torch.zeros(())) / len(x)).backward()
        loop.update()


def grows(loop: Loop) -> None:
    """A branch that is used from the second epoch on."""
    for epoch, _, x, y in loop.steps():
        loop.loss(x, y, branch=epoch > 0).backward()
        loop.update()


def siamese(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        (loop.loss(x, y) + 0.2 * (loop.model(x) - loop.model(-x)).square().mean()).backward()
        loop.update()


def functional_call(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        found = torch.func.functional_call(loop.model, dict(loop.model.named_parameters()), (x,))
        nn.functional.cross_entropy(found, y).backward()
        loop.update()


def functional_gradients(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        named = dict(loop.model.named_parameters())

        def loss(given: dict[str, Tensor], x: Tensor = x, y: Tensor = y) -> Tensor:
            return nn.functional.cross_entropy(torch.func.functional_call(loop.model, given, (x,)), y)

        found = torch.func.grad(loss)({name: each.detach() for name, each in named.items()})
        for name, each in named.items():
            each.grad = found[name]
        loop.update()


def zeroes_first(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        loop.optimizer.zero_grad(set_to_none=False)
        loop.loss(x, y).backward()
        loop.optimizer.step()


def many_steps_a_batch(loop: Loop) -> None:
    for _, _, x, y in loop.steps():
        for _ in range(2):
            loop.loss(x, y).backward()
            loop.update()


def validates(loop: Loop) -> None:
    """Tests in the middle of an epoch, with and without gradients, in evaluation mode."""
    for _, step, x, y in loop.steps():
        if step == 1:
            loop.model.eval()
            with torch.no_grad():
                loop.loss(x, y)
            loop.loss(x, y)
            loop.model.train()
        loop.loss(x, y).backward()
        loop.update()


def sharpness_aware(loop: Loop) -> None:
    """Two passes a step, the second one uphill (SAM)."""
    for _, _, x, y in loop.steps():
        loop.loss(x, y).backward()
        loop.mean()
        known = loop.with_gradients()
        norm = torch.stack([each.grad.norm() for each in known]).norm()
        moves = [0.05 * each.grad / norm for each in known]
        before = [each.detach().clone() for each in known]
        with torch.no_grad():
            for each, move in zip(known, moves, strict=True):
                each.add_(move)
        loop.optimizer.zero_grad()
        loop.loss(x, y).backward()
        with torch.no_grad():
            for each, kept in zip(known, before, strict=True):
                each.copy_(kept)
        loop.update()


def moving_average(loop: Loop) -> None:
    """A moving average of the weights, which the model takes over at the end of each epoch."""
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for _, step, x, y in loop.steps():
        loop.loss(x, y).backward()
        loop.update()
        average.update_parameters(loop.model)
        if step == 3:
            loop.model.load_state_dict(average.module.state_dict())


def teacher(loop: Loop) -> None:
    """A copy of the model, made before training, gives soft targets."""
    known = copy.deepcopy(loop.model).requires_grad_(False)
    for _, _, x, y in loop.steps():
        target = known(x).softmax(1)
        (loop.loss(x, y) + 0.1 * (loop.model(x).softmax(1) - target).square().mean()).backward()
        loop.update()


def hooked_gradients(loop: Loop) -> None:
    loop.model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    loop.model.head.register_full_backward_hook(lambda module, inputs, outputs: None)
    _with_gradients(lambda _: None)(loop)


def compiled_later(loop: Loop) -> None:
    loop.model.compile(backend="eager")
    simple(loop)


def plateau(loop: Loop) -> None:
    scheduler = lr_scheduler.ReduceLROnPlateau(loop.optimizer, patience=0, factor=0.5, threshold=0.5)
    for _, _, x, y in loop.steps():
        loss = loop.loss(x, y)
        loss.backward()
        loop.update()
        scheduler.step(loop.average(loss, len(x)))


PASSES: dict[str, _Loop] = {
    each.__name__: each
    for each in (
        double_backward, several_losses, retained_graph, gradient_of_a_vector, detached_target, branches_by_data, grows,
        siamese, functional_call, functional_gradients, zeroes_first, many_steps_a_batch, validates, sharpness_aware,
        moving_average, teacher, hooked_gradients, compiled_later, plateau,
    )
}  # fmt: skip


# Schedulers, each stepped after every batch.


def _scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> _Loop:
    def run(loop: Loop) -> None:
        scheduler = make(loop.optimizer)
        for _, _, x, y in loop.steps():
            loop.loss(x, y).backward()
            loop.update()
            scheduler.step()
            loop.seen.append(loop.optimizer.param_groups[0]["lr"])

    return run


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine_with_restarts": lambda given: lr_scheduler.CosineAnnealingWarmRestarts(given, 3),
    "cyclic": lambda given: lr_scheduler.CyclicLR(given, 0.01, 0.1, step_size_up=2),
    "warm_up_then_decay": lambda given: lr_scheduler.SequentialLR(
        given,
        [lr_scheduler.LinearLR(given, 0.1, total_iters=3), lr_scheduler.ExponentialLR(given, 0.9)],
        [3],
    ),
    "chained": lambda given: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(given, 0.5, 2), lr_scheduler.MultiplicativeLR(given, lambda _: 0.9)]
    ),
    "lambda": lambda given: lr_scheduler.LambdaLR(given, lambda step: 1 / (1 + step)),
}


# Networks.


class _Tied(Network):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8).double()
        self.again.weight = self.branch.weight

    def forward(self, x: Tensor, branch: bool = True, saves: bool | None = None) -> Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.branch(torch.tanh(self.trunk(x)))))))


class _Parametrized(Network):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.trunk)
        parametrizations.orthogonal(self.branch)


class _Odd(Network):
    """Has a scalar, an empty parameter, a buffer that counts, and a parameter that nobody uses."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, branch: bool = True, saves: bool | None = None) -> Tensor:
        self.steps += int(self.training)
        return super().forward(x, branch, saves) * self.scale


class _Convolutional(Network):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 2).double().to(memory_format=torch.channels_last)
        self.head = nn.Linear(8, 3).double()

    def forward(self, x: Tensor, branch: bool = True, saves: bool | None = None) -> Tensor:
        pictures = x.view(-1, 1, 2, 3).contiguous(memory_format=torch.channels_last)
        return self.head(torch.tanh(self.convolution(pictures)).flatten(1))


class _Recurrent(Network):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(2, 8, batch_first=True).double()

    def forward(self, x: Tensor, branch: bool = True, saves: bool | None = None) -> Tensor:
        return self.head(self.recurrent(x.view(-1, 3, 2))[0][:, -1])


class _Attentive(Network):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True).double()
        self.head = nn.Linear(6, 3).double()

    def forward(self, x: Tensor, branch: bool = True, saves: bool | None = None) -> Tensor:
        parts = x.view(-1, 3, 2)
        return self.head(self.attention(parts, parts, parts, need_weights=False)[0].flatten(1))


class _Embedding(Network):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8).double()

    def forward(self, x: Tensor, branch: bool = True, saves: bool | None = None) -> Tensor:
        return self.head(self.words((x * 10).long().clamp(-25, 24) + 25).mean(1))


class _Frozen(Network):
    """Batch normalization that is frozen, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double().requires_grad_(False)

    def forward(self, x: Tensor, branch: bool = True, saves: bool | None = None) -> Tensor:
        self.norm.eval()
        return self.head(self.norm(torch.tanh(self.branch(torch.tanh(self.trunk(x))))))


class _Synchronized(Network):
    """The statistics of all workers' batches are those of the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(8).double()
        self.planes = nn.SyncBatchNorm(2, momentum=None, affine=False).double()

    def forward(self, x: Tensor, branch: bool = True, saves: bool | None = None) -> Tensor:
        inputs = self.planes(x.view(-1, 2, 3)).flatten(1)
        return self.head(self.norm(torch.tanh(self.branch(torch.tanh(self.trunk(inputs))))))


class _Sequence(Network):
    def forward(self, x: Tensor, branch: bool = True, saves: bool | None = None) -> Tensor:
        layers = nn.Sequential(self.trunk, nn.Tanh(), self.branch, nn.Tanh())
        return self.head(checkpoint_sequential(layers, 2, x, use_reentrant=False))


class _Mixed(Network):
    """Its first layers are narrower than its head, as half-precision convolutions beside float norms."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk.float()
        self.branch.float()

    def forward(self, x: Tensor, branch: bool = True, saves: bool | None = None) -> Tensor:
        hidden = torch.tanh(self.branch(torch.tanh(self.trunk(x.float()))))
        return self.head(hidden.double())


NETWORKS: dict[str, Callable[[], Network]] = {
    "tied_weights": _Tied,
    "parametrizations": _Parametrized,
    "odd_parameters": _Odd,
    "channels_last": _Convolutional,
    "lstm": _Recurrent,
    "attention": _Attentive,
    "embedding": _Embedding,
    "frozen_norm": _Frozen,
    "synchronized_norm": _Synchronized,
    "mixed_dtypes": _Mixed,
    "checkpoint_sequential": _Sequence,
    "compiled": lambda: torch.compile(Network(), backend="eager"),
}


# Optimizers.


def _grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Each layer with a rate of its own; vectors without decay; one layer that nobody trains."""
    given = [each for name, each in model.named_parameters() if not name.startswith("branch")]
    groups = [
        {"params": [each], "lr": 0.02 * (number + 1), "weight_decay": 0.01 * (each.ndim > 1)}
        for number, each in enumerate(given)
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "param_groups": _grouped,
    "dampened_sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, dampening=0.3),
    "maximize": lambda model: torch.optim.SGD(model.parameters(), lr=0.001, maximize=True),
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=0.5),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.005, momentum=0.5, centered=True),
}


def simple(loop: Loop) -> None:
    """Forward, backward, step, with clipping."""
    for _, _, x, y in loop.steps():
        loop.loss(x, y).backward()
        nn.utils.clip_grad_norm_(loop.parameters(), 0.5)
        loop.update()


TRICKS: dict[str, _Loop] = (
    {name: _with_gradients(act) for name, act in GRADIENTS.items()}
    | {name: _after_steps(act) for name, act in WRITES.items()}
    | PASSES
    | {name: _scheduled(make) for name, make in SCHEDULES.items()}
    | dict.fromkeys([*NETWORKS, *OPTIMIZERS], simple)
)
EXACT = {"lbfgs": 1e-8, "mixed_dtypes": 1e-6}
"""How far they may be from plain torch, where not 1e-12: a history that makes much of the last bits, float32."""
assert EPOCHS == 3, "some of them do something in epochs 1 and 2"
