"""Asynchronous decentralized parallel SGD (AD-PSGD).

Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018, arXiv
1710.06952.

    x_i, x_j <- (x_i + x_j)/2      for a random neighbor j, while g_i is computed
    x_i <- x_i - lr * g_i(x_i as it was read)

Pairs are edges of the topology (`topology`) between workers of different colors. Active workers send a request at every
step, and passive workers reply, so there are no cyclic waits (see `pairing/keeper.py`). An average is atomic on both
sides: the active worker changes nothing between request and reply, and the passive worker handles one request at a
time. Staleness = number of averages between the reading of the parameters and the update. After an epoch the model of
worker 0 is evaluated; at the end, the mean of all models.

Departures from the paper:

- The reply is half of the difference and not x_j, so the sum over all workers is preserved under interleaving.
- Any torch optimizer replaces `- lr * g_i`. Its state is separate on each worker.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, ClassVar

from torch import Tensor

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.specs import chosen
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.gossip.mixing.replica import of_replicas
from polyrhythm.strategies.gossip.mixing.turns import remark
from polyrhythm.strategies.gossip.pairing.keeper import ANSWER, Keeper, Reply, place_of
from polyrhythm.strategies.gossip.pairing.membership import KINDS, Host, KeeperSuccessor, Member, Membership
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.state import MEAN, Part, State, StateField
from polyrhythm.strategies.strategy import Facts, Paper, Remarks, Strategy, Traits
from polyrhythm.strategies.topologies.ring import Ring
from polyrhythm.strategies.topology import TOPOLOGIES, Topology
from polyrhythm.strategies.worker_part import OptimizerSource, Step, WorkerPart, WorkerSetting, Writes
from polyrhythm.training.optimizer_plan import OptimizerPlan


class ADPSGD(Strategy, Remarks):
    """Every worker averages with one neighbor at a time, and waits for no other worker.

    Attributes:
        topology: graph of the averaging pairs; directions of its edges are ignored.
    """

    paper: ClassVar[Paper] = Paper(
        "Lian, Zhang, Zhang, Liu",
        "Asynchronous decentralized parallel stochastic gradient descent",
        "ICML",
        2018,
        "1710.06952",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="M",
        staleness="1",
        use_it="uneven, slow or unreliable machines on a slow network, without servers",
        when_a_worker_dies="the others continue; a replacement starts from the mean of its neighbors' parameters",
    )
    why_not_compressed: ClassVar[str] = (
        "pairs are random, and each worker would need copies of all others: use d_psgd"
    )

    topology: Annotated[Topology, chosen("topology", TOPOLOGIES)] = Ring()

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        self.topology.check(workers)

    def remark(self, workers: int) -> str:
        return remark(self.topology, workers)

    def traits(self, workers: int) -> Traits:
        """Return the traits of asynchronous workers; a single worker is synchronous and reads its newest parameters."""
        alone = workers == 1
        return Traits(lockstep=alone, waits_for_slower=False, draws=not alone)

    def faults(self, workers: int) -> FaultPolicy:
        if workers == 1:
            return FaultPolicy()
        # A replacement of rank 0 learns the membership from the others, and admits and releases them.
        return FaultPolicy.independent(workers)

    def resharding(self, before: int, after: int) -> Resharding:
        return of_replicas(after, ADPSGDWorker.fields, together=False)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return ADPSGDWorker(setting, self.topology)


class ADPSGDWorker(WorkerPart):
    """Notifies its keeper when a step begins and when there is a gradient."""

    follows = OptimizerSource.PLAN
    writes = Writes.ADDED
    fields = (
        StateField("parameters", Tensor, MEAN, at="_flat.vector"),
        StateField("optimizer", Part, MEAN, at="_keeper.optimizer"),
    )

    def __init__(self, setting: WorkerSetting, topology: Topology) -> None:
        super().__init__()
        self._network = setting.network
        self._flat = setting.flat
        self._place = place_of(topology, setting.roles.workers, setting.workers.rank)
        self._keeper = Keeper(self._place, setting)
        self._keeper.staleness = self.staleness
        self._host_returns = setting.leader_returns
        self._member: Member | None = None
        self._succeeds = setting.succeeds
        self._membership: Membership = (
            KeeperSuccessor(self._keeper, setting.flat)
            if setting.succeeds
            else Host(self._keeper, setting.flat)
        )
        self._serving: Handle | None = None
        self._training = self._stays = False
        if setting.succeeds and not self._place.leads:  # a new rank 0 waits for all living workers
            self._join_in()

    def start(self, step: int) -> int:
        """Begin together with all others; a replacement starts from the mean of its partners' parameters.

        Raises:
            PeerLost: worker 0 failed, and the call is to be repeated with its replacement; or this is a replacement,
                and the run is ending.
        """
        if self._serving is None:
            self._join_in()
        step = self._ask(Message(Kind.JOIN, step=step)).step
        self._training = True
        return step

    def begin(self, step: Step) -> None:
        if self._place.active:
            self._network.send(self._place.rank, Message(Kind.DIFFERENCE, step=step.number))

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if step.stop and self._place.others:
            self._network.send(self._place.rank, Message(Kind.EVENT, stop=True))
        self._keeper.plan = step.plan
        push = Message(Kind.PUSH, step=step.number, weight=step.weight, learning_rate=learning_rate)
        return self._ask(push).stop or step.stop

    def catch_up(self) -> None:
        self._ask(Message(Kind.PULL))

    def end(self) -> None:
        """Wait for all others; on worker 0 the flat vector then holds the mean of all models.

        Raises:
            PeerLost: worker 0 failed; the call is to be repeated with its replacement.
        """
        self._ask(Message(Kind.LEAVE))
        self._training = False
        if self._serving is not None and self._member is not None:
            self._serving.wait()
            if self._host_returns:  # worker 0 may fail with the model that it has just received
                self._member.stay()
                self._stays = True
                self._serve()

    def release(self) -> None:
        """End rank 0's keeper, which until now has sent late replacements `LEAVE`."""
        if self._serving is not None:
            self._network.send(self._place.rank, Message(Kind.LEAVE))
            self._serving.wait()

    def close(self) -> None:
        if self._stays and self._serving is not None:
            self._network.send(self._place.rank, Message(Kind.LEAVE))
            self._serving.wait()

    def state(self) -> State:
        tensors, facts = super().state()
        newest = self._keeper.copy() if self._training else None
        return tensors if newest is None else tensors | {"parameters": newest}, facts

    def _join_in(self) -> None:
        if not self._place.leads:
            member = Member(
                self._keeper,
                self._flat,
                resumed=self.restored,
                succeeds=self._succeeds,
                host_returns=self._host_returns,
            )
            self._membership = self._member = member
        if self._place.others:
            self._serve()

    def _serve(self) -> None:
        self._serving = self._network.start(lambda: serve(self._network, self._keeper, self._membership))

    def _ask(self, message: Message) -> Message:
        own = self._place.rank
        if self._serving is None:
            side = self._membership if message.kind in KINDS else self._keeper
            return side.on_message(own, message)[-1][1]
        self._network.send(own, message)
        answer = self._network.receive(own, ANSWER)[1]
        if answer.kind is Kind.LEAD:
            raise PeerLost(self._place.workers[0], "waiting for its reply")
        if answer.kind is Kind.LEAVE:
            self._serving.wait()  # raises the error of the background thread, if any
            raise PeerLost(self._place.workers[0], "joining a run that is ending")
        return answer


