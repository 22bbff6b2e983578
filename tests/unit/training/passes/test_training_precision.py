"""Mixed precision, as far as a CPU can show it: bfloat16 as chosen, and float16's scaling of gradients."""

import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.training.forward_pass import Precision, use_repeatable_convolutions

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.float32), ("auto", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_chooses_on_a_cpu(name, dtype):
    precision = Precision.choose(name, CPU)
    assert precision.dtype == dtype
    with precision.autocast():
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype == dtype


def test_float32_leaves_a_float64_model_alone():
    with Precision.choose("float32", CPU).autocast():
        assert (
            nn.Linear(2, 2, dtype=torch.float64)(torch.zeros(1, 2, dtype=torch.float64)).dtype
            == torch.float64
        )


def test_bfloat16_computes_in_it_and_keeps_weights_and_gradients():
    torch.manual_seed(0)
    layer, images = nn.Linear(16, 4), torch.randn(8, 16)
    precision = Precision.choose("bfloat16", CPU)
    with precision.autocast():
        outputs = layer(images)
        loss = nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long))
    precision.scale(loss).backward()
    assert outputs.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    rounded = images.bfloat16().double() @ layer.weight.detach().bfloat16().double().T + layer.bias.double()
    torch.testing.assert_close(outputs.double(), rounded, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("name", ["float16", "float8", "half"])
def test_refuses_what_a_cpu_cannot_do_or_nobody_knows(name):
    with pytest.raises(RequestError, match=f"precision .?{name}"):
        Precision.choose(name, CPU)


def test_the_refusal_names_the_device_and_the_choices():
    with pytest.raises(
        RequestError, match="precision float16 is not possible on cpu: choose float32 or bfloat16"
    ):
        Precision.choose("float16", CPU)


def test_without_scaling_nothing_is_touched():
    precision = Precision.choose("bfloat16", CPU)
    loss, gradients = torch.tensor(2.0), torch.tensor([1.0, float("inf")])
    assert precision.scale(loss) is loss
    assert precision.unscale(gradients)
    assert gradients.tolist() == [1.0, float("inf")]
    assert precision.state_dict() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaled_gradients_come_back_exactly(dtype):
    precision = Precision(torch.float16, CPU)
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=dtype, requires_grad=True)
    precision.scale((weights**2).sum()).backward()
    assert weights.grad.tolist() == [2 * 65536, 4 * 65536, 6 * 65536]
    assert precision.unscale(weights.grad)
    assert weights.grad.tolist() == [2, 4, 6]
    assert weights.tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_is_told_and_halves_the_scale(bad):
    precision = Precision(torch.float16, CPU)
    assert precision.scale(torch.tensor(1.0)).item() == 65536
    assert not precision.unscale(torch.tensor([1.0, bad]))
    assert precision.scale(torch.tensor(1.0)).item() == 32768
    assert precision.unscale(torch.tensor([1.0, 2.0]))


def test_the_scale_survives_a_checkpoint():
    first = Precision(torch.float16, CPU)
    first.scale(torch.tensor(1.0))
    first.unscale(torch.tensor([float("inf")]))
    second = Precision(torch.float16, CPU)
    second.load_state_dict(first.state_dict())
    assert second.scale(torch.tensor(1.0)).item() == 32768
    assert second.state_dict() == first.state_dict()
    other = Precision.choose("bfloat16", CPU)
    other.load_state_dict(first.state_dict())
    assert other.state_dict() == {}
    first.load_state_dict({})
    assert first.scale(torch.tensor(1.0)).item() == 32768


@pytest.mark.parametrize(
    ("device", "dtype", "restricted"),
    [("cuda", torch.float32, True), ("cuda", torch.bfloat16, False), ("cpu", torch.float32, False)],
)
def test_float32_convolutions_of_a_gpu_have_the_same_bits_in_each_run(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, restricted: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    use_repeatable_convolutions(torch.device(device), dtype)
    assert torch.backends.cudnn.deterministic is restricted
