"""The server of Downpour: a shard and its optimiser; sums come in, and whoever fetches gets the parameters.

worker ── PUSH(sum of gradients) ─▶ optimiser step, version + 1            no answer
── FETCH ─▶ ◀─ PARAMETERS ──                                        while the worker computes
"""

from __future__ import annotations

from collections import Counter

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.admission import admit_push, payload
from polyrhythm.strategies.parameter_server.serving.optimized_shard import OptimizedShard
from polyrhythm.strategies.parameter_server.serving.presence import Presence
from polyrhythm.strategies.state import State

Reply = tuple[int, Message]


class SumServer:
    """One server; see `ServerPart`.

    Args:
        workers: their ranks, worker 0's first.
        warm_start_steps: of worker 0, before which the others get no parameters; all of its steps, if it takes fewer.

    Attributes:
        version: updates so far.
        staleness: how many gradients were applied at which staleness.
    """

    def __init__(self, workers: tuple[int, ...], warm_start_steps: int) -> None:
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self._shard = OptimizedShard()
        self._presence = Presence(workers)
        self._warm_start_steps = warm_start_steps
        self._steps = [0] * len(workers)
        self._stop = False

    @property
    def done(self) -> bool:
        """Whether all workers have left, and worker 0 has let the servers go."""
        return self._presence.done

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each worker it holds."""
        return dict(zip(self._presence.pushers, self._steps, strict=True))

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a rank and gives the replies.

        Raises:
            RefusedMessage: a message that no worker of ours sends.
        """
        number = self._presence.number(source, message.kind)
        if message.kind is Kind.PUSH:
            admit_push(message, self._shard.values, self.version, message.step)  # a sum may end at any step
            self._stop |= message.stop
            return self._push(number, message)
        if message.kind is Kind.FETCH:
            self._stop |= message.stop
            return [self._answer(source), *self._release()]
        if message.kind is Kind.PULL:
            return self._pull(source, message)
        if message.kind is Kind.LEAVE:
            return self._go_on() if self._presence.leave(source) else []
        if message.kind is Kind.CONFIGURE:
            self._shard.configure(message)
            if message.step > 0:  # else nobody can tell how many there are
                self._warm_start_steps = min(self._warm_start_steps, message.step)
            return []
        if message.kind is Kind.PARAMETERS:
            self._shard.initialise(payload(message))
            return self._release()
        raise RefusedMessage(
            Reason.KIND, f"a server cannot do anything with {message.kind.name} from rank {source}"
        )

    def on_loss(self, rank: int) -> list[Reply]:
        """Forgets a worker, until a successor pulls; what it has pushed still counts."""
        if rank not in self._presence.numbers or not self._presence.lose(rank):
            return []
        return self._go_on()

    def _go_on(self) -> list[Reply]:
        final = self._presence.ready_to_end
        ending = [] if final is None or not self._shard.ready else [self._answer(final)]
        return self._release() + ending

    def state(self) -> State:
        """Gives all that a resumed server needs, parameters included."""
        tensors, facts = self._shard.state()
        return tensors, {
            "version": self.version,
            "steps": list(self._steps),
            "staleness": {str(key): count for key, count in self.staleness.items()},
            **facts,
        }

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; worker 0's initial parameters are then not needed."""
        facts = state[1]
        self.version = facts["version"]
        self._steps = list(facts["steps"])
        self.staleness = Counter({int(key): count for key, count in facts["staleness"].items()})
        self._shard.load_state(state)

    def _pull(self, source: int, message: Message) -> list[Reply]:
        if message.stop:  # the final parameters
            self._presence.final = source
            final = self._presence.ready_to_end
            return [] if final is None or not self._shard.ready else [self._answer(final)]
        if not self._presence.enter(source):
            return [(source, Message(Kind.LEAVE))]
        self._presence.asking.append(source)
        return self._release()

    def _push(self, worker: int, message: Message) -> list[Reply]:
        """Applies a sum of gradients, the last of which is of step `message.step`, unless it has been applied."""
        if message.step < self._steps[worker]:
            return []
        self._steps[worker] = message.step + 1
        if message.weight > 0:
            self._shard.step(payload(message), message.learning_rate)
            self.staleness[self.version - message.version] += round(message.weight)
            self.version += 1
        return self._release()

    def _release(self) -> list[Reply]:
        """Answers those who wait for their first parameters, as far as they need not wait."""
        first = self._presence.pushers[0]
        warm = self._stop or self._steps[0] >= self._warm_start_steps or not self._presence.is_there(first)
        asking = self._presence.asking
        free = [rank for rank in asking if self._shard.ready and (warm or rank == first)]
        self._presence.asking = [rank for rank in asking if rank not in free]
        return [self._answer(rank) for rank in free]

    def _answer(self, source: int) -> Reply:
        step = self._steps[self._presence.numbers[source]]
        values = self._shard.shown()
        return source, Message(Kind.PARAMETERS, values, version=self.version, step=step, stop=self._stop)
