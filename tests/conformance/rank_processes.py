"""Real ranks as processes, for tests: each runs a function, and talks with the test over a pipe.

The processes are forked from a clean one, so neither the threads of a test that ran before nor its files are inherited.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from conformance.clean_process import CONTEXT
from polyrhythm.communication.transports.torch_distributed.communicator import (
    TorchDistributedCommunicator,
    connect,
)
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous, host_store, local
from processes.family import stop
from processes.stacks import stacks_of_children

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Seat:
    """What a rank's function gets.

    Attributes:
        rank: this rank.
        size: how many there are.
        port: of the store.
        pipe: to the test.
        generation: how many processes have had this rank before.
        shared_memory: whether messages may travel through it.
    """

    rank: int
    size: int
    port: int
    pipe: Connection
    generation: int = 0
    shared_memory: bool = True

    def rendezvous(self) -> Rendezvous:
        """Meets the other ranks."""
        return local(self.rank, self.size, self.port, self.generation)

    def connect(self) -> tuple[Rank, TorchDistributedCommunicator]:
        """Joins the other ranks."""
        return connect(self.rendezvous(), self.shared_memory)

    def tell(self, fact: Any) -> None:
        """Tells the test something."""
        self.pipe.send(("fact", fact))

    def wait_for_word(self) -> Any:
        """Waits for what the test says."""
        return self.pipe.recv()


class RankProcesses:
    """A set of ranks; leaving the context ends those that are still there."""

    def __init__(
        self, main: Callable[..., None], size: int, *arguments: Any, shared_memory: bool = True
    ) -> None:
        self.store = host_store()
        self._main, self._arguments = main, arguments
        self._shared_memory = shared_memory
        started = [self._start(rank, size, 0) for rank in range(size)]
        self._pipes: list[Connection] = [pipe for pipe, _ in started]
        self._processes = [process for _, process in started]
        self._generations = [0] * size

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()

    def succeed(self, rank: int) -> None:
        """Starts a successor of a rank that is dead; what is said and heard then, it hears and says."""
        self._processes[rank].join(PATIENCE_S)
        self._generations[rank] += 1
        self._pipes[rank], self._processes[rank] = self._start(
            rank, len(self._pipes), self._generations[rank]
        )

    def _start(self, rank: int, size: int, generation: int) -> tuple[Connection, Any]:
        ours, theirs = CONTEXT.Pipe()
        seat = Seat(rank, size, self.store.port, theirs, generation, self._shared_memory)
        process = CONTEXT.Process(target=_run, args=(self._main, seat, self._arguments), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def hear(self, rank: int) -> Any:
        """Gives the next fact that a rank tells; fails with the tracebacks of all ranks if it has none to tell."""
        if self._pipes[rank].poll(PATIENCE_S):
            kind, fact = self._word(rank)
            if kind == "fact":
                return fact
        else:
            kind, fact = "error", f"said nothing for {PATIENCE_S:g} s\n{stacks_of_children()}"
        others = [self._last_words(other) for other in range(len(self._pipes)) if other != rank]
        raise AssertionError("\n".join([f"rank {rank}: {fact}", *others]))

    def _word(self, rank: int) -> tuple[str, Any]:
        try:
            word: tuple[str, Any] = self._pipes[rank].recv()
        except EOFError:
            return "error", "died"
        return word

    def _last_words(self, rank: int) -> str:
        kind, fact = "fact", "nothing"
        while kind == "fact" and self._pipes[rank].poll(0.5):
            kind, fact = self._word(rank)
        return f"rank {rank} said last: {fact}"

    def hear_all(self, ranks: range | list[int]) -> list[Any]:
        """Gives the next fact of each of some ranks."""
        return [self.hear(rank) for rank in ranks]

    def say(self, rank: int, word: Any) -> None:
        """Says something to a rank."""
        self._pipes[rank].send(word)

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Sends a signal; gives the time at which, on the clock of `time.monotonic`."""
        pid = self._processes[rank].pid
        assert pid is not None
        at = time.monotonic()
        if number == signal.SIGSTOP:
            stop(pid)
        else:
            os.kill(pid, number)
        return at

    def kill(self, rank: int) -> float:
        """Kills a rank, waits until it is gone, and gives the time at which it was killed."""
        killed_at = self.signal(rank, signal.SIGKILL)
        self._processes[rank].join(PATIENCE_S)
        return killed_at

    def wait_for_end(self, ranks: range | list[int]) -> None:
        """Returns when some ranks have left with status 0; fails if one does not."""
        for rank in ranks:
            process = self._processes[rank]
            process.join(PATIENCE_S)
            if process.exitcode != 0:
                self.hear(rank)  # tells why, if the rank could
            assert process.exitcode == 0, f"rank {rank} left with status {process.exitcode}"


def _run(main: Callable[..., None], seat: Seat, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    status = 0
    try:
        main(seat, *arguments)
    except BaseException:
        status = 1
        seat.pipe.send(("error", traceback.format_exc()))
    os._exit(status)
