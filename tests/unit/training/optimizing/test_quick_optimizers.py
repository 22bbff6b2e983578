import subprocess
import sys

import torch
from torch import nn

from polyrhythm.training.flat_optimizer import Span, make_optimizers_quickly
from polyrhythm.training.optimizer_plan import OptimizerPlan

PROGRAM = """
import sys, torch
from polyrhythm.api.train import prepare_process
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
prepare_process()
for kind in (torch.optim.SGD, torch.optim.Adam):
    model = torch.nn.Linear(3, 2)
    flat = FlatParameters(model)
    made = OptimizerPlan.of(kind(model.parameters(), lr=0.1), flat).build(flat.vector)
    made.step(torch.ones(8), 0.1)
    made.state()
print("torch._dynamo" in sys.modules)
method = torch.optim.Optimizer.zero_grad.__wrapped__
torch.compile(model, backend="eager")
torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
print(method.__dict__["__dynamo_disable"] is method)
"""


def test_a_process_that_trains_does_not_import_the_compiler_until_it_compiles_something() -> None:
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, timeout=100, capture_output=True, text=True
    )
    assert told.stdout.split() == ["False", "False"]


def test_optimizers_stay_what_they_are() -> None:
    make_optimizers_quickly()
    make_optimizers_quickly()
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.1})
    parameter.grad = torch.tensor([2.0, 4.0])
    optimizer.step()
    assert parameter.tolist() == [0.0, -4.0]
    copy = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    copy.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    copy.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in copy.param_groups] == [0.5, 0.1]
    optimizer.zero_grad()
    assert parameter.grad is None


def test_a_flat_step_records_no_gradients() -> None:
    vector = torch.ones(3)
    plan = OptimizerPlan("SGD", (Span(0, 3, {"lr": 0.5}),), 0.5)
    plan.build(vector).step(torch.tensor([1.0, 2.0, 3.0]), 0.25)
    assert vector.tolist() == [0.75, 0.5, 0.25]
    assert torch.is_grad_enabled()
