"""Search by gradients: its steps against plain autograd, and the networks that it finds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional

from polyrhythm.api.tune import carry_out, plan
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.errors import RequestError
from polyrhythm.models.architectures.cell_network import CellNetwork
from polyrhythm.models.create import create_model
from polyrhythm.search.differentiable import EDGES, KINDS, Choice, Supernet, searched
from polyrhythm.search.space import Space

SHAPE = (1, 8, 8)
ALL = dict.fromkeys(EDGES, KINDS)
SPACE: dict[str, Any] = {
    "model": f"cell_network({', '.join(f'{name}={{{name}}}' for name in EDGES)}, channels=4)",
    **{name: list(KINDS) for name in EDGES},
}


def supernet(allowed: Any = ALL) -> Supernet:
    torch.manual_seed(0)
    return Supernet(allowed, CellNetwork(channels=3), 3, SHAPE).double()


def pictures(count: int) -> TensorSplit:
    """Of three classes: whether the left or the right half is brighter, or the upper one."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (count,), generator=generator)
    images = torch.randn(count, *SHAPE, generator=generator)
    images[labels == 0, :, :, :4] += 1
    images[labels == 1, :, :, 4:] += 1
    images[labels == 2, :, :4] += 1
    return TensorSplit(images, labels)


def dataset(count: int = 128) -> Dataset:
    return Dataset("halves", pictures(count), pictures(60), ("a", "b", "c"), SHAPE, default_epochs=2)


def test_where_one_kind_has_all_the_share_it_is_the_network_of_that_kind() -> None:
    """A mixed cell whose numbers are far apart is a plain cell; batch norm scales nothing in both."""
    kinds = dict(zip(EDGES, ("conv3", "skip", "pool", "zero", "conv1", "conv3"), strict=True))
    model = supernet()
    with torch.no_grad():
        for name, kind in kinds.items():
            model.numbers[name].fill_(-1e9)[KINDS.index(kind)] = 0
    single = supernet({name: (kind,) for name, kind in kinds.items()})
    for mixed, plain in zip(model.layers, single.layers, strict=True):
        if hasattr(mixed, "edges"):
            for edge, other, kind in zip(mixed.edges, plain.edges, kinds.values(), strict=True):
                other[0].load_state_dict(edge[KINDS.index(kind)].state_dict())
        else:
            plain.load_state_dict(mixed.state_dict())
    images = torch.randn(4, *SHAPE, dtype=torch.float64)
    torch.testing.assert_close(model(images), single(images))


