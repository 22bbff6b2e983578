"""Steps that do not import torch's compiler have the bits of torch's own, and are not taken where a step has hooks."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from polyrhythm.training.flat_optimizer import make_optimizers_quickly, quick_step

make_optimizers_quickly()


def made(name):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    options = {"momentum": 0.9, "lr": 0.1} if name == "SGD" else {}
    return net, getattr(torch.optim, name)(net.parameters(), **options)


def trained(name, step_of):
    net, optimizer = made(name)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for seed in range(4):
        images = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
        net(images).square().mean().backward()
        step_of(optimizer)()
        optimizer.zero_grad()
        schedule.step()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


names = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
quick = {name: trained(name, quick_step) for name in names}

_, optimizer = made("Adam")
assert quick_step(optimizer) is not None
handle = optimizer.register_step_pre_hook(lambda *_: None)
assert quick_step(optimizer) is None
handle.remove()
handle = register_optimizer_step_post_hook(lambda *_: None)
assert quick_step(optimizer) is None
handle.remove()
assert quick_step(optimizer) is not None
optimizer.step = lambda: None
assert quick_step(optimizer) is None
assert "torch._dynamo" not in sys.modules

for name, vector in quick.items():
    assert torch.equal(vector, trained(name, lambda optimizer: optimizer.step)), name
assert "torch._dynamo" in sys.modules
assert quick_step(made("Adam")[1]) is None
"""


def test_quick_steps_have_the_bits_of_torchs_own_without_its_compiler() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True)
    assert not done.returncode, done.stderr
