"""A page on which one drops an image, and reads what it shows: a server on loopback, for `predict --serve`.

    GET  /           the page
    POST /predict    an image file as the body; JSON: `classes`, `none_of_these`, `networks`, or `error` (status 400)

It answers this machine alone. A page of some other site, which a browser here has open, is not answered either: names
that lead to this address are refused by the request's `Host`, and what such a page sends by its `Origin`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from threading import BoundedSemaphore, Lock, Timer
from typing import IO, Any

from polyrhythm.api.predict import Networks
from polyrhythm.errors import RequestError, printable
from polyrhythm.escaping import html as escape
from polyrhythm.reporting.pages.report_page import STYLE

LOOPBACK = "127.0.0.1"
_MOST_BYTES = 64 << 20
_MOST_DIGITS = 20
_SILENT_S = 30.0
"""Seconds of silence after which a connection is closed."""
RECEIVED_S = 60.0
"""Limit of the seconds in which a request must have arrived whole, however often a part of it arrives."""
_WAITING = 128
"""Connections that may wait to be accepted."""
_AT_ONCE = 16
"""Images that are held in memory at once; further ones wait."""

Answer = Callable[[IO[bytes]], dict[str, Any]]


def serve(networks: Networks, top: int, port: int, ready: Callable[[str], None]) -> None:
    """Answer browsers on this machine until interrupted.

    Args:
        networks: networks that name what images show.
        top: number of classes of an image.
        port: TCP port on loopback; 0 takes a free one.
        ready: receiver of the page's address, once it can be opened.

    Raises:
        RequestError: the port is taken, or may not be used.
    """
    one_at_a_time = Lock()

    def answer(picture: IO[bytes]) -> dict[str, Any]:
        with one_at_a_time:
            (found,) = networks.described([picture], top)
        return found

    with server_of(answer, _page(networks), port) as server:
        ready(f"http://{LOOPBACK}:{server.server_port}/")
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            return


def server_of(answer: Answer, page: str, port: int) -> ThreadingHTTPServer:
    """Return a server of a page and of the answers to images that it sends, bound to loopback.

    Raises:
        RequestError: the port is taken, or may not be used.
    """
    held = BoundedSemaphore(_AT_ONCE)

    class Handler(BaseHTTPRequestHandler):
        """Answers one connection."""

        timeout = _SILENT_S
        _limit: Timer | None = None
        server_version, sys_version = "polyrhythm", ""

        def handle_one_request(self) -> None:
            """Handle a request, which must arrive in time."""
            self._limit = Timer(RECEIVED_S, self._stop_receiving)
            self._limit.daemon = True
            self._limit.start()
            try:
                super().handle_one_request()
            finally:
                self._limit.cancel()

        def _stop_receiving(self) -> None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RD)

        def do_GET(self) -> None:
            """Answer with the page."""
            if not self._is_ours():
                self._send(403, "text/plain", b"this page is for this machine\n")
            elif self.path == "/":
                self._send(200, "text/html; charset=utf-8", page.encode())
            else:
                self._send(404, "text/plain", b"there is nothing here\n")

        def do_POST(self) -> None:
            """Answer what an image shows."""
            length = self.headers.get("Content-Length", "")
            if not self._is_ours() or self.path != "/predict":
                self._refuse(403, "this page is for this machine")
            elif not length.isascii() or not length.isdigit():
                self._refuse(411, "the length of the image is missing")
            elif len(length) > _MOST_DIGITS or int(length) > _MOST_BYTES:
                self._refuse(413, f"an image may have at most {_MOST_BYTES >> 20} MiB")
            else:
                with held:
                    self._answer(int(length))

        def _answer(self, length: int) -> None:
            try:
                picture = self.rfile.read(length)
            except OSError:  # timeout: nothing was received
                picture = b""
            if self._limit is not None:
                self._limit.cancel()
            if len(picture) < length:
                self._refuse(408, "the image has not arrived in time")
                return
            try:
                found = answer(BytesIO(picture))
            except RequestError as error:
                self._refuse(400, str(error))
            else:
                self._send(200, "application/json", json.dumps(found).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: the page itself shows the result of each image."""

        def _is_ours(self) -> bool:
            own = [f"{name}:{server.server_port}" for name in (LOOPBACK, "localhost")]
            origin = self.headers.get("Origin")
            return self.headers.get("Host") in own and origin in (None, *(f"http://{name}" for name in own))

        def _refuse(self, status: int, why: str) -> None:
            self.close_connection = True  # the rest of the image is not read
            self._send(status, "application/json", json.dumps({"error": printable(why)}).encode())

        def _send(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            with suppress(OSError):  # the client has left
                self.end_headers()
                self.wfile.write(content)

    try:
        server = _Server((LOOPBACK, port), Handler)
    except OSError as error:
        raise RequestError(
            f"port {port} cannot be used ({error.strerror}): give another, or 0 for a free one"
        ) from None
    server.daemon_threads = True
    return server


class _Server(ThreadingHTTPServer):
    """A server with a queue long enough for a browser that sends many images at once."""

    request_queue_size = _WAITING


_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)

