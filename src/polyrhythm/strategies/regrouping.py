"""How the worker's side of a strategy goes on with other workers than before."""

from __future__ import annotations

from typing import NamedTuple

from polyrhythm.communication.communicator import Communicator


class Reassembled(NamedTuple):
    """How a member of a group goes on after somebody of it was lost, or came.

    Attributes:
        step: steps that all of the group have done now.
        over: whether nothing is left but to leave.
        there: the group's workers that are there, by their indices, in their order.
        absent: those of the group that are not.
        round: how many times the group has regrouped.
    """

    step: int
    over: bool
    there: tuple[int, ...]
    absent: tuple[int, ...]
    round: int


class Regrouping:
    """What a worker part is asked where workers are lost and come, and says of how far it is with the others.

    Somebody is lost or comes: all break off what is under way, and agree on where the others go on.

        break_off ─▶ begun_again ─▶ meetings ─▶ ( take_over, if behind ) ─▶ regroup

    A group in which workers regroup among themselves (`regroups_apart`) does all of it in `reassemble`.
    """

    def break_off(self) -> None:
        """The workers' communicator has been revoked: gives up whatever is under way on it.

        Afterwards nothing of that touches the flat vector or the gradients any more.
        """

    def begun_again(self, step: int) -> int:
        """Says with how many steps done this worker goes on after `break_off`; fewer, if the latest was not whole.

        Args:
            step: that it had done.
        """
        return step

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        """Goes on with other workers than before, where the strategy `regroups`; a successor begins with it.

        All members have met equally often: those who had less often have been given another's flat vector and `state`
        (`take_over`). Gradients are zero, in new memory, and nothing is under way. A step that broke is begun again.

        Args:
            workers: those that go in step from now on; all of them are told at the same place.
            members: their indices among all workers of the run, in the same order; worker 0 is always there.

        Raises:
            PeerLost: another is lost meanwhile; then it is called again, after `break_off`.
        """
        raise NotImplementedError

    @property
    def due(self) -> bool:
        """Whether somebody waits to be let into this worker's group, where the strategy `regroups_apart`."""
        return False

    def reassemble(self, *, enters: bool) -> Reassembled:
        """Goes on with those of this worker's group who are there, where the strategy `regroups_apart`.

        What was under way in the group is given up, and a step that servers have not taken is begun again by all.

        Args:
            enters: whether this worker is a successor, which has not been in the group.

        Raises:
            PeerLost: another of the group is lost meanwhile, and then it is called again; or a server is.
        """
        raise NotImplementedError

    def meetings(self, step: int) -> int:
        """Says how many times all workers have met, none going on before all had come, in so many steps.

        Who has met less often than another is behind it; others need not have done equally many steps to regroup.

        Args:
            step: steps done.
        """
        return step

    def exchanges(self, step: int) -> int:
        """Says how many times others have been given what this worker has learned, in so many steps.

        What a lost worker did since the last time is gone. Default: at every meeting.

        Args:
            step: steps done.
        """
        return self.meetings(step)

    def lets_in(self, step: int) -> bool:
        """Whether a step may be broken off, before it begins, to let a worker in; default: one with a meeting.

        Args:
            step: its number.
        """
        return self.meetings(step + 1) > self.meetings(step)

    @property
    def has_stopped(self) -> bool:
        """Whether others have stopped where this worker is, as it has heard in regrouping or as it came."""
        return False
