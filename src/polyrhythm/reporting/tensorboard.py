"""The same events for TensorBoard: scalars over images seen."""

from __future__ import annotations

import errno
import io
import os
import time
from typing import TYPE_CHECKING, Any

from polyrhythm.events import RunStarted
from polyrhythm.reporting.loggers import Scalars

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from polyrhythm.events import Event

_FORMAT = "brain.Event:2"


class TensorBoardWriter:
    """Writes one TensorBoard file; its step is the number of images that all workers together have seen.

    For what it writes see `Scalars`.

    Raises:
        OSError: the folder or the file cannot be made.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        # TensorBoard takes half a second to import. Its record format is written directly, since its own
        # EventFileWriter imports TensorFlow where that is installed, and writes from a thread.
        from tensorboard.summary.writer import record_writer

        self._clock = clock
        self._zero_s = clock()
        self._scalars = Scalars()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{int(self._zero_s):010d}.{os.getpid()}"
        self._file = path.open("ab", buffering=0)
        self._record_writer = record_writer.RecordWriter
        self._write(self._zero_s, file_version=_FORMAT)

    def on_event(self, event: Event) -> None:
        """Write the scalars of one event, if it has any, at once."""
        scalars = self._scalars.of(event)
        if isinstance(event, RunStarted):
            self._zero_s = self._clock() - event.time_s
        if scalars:
            values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
            # Placed by the run's clock, so that a simulated run shows its own time.
            placed_s = self._zero_s + event.time_s
            self._write(placed_s, step=self._scalars.images_seen, summary={"value": values})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, wall_time_s: float, **content: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        record = io.BytesIO()
        self._record_writer(record).write(
            event_pb2.Event(wall_time=wall_time_s, **content).SerializeToString()
        )
        end = self._file.seek(0, os.SEEK_END)
        if self._file.write(record.getvalue()) != len(record.getvalue()):
            self._file.truncate(end)  # half a record would make the rest unreadable
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
