"""Who puts checkpoints into the archive, beside training: what is saved is a copy that nobody changes any more.

    leader     copy ─▶ begin ── train ── train ── look ─▶ CheckpointSaved, or a notice that it could not be written
    thread              └─ write ─ fsync ─ rename ─┘

One is under way at most: the next one waits for it, since a disk that is slower than an epoch would otherwise fall
behind ever further. The run's end and an interruption wait as well.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from polyrhythm.claim import Superseded
from polyrhythm.communication.activity import Activity
from polyrhythm.errors import RunError
from polyrhythm.events import CheckpointSaved, Event, Notice
from polyrhythm.roles.keeping.archive import Archive
from polyrhythm.roles.keeping.snapshot import Snapshot


class Archivist:
    """Saves one checkpoint after the other. What cannot be written is said, and training goes on.

    But not in a folder that a later start has: all that looks at what has been written then raises `Superseded`.

    Args:
        archive: where to.
        activity: of the rank, for its watchdog.
        say: takes events, whose times it sets; called on the thread that calls this object.
        beside: whether to write on another thread; in virtual time, where writing takes none, it is done at once.
    """

    def __init__(
        self, archive: Archive, activity: Activity, say: Callable[[Event], None], *, beside: bool
    ) -> None:
        self._archive = archive
        self._activity = activity
        self._say = say
        self._beside = beside
        self._writing: tuple[Snapshot, float | None, Future[str]] | None = None
        self._saved_step: int | None = None  # of the last one, if it could be written

    def begin(self, snapshot: Snapshot, top1: float | None = None) -> None:
        """Begins to write a checkpoint, when the one before is done.

        Args:
            snapshot: nothing of it may change any more.
            top1: the model's test accuracy, a fraction, if it was tested.
        """
        self.wait()
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = snapshot, top1, thread.submit(self._archive.save, snapshot)
        thread.shutdown(wait=False)  # ends with its only work, which the interpreter's end waits for
        if not self._beside:
            self.wait()

    def look(self) -> None:
        """Says what has become of the checkpoint under way, if it is done."""
        if self._writing is not None and self._writing[-1].done():
            self._tell()

    def wait(self) -> None:
        """Waits until no checkpoint is under way."""
        if self._writing is not None:
            with self._activity.doing("writing a checkpoint", takes_long=True):
                self._writing[-1].exception()
            self._tell()

    def tested(self, top1: float) -> None:
        """Takes the test accuracy, a fraction, of the model that was saved last, and keeps it if it is the best."""
        self.wait()
        if self._saved_step is not None:
            try:
                self._archive.keep_best(self._saved_step, top1)
            except Superseded:
                raise
            except RunError as error:
                self._say(Notice(time_s=0, text=str(error)))

    def _tell(self) -> None:
        assert self._writing is not None
        (snapshot, top1, future), self._writing, self._saved_step = self._writing, None, None
        try:
            path = future.result()
        except Superseded:
            raise
        except RunError as error:  # anything else is a bug
            self._say(Notice(time_s=0, text=f"{error}, and training goes on"))
            return
        self._saved_step = snapshot.step
        self._say(CheckpointSaved(time_s=0, path=path, epoch=snapshot.epoch, step=snapshot.step))
        if top1 is not None:
            self.tested(top1)