_OWN_STYLE = """
.drop { display: block; border: 2px dashed var(--rule); border-radius: 12px; background: var(--panel);
  padding: clamp(1.8rem, 6vw, 3.5rem) 1rem; text-align: center; cursor: pointer; margin: 1.6rem 0; }
.drop:hover, .drop:focus-within, .drop.over { border-color: var(--accent); }
.drop input { position: absolute; width: 1px; height: 1px; opacity: 0; }
.drop strong { font-size: 1.15rem; }
.shown { display: grid; grid-template-columns: minmax(0, 220px) minmax(0, 1fr); gap: 1.2rem; margin: 0 0 1.2rem;
  background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: 1rem; }
.shown img { width: 100%; max-height: 220px; object-fit: contain; border-radius: 4px; }
.shown h3 { overflow-wrap: anywhere; margin-bottom: .5rem; font-weight: 500; color: var(--soft); }
.shown ol { list-style: none; margin: 0; padding: 0; }
.shown li { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 0 1rem; margin: .45rem 0;
  overflow-wrap: anywhere; }
.shown li:first-child { font-weight: 650; font-size: 1.15rem; }
.shown li.none { display: block; color: var(--alarm); }
.shown li.none ~ li { font-weight: 400; font-size: 1rem; }
.bar { grid-column: 1 / -1; height: .5rem; border-radius: 3px;
  background: linear-gradient(to right, var(--accent) var(--part), var(--rule) var(--part)); }
.wrong { color: var(--alarm); }
@media (max-width: 560px) { .shown { grid-template-columns: 1fr; } .shown img { max-height: 300px; } }
"""

_OWN_SCRIPT = """
const drop = document.querySelector(".drop"), chosen = drop.querySelector("input");
const list = document.getElementById("found");
const made = (kind, text, name) => {
  const one = document.createElement(kind);
  if (text) one.textContent = text;
  if (name) one.className = name;
  return one;
};
async function show(file) {
  const card = made("article", "", "shown"), image = made("img"), text = made("div"), answers = made("ol");
  image.alt = "";
  image.src = URL.createObjectURL(file);
  image.onerror = () => { image.replaceWith(made("p", "no preview of this format", "soft small")); };
  const waits = made("p", "looking …", "soft");
  text.append(made("h3", file.name || "pasted image"), waits, answers);
  card.append(image, text);
  list.prepend(card);
  let found;
  try {
    found = await (await fetch("/predict", {method: "POST", body: file})).json();
  } catch {
    found = {error: "no answer: is polyrhythm predict --serve still running?"};
  }
  waits.remove();
  if (found.error) { text.append(made("p", found.error, "wrong")); return; }
  if (found.none_of_these) answers.append(made("li", "none of these", "none"));
  for (const each of found.classes) {
    const row = made("li"), bar = made("div", "", "bar"), share = (100 * each.probability).toFixed(1) + " %";
    bar.style.setProperty("--part", share.replace(" ", ""));
    row.append(made("span", each.class), made("span", share), bar);
    answers.append(row);
  }
}
async function all(files) { for (const file of files) await show(file); }
chosen.addEventListener("change", async () => { await all([...chosen.files]); chosen.value = ""; });
document.addEventListener("dragover", event => { event.preventDefault(); drop.classList.add("over"); });
document.addEventListener("dragleave", event => { if (!event.relatedTarget) drop.classList.remove("over"); });
document.addEventListener("drop", event => {
  event.preventDefault();
  drop.classList.remove("over");
  all([...event.dataTransfer.files]);
});
document.addEventListener("paste", event => all([...event.clipboardData.files]));
"""


def _page(networks: Networks) -> str:
    """Return the page for these networks."""
    names = ", ".join(escape(each.model_name) for each in networks.served)
    classes = networks.classes
    weights = "".join(
        f"<li><code>{escape(printable(str(each.weights)))}</code></li>" for each in networks.served
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>What does it show? – Polyrhythm</title>
<style>{STYLE}{_OWN_STYLE}</style>
</head>
<body>
<main>
<header><h1>What does it show?</h1>
<p class="soft">{names}, for {len(classes)} classes</p></header>
<label class="drop"><input type="file" accept="image/*" multiple>
<strong>Drop images here</strong><br><span class="soft">or choose files, or paste</span></label>
<section id="found" aria-live="polite" aria-label="Predicted classes"></section>
<details><summary>Classes and weights</summary>
<p class="small">{escape(", ".join(classes))}</p><ul class="small">{weights}</ul></details>
<footer>Images stay on this machine.</footer>
</main>
<script>{_OWN_SCRIPT}</script>
</body>
</html>
"""
