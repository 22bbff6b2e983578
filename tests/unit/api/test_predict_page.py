"""The page on which one drops a picture: its server on loopback, and what a browser shows."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from PIL import Image

import polyrhythm
from browser import Browser, chromium
from polyrhythm.api import predict_page
from polyrhythm.api.predict import Networks
from polyrhythm.api.predict_page import serve
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.models.weights import save_weights

FACTS = {"image_shape": "3,8,8", "black": "-1,-1,-1", "white": "1,1,1"}
EVIL = "<img src=x onerror=alert(1)>"
Asked = Callable[..., tuple[int, str]]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "w.safetensors"
    model = create_model("mlp", classes=3, image_shape=(3, 8, 8))
    save_weights(model, path, {"model": "mlp", "classes": f"cat\ndog\n{EVIL}", **FACTS})
    return path


def _png() -> bytes:
    file = BytesIO()
    Image.linear_gradient("L").convert("RGB").save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def address(weights: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that runs in a thread until the test is over."""
    made, at = [], []
    original = predict_page.server_of

    def noted(*arguments: object) -> object:
        made.append(original(*arguments))  # type: ignore[arg-type]
        return made[0]

    monkeypatch.setattr(predict_page, "server_of", noted)
    up = Event()

    def ready(address: str) -> None:
        at.append(address)
        up.set()

    networks = Networks.load(weights, "cpu", None, 0.99, {})
    thread = Thread(target=serve, args=(networks, 3, 0, ready))
    thread.start()
    assert up.wait(20)
    yield at[0]
    made[0].shutdown()
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def ask(address: str) -> Asked:
    """Sends a request with headers of the test's own; returns status and text."""
    host = address.removeprefix("http://").rstrip("/")

    def asked(method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found

    return asked


def test_a_picture_that_is_sent_is_named_as_predict_names_it(
    ask: Asked, weights: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(_png())
    (expected,) = polyrhythm.predict(tmp_path / "a.png", weights, top=3, none_below=0.99)["images"]
    status, text = ask("POST", "/predict", _png())
    found = json.loads(text)
    assert status == 200
    assert found["classes"] == expected["classes"]
    assert found["none_of_these"]


def test_what_is_no_picture_is_said_so(ask: Asked) -> None:
    status, text = ask("POST", "/predict", b"no picture")
    assert (status, json.loads(text)["error"]) == (
        400,
        "the image cannot be read (not an image): repair it, or leave it out",
    )


def test_only_this_machine_is_answered(ask: Asked, address: str) -> None:
    assert ask("GET", "/")[0] == 200
    assert ask("GET", "/etc/passwd")[0] == 404
    assert ask("GET", "/", Host="evil.example")[0] == 403  # a name that leads here
    assert ask("POST", "/predict", _png(), Origin="http://evil.example")[0] == 403
    assert ask("POST", "/predict", _png(), Origin=address.rstrip("/"))[0] == 200
    assert ask("POST", "/predict", **{"Content-Length": str(1 << 40)})[0] == 413
    assert ask("POST", "/predict", **{"Content-Length": "-1"})[0] == 411


def test_many_pictures_at_once_are_all_named(ask: Asked) -> None:
    picture = _png()
    with ThreadPoolExecutor(50) as threads:
        found = list(threads.map(lambda _: ask("POST", "/predict", picture)[0], range(50)))
    assert found == [200] * 50


def test_a_picture_that_does_not_arrive_in_time_is_refused(
    ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict_page, "RECEIVED_S", 0.05)
    status, text = ask("POST", "/predict", b"some", **{"Content-Length": "100"})
    assert (status, json.loads(text)["error"]) == (408, "the image has not arrived in time")
    assert ask("POST", "/predict", **{"Content-Length": "9" * 5000})[0] == 413


def test_a_port_that_is_taken_is_named(address: str, weights: Path) -> None:
    port = int(address.rsplit(":", 1)[1].rstrip("/"))
    with pytest.raises(RequestError, match=f"port {port} cannot be used"):
        serve(Networks.load(weights, "cpu", None, 0, {}), 3, port, print)


DROP = """
(async () => {
  const bytes = Uint8Array.from(atob("%s"), letter => letter.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], "%s", {type: "image/png"}));
  document.querySelector(".drop").dispatchEvent(
    new DragEvent("drop", {bubbles: true, cancelable: true, dataTransfer: files}));
  for (let turn = 0; turn < 200; turn++) {
    const card = document.querySelector(".shown");
    if (card && !card.querySelector("p.soft:not(.small)")) return card.innerText;
    await new Promise(done => setTimeout(done, 50));
  }
})()
"""


@pytest.mark.skipif(chromium() is None, reason="no Chromium")
@pytest.mark.parametrize("width", [1280, 375])
def test_a_browser_shows_what_a_dropped_picture_shows(width: int, address: str, tmp_path: Path) -> None:
    with Browser() as browser:
        browser.open_address(address, width=width)
        text = browser.evaluate(DROP % (base64.b64encode(_png()).decode(), "a" * 60 + ".png"))
        assert "none of these" in text
        assert EVIL in text  # as a text, not as an element
        assert text.count("%") == 3
        broken = browser.evaluate(DROP % (base64.b64encode(b"no picture").decode(), "b.png"))
        assert "cannot be read (not an image)" in broken
        wide = browser.evaluate("document.documentElement.scrollWidth")
        assert wide <= width
        browser.screenshot(tmp_path / "page.png")
        unexpected = [error for error in browser.errors if "400" not in error]
        assert not unexpected
        elsewhere = [each for each in browser.requests if not each.startswith((address, "blob:", "data:"))]
        assert not elsewhere
