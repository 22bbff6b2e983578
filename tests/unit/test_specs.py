from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from polyrhythm.errors import RequestError
from polyrhythm.specs import IMPORTS, Spec, build, choices, parse, validated
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.parameter_server.merge.plain import Plain
from polyrhythm.training.optimizers.sgd import SGD

OPTIMIZERS = "polyrhythm.training.optimizers"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("sgd", Spec("sgd")),
        (" sgd() ", Spec("sgd")),
        ("sgd(lr=0.1, nesterov=true)", Spec("sgd", {"lr": 0.1, "nesterov": True})),
        ("a(b=c(d=-1), e='x y')", Spec("a", {"b": Spec("c", {"d": -1}), "e": "x y"})),
        ("step(at=[0.5, 0.75])", Spec("step", {"at": [0.5, 0.75]})),
        ("a(b=none, c=None, d=false)", Spec("a", {"b": None, "c": None, "d": False})),
        ("ps(consistency=async)", Spec("ps", {"consistency": "async"})),
        ("from(lambda=2, path='import in')", Spec("from", {"lambda": 2, "path": "import in"})),
        ("own.Ring", Spec("own.Ring")),
        (
            "a(b=own.Ring, c=own.rings.Ring(d=1))",
            Spec("a", {"b": "own.Ring", "c": Spec("own.rings.Ring", {"d": 1})}),
        ),
    ],
)
def test_parse(text: str, spec: Spec) -> None:
    assert parse(text) == spec


@pytest.mark.parametrize(
    "text", ["sgd(lr=0.1, momentum=0.9)", "a(b=c(d=-1), e='x y', f=[1, 2], g=True, h=None)"]
)
def test_a_spec_is_read_back_from_its_text(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(",
        "a b",
        "1",
        "a.",
        "a().b",
        "a(",
        "a(1)",
        "a(**b)",
        "a(b=c d)",
        "a(b=1 + x)",
        "a()()",
        "[a]",
        "(" * 500,
    ],
)
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot read"):
        parse(text)


@pytest.mark.parametrize("text", ["9" * 5000, f"a({'9' * 5000})", f"a(b={'x.' * 2500}x)"], ids=len)
def test_a_refusal_shows_the_beginning_of_what_is_endless(text: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"cannot read '{text[:199]}: ")) as refusal:
        parse(text)
    assert len(str(refusal.value)) < 600


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="lr is given twice"):
        parse("sgd(lr=1, lr=2)")


def test_build_says_what_it_could_not_read() -> None:
    with pytest.raises(RequestError, match=r"^optimizer: cannot read 'sgd\('"):
        build("optimizer", "sgd(", OPTIMIZERS)


def test_build_checks_values() -> None:
    assert build("optimizer", "sgd(lr=0.5)", OPTIMIZERS) == SGD(lr=0.5)
    with pytest.raises(RequestError, match=r"^optimizer sgd: lr should be greater than 0 \(given 0\)$"):
        build("optimizer", "sgd(lr=0)", OPTIMIZERS)


class Numbers(BaseModel):
    count: int = 1
    maybe: int | None = None
    share: float = 0.0
    flag: bool = False


@pytest.mark.parametrize("value", [True, False, 2.0, 2.5, "2.0", "two", ""])
@pytest.mark.parametrize("key", ["count", "maybe"])
def test_only_whole_numbers_count(key: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        validated("it", Numbers, {key: value})
    assert str(refusal.value) == f"it: {key} should be a whole number (given {value!r})"


def test_numbers_may_come_as_text() -> None:
    made = validated("it", Numbers, {"count": "-2", "maybe": "3", "share": "1e-2", "flag": True})
    assert made == Numbers(count=-2, maybe=3, share=0.01, flag=True)


def test_a_truth_value_is_no_number() -> None:
    with pytest.raises(RequestError, match=r"^it: share should be a number \(given True\)$"):
        validated("it", Numbers, {"share": True})


class Halved(Plain):
    """A merge rule outside the package."""

    share: float = 0.5


def test_a_class_outside_the_package_is_built_back_from_its_own_spec() -> None:
    made = build("strategy", f"parameter_server(merge={__name__}.Halved(share=0.25))", *FAMILIES)
    assert made.merge == Halved(share=0.25)  # type: ignore[attr-defined]
    assert build("strategy", str(made), *FAMILIES) == made


def test_a_class_of_another_kind_is_refused() -> None:
    with pytest.raises(RequestError, match=r"Halved is no strategy: it must derive from .*\.Strategy$"):
        build("strategy", f"{__name__}.Halved", *FAMILIES)


def test_text_imports_no_module_that_the_user_has_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ownmerge.py").write_text(
        "from polyrhythm.strategies.parameter_server.merge.plain import Plain\nclass Mine(Plain):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(IMPORTS, raising=False)
    folder = "polyrhythm.strategies.parameter_server.merge"
    for name in ("ownmerge.Mine", "os.path", "os.nothing", "__main__.Mine"):
        with pytest.raises(RequestError, match=r"is not imported|is of another script"):
            build("merge rule", name, folder)
    assert "ownmerge" not in sys.modules
    monkeypatch.setenv(IMPORTS, "absent,ownmerge")
    assert isinstance(build("merge rule", "ownmerge.Mine", folder), Plain)
    with pytest.raises(RequestError, match="cannot import absent"):
        build("merge rule", "absent.Mine", folder)


def test_every_strategy_is_built_back_from_its_own_spec() -> None:
    for family in FAMILIES:
        for kind in choices(family).values():
            made = kind()
            assert build("strategy", str(made), *FAMILIES) == made


@pytest.mark.parametrize(
    ("former", "today", "folder"),
    [
        ("colour_jitter", "color_jitter", "polyrhythm.augmentation.transforms"),
        ("pca_colour(strength=0.5)", "pca_color(strength=0.5)", "polyrhythm.augmentation.transforms"),
        ("synchronised", "synchronized", "polyrhythm.training.batch_norms"),
    ],
)
def test_a_choice_has_its_former_name_until_the_next_version(former: str, today: str, folder: str) -> None:
    assert str(build("choice", former, folder)) == today


def test_a_key_has_its_former_name_until_the_next_version() -> None:
    former = build("strategy", "pipeline(normalise=batch, schedule=gpipe)", *FAMILIES)
    assert str(former) == str(build("strategy", "pipeline(normalize=batch, schedule=gpipe)", *FAMILIES))
    with pytest.raises(RequestError, match="normalise"):
        build("strategy", "pipeline(normalise=batch, normalize=batch)", *FAMILIES)
