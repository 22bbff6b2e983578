"""Interface of a strategy for the session of a server: `Rule`, its inputs, and its results.

    ServerSession ── apply(batch) ─▶ Rule ─▶ Applied: an update was made, or none
                                          ─▶ Deferred: waits for other servers; then `resume`

A rule holds a shard of the parameters and changes it. It knows pushers by number only, and no repeated steps,
no membership and no end of the run: those are the session's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.admission import admit_push
from polyrhythm.strategies.parameter_server.serving.gate import Gate
from polyrhythm.strategies.state import State, Stateful

Reply = tuple[int, Message]
"""A rank, and the message for it.

Pushes, pulls and answers are `Message`s as they are on the wire, with fields of the same meaning (a version
that was read, a step, a weight, a rate): to make and read one more tuple for each would cost a simulated step
some 4 %. Messages with other meanings of these fields have types of their own, with `message` and `of`:
`Entrance`, `Part`, `Relay`, …
"""


class Contribution(NamedTuple):
    """A gradient that a pusher has sent.

    Attributes:
        pusher: number of the pusher.
        gradient: `(n,)`.
        read_version: version of the parameters at which it was computed.
        step: step of the pusher.
        weight: samples that it is the mean of, in units of a full batch.
        rate: learning rate of an update with it.
        fresh: number of gradients in it that had not been known at its arrival.
        seen: `(n,)`, the parameters that the pusher was answered with before, where the rule remembers them.
    """

    pusher: int
    gradient: Tensor
    read_version: int
    step: int
    weight: float
    rate: float
    fresh: int = 1
    seen: Tensor | None = None


contribution_of: Callable[[tuple[int, Tensor, int, int, float, float, int, Tensor | None]], Contribution]
contribution_of = partial(tuple.__new__, Contribution)
"""Make one of its fields, in less time than calling the class takes; see `message_of`."""


class Given(NamedTuple):
    """Answer to a pusher instead of the parameters.

    Attributes:
        kind: kind of the message.
        tensor: `(n,)`, which does not change any more.
        step: step of the message.
    """

    kind: Kind
    tensor: Tensor
    step: int


class Applied(NamedTuple):
    """Result of a batch.

    Attributes:
        batch: the contributions that are over: all that were given, but for those that not all servers have.
        updates: number of updates made of them; 0 if all batches are empty, or if there are too few.
        staleness: number of applied gradients by staleness.
        answers: answers to pushers instead of the parameters, by their numbers; None: nothing else.
    """

    batch: Sequence[Contribution]
    updates: int
    staleness: dict[int, int]
    answers: dict[int, Given] | None = None


applied_of: Callable[[tuple[Sequence[Contribution], int, dict[int, int], None]], Applied]
applied_of = partial(tuple.__new__, Applied)


class Deferred(NamedTuple):
    """A batch waits for messages of other servers.

    Attributes:
        notify: messages to other servers.
    """

    notify: Sequence[Reply] = ()


class News(NamedTuple):
    """Result of another server's message.

    Attributes:
        updates: number of updates made of it.
        stop: whether a pusher elsewhere was asked to stop.
        done: whether the run is over.
    """

    updates: int = 0
    stop: bool = False
    done: bool = False


class Presence(NamedTuple):
    """The present pushers.

    Attributes:
        present: number of pushers.
        lost: whether any is lost and has no replacement yet.
        final: whether the final parameters are asked for.
        done: whether the run is over.
    """

    present: int
    lost: bool
    final: bool
    done: bool


class Rule(Stateful):
    """One server's rule, with its state, without the session's counters.

    If a state is loaded, worker 0's parameters are not needed.

    Attributes:
        gate: gate, which decides when contributions are applied and which pushers are answered.
        values: `(n,)`, the shard; empty until it has been begun with.
        ready: whether there are parameters.
        final: whether no other server can change them any more, once all pushers have left.
        contributes: kind of the messages with contributions.
        last: number of the last gradient in a contribution, minus the step in its message.
        repeats: whether a repeated step counts as an empty batch, and is not applied again.
        parts: whether a LEAVE may contain a last contribution.
        forgets: whether held contributions of a failed pusher are dropped, since its replacement repeats
            them.
        remembers: whether contributions include the parameters that their pusher has `seen`.
        defers: whether an update needs messages of other servers.
        chooses: whether a batch that is too small is dropped.
        leaves_out: whether contributions of empty batches are recorded as dropped.
        converses: whether it sends messages to other servers on its own, and so gets the membership
            (`attend`).
        outgoing: messages to other servers, which the session sends next.
        screens: whether contributions with non-finite numbers count as empty batches.
        admit: check of a contribution, which raises if it cannot be right; see `admit_push`.
    """

    contributes: Kind = Kind.PUSH
    last: int = 0
    repeats: bool = True
    parts: bool = False
    forgets: bool = False
    remembers: bool = False
    defers: bool = False
    chooses: bool = False
    leaves_out: bool = False
    screens: bool = False
    converses: bool = False
    admit = staticmethod(admit_push)

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.values = torch.empty(0)
        self.ready = False
        self.outgoing: list[Reply] = []
        self.final = True

    def configure(self, message: Message) -> None:
        """Take the plan of the optimizer; raise `RefusedMessage` if it is none, too late, or there is none here."""
        raise RefusedMessage(Reason.KIND, "there is nothing to be configured")

    def begin(self, values: Tensor) -> None:
        """Begin with worker 0's parameters, `(n,)`, which change in place; or with those of `load_state`."""
        raise NotImplementedError

    def apply(self, batch: Sequence[Contribution], version: int) -> Applied | Deferred:
        """Make an update of contributions, summed in their order, where `version` updates were made before."""
        raise NotImplementedError

    def on_peer(self, peer: int, message: Message) -> News | None:
        """Handle another server's message; return None where nothing but `resume` follows from it.

        Raise `RefusedMessage` if no server sends this now.
        """
        raise RefusedMessage(
            Reason.SENDER,
            f"a server received {message.kind.name} from rank {peer}, which pushes nothing here",
        )

    def resume(self, batch: Sequence[Contribution], version: int) -> Applied | Deferred | None:
        """Continue with the oldest deferred batch; None while messages are missing, `Deferred` for further messages."""
        raise NotImplementedError

    def answer(self, pusher: int, version: int) -> Tensor:
        """Return the parameters as they are now, `(n,)`, in memory that no update changes."""
        raise NotImplementedError

    def attend(self, presence: Presence) -> None:
        """Handle the membership after any message, where the rule `converses`."""

    def admits(self, pusher: int) -> bool:
        """Return whether a pusher that had left, or its replacement, may still enter."""
        return True

    def enter(self, pusher: int) -> None:
        """Forget a pusher that has a replacement."""

    def exact_state(self) -> State:
        """Return the whole state, so that another server's rule can continue like this one, in the middle of a run."""
        raise NotImplementedError

    def load_exact_state(self, state: State) -> None:
        """Restore what `exact_state` returned, in place of all that there was."""
        raise NotImplementedError
