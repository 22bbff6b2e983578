"""What a worker is given so that it can begin beside others: all that no server holds.

successor                leader                      servers
  JOIN ────────────────▶ enters it
  ◀──── welcome ──────── untrained tensors, time, what others did of epochs
  PULL ────────────────────────────────────────────▶ enter it
  ◀──── parameters, and how many of its steps count ──
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message, pack_tensors, unpack_tensors
from polyrhythm.data.dealing import Begun
from polyrhythm.errors import PeerLost
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import LEADER, World

_TAG = 1
"""Nothing else that the leader sends a worker can be taken for a welcome."""


@dataclass(frozen=True)
class Welcome:
    """A welcome.

    Attributes:
        untrained: what is not trained (batch-norm statistics, frozen parameters), by name: the leader's.
        time_s: since training started, on the run's clock.
        begun: what other numbers of workers did of epochs that were not over when this run was resumed.
    """

    untrained: dict[str, Tensor]
    time_s: float
    begun: Begun = field(default_factory=Begun)

    def message(self) -> Message:
        """Packs it to be sent."""
        facts = {"time_s": self.time_s, "begun": self.begun.to_json()}
        return Message(Kind.STATE, pack_tensors(self.untrained, facts), tag=_TAG)

    @classmethod
    def receive(cls, control: Communicator) -> Welcome:
        """Waits for the leader's welcome."""
        return cls.of(control.receive(LEADER, _TAG)[1])

    @classmethod
    def of(cls, message: Message) -> Welcome:
        """Reads what `message` wrote."""
        assert message.tensor is not None
        tensors, facts = unpack_tensors(message.tensor)
        return cls(tensors, facts["time_s"], Begun.from_json(facts["begun"]))

    def give(self, replica: Replica) -> None:
        """Overwrites what is not trained of a replica."""
        for name, value in replica.untrained.items():
            value.copy_(self.untrained[name])


def join(world: World, replica: Replica, channel: LeaderChannel) -> Welcome:
    """Asks the leader, or the next one, to let this rank, a successor, take part; gives what it was told."""
    while True:
        try:
            channel.control.send(LEADER, Message(Kind.JOIN, version=world.incarnation))
            welcome = Welcome.of(channel.receive(_TAG))
        except PeerLost:
            if not channel.survives_leader:
                raise
            channel.mark_leader_lost()
            channel.await_leader()
            continue
        welcome.give(replica)
        return welcome


def share_untrained(world: World, replica: Replica) -> None:
    """Makes what is not trained equal to worker 0's, though some may be lost meanwhile, which breaks a collective."""
    if not replica.untrained:
        return
    control = world.control()
    if not world.leads:
        Welcome.receive(control).give(replica)
        return
    message = Welcome(replica.untrained, 0.0).message()
    for rank in world.cast.workers:
        if rank != LEADER:
            with suppress(PeerLost):  # who is lost is missed where something is received from it
                control.send(rank, message)
