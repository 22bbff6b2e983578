"""A live server for tests that attack it: three ranks in one process, of which one serves on a thread of its own."""

from __future__ import annotations

import threading
from collections import Counter

import torch

from polyrhythm.communication.message import Kind, Message, pack_json, unpack_json
from polyrhythm.communication.transports.torch_distributed.communicator import (
    TorchDistributedCommunicator,
    connect,
)
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.roles.server import serve
from polyrhythm.roles.world import World
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

LEADER, WORKER, SERVER = range(3)
CAST = RoleAssignment((LEADER, WORKER), (SERVER,))
NUMBERS, RATE = 10, 0.5
PLAN = OptimizerPlan("SGD", (Span(0, NUMBERS, {"lr": RATE}),), RATE)
PATIENCE_S = 20.0


class LiveServer:
    """A leader, a worker, and the server.

    Args:
        shared_memory: whether links go through it.
    """

    def __init__(self, shared_memory: bool = True) -> None:
        self.store = host_store()
        ends = [connect(local(rank, 3, self.store.port), shared_memory) for rank in range(3)]
        self.homes: list[Rank] = [home for home, _ in ends]
        self.networks: list[TorchDistributedCommunicator] = [network for _, network in ends]
        self.serving = threading.Thread(target=self._serve)
        self.serving.start()

    def _serve(self) -> None:
        serve(ParameterServer(), World(self.networks[SERVER], CAST, refused=self.homes[SERVER].refused))

    def ask(self, rank: int, message: Message) -> Message:
        """Sends something to the server; gives the answer."""
        self.networks[rank].send(SERVER, message)
        return self.networks[rank].receive(SERVER)[1]

    def begin(self) -> None:
        """Gives the server what it starts with."""
        self.networks[LEADER].send(SERVER, Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
        self.networks[LEADER].send(SERVER, Message(Kind.PARAMETERS, torch.zeros(NUMBERS)))
        for rank in CAST.workers:
            self.ask(rank, Message(Kind.PULL))

    def end(self) -> Counter[str]:
        """Ends the run as workers do; gives what the server says that it refused."""
        for rank in CAST.workers:
            self.networks[rank].send(SERVER, Message(Kind.LEAVE))
        self.ask(LEADER, Message(Kind.PULL, stop=True))
        self.networks[LEADER].send(SERVER, Message(Kind.LEAVE))
        control = World(self.networks[LEADER], CAST).control()
        while True:
            _, message = control.receive(SERVER)
            assert message.tensor is not None
            if message.kind is Kind.REPORT:
                self.serving.join(PATIENCE_S)
                return Counter(unpack_json(message.tensor)["refused"])

    def close(self) -> None:
        leaving = [threading.Thread(target=home.close) for home in self.homes]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join(PATIENCE_S)
