"""Weights that torchvision and the hub publish, fetched from a server of the test's own."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import save_file

from polyrhythm.errors import RequestError
from polyrhythm.models import fine_tuning as start
from polyrhythm.models.create import create_model, published_address
from polyrhythm.models.fine_tuning import head_of, pixels_of, start_from
from polyrhythm.models.pretrained import torchvision

SHAPE = (3, 64, 64)
REPOSITORY = "owner/tiny"


class _Served(SimpleHTTPRequestHandler):
    asked: list[str]

    def log_message(self, *ignored: object) -> None:
        self.asked.append(self.path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "web").mkdir()
    return tmp_path / "web"


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    handler = type("Handler", (_Served,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as listening:
        thread = Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", asked
        listening.shutdown()
        thread.join()


def _model(spec: str, classes: int, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return create_model(spec, classes=classes, image_shape=SHAPE)


def _published(folder: Path, mean: list[float]) -> dict[str, torch.Tensor]:
    """Puts a network's weights where the hub would have them."""
    files = folder / REPOSITORY / "resolve" / "main"
    files.mkdir(parents=True)
    tensors = _model("timm.test_efficientnet", 9, seed=1).state_dict()
    save_file(tensors, files / "model.safetensors")
    (files / "config.json").write_text(json.dumps({"pretrained_cfg": {"mean": mean}}))
    return tensors


def _hub(address: str) -> str:
    return f"hub(repository='{REPOSITORY}', address='{address}')"


def test_the_hubs_weights_are_fetched_once_and_only_the_head_is_new(
    folder: Path, server: tuple[str, list[str]]
) -> None:
    address, asked = server
    given = _published(folder, [0.5, 0.5, 0.5])
    model = _model("timm.test_efficientnet", 3, seed=2)
    for _ in range(2):
        start_from(model, _hub(address))
    head = f"{head_of(model)}."
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, torch.zeros_like(tensor) if name.startswith(head) else given[name]), name
    assert asked == [f"/{REPOSITORY}/resolve/main/model.safetensors"]


@pytest.mark.parametrize(("mean", "pixels"), [([0.485, 0.456, 0.406], "imagenet"), ([0.5] * 3, "centered")])
def test_pixels_are_normalized_as_the_repository_says(
    folder: Path, server: tuple[str, list[str]], mean: list[float], pixels: str
) -> None:
    _published(folder, mean)
    assert pixels_of(_hub(server[0])) == pixels


def test_pixels_that_pictures_cannot_have_are_refused(folder: Path, server: tuple[str, list[str]]) -> None:
    _published(folder, [0.1, 0.2, 0.3])
    with pytest.raises(RequestError, match=r"pixels of mean \(0.1, 0.2, 0.3\).*--pixels"):
        pixels_of(_hub(server[0]))


def test_without_a_network_the_refusal_is_one_line_that_says_what_to_do(folder: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RequestError) as refusal:
            start_from(_model("timm.test_efficientnet", 3, seed=2), _hub(address))
    message = str(refusal.value)
    assert "cannot be fetched" in message
    assert "Connection refused" in message
    assert "where there is a network" in message
    assert "\n" not in message
    assert not list((folder.parent / "home").rglob("*.safetensors"))


def test_a_file_that_came_only_in_part_is_not_kept(folder: Path) -> None:
    """The server promises more than it sends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 10)

        thread = Thread(target=answer)
        thread.start()
        with pytest.raises(RequestError, match="10 of 100 bytes arrived"):
            start_from(
                _model("timm.test_efficientnet", 3, seed=2),
                _hub(f"http://127.0.0.1:{listening.getsockname()[1]}"),
            )
        thread.join()
    assert [path for path in (folder.parent / "home").rglob("*") if path.is_file()] == []


def _torchvisions(
    folder: Path, address: str, monkeypatch: pytest.MonkeyPatch, told: str = ""
) -> dict[str, torch.Tensor]:
    tensors = _model("torchvision.shufflenet_v2_x0_5", 1000, seed=1).state_dict()
    torch.save(tensors | {"aux1.fc.weight": torch.zeros(1)}, folder / "weights.pth")
    checksum = told or sha256((folder / "weights.pth").read_bytes()).hexdigest()[:8]
    (folder / "weights.pth").rename(folder / f"shufflenet-{checksum}.pth")
    monkeypatch.setattr(torchvision, "published_address", lambda name: f"{address}/shufflenet-{checksum}.pth")
    return tensors


def test_torchvisions_weights_are_fetched_and_verified(
    folder: Path, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _torchvisions(folder, server[0], monkeypatch)
    model = _model("torchvision.shufflenet_v2_x0_5", 1000, seed=2)
    start_from(model, "torchvision(weights='ShuffleNet_V2_X0_5_Weights.DEFAULT')")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, given[name]), name


def test_another_file_than_the_known_one_is_refused(
    folder: Path, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _torchvisions(folder, server[0], monkeypatch, told="0123abcd")
    with pytest.raises(RequestError, match=r"is not the known file .* not 0123abcd"):
        start_from(
            _model("torchvision.shufflenet_v2_x0_5", 1000, seed=2),
            "torchvision(weights='ShuffleNet_V2_X0_5_Weights.DEFAULT')",
        )


def test_names_are_torchvisions() -> None:
    address = published_address("ResNet18_Weights.IMAGENET1K_V1")
    assert address.endswith("/resnet18-f37072fd.pth")
    assert published_address("ResNet18_Weights.DEFAULT") == address
    with pytest.raises(
        RequestError, match=r"unknown weights of torchvision 'ResNet18_Weight\.DEFAULT': did you mean"
    ):
        published_address("ResNet18_Weight.DEFAULT")


@pytest.mark.parametrize(
    ("weights", "pixels"),
    [("ResNet18_Weights.DEFAULT", "imagenet"), ("GoogLeNet_Weights.DEFAULT", "centered")],
)
def test_torchvisions_pixels(weights: str, pixels: str) -> None:
    assert start.pixels_of(f"torchvision(weights='{weights}')") == pixels
