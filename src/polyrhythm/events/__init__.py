"""The facts that a run emits: frozen, small, one JSON object a line in `events.jsonl`.

Every reader (live progress, TensorBoard, the report) sees only these, so a real run, a simulated one and a
replayed one look alike. Times are seconds on the run's own clock, which starts at 0 when training starts.
"""

from polyrhythm.events.event import Event
from polyrhythm.events.losses import WorkerJoined, WorkerLost
from polyrhythm.events.notices import Notice, Restarted, ServerJoined, ServerLost, Straggler
from polyrhythm.events.progress import CacheUsed, ServerProgress, WorkerProgress, WorkerTimings
from polyrhythm.events.record import from_json
from polyrhythm.events.run import CheckpointSaved, Evaluated, RunEnded, RunStarted

__all__ = [
    "CacheUsed",
    "CheckpointSaved",
    "Evaluated",
    "Event",
    "Notice",
    "Restarted",
    "RunEnded",
    "RunStarted",
    "ServerJoined",
    "ServerLost",
    "ServerProgress",
    "Straggler",
    "WorkerJoined",
    "WorkerLost",
    "WorkerProgress",
    "WorkerTimings",
    "from_json",
]
