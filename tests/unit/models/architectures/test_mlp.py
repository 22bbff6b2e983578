import pytest
import torch

from polyrhythm.errors import RequestError
from polyrhythm.models.architectures.mlp import MLP
from polyrhythm.specs import build


def _numbers(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_default_on_digits_is_the_reports_64_64_10():
    assert _numbers(MLP().create(10, (1, 8, 8))) == 64 * 64 + 64 + 64 * 10 + 10


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("mlp(hidden=[])", 12 * 3 + 3),
        ("mlp(hidden=5)", 12 * 5 + 5 + 5 * 3 + 3),
        ("mlp(hidden=[5, 4], dropout=0.5)", 12 * 5 + 5 + 5 * 4 + 4 + 4 * 3 + 3),
    ],
)
def test_the_layers_have_the_widths_of_the_spec(spec, expected):
    config = build("model", spec, "polyrhythm.models.architectures")
    assert _numbers(config.create(3, (3, 2, 2))) == expected
    assert build("model", str(config), "polyrhythm.models.architectures") == config


def test_it_computes_the_rule_of_its_page():
    model = MLP(hidden=(5, 4)).create(3, (1, 2, 3)).double()
    w1, b1, w2, b2, w3, b3 = model.parameters()
    images = torch.randn(7, 1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    hidden = torch.tanh(torch.tanh(images.reshape(7, 6) @ w1.T + b1) @ w2.T + b2)

    torch.testing.assert_close(model(images), hidden @ w3.T + b3)


def test_dropout_acts_in_training_only():
    model = MLP(hidden=200, dropout=0.5).create(3, (1, 2, 3))
    images = torch.ones(1, 1, 2, 3)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


@pytest.mark.parametrize(
    "spec", ["mlp(hidden=0)", "mlp(dropout=1.0)", "mlp(activation=softplus)", "mlp(width=3)"]
)
def test_a_wrong_value_is_refused(spec):
    with pytest.raises(RequestError, match="model mlp"):
        build("model", spec, "polyrhythm.models.architectures")
