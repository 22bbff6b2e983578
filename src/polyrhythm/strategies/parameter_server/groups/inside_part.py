"""What goes on inside a group, between two meetings of its leader with the servers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan


class Contribution(NamedTuple):
    """What a group has for the servers; the numbers themselves are in every member's flat gradients.

    Attributes:
        step: the number of the contribution, what it weighs, and whether a member wants to stop.
        learning_rate: to update with.
    """

    step: Step
    learning_rate: float


class InsidePart(Protocol):
    """One member's side; all members do the same.

    Attributes:
        plan: of the optimiser that the servers run.
        steps: of a contribution.
    """

    plan: OptimizerPlan
    steps: int

    def start(self, step: int) -> None:
        """All members begin at this step, with the servers' parameters."""

    def resume(self, step: int, contributions: int) -> bool:
        """Goes on in the middle of a contribution as it was saved, where all members can; gives whether they do.

        Args:
            step: that this member had come to.
            contributions: that the servers hold of the group.
        """

    def begin(self, step: Step) -> None:
        """A step begins."""

    def bucket_ready(self, bucket: int) -> None:
        """The gradients of this bucket are final."""

    def contribute(self, step: Step, learning_rate: float) -> Contribution | None:
        """All gradients are final; gives what the group has for the servers, if it is time for that."""

    def refresh(self) -> None:
        """The flat vector holds the servers' parameters."""

    def break_off(self) -> None:
        """The group's communicator has been revoked: gives up whatever is under way on it."""

    def regroup(self, group: Communicator) -> None:
        """Goes on with those who are there; `start` follows, with the servers' parameters."""

    @property
    def apart(self) -> bool:
        """Whether members have taken steps that the servers have not heard of."""

    def rest(self) -> Contribution | None:
        """The run is over: gives what the servers have not heard of, if there is anything."""

    def present(self) -> Tensor | None:
        """Gives the group's model, `(size,)`, where it is not the flat vector."""

    def state(self) -> State:
        """Gives what a resumed member needs."""

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; called before `start`."""
