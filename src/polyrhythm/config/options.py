"""Options as keyword arguments, so that an editor shows them and mypy checks them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypedDict

from polyrhythm.errors import RequestError, unknown

REAL_ONLY = ("port", "gather_s", "listen", "token_file", "vacant", "notice_s")
"""Options that mean nothing where no process is: `simulate` refuses them."""


class NetworkOptions(TypedDict, total=False):
    """What a network is and was trained on, where its weights do not say so."""

    data: Any
    model: Any


class PictureOptions(TypedDict, total=False):
    """How a trained network's test pictures are read; as in `RunOptions`."""

    image_size: int | None
    scale: int | None
    skip_unreadable: bool


class TrainedOptions(NetworkOptions, PictureOptions, total=False):
    """How a trained network and its test pictures are opened."""


class EvaluateOptions(PictureOptions, total=False):
    """What `evaluate` takes besides its own arguments; see `Views` for the first four."""

    dense: bool
    ten_crop: bool
    flip: bool
    scales: Sequence[int]
    best: bool
    greedy: bool


class RunOptions(TypedDict, total=False):
    """What `train` and `simulate` take besides their own arguments; `RunConfig` has what each means and its default."""

    data: Any
    model: Any
    strategy: Any
    workers: int
    min_workers: int
    restarts: int
    silence_s: float
    gather_s: float
    on_loss: Literal["keep_batch", "rescale"]
    epochs: int | None
    batch_size: int
    optimizer: Any
    schedule: Any
    batch_schedule: Any
    seed: int
    weights: str | None
    freeze: str
    freeze_epochs: int | None
    rate_decay: float
    augment: str
    image_size: int | None
    scale: int | None
    size_schedule: str
    loss: Any
    class_weights: Literal["none", "balanced"]
    teacher: str | None
    temperature: float
    teacher_share: float
    pixels: Literal["imagenet", "centred"] | None
    label_smoothing: float
    weight_average: float
    precision: str
    device: str
    cache: str
    decoded: str | None
    compile: bool
    channels_last: bool
    keep_checkpoints: int
    keep_best: bool
    skip_unreadable: bool
    timings: bool
    tensorboard: bool
    threads: int | None
    port: int
    listen: str | None
    token_file: str | None
    vacant: int
    notice_s: float | None


def refuse_unknown(options: Iterable[str], known: type) -> None:
    """Refuses options that nobody knows, as those of `RunConfig` are refused.

    Args:
        options: names of what was given.
        known: one of the classes above.

    Raises:
        RequestError: there is another.
    """
    names = known.__annotations__
    for name in options:
        if name not in names:
            raise unknown("option", name, names)


def refuse_real_only(options: Iterable[str]) -> None:
    """Refuses options of `REAL_ONLY` in a simulation.

    Raises:
        RequestError: one of them was given.
    """
    for name in options:
        if name in REAL_ONLY:
            raise RequestError(
                f"simulated ranks meet at no port, and nobody joins them: leave --{name.replace('_', '-')} out"
            )
