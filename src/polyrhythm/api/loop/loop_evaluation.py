"""Evaluation of a copy of a loop's model while its steps continue; see `roles/leading/evaluator.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from polyrhythm.errors import PolyrhythmError, RequestError, RunError
from polyrhythm.evaluation.evaluate import in_evaluation_mode
from polyrhythm.evaluation.forked_call import can_fork, described, why_no_memory
from polyrhythm.events import Notice
from polyrhythm.roles.checkpointing.model_snapshot import ModelSnapshot
from polyrhythm.roles.leading.evaluator import Evaluator, ModelTest
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World

Evaluate = Callable[[nn.Module], Mapping[str, float | Tensor]]
Log = Callable[[ModelSnapshot, dict[str, float]], None]


class LoopEvaluation:
    """An evaluation that `Group.evaluate_async` has begun.

    Args:
        step: steps done at the call.
        evaluator: evaluator of the coordinator; None on other workers.

    Attributes:
        step: steps done at the call.
        values: results by name, once they have arrived; None before, on other workers, and where it was skipped.
    """

    def __init__(self, step: int, evaluator: Evaluator | None) -> None:
        self.step = step
        self.values: dict[str, float] | None = None
        self._evaluator = evaluator

    @property
    def done(self) -> bool:
        """Whether it has ended, or was skipped; never waits."""
        if self._evaluator is None:
            return True
        self._evaluator.look()
        return not self._is_pending

    def wait(self) -> dict[str, float] | None:
        """Wait until it has ended; return `values`."""
        while self._evaluator is not None and self._is_pending:
            self._evaluator.finish_one()
        return self.values

    @property
    def _is_pending(self) -> bool:
        return self._evaluator is not None and any(each.step == self.step for each in self._evaluator.pending)


class LoopEvaluator:
    """Evaluates copies of the coordinator's model.

    Args:
        replica: replica of the coordinator.
        world: context of this rank.
        emit: receiver of notices.
        skips_failures: see `Evaluator`.

    Raises:
        RequestError: steps cannot continue during an evaluation.
    """

    def __init__(
        self, replica: Replica, world: World, emit: Callable[[Notice], None], *, skips_failures: bool
    ) -> None:
        vector = replica.flat.vector
        if vector.device.type != "cpu" or not can_fork():
            raise RequestError(
                "group.evaluate_async: a process that computes on a GPU, or on another system than Linux, cannot be "
                "copied: evaluate in place, as by `if group.leads`"
            )
        if reason := why_no_memory(vector.nbytes):
            raise RequestError(f"group.evaluate_async: {reason}: evaluate in place, as by `if group.leads`")
        self._replica = replica
        self.skips_failures = skips_failures
        self.evaluator = Evaluator(world, emit, skips=True, skips_failures=skips_failures)

    def begin(self, function: Evaluate, epoch: int, step: int, taken_s: float, log: Log) -> LoopEvaluation:
        """Copy the model, and evaluate the copy."""
        replica = self._replica
        started = LoopEvaluation(step, self.evaluator)

        def evaluated(model: ModelSnapshot) -> dict[str, float]:
            with (
                replica.computing_with(model.parameters, model.buffers),
                in_evaluation_mode(replica.model),
            ):
                return _values(function, replica.model)

        def done(model: ModelSnapshot, values: dict[str, float]) -> None:
            started.values = values
            log(model, values)

        buffers = {name: value.detach().clone() for name, value in replica.buffers.items()}
        snapshot = ModelSnapshot(epoch, step, taken_s, replica.flat.vector.detach().clone(), buffers)
        self.evaluator.begin(ModelTest(snapshot, evaluated, done))
        return started


def _values(function: Evaluate, model: nn.Module) -> dict[str, float]:
    """Return the results of a user's function.

    Raises:
        RunError: it has failed, or has returned something else than numbers by name.
    """
    try:
        with torch.no_grad():
            found = function(model)
        if not isinstance(found, Mapping):
            raise RunError(f"it returned a {type(found).__name__}, and not numbers by name")
        return {str(name): float(value) for name, value in found.items()}
    except PolyrhythmError:
        raise
    except (Exception, SystemExit) as error:
        raise RunError(described(error)) from None
