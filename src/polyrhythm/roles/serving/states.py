"""The states of a server's shards, on their way between its part and the leader."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.communication.message import (
    Kind,
    Message,
    Reason,
    RefusedMessage,
    pack_tensors,
    unpack_tensors,
)
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.server_part import KeepingPart, ServerPart


class States:
    """Answers the leader's requests for states on one server, and takes the state of a checkpoint.

    Args:
        part: of the server.
        own: the number of its own shard.
        channel: to the leader.
    """

    def __init__(self, part: ServerPart, own: int, channel: LeaderChannel) -> None:
        self._part = part
        self._own = own
        self._channel = channel

    def resume(self, shards: Sequence[int]) -> None:
        """Takes from the leader what the run resumes from.

        Args:
            shards: the server's own, then those that it keeps.
        """
        for shard in shards:
            _, message = self._channel.control.receive(LEADER)
            self._load(shard, message)

    def on_message(self, source: int, message: Message) -> None:
        """Gives the leader the state of a shard, or takes it back before there is one.

        Raises:
            RefusedMessage: somebody else asks, for what is not here, or what comes is too late or no state.
        """
        if source != LEADER:
            raise RefusedMessage(Reason.SENDER, f"rank {source} asked for a checkpoint")
        if message.kind is Kind.CHECKPOINT:
            self._hand_in(message.step)
            return
        if self._has_begun():
            raise RefusedMessage(
                Reason.ORDER, f"the state of shard {message.step} came although training has begun"
            )
        self._load(message.step, message)

    def _load(self, shard: int, message: Message) -> None:
        state = unpack_tensors(payload(message))
        if shard == self._own:
            self._part.load_state(state)
        elif isinstance(self._part, KeepingPart):
            self._part.load_state_of(shard, state)

    def _has_begun(self) -> bool:
        try:
            self._part.state()
        except RefusedMessage:  # there are no parameters yet
            return False
        return True

    def _hand_in(self, shard: int) -> None:
        """Only servers that keep others' have more than one."""
        if shard == self._own:
            state = self._part.state()
        elif isinstance(self._part, KeepingPart):
            state = self._part.state_of(shard)
        else:
            raise RefusedMessage(
                Reason.NUMBERS, f"the state of shard {shard} was asked for, which is not here"
            )
        self._channel.answer(Message(Kind.STATE, pack_tensors(*state), step=shard))
