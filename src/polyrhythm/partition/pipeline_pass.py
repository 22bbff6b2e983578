"""One rank's passes of a pipeline: units in the order of a schedule, and the messages between stages.

    stage s     ◀── values of microbatch m ── stage s-1      forward; with it, whether anybody so far wants to stop
    stage s     ── their gradients ──▶ stage s-1             backward; with it, the loss, and whether anybody wants to

Chunk c of rank k is stage c K + k. Sends are started and not waited for until a step's end, so a rank waits for nothing
but what its next unit needs, in the order that `timetable` has.

A stage that must see a batch as a whole (`StageWork.together`) waits for all of its microbatches, and then computes
them at once and passes each on; so it does backward.

What a stage computes is a `StageWork`: of a network (`stage.py`), or in a dry run nothing but sizes
(`SizedStage`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol

from torch import Tensor

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import RunError
from polyrhythm.partition.schedule import Schedule, Unit

Lap = Literal["forward", "backward", "other"]

WAIT = "wait"

FORWARD_SHARE = 1 / 3
"""Forward pass's share of a stage's time; the backward pass has one product for inputs and one for weights."""


@dataclass
class Pipelined:
    """A batch in the pipeline.

    Attributes:
        rows: images of each microbatch.
        first: number of its first microbatch in the run, by which messages are known.
        learning_rate: learning rate to update with after it.
        pass_time: function that advances virtual time by a share of a step's time; its text names the activity.
        lap: function that records the phase and the activity that have just ended, for the worker's timings.
        stop: whether any stage is known to want to stop after it.
        loss: the sum of its microbatches' shares of the mean loss, as far as they are known.
    """

    rows: tuple[int, ...]
    first: int = 0
    learning_rate: float = 0.0
    pass_time: Callable[[float, str], None] = lambda share, what: None
    lap: Callable[[Lap, str], None] = lambda part, what: None
    stop: bool = False
    loss: float = 0.0

    @property
    def images(self) -> int:
        """Images in all."""
        return sum(self.rows)


def rows_of(images: int, microbatches: int) -> tuple[int, ...]:
    """Return how many images each microbatch has: the first ones one more where they do not divide."""
    least, more = divmod(images, microbatches)
    return tuple(least + (number < more) for number in range(microbatches))


class StageWork(Protocol):
    """Computation of one stage.

    Attributes:
        share: share of the whole network's time.
        recomputes: whether its forward pass is run again before its backward pass.
        together: whether all microbatches of a batch are computed at once.
    """

    share: float
    recomputes: bool
    together: bool

    def forward(self, numbers: Sequence[int], values: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Return the values for the next stage, of each of some microbatches; none of the last stage.

        Args:
            numbers: numbers of the microbatches in the stream; one, unless `together`.
            values: values of the stage before, of each; none for the first.
        """

    def take(self, number: int, message: Message, position: int) -> Tensor:
        """Return a received value, or raise `RunError` if it is invalid."""

    def take_gradient(self, number: int, message: Message, position: int) -> Tensor:
        """Return the gradient of a value that has been sent, or raise `RunError` if it is none."""

    def loss(self, number: int) -> float:
        """Return a microbatch's share of its batch's mean loss; of the last stage, after `forward`."""

    def backward(self, numbers: Sequence[int], gradients: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Add to the gradients of the parameters, or where this is split leave it to `weights`; return the inputs'."""

    def weights(self, number: int) -> None:
        """Add to the gradients of the parameters what `backward` has left."""

    @property
    def inputs(self) -> int:
        """Number of values received from the stage before."""

    @property
    def outputs(self) -> int:
        """Number of values sent to the next stage."""


@dataclass
class PipelinePass:
    """One rank's part of a pipeline. All ranks must be given the same batches in the same order.

    Args:
        schedule: the order of units.
        microbatches: microbatches of a batch.
        group: the ranks of the pipeline, in the order of their stages.
        stages: stages of this rank, in the order of their chunks.
        copies: copies of every stage, where microbatches are dealt out among them: `group` has the first
            stage's copies, then
            the next one's, and so on. Empty: one of each.

    Attributes:
        batches: batches in the pipeline, by number; the first one is 0 whenever it was empty.
        live: number of microbatches and chunks with activations kept now.
        most_live: largest such number so far.
    """

    schedule: Schedule
    microbatches: int
    group: Communicator
    stages: Sequence[StageWork]
    copies: tuple[int, ...] = ()
    batches: dict[int, Pipelined] = field(default_factory=dict)
    live: int = 0
    most_live: int = 0
    _sent: deque[Handle] = field(default_factory=deque)
    _losses: dict[int, float] = field(default_factory=dict)
    _held: dict[tuple[str, int], dict[int, list[Tensor]]] = field(default_factory=dict)
    _early: dict[tuple[int, int, tuple[int, int]], Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        copies = self.copies or (1,) * self.group.size
        self._firsts = [0, *accumulate(copies)]
        self._ranks = len(copies)
        self._rank = bisect_right(self._firsts, self.group.rank) - 1

    def run(self, unit: Unit) -> None:
        """Compute a unit; its microbatch counts from the first one of batch 0."""
        number = unit.microbatch
        batch = self.batches[number // self.microbatches]
        position = number % self.microbatches
        # A microbatch without images does not travel; the first one does, with the requests to stop.
        if batch.rows[position] or position == 0:
            {"F": self._forward, "B": self._backward, "W": self._weights}[unit.kind](unit, batch)

    def finish_sends(self) -> None:
        """Wait until all that was sent has left."""
        while self._sent:
            self._sent.popleft().wait()

    def _forward(self, unit: Unit, batch: Pipelined) -> None:
        number, stage, place = unit.microbatch, self.stages[unit.chunk], self._place(unit)
        rows, known_as = batch.rows[number % self.microbatches], batch.first + number % self.microbatches
        values = []
        for position in range(stage.inputs):
            message = self._receive(self._member(place - 1, number), 2 * (place - 1), (known_as, position))
            # A wish to stop goes to the last stage with the values, and from there to all with the gradients: no
            # message more.
            batch.stop = batch.stop or message.stop
            values.append(stage.take(number, message, position))
        batch.lap("other", WAIT)
        what = self._unit_name("forward", unit)
        self._pass(batch, stage, rows, FORWARD_SHARE, what)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        for done, outputs in self._computed(unit, batch, values, stage.forward):
            if place + 1 < self._places:
                known_as = batch.first + done % self.microbatches
                for position, value in enumerate(outputs):
                    self._send(
                        self._member(place + 1, done),
                        Message(Kind.VECTOR, value, position, known_as, stop=batch.stop, tag=2 * place),
                    )
            else:
                batch.loss += stage.loss(done)
        batch.lap("forward", what)

    def _computed(
        self,
        unit: Unit,
        batch: Pipelined,
        values: list[Tensor],
        compute: Callable[[Sequence[int], Sequence[list[Tensor]]], list[list[Tensor]]],
    ) -> list[tuple[int, list[Tensor]]]:
        """Return the outputs of each microbatch computed now; a stage that defers returns none or all."""
        number = unit.microbatch
        if not self.stages[unit.chunk].together:
            return [(number, compute([number], [values])[0])]
        held = self._held.setdefault((unit.kind, unit.chunk), {})
        held[number] = values
        # Microbatches without images are the last of a batch, and are never computed.
        if number % self.microbatches + 1 < sum(map(bool, batch.rows)):
            return []
        numbers = list(held)
        found = list(zip(numbers, compute(numbers, list(held.values())), strict=True))
        held.clear()
        return found

    def _backward(self, unit: Unit, batch: Pipelined) -> None:
        number, stage, place = unit.microbatch, self.stages[unit.chunk], self._place(unit)
        rows, known_as = batch.rows[number % self.microbatches], batch.first + number % self.microbatches
        gradients = []
        loss = stage.loss(number) if place + 1 == self._places else 0.0
        for position in range(stage.outputs):
            message = self._receive(self._member(place + 1, number), 2 * place + 1, (known_as, position))
            if position == 0:
                loss = message.weight
                if unit.chunk + 1 == len(self.stages):
                    batch.loss += loss
            batch.stop = batch.stop or message.stop
            gradients.append(stage.take_gradient(number, message, position))
        batch.lap("other", WAIT)
        what, split = self._unit_name("backward", unit), self.schedule.splits_backward
        whole = 1 - FORWARD_SHARE
        share = whole / (2 if split else 1) + (FORWARD_SHARE if stage.recomputes else 0)
        self._pass(batch, stage, rows, share, what)
        self._losses[number] = loss
        for done, found in self._computed(unit, batch, gradients, stage.backward):
            self.live -= 1
            loss, known_as = self._losses.pop(done), batch.first + done % self.microbatches
            for position, value in enumerate(found if place else []):
                self._send(
                    self._member(place - 1, done),
                    Message(
                        Kind.VECTOR, value, position, known_as, loss, stop=batch.stop, tag=2 * (place - 1) + 1
                    ),
                )
        batch.lap("backward", what)

    def _weights(self, unit: Unit, batch: Pipelined) -> None:
        stage, what = self.stages[unit.chunk], self._unit_name("weights", unit)
        rows = batch.rows[unit.microbatch % self.microbatches]
        self._pass(batch, stage, rows, (1 - FORWARD_SHARE) / 2, what)
        stage.weights(unit.microbatch)
        batch.lap("backward", what)

    def _unit_name(self, what: str, unit: Unit) -> str:
        """Return a unit's name in a timeline: `forward 3`, and the stage where a rank has several."""
        text = f"{what} {unit.microbatch % self.microbatches}"
        return text if len(self.stages) == 1 else f"{text} of stage {self._place(unit)}"

    def _pass(self, batch: Pipelined, stage: StageWork, rows: int, share: float, what: str) -> None:
        """Let the time of a unit pass: K workers' images pass through a stage, `rows` of them in this unit."""
        if rows:
            batch.pass_time(self.group.size * stage.share * share * rows / batch.images, what)

    @property
    def _places(self) -> int:
        return self._ranks * len(self.stages)

    def _place(self, unit: Unit) -> int:
        return unit.chunk * self._ranks + self._rank

    def _member(self, place: int, number: int) -> int:
        """Return the member that computes a microbatch at a place: of several copies, the next one each time."""
        rank = place % self._ranks
        first, stop = self._firsts[rank : rank + 2]
        return first + number % (stop - first)

    def _send(self, to: int, message: Message) -> None:
        # Completed sends are released here, so that their tensors do not stay until the step ends.
        while self._sent and self._sent[0].done():
            self._sent.popleft().wait()
        self._sent.append(self.group.start_send(to, message))

    def _receive(self, source: int, tag: int, wanted: tuple[int, int]) -> Message:
        """Wait for a value, by its microbatch and its position among the values; others may overtake it."""
        while (source, tag, wanted) not in self._early:
            _, message = self.group.receive(source, tag)
            found = message.step, message.version
            if message.tensor is None or found[0] >= wanted[0] + 2 * self._places * self.microbatches:
                raise RunError(
                    f"worker {source} of the pipeline sent microbatch {found[0]} where {wanted[0]} was expected; all "
                    "workers must train the same network"
                )
            if found >= wanted:  # else it is a duplicate
                self._early[source, tag, found] = message
        return self._early.pop((source, tag, wanted))


class SizedStage:
    """A stage of a dry run: what it sends has the size of its values, and nothing is computed.

    Args:
        share: share of the whole network's time.
        before: numbers per image of each value received from the stage before.
        after: numbers per image of each value sent to the next stage.
        made: returns a proxy tensor for the given numbers of each of a microbatch's images.
        recomputes: whether its forward pass is run again.
        together: whether all microbatches of a batch are computed at once.
    """

    def __init__(
        self,
        share: float,
        before: tuple[int, ...],
        after: tuple[int, ...],
        made: Callable[[int, int], Tensor],
        *,
        recomputes: bool = False,
        together: bool = False,
    ) -> None:
        self.share = share
        self.recomputes = recomputes
        self.together = together
        self.inputs, self.outputs = len(before), len(after)
        self._before, self._after = before, after
        self._made = made

    def forward(self, numbers: Sequence[int], values: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Return proxies of the values for the next stage."""
        return [[self._made(number, size) for size in self._after] for number in numbers]

    def take(self, number: int, message: Message, position: int) -> Tensor:
        """Return the received value."""
        assert message.tensor is not None
        return message.tensor

    def take_gradient(self, number: int, message: Message, position: int) -> Tensor:
        """Return the received gradient."""
        return self.take(number, message, position)

    def loss(self, number: int) -> float:
        """Return 0: nothing is learned."""
        return 0.0

    def backward(self, numbers: Sequence[int], gradients: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Return proxies of the gradients of the received values."""
        return [[self._made(number, size) for size in self._before] for number in numbers]

    def weights(self, number: int) -> None:
        """Nothing is computed."""
