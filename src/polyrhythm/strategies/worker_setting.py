"""What the worker's side of a strategy works with."""

from __future__ import annotations

from dataclasses import dataclass

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.cast import Cast
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan


@dataclass(frozen=True)
class WorkerSetting:
    """What a worker part works with.

    Attributes:
        network: all ranks of the run.
        workers: the workers only; `workers.rank` is this worker's index.
        cast: which ranks of `network` do what.
        flat: the model's parameters and gradients.
        plan: the user's optimiser.
        steps: that every worker takes in the whole run; None where nobody can tell (a user's own loop).
        still: whether parameters and gradients are zeros that nothing changes, as in a rehearsal.
        head: in a rehearsal of a strategy that cuts the network, `ModelSizes.head`.
        batch_size: of a step of weight 1, in a rehearsal.
        succeeds: whether this worker is the successor of one that was lost, and the servers have all they need.
        incarnation: how many have had this worker's rank before it.
        leader_returns: whether worker 0 gets a successor when it is lost.
    """

    network: Communicator
    workers: Communicator
    cast: Cast
    flat: FlatParameters
    plan: OptimizerPlan
    steps: int | None = None
    still: bool = False
    head: tuple[int, ...] = ()
    batch_size: int = 0
    succeeds: bool = False
    incarnation: int = 0
    leader_returns: bool = False
