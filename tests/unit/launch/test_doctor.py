"""What a machine allows, as `polyrhythm doctor` finds it: on this one, and on ones with less."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
from pathlib import Path

import pytest

from conformance.clean_process import CONTEXT
from polyrhythm.cli.main import _status, main
from polyrhythm.launch import doctor
from polyrhythm.launch.doctor import Finding, examine
from polyrhythm.launch.process import descriptors_needed

CHECKS = [
    *("open files", "processes", "cores", "memory", "shared memory", "loopback", "store", "interfaces"),
    *("name service", "ports", "disk", "GPU", "NCCL"),
]
CLONE_NEWNET = 0x40000000


def test_every_check_finds_something_here_and_leaves_nothing(tmp_path: Path) -> None:
    found = examine(tmp_path / "runs", 2)
    assert [each.check for each in found] == CHECKS
    assert all(each.found and each.state != "fails" for each in found), found
    assert not any("could not be looked at" in each.found for each in found), found
    assert not list(tmp_path.iterdir())


def test_it_says_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _status(["doctor", "--json", "--out", "runs"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fails"] is False
    assert [each["check"] for each in told["checks"]] == CHECKS
    files = told["checks"][0]
    assert files["values"]["needed"] == descriptors_needed(2)
    assert (files["values"]["soft"], files["values"]["hard"]) == resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_folder_that_cannot_be_written_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(["doctor", "--out", "/proc/runs"]) == 1
    assert "disk fails /proc/runs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("hard", "ranks", "state"), [(64, 8, "fails"), (96, 8, "ok"), (-1, 1000, "ok")])
def test_open_files_are_those_that_a_run_asks_for(
    hard: int, ranks: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, hard))
    assert doctor.open_files(ranks).state == state


def test_a_limit_on_processes_is_compared_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_group_limit", lambda _: 100)
    assert doctor.processes(8).state == "fails"
    assert doctor.processes(2).state == "ok"


def test_a_share_of_the_cores_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_cores", lambda: 16)
    monkeypatch.setattr(doctor, "_quota_of_cores", lambda: 1.5)
    found = doctor.cores(2)
    assert found.state == "limited"
    assert "1.5 of them" in found.found
    monkeypatch.setattr(doctor, "_quota_of_cores", lambda: None)
    assert doctor.cores(16).state == "ok"
    assert doctor.cores(17).state == "limited"


def test_a_name_service_that_knows_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = doctor.name_service()
    assert found.state == "limited"
    assert "--master-addr" in found.advice


def test_the_disk_of_a_folder_is_that_of_the_nearest_mount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mounts = ["/dev/a / ext4 rw 0 0", f"server:/b {tmp_path} nfs4 rw 0 0", "c /c tmpfs rw 0 0"]
    monkeypatch.setattr(doctor, "_lines", lambda _: iter(mounts))
    found = doctor.disk(tmp_path / "runs")
    assert (found.state, found.values["kind"]) == ("limited", "nfs4")


def test_a_check_that_cannot_look_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Finding:
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr(doctor, "memory", broken)
    found = {each.check: each for each in examine(tmp_path, 1)}
    assert found["memory"].state == "limited"
    assert "No such file" in found["memory"].found
    assert list(found) == CHECKS


def without_network(folder: str) -> None:
    os.chdir(folder)
    os.dup2(os.open("told", os.O_WRONLY | os.O_CREAT), 1)
    assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
    main(["doctor", "--json"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_a_loopback_that_is_down_fails(tmp_path: Path) -> None:
    process = CONTEXT.Process(target=without_network, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == 1
    checks = {each["check"]: each for each in json.loads((tmp_path / "told").read_text())["checks"]}
    assert [checks[name]["state"] for name in ("loopback", "store", "interfaces")] == [
        "fails",
        "fails",
        "limited",
    ]
    assert "ip link set lo up" in checks["loopback"]["advice"]
