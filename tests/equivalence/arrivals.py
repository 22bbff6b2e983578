"""What a reference of asynchronous servers is told of a run: which message came when, and nothing of what it did."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.jobs import batch, cosine, vector_of
from polyrhythm.communication.message import Kind
from polyrhythm.roles.job import Job


class Arrival(NamedTuple):
    """A message that a server took.

    Attributes:
        server: its number.
        rank: of the sender.
        kind: of the message.
        number: the step, or of what servers tell each other the round.
        final: whether a pull asks for the final parameters.
    """

    server: int
    rank: int
    kind: Kind
    number: int
    final: bool


def note_arrivals(monkeypatch, server_class) -> list[Arrival]:
    """Gives a list that fills with what servers of a class take; they are numbered as they are first spoken to."""
    seen: list[Arrival] = []
    servers: list[object] = []
    inner = server_class.on_message

    def on_message(self, source, message):
        if not any(self is server for server in servers):
            servers.append(self)
        between_servers = message.kind in (Kind.DIFFERENCE, Kind.ANNOUNCE)
        number = message.version if between_servers else message.step
        final = message.kind is Kind.PULL and message.stop
        seen.append(Arrival(servers.index(self), source, message.kind, number, final))
        return inner(self, source, message)

    monkeypatch.setattr(server_class, "on_message", on_message)
    return seen


class Workers:
    """Every worker's copy of the parameters, and its gradients, in plain torch."""

    def __init__(self, job: Job, servers: int) -> None:
        torch.manual_seed(job.learning.seed)
        self.job = job
        self.start = vector_of(job.make_model())
        ends = [len(self.start) * server // servers for server in range(servers + 1)]
        self.cuts = [slice(*places) for places in pairwise(ends)]
        self.copies = [self.start.clone() for _ in range(job.workers)]
        self._gradients: dict[tuple[int, int], Tensor] = {}

    def samples(self, worker: int, step: int) -> int:
        """How many samples there are in a batch."""
        return len(self._batch(worker, step)[1])

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        learning = self.job.learning
        if learning.schedule.name == "constant":
            return learning.optimizer.lr
        return cosine(self.job, step, self.job.steps_per_epoch * learning.epochs)

    def gradient(self, worker: int, step: int) -> Tensor:
        """The mean gradient of a batch at the worker's copy, as it was when the gradient was first asked for."""
        if (worker, step) not in self._gradients:
            model = self.job.make_model()
            nn.utils.vector_to_parameters(self.copies[worker].clone(), model.parameters())
            images, labels = self._batch(worker, step)
            loss = functional.cross_entropy(model(images.to(self.start.dtype)), labels, reduction="sum")
            (loss / max(1, len(labels))).backward()
            found = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
            self._gradients[worker, step] = found
        return self._gradients[worker, step]

    def _batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        length = self.job.steps_per_epoch
        return batch(self.job, step // length, step % length, worker, self.job.workers)
