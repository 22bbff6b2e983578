"""What one rank of a run does, once it knows how to reach the others."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.communication.around import RecordingCommunicator
from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.communication.transports.torch_distributed.transport import connect
from polyrhythm.events import Event
from polyrhythm.launch.cores import use_threads
from polyrhythm.roles.job import Job
from polyrhythm.roles.server import serve
from polyrhythm.roles.worker import work
from polyrhythm.roles.world import StopWish, World
from polyrhythm.strategies.cast import Cast


def run_rank(
    job: Job, cast: Cast, rendezvous: Rendezvous, threads: int, stop: StopWish, emit: Callable[[Event], None]
) -> None:
    """Plays this rank's role until the run is over.

    Args:
        job: what to train.
        cast: who does what.
        rendezvous: how to reach the others.
        threads: compute threads of a worker; a server has one.
        stop: whether someone wants to stop.
        emit: takes the run's events, on the leader.
    """
    home, network = connect(rendezvous)
    arrivals = Arrivals()
    recorded = RecordingCommunicator(network, arrivals)
    world = World(recorded, cast, stop=stop, emit=emit, arrivals=arrivals, incarnation=rendezvous.incarnation)
    if world.is_worker:
        use_threads(threads)
        work(job, world)
    else:
        use_threads(1)
        serve(job.strategy, world, job.keeping.resume)
    home.close()
