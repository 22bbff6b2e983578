"""Every optimizer of the folder against plain torch, its rule in numpy, and itself on slices."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.specs import build, choices
from polyrhythm.training.optimizers.sgd import SGD

FOLDER = "polyrhythm.training.optimizers"
STEPS = 8
# odd sizes, so that vectorised loops have tails, and one tensor in which their heads dominate
SHAPES = [(7,), (13, 11), (3, 5, 3, 3), (1,), (129,), (17, 31), (1000,)]
OPTIM = torch.optim

# spec, and the same with torch's own hands
CASES = {
    "sgd": lambda p: OPTIM.SGD(p, lr=0.05, momentum=0.9),
    "sgd(lr=0.3, momentum=0, weight_decay=0.01)": lambda p: OPTIM.SGD(p, lr=0.3, weight_decay=0.01),
    "sgd(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01)": lambda p: OPTIM.SGD(
        p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01
    ),
    "adagrad": lambda p: OPTIM.Adagrad(p, lr=0.01),
    "adagrad(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1, eps=0.01, weight_decay=0.01)": lambda p: (
        OPTIM.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1, eps=0.01, weight_decay=0.01)
    ),
    "adadelta": lambda p: OPTIM.Adadelta(p),
    "adadelta(lr=0.5, rho=0.8, eps=0.001, weight_decay=0.01)": lambda p: OPTIM.Adadelta(
        p, lr=0.5, rho=0.8, eps=1e-3, weight_decay=0.01
    ),
    "rmsprop": lambda p: OPTIM.RMSprop(p, lr=0.001),
    "rmsprop(lr=0.01, alpha=0.9, eps=0.1, momentum=0.9, centered=True, weight_decay=0.01)": lambda p: (
        OPTIM.RMSprop(p, lr=0.01, alpha=0.9, eps=0.1, momentum=0.9, centered=True, weight_decay=0.01)
    ),
    "adam": lambda p: OPTIM.Adam(p, lr=0.001),
    "adam(lr=0.01, betas=[0.8, 0.9], eps=0.001, amsgrad=True, weight_decay=0.01)": lambda p: OPTIM.Adam(
        p, lr=0.01, betas=(0.8, 0.9), eps=1e-3, amsgrad=True, weight_decay=0.01
    ),
    "nadam": lambda p: OPTIM.NAdam(p, lr=0.002),
    "nadam(lr=0.01, betas=[0.8, 0.9], eps=0.001, momentum_decay=0.1, weight_decay=0.01)": lambda p: (
        OPTIM.NAdam(p, lr=0.01, betas=(0.8, 0.9), eps=1e-3, momentum_decay=0.1, weight_decay=0.01)
    ),
    "adamw": lambda p: OPTIM.AdamW(p, lr=0.001, weight_decay=0.01),
    "adamw(lr=0.01, betas=[0.8, 0.9], eps=0.001, weight_decay=0.1)": lambda p: OPTIM.AdamW(
        p, lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1
    ),
}
OURS = ["tf1_rmsprop", "tf1_rmsprop(lr=0.05, decay=0.8, momentum=0.7, epsilon=0.1, weight_decay=0.01)"]


def start(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def gradients(step, dtype):
    generator = torch.Generator().manual_seed(100 + step)
    size = 10.0 ** (step % 3 - 1)
    return [size * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def advance(optimizer, parameters, gradients_of, steps=STEPS):
    base = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = base * (1 - 0.1 * step)
        for parameter, gradient in zip(parameters, gradients_of(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return flat(parameters)


def train(create, dtype):
    parameters = [nn.Parameter(tensor) for tensor in start(dtype)]
    return advance(create(parameters), parameters, lambda step: gradients(step, dtype))


def train_cut(create, dtype, cuts):
    """Trains slices of one vector, each with an optimizer of its own."""
    vector = flat(start(dtype))
    whole = [flat(gradients(step, dtype)) for step in range(STEPS)]
    for here, there in pairwise([0, *cuts, len(vector)]):
        slice_ = nn.Parameter(vector[here:there])
        advance(create([slice_]), [slice_], lambda step, a=here, b=there: [whole[step][a:b]])
    return vector


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec", CASES)
def test_equals_plain_torch_bit_for_bit(spec, dtype):
    assert torch.equal(train(build("optimizer", spec, FOLDER).create, dtype), train(CASES[spec], dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec", [*CASES, *OURS])
def test_one_flat_vector_or_slices_equal_separate_tensors_bit_for_bit(spec, dtype):
    create = build("optimizer", spec, FOLDER).create
    separate = train(create, dtype)
    assert torch.equal(train_cut(create, dtype, []), separate)
    assert torch.equal(train_cut(create, dtype, [1, 6, 101, 1024, 1477]), separate)


@pytest.mark.parametrize("spec", [*CASES, *OURS])
def test_a_spec_survives_text_and_pickle(spec):
    config = build("optimizer", spec, FOLDER)
    assert build("optimizer", str(config), FOLDER) == config
    assert pickle.loads(pickle.dumps(config)) == config


def sgd(w, g, state, t, lr, m=0.0, nesterov=False):
    v = state["v"] = m * state.get("v", 0.0) + g
    return w - lr * (g + m * v if nesterov else v)


def adagrad(w, g, state, t, lr, d, s0, e):
    s = state["s"] = state.get("s", s0) + g**2
    return w - lr / (1 + (t - 1) * d) * g / (np.sqrt(s) + e)


def adadelta(w, g, state, t, lr, r, e):
    s = state["s"] = r * state.get("s", 0.0) + (1 - r) * g**2
    d = g * np.sqrt(state.get("u", 0.0) + e) / np.sqrt(s + e)
    state["u"] = r * state.get("u", 0.0) + (1 - r) * d**2
    return w - lr * d


def rmsprop(w, g, state, t, lr, a, e, m):
    v = state["v"] = a * state.get("v", 0.0) + (1 - a) * g**2
    n = state["n"] = a * state.get("n", 0.0) + (1 - a) * g
    u = state["u"] = m * state.get("u", 0.0) + g / (np.sqrt(v - n**2) + e)
    return w - lr * u


def adam(w, g, state, t, lr, b1, b2, e):
    m = state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    v = state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
    state["largest"] = np.maximum(state.get("largest", 0.0), v)
    return w - lr * (m / (1 - b1**t)) / (np.sqrt(state["largest"] / (1 - b2**t)) + e)


def nadam(w, g, state, t, lr, b1, b2, e, d):
    m = state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    v = state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
    k = [b1 * (1 - 0.96 ** (i * d) / 2) for i in range(1, t + 2)]
    step = k[t] * m / (1 - np.prod(k)) + (1 - k[t - 1]) * g / (1 - np.prod(k[:-1]))
    return w - lr * step / (np.sqrt(v / (1 - b2**t)) + e)


def tf1_rmsprop(w, g, state, t, lr, r, m, e):
    v = state["v"] = r * state.get("v", 1.0) + (1 - r) * g**2
    u = state["u"] = m * state.get("u", 0.0) + lr * g / np.sqrt(v + e)
    return w - u


# the longer specs from above, all with weight decay 0.01
RULES = {
    list(CASES)[1]: (sgd, {"lr": 0.3}),
    list(CASES)[2]: (sgd, {"lr": 0.1, "m": 0.8, "nesterov": True}),
    list(CASES)[4]: (adagrad, {"lr": 0.1, "d": 0.1, "s0": 0.1, "e": 0.01}),
    list(CASES)[6]: (adadelta, {"lr": 0.5, "r": 0.8, "e": 1e-3}),
    list(CASES)[8]: (rmsprop, {"lr": 0.01, "a": 0.9, "e": 0.1, "m": 0.9}),
    list(CASES)[10]: (adam, {"lr": 0.01, "b1": 0.8, "b2": 0.9, "e": 1e-3}),
    list(CASES)[12]: (nadam, {"lr": 0.01, "b1": 0.8, "b2": 0.9, "e": 1e-3, "d": 0.1}),
    OURS[1]: (tf1_rmsprop, {"lr": 0.05, "r": 0.8, "m": 0.7, "e": 0.1}),
}


@pytest.mark.parametrize("spec", RULES)
def test_follows_its_written_rule_while_the_rate_changes(spec):
    rule, numbers = RULES[spec]
    w, state = flat(start(torch.float64)).numpy(), {}
    for step in range(STEPS):
        g = flat(gradients(step, torch.float64)).numpy() + 0.01 * w
        w = rule(w, g, state, step + 1, **{**numbers, "lr": numbers["lr"] * (1 - 0.1 * step)})
    trained = train(build("optimizer", spec, FOLDER).create, torch.float64)
    # NAdam keeps its product of momenta in float32
    np.testing.assert_allclose(trained.numpy(), w, rtol=1e-5 if rule is nadam else 1e-10, atol=1e-12)


@pytest.mark.parametrize("name", choices(FOLDER))
def test_the_defaults_learn_the_digits(name):
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = build("optimizer", name, FOLDER).create(model.parameters())
    for _ in range(15):
        for batch in torch.randperm(1400).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
    assert accuracy > 0.87


@pytest.mark.parametrize("name", choices(FOLDER))
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("lr=0", "lr should be greater than 0 (given 0)"),
        ("lr=-1", "lr should be greater than 0 (given -1)"),
        ("lr=1e999", "lr should be a finite number (given inf)"),
        ("lr=fast", "lr should be a valid number (given 'fast')"),
        ("lr=True", "lr should be a number (given True)"),
        ("weight_decay=-1e-4", "weight_decay should be greater than or equal to 0 (given -0.0001)"),
        ("weight_decai=1", "unknown key of optimizer"),
    ],
)
def test_refuses_values_out_of_range(name, values, message):
    with pytest.raises(RequestError) as caught:
        build("optimizer", f"{name}({values})", FOLDER)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sgd(momentum=1)", "momentum should be less than 1"),
        ("sgd(momentum=0, nesterov=True)", "nesterov=True needs a momentum above 0"),
        ("adam(betas=[0.9, 1.0])", "betas.1 should be less than 1"),
        ("adam(betas=[0.9])", "betas"),
        ("adadelta(eps=0)", "eps should be greater than 0"),
        ("rmsprop(alpha=1.5)", "alpha should be less than 1"),
        ("tf1_rmsprop(epsilon=0)", "epsilon should be greater than 0"),
        ("adamm", "did you mean adam"),
    ],
)
def test_refuses_what_one_optimizer_cannot_do(spec, message):
    with pytest.raises(RequestError, match=message):
        build("optimizer", spec, FOLDER)


def test_a_text_number_is_read_as_yaml_leaves_it():
    assert SGD(lr="1e-3").lr == 0.001
