import subprocess
import sys

import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model, model_names
from polyrhythm.specs import parse

GREY = (1, 32, 32)


@pytest.fixture(scope="module")
def names():
    return model_names()


def test_a_module_is_given_back_as_it_is():
    module = nn.Linear(3, 2)
    assert create_model(module, classes=2, image_shape=(3, 1, 1)) is module


@pytest.mark.parametrize("spec", ["mlp(hidden=7)", parse("mlp(hidden=7)")])
def test_a_spec_may_be_text_or_parsed(spec):
    model = create_model(spec, classes=10, image_shape=(1, 8, 8))
    assert sum(parameter.numel() for parameter in model.parameters()) == 65 * 7 + 8 * 10


def test_weights_are_those_of_the_global_generator():
    def weights(seed):
        torch.manual_seed(seed)
        model = create_model("torchvision.resnet18", classes=10, image_shape=GREY)
        return nn.utils.parameters_to_vector(model.parameters()), torch.rand(3)

    (first, next_draw), (again, same_draw), (other, _) = weights(0), weights(0), weights(1)
    assert torch.equal(first, again)
    assert torch.equal(next_draw, same_draw)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["timm.resnet18", "torchvision.resnet18", "resnet18"])
def test_a_name_in_both_libraries_is_torchvisions_unless_prefixed(name):
    model = create_model(name, classes=7, image_shape=GREY)

    # of ResNet-18's 11,689,512 numbers two of three channels of 64x7x7 are gone, and the head is 513x7
    assert (
        sum(parameter.numel() for parameter in model.parameters())
        == 11_689_512 - 2 * 3136 - 513 * 1000 + 513 * 7
    )
    assert model(torch.zeros(2, *GREY)).shape == (2, 7)
    assert type(model).__module__.startswith("timm" if name.startswith("timm") else "torchvision")
    assert model.training


def test_names_are_unique_and_start_with_our_own(names):
    assert names[:5] == ["cell_network", "cifar_resnet", "deep_image", "lenet5", "mlp"]
    assert len(names) == len(set(names))
    assert {"alexnet", "resnet18", "timm.resnet18", "tf_efficientnet_lite0"} <= set(names)


def test_what_gives_no_class_is_not_listed(names):
    others = (
        "fasterrcnn_resnet50_fpn",
        "fcn_resnet50",
        "r3d_18",
        "quantized_resnet18",
        "gemma4_vit_167m_enc",
    )
    assert not set(others) & set(names)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet81", r"unknown model 'resnet81': did you mean .*resnet18"),
        ("lenet", r"unknown model 'lenet': did you mean .*lenet5"),
        ("nomodel", r"unknown model 'nomodel': there are \d+, such as .*lenet5"),
        ("torchvision.lenet5", r"unknown torchvision model 'lenet5'"),
        ("timm.alexnet", r"unknown timm model 'alexnet'"),
        ("resnet18(dropout=0.1)", r"resnet18 cannot be made with dropout=0.1: .*unexpected.*'dropout'"),
        ("timm.resnet18(width=2)", r"resnet18 cannot be made with width=2: .*unexpected.*'width'"),
        ("resnet18(num_classes=3)", r"leave num_classes out; the number of classes follows from the data"),
        ("timm.resnet18(pretrained=true)", r"leave pretrained out"),
        ("lenet5(width=3)", r"unknown key of model lenet5 'width': did you mean widths"),
        ("timm.", r"cannot read ''"),
    ],
)
def test_a_wrong_request_is_one_line_with_the_mend(spec, message):
    with pytest.raises(RequestError, match=message) as caught:
        create_model(spec, classes=10, image_shape=GREY)
    assert "\n" not in str(caught.value)


def test_our_own_models_do_not_pay_for_the_libraries():
    program = (
        "import sys; from polyrhythm.models import create_model;"
        "create_model('lenet5', classes=10, image_shape=(1, 28, 28));"
        "print(sorted({'torchvision', 'timm'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert result.stdout == "[]\n"
