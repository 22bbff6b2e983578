"""A short share of the soak; see benchmarks/soak for the whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak"
EPOCHS = 12


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SOAK))
    import soak as module

    monkeypatch.setattr(module, "EPOCHS", EPOCHS)
    yield module
    del sys.modules["soak"]


def seed_of(soak, kind: str, strategy: str) -> int:
    """The first seed that draws a case of this kind and strategy."""

    def drawn(seed: int) -> tuple[str, str]:
        case, _ = soak.draw(seed, soak.WEIGHTS)
        return case.kind, case.strategy

    return next(seed for seed in range(100_000) if drawn(seed) == (kind, strategy))


@pytest.mark.parametrize(("kind", "strategy"), [("kill", "parameter_server"), ("launcher", "synchronous")])
def test_a_drawn_case_keeps_what_it_promises(soak, kind: str, strategy: str, tmp_path: Path) -> None:
    case = soak.play(seed_of(soak, kind, strategy), tmp_path, soak.References(tmp_path), soak.WEIGHTS)
    assert case.failure == ""
    assert case.did
    assert case.hash_checked == (kind == "launcher")
    assert list(tmp_path.iterdir()) == []


def test_promises_that_are_not_kept_are_found(soak, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run ends well, with other parameters than it should have; and then with a file that nobody knows."""
    references = soak.References(tmp_path)
    monkeypatch.setattr(references, "sha256", lambda case: "another")
    monkeypatch.setitem(soak.PLAYS, "suspend", lambda run, dice: run.start())
    case = soak.play(seed := seed_of(soak, "suspend", "synchronous"), tmp_path, references, soak.WEIGHTS)
    assert case.failure == "its parameters are not those of the undisturbed run"
    run = soak.Run(tmp_path / f"case-{seed}", case)
    (run.run / "draft").touch()
    run.start()
    with pytest.raises(soak.Broken, match=r"leaves files behind: \[.draft"):
        soak.check(run, references)


def test_a_seed_draws_the_same_case_each_time(soak) -> None:
    for seed in range(50):
        (first, dice), (second, again) = soak.draw(seed, soak.WEIGHTS), soak.draw(seed, soak.WEIGHTS)
        assert first == second
        assert dice.random() == again.random()
