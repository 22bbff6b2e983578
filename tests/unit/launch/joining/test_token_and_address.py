"""Run tokens from files and the environment, and addresses as people write them."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.launch.joining.connections import (
    LEAST_CHARACTERS,
    TOKEN_VARIABLE,
    Address,
    door_key,
    draw_token,
    link_key,
    listener_at,
    parse_address,
    read_token,
)

GOOD = "t" * LEAST_CHARACTERS


def test_a_file_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, f" {GOOD}e ")
    assert read_token(None) == f"{GOOD}e"
    file = tmp_path / "token"
    file.write_text(f"{GOOD}f\n")
    file.chmod(0o640)
    assert read_token(file) == f"{GOOD}f"


def test_short_and_unreadable_tokens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, GOOD[1:])
    with pytest.raises(
        RequestError, match=rf"^the token of the environment's {TOKEN_VARIABLE} has 15 characters"
    ):
        read_token(None)
    with pytest.raises(RequestError, match=r"^cannot read the token file [^ ]+: [A-Z][a-z ]+$"):
        read_token(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff" * 40)
    (tmp_path / "bytes").chmod(0o600)
    with pytest.raises(RequestError, match=r"^cannot read the token file"):
        read_token(tmp_path / "bytes")


def test_a_token_that_every_user_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "the token"
    file.write_text(f"{GOOD}\n")
    file.chmod(0o644)
    with pytest.raises(RequestError) as refusal:
        read_token(file)
    assert str(refusal.value) == (
        f"the token file {file} can be read by every user of this host: chmod 600 '{file}'"
    )


def test_a_drawn_token_is_for_its_owner_alone(tmp_path: Path) -> None:
    token, file = draw_token(tmp_path)
    assert read_token(file) == token
    assert len(bytes.fromhex(token)) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    again, file = draw_token(tmp_path)
    assert again != token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_keys_of_door_and_links_are_not_the_same() -> None:
    assert len({door_key(GOOD), link_key(GOOD), door_key(GOOD + "x"), link_key(GOOD + "x")}) == 4


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.5:4711", Address("10.0.0.5", 4711)),
        ("4711", Address("127.0.0.1", 4711)),
        (":0", Address("127.0.0.1", 0)),
        ("node7:80", Address("node7", 80)),
        ("[::1]:80", Address("::1", 80)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "host:65536", "host:-1", "1.2.3.4:¹"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot read the address"):
        parse_address(text)


def test_a_door_listens_on_one_interface_that_is_there_and_free() -> None:
    with pytest.raises(RequestError, match="names no interface"):
        listener_at(Address("0.0.0.0", 0))
    with pytest.raises(RequestError, match="cannot be used"):
        listener_at(Address("192.0.2.1", 0))  # of documents only
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RequestError, match="cannot be used"):
        listener_at(Address("127.0.0.1", taken.getsockname()[1]))
    with listener_at(Address("127.0.0.1", 0)) as free:
        assert free.getsockname()[0] == "127.0.0.1"
