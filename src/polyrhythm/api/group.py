"""A group of workers around a loop of the user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from polyrhythm.api.distributed_optimizer import DistributedOptimizer
from polyrhythm.api.final_model import share_final_model
from polyrhythm.api.server_states import ServerStates
from polyrhythm.api.shard import Shard, batches_of
from polyrhythm.api.step_weight import StepWeight
from polyrhythm.communication.message import Kind, unpack_json
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.config.assemble import warn_of
from polyrhythm.errors import RequestError, RunError
from polyrhythm.launch.meeting import FAILED_KEY
from polyrhythm.launch.patience import speaking_up
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy

_Model = TypeVar("_Model", bound=nn.Module)


class Group:
    """This worker's end of a group; made by `join`, used in a `with`.

    At the end of the `with` all workers hold the run's final model. If its body raises, this worker leaves without a
    word and the error goes on; once its process has ended, others that wait for it get `RunError`.

    Args:
        strategy: how the workers share the work.
        world: where this rank is.
        home: this rank's connections.

    Attributes:
        rank: index of this worker.
        workers: how many there are.
        leads: whether this worker is the one to print and to save.
        staleness: after the `with`, on the leader: how many gradients were applied at which staleness.
    """

    def __init__(self, strategy: Strategy, world: World, home: Rank) -> None:
        # A name of its own: groups of one name are made once, and the replica makes "workers".
        self._peers = world.network.subgroup("loop", world.cast.workers)
        self.rank = self._peers.rank
        self.workers = self._peers.size
        self.leads = world.leads
        self.staleness: Counter[int] = Counter()
        self._strategy = strategy
        self._world = world
        self._home = home
        self._control = world.control()
        self._weight = StepWeight()
        self._replica: Replica | None = None
        self._optimizer: DistributedOptimizer | None = None

    def distribute(
        self, model: _Model, optimizer: torch.optim.Optimizer
    ) -> tuple[_Model, DistributedOptimizer]:
        """Ties a model and its optimiser to those of the other workers.

        All workers get worker 0's parameters at the model's first use in training; weights loaded until then count.

        Args:
            model: changed in place: its parameters become views of one vector. On its final device.
            optimizer: over the model's parameters, which it must treat number by number, as SGD and Adam do.

        Returns:
            The same model, and the optimiser to be used from now on.

        Raises:
            RequestError: model or optimiser cannot be distributed, or one has been.
        """
        if self._replica is not None:
            raise RequestError("a group distributes one model: put several into one nn.Module")
        if self._strategy.cuts_network:
            raise RequestError(
                f"{self._strategy} computes forward and backward passes itself, which a loop of your own does: use "
                "polyrhythm.train, or join with synchronous"
            )
        self._replica = Replica(model, optimizer, self._strategy, self._world, announce=False)
        served = self.leads and len(self._world.cast.servers) > 0
        servers = ServerStates(self._world, self._strategy) if served else None
        made = DistributedOptimizer(optimizer, self._replica, self._weight, str(self._strategy), servers)
        if self.leads:
            warn_of(self._strategy, self.workers, float(optimizer.param_groups[0]["lr"]))
        if served:
            made.register_step_post_hook(lambda *_: self._hear())
        self._optimizer = made
        return model, made

    def shard(self, loader: Iterable[Any]) -> Shard:
        """Gives this worker's share of a loader; all workers must call it at the same place of their programs.

        - A `DataLoader` over a map-style data set: its batch size is that of one worker. Every step deals
          N x batch_size images of the sampler's order out among the N workers, so workers' images are disjoint and
          cover everything. A sampler that shuffles does so anew each epoch, the same on all; one of your own must
          draw from torch's generators. Where fewer images than workers are left, some worker sees one of the others'
          images in a step whose gradient does not count.
        - A `DataLoader` with a batch sampler, or over an `IterableDataset`, or any other iterable, the same on all
          workers: each takes every N-th batch, and all stop after the last whole round.
        """
        return Shard(batches_of(loader, self._peers), self._weight, self._epoch_begins)

    def average(self, value: float | Tensor, weight: float = 1.0) -> float:
        """Gives the mean of the workers' values, the same on all; returns when all workers have called it.

        In a strategy that lets workers go at their own pace, the k-th call of a worker meets the k-th of the
        others, so the faster ones wait here for the slowest: call it once an epoch or at the end.

        Args:
            value: this worker's.
            weight: how much it counts, such as the images behind it.
        """
        if self._optimizer is not None and self._optimizer.over:
            raise RequestError("the run is over: call group.average inside the `with` of polyrhythm.join")
        total = torch.tensor([float(value) * weight, weight], dtype=torch.float64)
        self._peers.all_reduce(total)
        return float(total[0] / total[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        elif not isinstance(error, RunError):  # that would be what this worker has noticed of another's end
            with suppress(
                RuntimeError
            ):  # the store may be gone, and the error that is under way matters more
                self._home.rendezvous.store.set(FAILED_KEY, str(self._world.network.rank))

    def _epoch_begins(self) -> None:
        if self._optimizer is not None and torch.is_grad_enabled():  # else it is an evaluation
            self._optimizer.begin_epoch()

    def _finish(self) -> None:
        if self._replica is None or self._optimizer is None:
            raise RequestError(
                "nothing was distributed: call group.distribute(model, optimizer) inside the `with`"
            )
        store = self._home.rendezvous.store
        store.set(f"script/left/{self.rank}", "")
        with speaking_up(self._who_is_missing):
            self._optimizer.start()
            self._replica.part.settle()
            self._replica.part.end()
            share_final_model(self._replica, self._peers)
            if self.leads:
                self._replica.part.let_go()
            self._hear_last_words()
            self._optimizer.over = True
            self._home.close()

    def _who_is_missing(self) -> str:
        store = self._home.rendezvous.store.clone()  # the other thread may be waiting on the store itself
        missing = [
            str(worker) for worker in range(self.workers) if not store.check([f"script/left/{worker}"])
        ]
        return (
            f"worker {self.rank} has left the loop after {self._steps()} steps and waits for worker "
            f"{', '.join(missing)} to leave"
            if missing
            else ""
        )

    def _steps(self) -> int:
        return 0 if self._optimizer is None else self._optimizer.steps

    def _hear(self) -> None:
        """Takes what servers report while training: nobody reads it here, but it must not pile up."""
        while self._control.poll() is not None:
            pass

    def _hear_last_words(self) -> None:
        """Takes every server's last report."""
        assert self._replica is not None
        self.staleness.update(self._replica.part.staleness)
        missing = set(self._world.cast.servers) if self.leads else set()
        while missing:
            source, message = self._control.receive()
            if message.kind is Kind.REPORT and message.tensor is not None:
                missing.discard(source)
                counts = unpack_json(message.tensor)["staleness"]
                self.staleness.update({int(staleness): count for staleness, count in counts.items()})
