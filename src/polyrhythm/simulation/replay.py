"""Replaying a real run in virtual time: the same job, with every rank hearing the others in the recorded order.

    then   worker ── push ──▶ server took 2, 0, 1, 1, …   whoever came first
    now    worker ── push ──▶ server waits for 2, then 0, then 1, …

Nothing else in a run depends on time, so the parameters come out the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.transport import SimulatedCluster
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import PolyrhythmError
from polyrhythm.events import Event, RunEnded
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.recording import Recording
from polyrhythm.roles.pace import DrawnPace
from polyrhythm.roles.server import serve
from polyrhythm.roles.worker import work
from polyrhythm.roles.world import World
from polyrhythm.simulation.script import Difference, Performance, Script, ScriptedCommunicator
from polyrhythm.strategies.cast import Cast

_STEP_S = 0.01


@dataclass(frozen=True)
class Replay:
    """What a replay came to.

    Attributes:
        parameters_sha256: of its final parameters; None if it came to no end.
        messages: recorded messages that were played.
        difference: the first, or None: then all is the same, bit for bit.
        summed_ranks: the most ranks whose vectors a collective added up.
    """

    parameters_sha256: str | None
    messages: int
    difference: Difference | None
    summed_ranks: int


def replay(job: Job, recording: Recording, emit: Callable[[Event], None] = lambda event: None) -> Replay:
    """Plays a recorded run again.

    Args:
        job: the run's, with checkpoints off: those were asked for by messages that are not recorded.
        recording: of the run.
        emit: takes the events, with virtual seconds.
    """
    assert job.keeping.folder is None or not job.keeping.checkpoints, "a replay writes no checkpoints"
    scripts = {
        rank: Script(rank, recording.ranks.get(rank, Arrivals())) for rank in range(recording.cast.size)
    }
    performance = Performance()
    digests: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, RunEnded):
            digests.append(event.result["parameters_sha256"])
        emit(event)

    def surround(rank: int, network: Communicator) -> Communicator:
        return ScriptedCommunicator(network, scripts[rank], performance)

    try:
        stage(job, recording.cast, surround, hear)
    except (
        PolyrhythmError
    ) as error:  # the order cannot be played: it leads nowhere, or the loss grows without end
        performance.notice(Difference(-1, sum(script.played for script in scripts.values()), str(error)))
    digest = digests[0] if digests else None
    performance.notice(_difference_at_end(list(scripts.values()), digest, recording))
    played = sum(script.played for script in scripts.values())
    return Replay(digest, played, performance.difference, performance.summed_ranks)


def _difference_at_end(scripts: list[Script], digest: str | None, recording: Recording) -> Difference | None:
    for script in scripts:
        if script.left:
            text = f"rank {script.rank} heard {script.left} messages more"
            return Difference(script.rank, script.played, text)
    if digest != recording.parameters_sha256:
        return Difference(-1, recording.messages, "the parameters differ, and no message does")
    return None


def stage(
    job: Job,
    cast: Cast,
    surround: Callable[[int, Communicator], Communicator],
    emit: Callable[[Event], None],
) -> None:
    """Runs a job in virtual time, all ranks equally fast.

    Args:
        job: what to learn.
        cast: who does what.
        surround: gives what a rank talks through, from its number and its simulated communicator.
        emit: takes the events.

    Raises:
        Deadlock: no rank can go on.
    """
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time), cast.size)
    for rank in range(cast.size):
        network = surround(rank, cluster.communicator(rank))
        world = World(network, cast, DrawnPace(time, lambda: _STEP_S), emit=emit)
        if world.is_worker:
            time.spawn(f"worker {rank}", lambda world=world: work(job, world))  # type: ignore[misc]
        else:
            time.spawn(f"server {rank}", lambda world=world: serve(job.strategy, world))  # type: ignore[misc]
    try:
        time.run()
    finally:
        time.close()
