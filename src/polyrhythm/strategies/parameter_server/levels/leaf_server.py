"""A leaf: it makes one gradient of those of its group, pushes it to the roots, and hands their answers on.

    workers ── PUSH ─▶ held until the group is complete ── PUSH(mean, samples) ─▶ roots, each its shard
            ◀─ PARAMETERS ── put together when all have answered ◀── VECTOR ────

A pull goes the same way, once all of the group ask: so they go on with the same parameters.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, pack_json
from polyrhythm.strategies.parameter_server.levels.groups import Levels
from polyrhythm.strategies.parameter_server.serving.admission import (
    admit_bare,
    admit_push,
    admitted_initial,
    admitted_plan,
    payload,
)
from polyrhythm.strategies.parameter_server.serving.aggregator import mean
from polyrhythm.strategies.state import State
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizer_plan import OptimizerPlan

Reply = tuple[int, Message]


class LeafServer:
    """One server; see `ServerPart`.

    Args:
        levels: who belongs to whom.
        index: of this leaf.

    Attributes:
        version: means that the roots have answered.
        staleness: empty: the roots count.
        done: whether it has been let go.
    """

    def __init__(self, levels: Levels, index: int) -> None:
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self.done = False
        self._members = levels.groups[index]
        self._roots = levels.roots
        self._others = tuple(leaf for leaf in levels.leaves if leaf != levels.leaves[index])
        self._there = set(self._members)
        self._steps = dict.fromkeys(self._members, 0)
        self._plan: OptimizerPlan | None = None
        self._begun = False
        self._like = torch.empty(0, device="meta")
        self._held: dict[int, Message] = {}
        self._asking: list[int] = []
        self._waiting: list[int] = []
        self._answers: dict[int, Message] = {}
        self._versions = dict.fromkeys(self._roots, 0)

    @property
    def steps(self) -> dict[int, int]:
        """With which step each worker was last let go on."""
        return self._steps

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a worker, a root or another leaf, and gives the replies.

        Raises:
            RefusedMessage: a message that none of them sends.
        """
        if source not in self._members:
            return self._hear_server(source, message)
        if message.kind is Kind.PUSH:
            self._admit(source, message)
            return self._push(source, message)
        if message.kind in (Kind.PULL, Kind.LEAVE):
            admit_bare(message)
            return self._pull(source, message) if message.kind is Kind.PULL else self._leave(source)
        if message.kind is Kind.CONFIGURE:
            if self._plan is not None:
                raise RefusedMessage(Reason.ORDER, "a second plan came")
            self._plan = admitted_plan(message)
            return []
        if message.kind is Kind.PARAMETERS:
            self._plan = admitted_initial(self._plan, payload(message), ready=self._begun)
            self._begun = True
            return self._initialise(self._plan, payload(message))
        raise RefusedMessage(
            Reason.KIND, f"a leaf cannot do anything with {message.kind.name} from rank {source}"
        )

    def on_loss(self, rank: int) -> list[Reply]:
        """No worker can be done without."""
        return []

    def state(self) -> State:
        """Nothing: between steps nothing is held, and the roots know the rest."""
        return {}, {}

    def load_state(self, state: State) -> None:
        """Takes nothing."""

    def _admit(self, source: int, message: Message) -> None:
        """Lets in a gradient for the parameters that were answered last."""
        if source in self._held or source not in self._there:
            raise RefusedMessage(Reason.ORDER, f"rank {source} pushed a second time, or after it had left")
        admit_push(message, self._like, self.version, self._steps[source])

    def _initialise(self, plan: OptimizerPlan, values: Tensor) -> list[Reply]:
        """Hands out the shards, each with its part of the plan."""
        replies = []
        for root, shard in zip(self._roots, shards(len(values), len(self._roots)), strict=True):
            text = pack_json(plan.part(shard.start, shard.stop).to_json())
            replies += [
                (root, Message(Kind.CONFIGURE, text)),
                (root, Message(Kind.PARAMETERS, values[shard])),
            ]
        return replies

    def _pull(self, source: int, message: Message) -> list[Reply]:
        if not message.stop:
            self._asking.append(source)
            if len(self._asking) < len(self._there):
                return []
        self._waiting = [source] if message.stop else self._asking
        self._asking = []
        return [(root, Message(Kind.PULL, stop=message.stop)) for root in self._roots]

    def _push(self, source: int, message: Message) -> list[Reply]:
        self._held[source] = message
        if len(self._held) < len(self._there):
            return []
        held = [self._held[member] for member in self._members if member in self._held]
        self._held = {}
        self._waiting = list(self._members)
        weights = [entry.weight for entry in held]
        weighty = [entry for entry in held if entry.weight > 0]
        whole = mean([payload(entry) for entry in held], weights) if weighty else payload(held[0])
        return [
            (
                root,
                Message(
                    Kind.PUSH,
                    whole[shard],
                    version=self._versions[root],
                    step=message.step,
                    weight=sum(weights),
                    learning_rate=message.learning_rate,
                    stop=any(entry.stop for entry in held),
                ),
            )
            for root, shard in zip(self._roots, shards(len(whole), len(self._roots)), strict=True)
        ]

    def _hear_server(self, source: int, message: Message) -> list[Reply]:
        if source in self._roots:
            return self._hear_root(source, message)
        if source not in self._others or message.kind is not Kind.LEAVE:
            raise RefusedMessage(
                Reason.SENDER,
                f"a leaf heard {message.kind.name} from rank {source}, which is not of its group",
            )
        self.done = True
        return []

    def _hear_root(self, root: int, message: Message) -> list[Reply]:
        """Takes a root's answer; hands all of them on, once they are there."""
        self._answers[root] = message
        self._versions[root] = message.version
        if len(self._answers) < len(self._roots):
            return []
        answers = [self._answers[root] for root in self._roots]
        self._answers = {}
        if message.kind is Kind.VECTOR:
            self.version += 1
        values = torch.cat([payload(answer) for answer in answers])
        self._like = values.to("meta")
        step = min(answer.step for answer in answers)
        stop = any(answer.stop for answer in answers)
        self._steps.update(dict.fromkeys(self._waiting, step))
        reply = Message(Kind.PARAMETERS, values, version=self.version, step=step, stop=stop)
        return [(rank, reply) for rank in self._waiting]

    def _leave(self, source: int) -> list[Reply]:
        """A worker leaves; the last takes the leaf's leave with it. Worker 0's second leave lets all servers go."""
        if source not in self._there:
            self.done = True
            return [(rank, Message(Kind.LEAVE)) for rank in (*self._others, *self._roots)]
        self._there.remove(source)
        return [] if self._there else [(root, Message(Kind.LEAVE)) for root in self._roots]