def test_steps_are_those_of_plain_autograd_on_disjoint_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of parameter moves by its own half alone, numbers first, and the other kind stays meanwhile."""
    seen: list[tuple[str, torch.Tensor]] = []
    steps: list[str] = []
    for kind in (torch.optim.SGD, torch.optim.Adam):
        step = kind.step

        def watched(self: Any, closure: None = None, kind: Any = kind, step: Any = step) -> None:
            steps.append(kind.__name__)
            step(self)

        monkeypatch.setattr(kind, "step", watched)
    data = dataset()
    images = TensorSplit.images

    def asked(self: TensorSplit, indices: torch.Tensor) -> torch.Tensor:
        if self is data.train:
            seen.append(((len(seen) % 2 and "weights") or "numbers", indices))
        return images(self, indices)

    monkeypatch.setattr(TensorSplit, "images", asked)
    searched(data, ALL, CellNetwork(channels=3), epochs=2, batch_size=16, seed=3)
    assert steps == ["Adam", "SGD"] * 8
    of = {what: torch.cat([each for name, each in seen if name == what]) for what in ("weights", "numbers")}
    assert set(of["weights"].tolist()).isdisjoint(of["numbers"].tolist())
    assert len(set(of["weights"].tolist()) | set(of["numbers"].tolist())) == 128
    assert all(len(numbers) == 128 for numbers in of.values())


def test_the_slope_of_a_number_is_that_of_finite_differences() -> None:
    model = supernet()
    split = pictures(12)
    images, labels = split.images(torch.arange(12)).double(), split.labels

    def loss(changed: Supernet) -> torch.Tensor:
        return functional.cross_entropy(changed(images), labels)

    numbers = list(model.numbers.parameters())
    slopes = torch.autograd.grad(loss(model), numbers)
    for place, slope in ((0, slopes[0]), (5, slopes[5])):
        for kind in range(len(KINDS)):
            found = []
            for sign in (1, -1):
                changed = copy.deepcopy(model.state_dict())
                changed[f"numbers.{EDGES[place]}"][kind] += sign * 1e-5
                other = supernet()
                other.load_state_dict(changed)
                found.append(float(loss(other).detach()))
            assert float(slope[kind]) == pytest.approx((found[0] - found[1]) / 2e-5, rel=1e-4, abs=1e-8)


def test_the_same_seed_finds_the_same_and_the_loss_falls() -> None:
    found = [
        searched(dataset(96), ALL, CellNetwork(channels=2), epochs=3, batch_size=16, seed=5) for _ in range(2)
    ]
    assert found[0] == found[1]
    assert found[0].losses[-1] < found[0].losses[0]
    for name, shares in found[0].shares.items():
        assert sum(shares.values()) == pytest.approx(1)
        likely = {kind: share for kind, share in shares.items() if kind != "zero"}
        assert found[0].edges[name] == max(likely, key=likely.get)  # type: ignore[arg-type]


def test_an_edge_that_ruins_every_picture_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kind that gives noise and one that leaves pictures as they are, on the only way, the second wins."""
    from polyrhythm.models.architectures import cell_network
    from polyrhythm.search import differentiable

    class Noise(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.randn_like(images)

    def edge(kind: str, width: int) -> torch.nn.Module:
        return Noise() if kind == "pool" else cell_network.edge_of(kind, width)  # type: ignore[arg-type]

    monkeypatch.setattr(differentiable, "edge_of", edge)
    allowed: Any = dict.fromkeys(EDGES, ("zero",)) | {"e03": ("pool", "skip")}
    learned = searched(dataset(256), allowed, CellNetwork(channels=4), epochs=6, batch_size=16, seed=0)
    assert learned.edges["e03"] == "skip"
    assert learned.shares["e03"]["skip"] > 0.55
    assert learned.edges["e01"] == "zero"


@pytest.mark.parametrize(
    ("space", "why"),
    [
        ({**SPACE, "lr": [0.1, 0.2]}, "lr is none"),
        ({"lr": [0.1, 0.2]}, "lr is none"),
        ({"model": ["mlp", "lenet5"]}, "model is none"),
        ({**SPACE, "e01": ["skip", "conv5"]}, "e01 cannot be 'conv5'"),
        ({"model": "mlp(hidden={e01})", "e01": ["skip", "conv3"]}, "the model is mlp"),
        ({"model": "cell_network(e02={e01})", "e01": ["skip", "conv1"]}, "the model is cell_network"),
    ],
)
def test_what_is_not_an_edge_cannot_be_chosen_by_gradients(space: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        plan(space, method="darts", budget="1 trial")


def test_edges_that_are_given_stay() -> None:
    choice = Choice.of(Space.of({"model": "cell_network(e01={e01}, e12=pool)", "e01": ["skip", "conv3"]}))
    assert choice.allowed["e01"] == ("skip", "conv3")
    assert choice.allowed["e12"] == ("pool",)


def test_too_few_pictures_for_a_batch_are_refused() -> None:
    with pytest.raises(RequestError, match="lower --batch-size"):
        searched(dataset(30), ALL, CellNetwork(), epochs=1, batch_size=16, seed=0)


def test_the_network_found_is_an_ordinary_model(tmp_path: Path) -> None:
    told: list[str] = []
    what = plan(
        SPACE,
        method="darts",
        budget="1 trial",
        simulation={"cluster": "office"},
        options={"data": "digits", "epochs": 1, "batch_size": 128, "workers": 2},
    )
    done = carry_out(what, out=tmp_path / "a", jobs=1, notify=told.append)
    best = done.search.best()
    assert best is not None
    assert len(done.search.trials) == 1
    recipe = yaml.safe_load((tmp_path / "a/best.yaml").read_text())
    edges = json.loads((tmp_path / "a/edges.json").read_text())
    assert recipe["model"] == SPACE["model"].format(**edges["edges"])
    assert create_model(recipe["model"], classes=10, image_shape=SHAPE)(torch.zeros(2, *SHAPE)).shape == (
        2,
        10,
    )
    assert any("darts: epoch 1 of 1" in line for line in told)
