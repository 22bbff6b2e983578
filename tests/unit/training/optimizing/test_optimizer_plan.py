"""Optimizers as plans: on the flat vector, or on shards of it, the bits of torch.optim on the model."""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.specs import build, choices
from polyrhythm.training.flat_optimizer import ELEMENTWISE, LAYERWISE, Span
from polyrhythm.training.flat_parameters import FlatParameters, shards
from polyrhythm.training.optimizer_plan import OptimizerPlan

FOLDER = "polyrhythm.training.optimizers"
OPTIM = torch.optim
# beside the catalog: classes that a user's own loop may bring
OTHERS = {
    "AdamW": lambda p: OPTIM.AdamW(p, lr=0.01),
    "Adamax": lambda p: OPTIM.Adamax(p, lr=0.01),
    "RAdam": lambda p: OPTIM.RAdam(p, lr=0.01),
    "Rprop": lambda p: OPTIM.Rprop(p, lr=0.01),
    "ASGD": lambda p: OPTIM.ASGD(p, lr=0.01),
    "SGD maximizing": lambda p: OPTIM.SGD(p, lr=0.01, momentum=0.9, dampening=0.5, maximize=True),
}


def perceptron(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(dtype)  # 44 numbers


def maker(name):
    return OTHERS[name] if name in OTHERS else build("optimizer", name, FOLDER).create


def gradient(step, dtype):
    return torch.randn(44, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def by_torch(make, rates, dtype):
    """Gives the vector after steps of the optimizer on the model's own tensors."""
    model = perceptron(dtype)
    optimizer = make(model.parameters())
    for step, rate in enumerate(rates):
        parts = gradient(step, dtype).split([parameter.numel() for parameter in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def plan_of(make, dtype=torch.float32):
    model = perceptron(dtype)
    optimizer = make(model.parameters())
    flat = FlatParameters(model)
    return OptimizerPlan.of(optimizer, flat), flat


ELEMENTWISE_CHOICES = [name for name, kind in choices(FOLDER).items() if not kind.layerwise]
RATES = [0.05, 0.04, 0.05, 0.01, 0.02, 0.02, 0.03]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", [*ELEMENTWISE_CHOICES, *OTHERS])
def test_flat_optimizers_have_the_bits_of_torch(name, servers, dtype):
    plan, flat = plan_of(maker(name), dtype)
    record = json.dumps(plan.to_json())  # as it travels
    pieces = shards(flat.size, servers)
    assert servers == 1 or pieces[0].stop not in {view.stop for view in flat.views}  # cuts a parameter
    optimizers = [
        OptimizerPlan.from_json(json.loads(record)).part(piece.start, piece.stop).build(flat.vector[piece])
        for piece in pieces
    ]
    for step, rate in enumerate(RATES):
        whole = gradient(step, dtype)
        for optimizer, piece in zip(optimizers, pieces, strict=True):
            optimizer.step(whole[piece], rate)
        assert torch.equal(whole, gradient(step, dtype)), "the gradient is not changed"
    assert torch.equal(flat.vector, by_torch(maker(name), RATES, dtype))


@pytest.mark.parametrize("name", [*choices(FOLDER), *OTHERS])
def test_state_goes_through_tensors_and_json(name):
    plan, flat = plan_of(maker(name))
    first = plan.build(flat.vector)
    for step, rate in enumerate(RATES[:4]):
        first.step(gradient(step, torch.float32), rate)
    tensors, facts = first.state()
    saved = {key: value.clone() for key, value in tensors.items()}
    vector = flat.vector.clone()
    second = plan.build(vector)
    second.load_state((saved, json.loads(json.dumps(facts))))
    for step, rate in enumerate(RATES[4:], start=4):
        second.step(gradient(step, torch.float32), rate)
    assert torch.equal(vector, by_torch(maker(name), RATES, torch.float32))


def two_groups(parameters):
    first, second, third, fourth = parameters
    return OPTIM.SGD(
        [{"params": [first], "lr": 0.1}, {"params": [fourth, second], "lr": 0.02, "momentum": 0.5}], lr=1.0
    ), third


def test_groups_become_spans_and_what_no_group_holds_is_left_alone():
    model = perceptron()
    optimizer, _ = two_groups(model.parameters())
    plan = OptimizerPlan.of(optimizer, FlatParameters(model))
    assert plan.kind == "SGD"
    assert [(span.start, span.stop) for span in plan.spans] == [(0, 15), (15, 20), (40, 44)]
    assert [(span.options["lr"], span.options["momentum"]) for span in plan.spans] == [
        (0.1, 0),
        (0.02, 0.5),
        (0.02, 0.5),
    ]
    assert "params" not in plan.spans[0].options


def test_neighbors_with_the_same_options_are_one_span():
    plan, _ = plan_of(lambda p: OPTIM.Adam(p, lr=0.01))
    assert [(span.start, span.stop) for span in plan.spans] == [(0, 44)]


@pytest.mark.parametrize("cuts", [[0, 44], [0, 10, 18, 30, 44], [0, 20, 40, 44]])
def test_several_groups_keep_their_ratio_whole_and_in_shards(cuts):
    model, reference = perceptron(), perceptron()
    optimizer, _ = two_groups(model.parameters())
    flat = FlatParameters(model)
    plan = OptimizerPlan.of(optimizer, flat)
    pieces = [slice(start, stop) for start, stop in pairwise(cuts)]
    parts = [plan.part(piece.start, piece.stop) for piece in pieces]
    if len(cuts) > 2:
        assert [span.options["lr"] for span in parts[-1].spans] == [0.02]  # no number of the first group
    made = [part.build(flat.vector[piece]) for part, piece in zip(parts, pieces, strict=True)]
    torch_optimizer, untrained = two_groups(reference.parameters())
    for step in range(3):
        whole = gradient(step, torch.float32)
        for parameter, part in zip(reference.parameters(), whole.split([15, 5, 20, 4]), strict=True):
            parameter.grad = None if parameter is untrained else part.view_as(parameter)
        torch_optimizer.step()
        for optimizer, piece in zip(made, pieces, strict=True):
            optimizer.step(whole[piece], 0.1)  # one rate for all shards: that of the vector's first group
    assert torch.equal(flat.vector, nn.utils.parameters_to_vector(reference.parameters()).detach())
    assert torch.equal(flat.vector[20:40], perceptron()[2].weight.detach().reshape(-1))


def test_the_learning_rate_is_the_first_groups_and_moves_the_others_with_it():
    model = perceptron()
    optimizer, _ = two_groups(model.parameters())
    flat = FlatParameters(model)
    before = flat.vector.clone()
    OptimizerPlan.of(optimizer, flat).build(flat.vector).step(torch.ones(44), 0.5)
    moved = before - flat.vector
    torch.testing.assert_close(moved[:15], torch.full((15,), 0.5))
    torch.testing.assert_close(moved[15:20], torch.full((5,), 0.1))
    torch.testing.assert_close(moved[40:], torch.full((4,), 0.1))
    assert torch.equal(moved[20:40], torch.zeros(20))


def test_a_part_cuts_through_spans_and_counts_from_its_own_start():
    plan = OptimizerPlan(
        "SGD", (Span(0, 10, {"lr": 1.0}), Span(10, 20, {"lr": 2.0}), Span(25, 30, {"lr": 3.0})), 1.0
    )
    assert plan.part(5, 27).spans == (
        Span(0, 5, {"lr": 1.0}),
        Span(5, 15, {"lr": 2.0}),
        Span(20, 22, {"lr": 3.0}),
    )
    assert plan.part(20, 25).spans == ()
    assert plan.part(12, 30).rate == 1.0
    assert plan.part(0, 30) == plan


def test_a_shard_that_is_not_trained_does_nothing():
    vector = torch.ones(5)
    optimizer = OptimizerPlan("Adam", (), 0.1).build(vector)
    optimizer.step(torch.ones(5), 0.1)
    assert torch.equal(vector, torch.ones(5))
    assert optimizer.state() == ({}, {})
    optimizer.load_state(({}, {}))


@pytest.mark.parametrize("name", choices(FOLDER))
def test_a_plan_is_json(name):
    plan, _ = plan_of(maker(name))
    again = OptimizerPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.kind == plan.kind
    assert [(span.start, span.stop) for span in again.spans] == [
        (span.start, span.stop) for span in plan.spans
    ]
    assert json.dumps(again.to_json()) == json.dumps(plan.to_json())


def test_the_whole_catalog_can_be_planned():
    kinds = {type(maker(name)(perceptron().parameters())) for name in choices(FOLDER)}
    assert kinds <= {*ELEMENTWISE.values(), *LAYERWISE.values()}


def test_a_class_that_needs_whole_matrices_is_refused():
    model = perceptron()
    optimizer = OPTIM.LBFGS(model.parameters())
    with pytest.raises(
        RequestError, match=r"^LBFGS cannot run on a slice of the parameters: use one of ASGD, Adadelta"
    ):
        OptimizerPlan.of(optimizer, FlatParameters(model))


def test_a_subclass_under_a_known_name_is_refused():
    kind = type("SGD", (OPTIM.SGD,), {})
    model = perceptron()
    with pytest.raises(RequestError, match=r"^SGD cannot run on a slice"):
        OptimizerPlan.of(kind(model.parameters(), lr=0.1), FlatParameters(model))


def test_a_parameter_of_another_model_is_refused():
    optimizer = OPTIM.SGD(perceptron().parameters(), lr=0.1)
    with pytest.raises(RequestError, match="trains a parameter that the model does not have"):
        OptimizerPlan.of(optimizer, FlatParameters(perceptron()))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "an optimizer plan lacks its kind, spans or rate"),
        ({"kind": "SGD"}, "an optimizer plan lacks its kind, spans or rate"),
        ({"kind": "SGD", "spans": [{"start": 0}]}, "an optimizer plan lacks its kind, spans or rate"),
        ({"kind": "SGD", "spans": []}, "an optimizer plan lacks its kind, spans or rate"),
        ({"kind": "SGD", "spans": [], "rate": "fast"}, "an optimizer plan lacks its kind, spans or rate"),
        ({"kind": "SGD", "spans": None, "rate": 0.1}, "an optimizer plan lacks its kind, spans or rate"),
        (
            {"kind": "os.system", "spans": [], "rate": 0.1},
            "an optimizer plan names 'os.system', which is none of ours",
        ),
    ],
)
def test_a_plan_that_names_no_optimizer_of_ours_is_refused(record, message):
    with pytest.raises(RequestError, match=f"^{message}$"):
        OptimizerPlan.from_json(record)


def test_a_rate_that_no_float_holds_is_refused():
    span = {"start": 0, "stop": 5, "options": {"lr": 10**400}}
    with pytest.raises(
        RequestError, match=r"^the learning rates of an optimizer plan must be numbers that are"
    ):
        OptimizerPlan.from_json({"kind": "SGD", "spans": [span], "rate": 0.1})


def test_frozen_parameters_are_passed_over_as_torch_does():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = FlatParameters(model)
    plan = OptimizerPlan.of(optimizer, flat)
    assert [(span.start, span.stop) for span in plan.spans] == [(0, 4)]


def test_an_optimizer_of_frozen_parameters_only_is_refused():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(RequestError, match="nothing to train"):
        OptimizerPlan.of(optimizer, FlatParameters(model))
