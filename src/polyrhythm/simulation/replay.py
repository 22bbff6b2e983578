"""Replay a real run in virtual time: the same job, every rank receiving in the recorded order.

    then   worker ── push ──▶ server took 2, 0, 1, 1, …   in the order of arrival
    now    worker ── push ──▶ server waits for 2, then 0, then 1, …

A receive from any rank is replaced by a receive from the rank in the recording. Nothing else in a run depends
on time, so the parameters are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from polyrhythm.communication.arrivals import Arrivals, check
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.forwarding import ForwardingCommunicator
from polyrhythm.communication.message import Message
from polyrhythm.errors import PolyrhythmError, RunError
from polyrhythm.events import Event, RunEnded
from polyrhythm.roles.checkpointing.recording import Recording
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import World
from polyrhythm.simulation.run import run_rank
from polyrhythm.simulation.simulated_run import ConstantCluster, RankProgram, constant_run


class ScriptOver(RunError):
    """A rank would receive more messages than were recorded."""


@dataclass(frozen=True)
class Difference:
    """First difference between a replay and the recording.

    Attributes:
        rank: rank that received a different message; -1: no rank did.
        message: number of messages that the rank had received before.
        text: description of the difference.
        source: rank of the sender; -1 where there is no message.
        kind: kind of the message; empty where there is none.
        step: step of the message's sender.
        version: updates applied to the parameters that the message was computed from.
    """

    rank: int
    message: int
    text: str
    source: int = -1
    kind: str = ""
    step: int = 0
    version: int = 0


class Script:
    """Recorded messages of one rank, and the position of the replay in them.

    Args:
        rank: rank of the part.
        arrivals: recorded arrivals.

    Attributes:
        played: messages received so far.
        difference: the first message that was not the recorded one.
    """

    def __init__(self, rank: int, arrivals: Arrivals) -> None:
        self.rank = rank
        self.played = 0
        self.difference: Difference | None = None
        self._arrivals = arrivals

    @property
    def left(self) -> int:
        """Recorded messages that have not been received."""
        return len(self._arrivals) - self.played

    def next_source(self) -> int:
        """Return the rank to receive from next.

        Raises:
            ScriptOver: none was recorded.
        """
        if not self.left:
            raise ScriptOver(
                f"rank {self.rank} waits for more than the {self.played} messages of the recording"
            )
        return self._arrivals.sources[self.played]

    def compare(self, source: int, message: Message) -> Difference | None:
        """Compare a message with the recorded one; return the difference if it is this rank's first."""
        number, self.played = self.played, self.played + 1
        if self.difference is not None or check(source, message) == self._arrivals.checks[number]:
            return None
        self.difference = Difference(
            self.rank,
            number,
            f"{message.kind.name} of step {message.step} from rank {source} is not the message that was recorded",
            source,
            message.kind.name,
            message.step,
            message.version,
        )
        return self.difference


@dataclass
class Performance:
    """Observations during a replay.

    Attributes:
        difference: the first of all ranks, in virtual time.
        summed_ranks: largest number of ranks in a sum of vectors.
    """

    difference: Difference | None = None
    summed_ranks: int = 1


class WatchedCommunicator(ForwardingCommunicator):
    """Note how many ranks a collective sums, in subgroups too.

    Args:
        inner: wrapped communicator.
        performance: receiver of the observations.
    """

    def __init__(self, inner: Communicator, performance: Performance) -> None:
        super().__init__(inner)

        def all_reduce(tensor: Tensor) -> None:
            performance.summed_ranks = max(performance.summed_ranks, inner.size)
            inner.all_reduce(tensor)

        def start_all_reduce(tensor: Tensor) -> Handle:
            performance.summed_ranks = max(performance.summed_ranks, inner.size)
            return inner.start_all_reduce(tensor)

        def subgroup(name: str, ranks: Sequence[int]) -> Communicator:
            return WatchedCommunicator(inner.subgroup(name, ranks), performance)

        self.all_reduce = all_reduce
        self.start_all_reduce = start_all_reduce
        self.subgroup = subgroup


class ScriptedCommunicator(WatchedCommunicator):
    """Receive from the rank that the script names where any would do; raise `ScriptOver` where it names none.

    Args:
        inner: wrapped communicator.
        script: script of this rank.
        performance: receiver of the differences.
    """

    def __init__(self, inner: Communicator, script: Script, performance: Performance) -> None:
        super().__init__(inner, performance)

        def receive(source: int | None = None, tag: int = 0) -> tuple[int, Message]:
            if source is not None:
                return inner.receive(source, tag)
            found, message = inner.receive(script.next_source(), tag)
            difference = script.compare(found, message)
            performance.difference = performance.difference or difference
            return found, message

        self.receive = receive


@dataclass(frozen=True)
class Replay:
    """The outcome of a replay.

    Attributes:
        parameters_sha256: SHA-256 of its final parameters; None if it did not end.
        messages: recorded messages that were replayed.
        difference: first difference; None: equal bit for bit.
        summed_ranks: largest number of ranks in a sum of vectors.
    """

    parameters_sha256: str | None
    messages: int
    difference: Difference | None
    summed_ranks: int


def replay(job: Job, recording: Recording, emit: Callable[[Event], None] = lambda event: None) -> Replay:
    """Replay a recorded run.

    Args:
        job: the run's, with checkpoints off: those were asked for by messages that are not recorded.
        recording: recording of the run.
        emit: receiver of the events, with virtual seconds.
    """
    assert job.checkpointing.folder is None or not job.checkpointing.checkpoints, (
        "a replay writes no checkpoints"
    )
    scripts = {
        rank: Script(rank, recording.ranks.get(rank, Arrivals())) for rank in range(recording.roles.size)
    }
    performance = Performance()
    digests: list[str] = []

    def observe(event: Event) -> None:
        if isinstance(event, RunEnded):
            digests.append(event.result["parameters_sha256"])
        emit(event)

    def role(world: World) -> None:
        network = ScriptedCommunicator(world.network, scripts[world.network.rank], performance)
        run_rank(job, replace(world, network=network))

    try:  # all ranks are equally fast: the recording determines the order
        constant_run(recording.roles, RankProgram(role), observe, ConstantCluster()).play()
    except (
        PolyrhythmError
    ) as error:  # the order cannot be played: it leads nowhere, or the loss grows without end
        stuck = Difference(-1, sum(script.played for script in scripts.values()), str(error))
        performance.difference = performance.difference or stuck
    digest = digests[0] if digests else None
    difference = performance.difference or _difference_at_end(list(scripts.values()), digest, recording)
    played = sum(script.played for script in scripts.values())
    return Replay(digest, played, difference, performance.summed_ranks)


def _difference_at_end(scripts: list[Script], digest: str | None, recording: Recording) -> Difference | None:
    for script in scripts:
        if script.left:
            text = f"recorded messages of rank {script.rank} that the replay lacks: {script.left}"
            return Difference(script.rank, script.played, text)
    if digest != recording.parameters_sha256:
        return Difference(-1, recording.messages, "the parameters differ, and no message does")
    return None