def serve(network: Communicator, keeper: Keeper, membership: Membership) -> None:
    """Handle messages until worker 0 has released all workers.

    Args:
        network: communicator of all ranks.
        keeper: keeper of the worker's parameters.
        membership: membership side of this worker.

    Raises:
        PeerLost: rank 0 failed; the worker has been notified by an answer of kind `LEAVE`.
    """
    leaving: dict[int, Handle] = {}
    try:
        while not membership.over:
            replies = _replies(network, keeper, membership)
            while replies:
                replies = _send(network, replies, leaving, keeper, membership)
    except Exception:
        network.send(*keeper.answer(Kind.LEAVE))
        raise
    for handle in leaving.values():
        with suppress(PeerLost):
            handle.wait()


def _replies(network: Communicator, keeper: Keeper, membership: Membership) -> list[Reply]:
    try:
        source, message = network.receive()
    except PeerLost as loss:
        return _on_loss(loss.rank, keeper, membership)
    return (membership if message.kind in KINDS else keeper).on_message(source, message)


def _on_loss(rank: int, keeper: Keeper, membership: Membership) -> list[Reply]:
    return [*membership.on_loss(rank), *keeper.on_loss(rank)]


def _send(
    network: Communicator,
    replies: list[Reply],
    leaving: dict[int, Handle],
    keeper: Keeper,
    membership: Membership,
) -> list[Reply]:
    """Start to send, and return the replies that follow from failed receivers.

    A rank is sent another message only after it has received the previous one: at most one send per rank is pending.
    """
    more: list[Reply] = []
    for to, reply in replies:
        with suppress(PeerLost):  # it may have been addressed to a failed predecessor
            if to in leaving:
                leaving.pop(to).wait()
        try:
            leaving[to] = network.start_send(to, reply)
        except PeerLost:
            more += _on_loss(to, keeper, membership)
    return more
