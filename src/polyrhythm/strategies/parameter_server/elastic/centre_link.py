"""A worker's end of the centre, over all its shards at once."""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_setting import WorkerSetting
from polyrhythm.training.flat_parameters import shards


class CentreLink:
    """Exchanges a worker's parameters with the servers that hold the centre.

    Args:
        setting: the worker's.
    """

    def __init__(self, setting: WorkerSetting) -> None:
        self._network = setting.network
        self._servers = setting.cast.servers
        self._size = setting.flat.size
        self._shards = shards(setting.flat.size, len(self._servers))
        self._offered: list[Handle] = []

    def initialise(self, vector: Tensor) -> None:
        """Gives every server its shard, `(size,)` in all; one worker calls this, before anyone exchanges."""
        for server, shard in zip(self._servers, self._shards, strict=True):
            self._network.send(server, Message(Kind.PARAMETERS, vector[shard]))

    def pull(self, final: bool = False) -> tuple[Tensor, int]:
        """Asks for the centre.

        Args:
            final: wait until all workers have left.

        Returns:
            The centre, `(size,)`, and how many of this worker's steps it knows of.

        Raises:
            PeerLost: this is a successor, and the run that it would join is ending.
        """
        answers = self._asked(Message(Kind.PULL, stop=final))
        if all(answer.kind is Kind.JOIN for answer in answers):  # a successor, of those who exchange together
            answers = self._asked(Message(Kind.JOIN, step=max(answer.step for answer in answers)))
        for server, answer in zip(self._servers, answers, strict=True):
            if answer.kind is Kind.LEAVE:  # others may have asked it in before they heard of the end
                raise PeerLost(server, "joining a run that is ending")
        pieces = [answer.tensor for answer in answers if answer.tensor is not None]
        assert len(pieces) == len(answers), "an answer carries the centre"
        return torch.cat(pieces), min(answer.step for answer in answers)

    def _asked(self, question: Message) -> list[Message]:
        """Asks all servers; gives their answers."""
        for server in self._servers:
            self._network.send(server, question)
        return [self._network.receive(server)[1] for server in self._servers]

    def offer(self, vector: Tensor, step: Step) -> None:
        """Starts an exchange: sends the worker's parameters, which must not change before `take`."""
        self._offered = [
            self._network.start_send(
                server, Message(Kind.VECTOR, vector[shard], step=step.number, stop=step.stop)
            )
            for server, shard in zip(self._servers, self._shards, strict=True)
        ]

    def take(self, vector: Tensor) -> bool:
        """Ends an exchange: takes the differences off the worker's parameters, as the centre has gained them.

        Returns:
            Whether this worker must stop.
        """
        stop = False
        differences = [self._network.receive(server)[1] for server in self._servers]
        for handle in self._offered:
            handle.wait()
        for shard, difference in zip(self._shards, differences, strict=True):
            assert difference.tensor is not None, "an exchange gives a difference"
            vector[shard].sub_(difference.tensor.to(vector.device))
            stop |= difference.stop
        return stop

    def part(self, vector: Tensor, steps: int) -> None:
        """Pulls at the centre for a last time, after so many steps, and leaves."""
        for server, shard in zip(self._servers, self._shards, strict=True):
            self._network.send(server, Message(Kind.LEAVE, vector[shard], step=steps))

    def let_go(self) -> None:
        """Tells all servers that nobody needs them any more."""
        for server in self._servers:
            self._network.send(server, Message(Kind.LEAVE))
