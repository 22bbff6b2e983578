"""Background service of one AD-PSGD worker: messages between its loop, its keeper, its membership and other workers.

loop ── notify, ask ─▶ keeper, or membership ── replies ─▶ other workers
◀── answer ──────┘      ▲── messages and failures of other workers
"""

from __future__ import annotations

from contextlib import suppress

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.gossip.pairing.keeper import ANSWER, Keeper, Reply
from polyrhythm.strategies.gossip.pairing.membership import KINDS, Host, KeeperSuccessor, Member, Membership
from polyrhythm.strategies.worker_part import WorkerSetting


class KeeperService:
    """Service of one worker; a single worker needs no background task.

    Args:
        setting: setting of the worker.
        keeper: keeper of its parameters.
    """

    def __init__(self, setting: WorkerSetting, keeper: Keeper) -> None:
        self._network, self._setting = setting.network, setting
        self._keeper, self._place = keeper, keeper.place
        self._member: Member | None = None
        self._membership: Membership = (
            KeeperSuccessor(keeper, setting.flat) if setting.succeeds else Host(keeper, setting.flat)
        )
        self._serving: Handle | None = None
        self._stays = False
        if setting.succeeds and not self._place.leads:  # a new rank 0 waits for all living workers
            self._open(restored=False)

    def join(self, step: int, *, restored: bool) -> int:
        """Begin together with all others; a replacement starts from the mean of its partners' parameters.

        Args:
            step: start step of the worker.
            restored: whether the flat vector holds the parameters of a checkpoint.

        Returns:
            The step to start at.

        Raises:
            PeerLost: worker 0 failed, and the call is to be repeated with its replacement; or this is a replacement,
                and the run is ending.
        """
        if self._serving is None:
            self._open(restored=restored)
        return self.ask(Message(Kind.JOIN, step=step)).step

    def notify(self, message: Message) -> None:
        """Send a message without an answer."""
        self._network.send(self._place.rank, message)

    def ask(self, message: Message) -> Message:
        """Return the answer to a message.

        Raises:
            PeerLost: see `join`.
        """
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

    def leave(self) -> None:
        """Wait for all others; on worker 0 the flat vector then holds the mean of all models.

        Raises:
            PeerLost: worker 0 failed; the call is to be repeated with its replacement.
        """
        self.ask(Message(Kind.LEAVE))
        if self._serving is not None and self._member is not None:
            self._serving.wait()
            if self._setting.leader_returns:  # worker 0 may fail with the model that it has just received
                self._member.stay()
                self._stays = True
                self._serve()

    def release(self) -> None:
        """End the service of rank 0, which until now has sent late replacements `LEAVE`."""
        if self._serving is not None:
            self.notify(Message(Kind.LEAVE))
            self._serving.wait()

    def close(self) -> None:
        """End the service of a worker that has answered a replacement of rank 0 until now."""
        if self._stays:
            self.release()

    def _open(self, *, restored: bool) -> None:
        if not self._place.leads:
            self._membership = self._member = Member(self._keeper, self._setting, restored=restored)
        if self._place.others:
            self._serve()

    def _serve(self) -> None:
        self._serving = self._network.start(lambda: serve(self._network, self._keeper, self._membership))


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
