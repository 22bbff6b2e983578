"""Training in two phases, as `freeze_epochs` asks for: a part stays frozen at first, then nearly all is trained.

    RUN-frozen:  `freeze_epochs` epochs with `freeze`      RUN:  the other epochs from its weights, norms frozen

Batch norms stand still in the second phase too: statistics of a few small batches would replace those of the many that
the weights were trained with, and networks that were tested with the one and trained with the other forget.
Two runs, each of which can be looked at, resumed and evaluated by itself; each has a whole learning-rate schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.errors import RequestError
from polyrhythm.launch.torchrun.spokesman import started_by_torchrun

if TYPE_CHECKING:
    from polyrhythm.api.observed_run import Run
    from polyrhythm.config.run_config import RunConfig
    from polyrhythm.events import Event
    from polyrhythm.reporting.observer import Observer


def train_thawing(
    train: Callable[..., Run | None],
    config: RunConfig,
    epochs: int,
    folder: Path,
    **told: Any,
) -> Run | None:
    """Trains in two phases.

    Args:
        train: trains a run; `polyrhythm.train`.
        config: of both phases together.
        epochs: of both phases together.
        folder: of the second run; the first's is beside it.
        **told: `observers` and `start_method`, as `train` takes them.

    Returns:
        The second run, or the first if it was interrupted.

    Raises:
        RequestError: the phases cannot be.
    """
    frozen_epochs = config.freeze_epochs
    assert frozen_epochs is not None
    if config.freeze == "none":
        raise RequestError("--freeze-epochs says for how long, not what: give --freeze body, or names")
    if frozen_epochs >= epochs:
        raise RequestError(
            f"--freeze-epochs {frozen_epochs} leaves none of {epochs} epochs for all: give more --epochs"
        )
    if started_by_torchrun():
        raise RequestError(
            "--freeze-epochs is two runs: under torchrun start one with --freeze, then one with --weights"
        )
    options = {name: getattr(config, name) for name in type(config).model_fields}
    first_folder = folder.with_name(f"{folder.name}-frozen")
    observers: Sequence[Observer] = told.pop("observers")
    first = train(
        out=first_folder,
        observers=[_Lasting(each) for each in observers],
        **told,
        **{**options, "freeze_epochs": None, "epochs": frozen_epochs},
    )
    if first is None or first.outcome != "done":
        return first
    changed = {"freeze": "norms", "freeze_epochs": None, "weights": str(first_folder)}
    return train(
        out=folder, observers=observers, **told, **{**options, **changed, "epochs": epochs - frozen_epochs}
    )


class _Lasting:
    """An observer who is not let go at the end of the first run."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_event(self, event: Event) -> None:
        self._observer.on_event(event)

    def close(self) -> None:
        """Does nothing: there is another run to come."""
