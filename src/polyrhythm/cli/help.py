"""`--help`: a verb's own options first, the options of every run by name alone, and examples.

polyrhythm plan --help        own options in full, those of every run as a list of names
polyrhythm plan --help all    all of them in full
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer import rich_utils
from typer.core import TyperCommand, TyperGroup

from polyrhythm.cli.output import print_labeled, width
from polyrhythm.config.run_config import RunConfig

_FOLDED = "polyrhythm.folded"
FIRST = "Job"
"""The panel of options of a run that `train --help` describes, too."""
PANELS = list(
    dict.fromkeys(str(info.json_schema_extra["panel"]) for info in RunConfig.model_fields.values())  # type: ignore[index]
)
"""Titles of the panels of options that every run has."""

EXAMPLES = {
    "": (
        "train --data digits --model mlp --workers 2",
        "compare --cluster office --data digits --model mlp --workers 4 --seeds 3",
    ),
    "train": (
        "train --data digits --model mlp --workers 2",
        "train --data photos/ --model resnet18 --workers 4 --strategy 'local_sgd(steps=8)'",
    ),
    "run": (
        "run --workers 4 train.py",
        "run --workers 2 train.py --epochs 5",
    ),
    "join": (
        "join 192.0.2.7:29400 --token-file token",
        "join 192.0.2.7:29400 --token-file token --device cuda",
    ),
    "submit": (
        "submit --engine 'slurm(nodes=2)' -- train recipe.yaml --workers 4",
        "submit --engine \"ssh(hosts='hosts.txt')\" --dry-run -- train --data digits --workers 4",
    ),
    "evaluate": ("evaluate runs/photos", "evaluate runs/photos --flip --scales 224,256"),
    "predict": (
        "predict photo.jpg --weights runs/photos",
        "predict photos/*.jpg --weights runs/photos --flip",
    ),
    "export": ("export runs/photos --out model.onnx", "export runs/photos --out model.pt2 --any-size"),
    "average": (
        "average runs/first runs/second --out mean.safetensors",
        "average runs/first --out mean.safetensors",
    ),
    "plan": (
        "plan --cluster office --target top1=0.85 --data digits --model mlp",
        "plan --cluster spot --target top1=0.9 --data digits --model mlp --budget 1USD",
    ),
    "compare": (
        "compare --cluster office --data digits --model mlp --workers 4 --seeds 3",
        "compare runs/first runs/second",
    ),
    "tune": (
        "tune space.yaml --data digits --model mlp --budget '20 trials'",
        "tune space.yaml --recipe recipe.yaml --method hyperband --prune median",
    ),
    "report": ("report runs/first", "report runs/first runs/second --plots png"),
    "why": ("why runs/first", "why runs/first --cluster profile.yaml"),
    "simulate": (
        "simulate --cluster office --data digits --model mlp --workers 4",
        "simulate --cluster spot --workers 32 --gradients none --steps 100 --check",
    ),
    "replay": ("replay runs/first", "replay runs/first --json"),
    "profile": ("profile --model resnet18 --data photos/", "profile --out mine.yaml train.py"),
    "calibrate": (
        "calibrate --cluster office --throughput '4 workers: 378 images/s'",
        "calibrate --cluster office --throughput 'easgd, 4 workers: 378' --fit step_time",
    ),
    "strategies": ("strategies", "strategies local_sgd"),
    "analyze": (
        "analyze --model resnet50 --classes 1000 --image-size 224",
        "analyze --model lenet5 --workers 8",
    ),
    "augment": (
        "augment 'crop(padding=2); flip' --data digits",
        "augment 'flip; color_jitter' --data photos/ --preview sheet.png",
    ),
    "doctor": ("doctor", "doctor --json"),
}
"""Two examples of every verb, and of the command line as a whole."""


class Interrupted(Exception):
    """KeyboardInterrupt, which newer versions of typer turn into an exit status without a message."""


class Verb(TyperCommand):
    """A verb of the command line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; `--help` folds the options of every run, unless `all` follows it."""
        if "--help" in args and any(map(_of_every_run, self.params)):
            following = args.index("--help") + 1
            ctx.meta[_FOLDED] = args[following : following + 1] != ["all"]
            args = args[:following]
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> Any:
        """Return the options, `--help` included, with plain metavars instead of Python's types."""
        return _with_plain_metavars(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown = [FIRST] if self.name == "train" else []
        folded: dict[str, list[str]] = {}
        options: list[Any] = [*self.params] if ctx.meta.get(_FOLDED) else []
        for option in options:
            if _of_every_run(option) and option.rich_help_panel not in shown and not option.hidden:
                folded.setdefault(option.rich_help_panel, []).append(option.opts[0])
                option.hidden = True
        _print_help(super().format_help, ctx, formatter)
        if folded:
            print(f" Options of every run (described by `polyrhythm {self.name} --help all`):\n")
            for panel in filter(folded.get, PANELS):
                print_labeled(f"   {panel}", " ".join(folded[panel]), indent=_NAMES)
            print()
        _print_examples(self.name or "")


_NAMES = 18
"""Column at which the names of folded options begin."""


class Verbs(TyperGroup):
    """The command line as a whole."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options outside verbs, with plain metavars."""
        return _with_plain_metavars(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(super().format_help, ctx, formatter)
        _print_examples("")


def _of_every_run(option: Any) -> bool:
    return getattr(option, "rich_help_panel", None) in PANELS


def _print_help(format_help: Callable[[Any, Any], None], ctx: Any, formatter: Any) -> None:
    rich_utils.MAX_WIDTH = width()
    format_help(ctx, formatter)


def _print_examples(verb: str) -> None:
    print(" Examples:\n")
    for example in EXAMPLES[verb]:
        print(f"   polyrhythm {example}")
    print()


def _with_plain_metavars(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        if each.param_type_name == "argument":
            each.metavar = each.metavar or each.name.upper()
            each.display_type_rich = _no_type  # newer typers show Python's type next to the name
        elif each.metavar is None:
            each.metavar = "" if each.is_flag else "TEXT"
    return parameters


def _no_type(ctx: typer.Context) -> str:
    return ""
