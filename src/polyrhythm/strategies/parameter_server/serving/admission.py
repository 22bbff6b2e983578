"""Admission: which messages a server accepts.

All other messages are refused before anything is changed.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, pack_json, unpack_json
from polyrhythm.errors import RequestError
from polyrhythm.training.optimizer_plan import OptimizerPlan

_BARE = (None, 0, 0, 1.0, 0.0)  # tensor, version, step, weight, learning rate


def admit_push(message: Message, values: Tensor, version: int, step: int) -> None:
    """Raise `RefusedMessage` unless a gradient fits the parameters, `(n,)`, and their version.

    Its step may be the pusher's next, `step`, or one before: a repetition is no harm.
    """
    admit_known_push(message, values, version, step, None)


def admit_known_push(message: Message, values: Tensor, version: int, step: int, known: Tensor | None) -> None:
    """Raise `RefusedMessage` as `admit_push` does, but do not ask a gradient that is `known` to fit.

    To ask torch for its size and dtype takes as long as all else here.
    """
    _, tensor, read, number, weight, rate, _, _ = message
    if tensor is None:
        raise _bare(message)
    # A payload has one dimension.
    if tensor is not known and (tensor.numel() != values.numel() or tensor.dtype is not values.dtype):
        raise RefusedMessage(
            Reason.PAYLOAD,
            f"a gradient of {tensor.numel()} numbers, {tensor.dtype}, arrived for {values.numel()} parameters, "
            f"{values.dtype}",
        )
    if not (0 <= weight < inf and 0 <= rate < inf):
        raise RefusedMessage(
            Reason.NUMBERS, f"a gradient arrived with weight {weight} and learning rate {rate}"
        )
    if not 0 <= read <= version:
        raise RefusedMessage(
            Reason.NUMBERS, f"a gradient of version {read} arrived where {version} is the newest"
        )
    if not 0 <= number <= step:
        raise RefusedMessage(
            Reason.STEP, f"a gradient of step {number} arrived where step {step} is the next"
        )


def admit_push_of_any_step(message: Message, values: Tensor, version: int, step: int) -> None:
    """Raise `RefusedMessage` as `admit_push` does, but let the step be later than the pusher's next."""
    admit_push(message, values, version, max(step, message.step))


def admit_vector(message: Message, values: Tensor, version: int = 0, step: int = 0) -> None:
    """Raise `RefusedMessage` unless a worker's own parameters fit the kept ones, `(n,)`; empty: nothing is kept.

    The worker decides the number of steps between two exchanges.
    """
    tensor = payload(message)
    if not len(values):
        raise RefusedMessage(Reason.ORDER, "a worker's parameters arrived before the first ones")
    if tensor.shape != values.shape or tensor.dtype != values.dtype:
        raise RefusedMessage(
            Reason.PAYLOAD,
            f"{tensor.numel()} parameters, {tensor.dtype}, arrived for {values.numel()}, {values.dtype}",
        )
    if (message.version, message.weight, message.learning_rate) != (0, 1.0, 0.0):
        raise RefusedMessage(Reason.NUMBERS, f"a {message.kind.name} arrived with numbers")
    if message.step < 0:  # the worker decides the number of steps between two exchanges
        raise RefusedMessage(Reason.STEP, f"parameters of step {message.step} arrived")


def admit_bare(message: Message) -> None:
    """Raise `RefusedMessage` where a message has more than its kind, perhaps a claim that something is final."""
    if message.tensor is not None:
        raise RefusedMessage(Reason.PAYLOAD, f"a {message.kind.name} arrived with a tensor")
    if message[1:6] != _BARE:
        raise RefusedMessage(Reason.NUMBERS, f"a {message.kind.name} arrived with numbers")


class Configuration(NamedTuple):
    """Optimizer of a server's shard, as rank 0 sends it before there are parameters.

    Attributes:
        plan: plan of its optimizer.
        pushes: pushes that every pusher makes in the whole run, where servers must know it; 0: not known.
    """

    plan: OptimizerPlan
    pushes: int = 0

    def message(self) -> Message:
        """Pack it to be sent."""
        return Message(Kind.CONFIGURE, pack_json(self.plan.to_json()), step=self.pushes)

    @classmethod
    def of(cls, message: Message) -> Configuration:
        """Unpack the result of `message`; raise `RefusedMessage` if the plan cannot be carried out."""
        record = unpack_json(payload(message))
        try:
            return cls(OptimizerPlan.from_json(record), message.step)
        except RequestError as error:
            raise RefusedMessage(Reason.MALFORMED, str(error)) from None


def admitted_initial(plan: OptimizerPlan | None, values: Tensor, *, ready: bool) -> OptimizerPlan:
    """Return the plan that was sent for the optimizer of the initial parameters.

    Raise `RefusedMessage` if they are not expected, are no real numbers, or too few for the plan.
    """
    if plan is None or ready:
        raise RefusedMessage(
            Reason.ORDER, "initial parameters arrived " + ("a second time" if ready else "before the plan")
        )
    covered = plan.spans[-1].stop if plan.spans else 0
    if not values.is_floating_point() or len(values) < covered:
        raise RefusedMessage(
            Reason.PAYLOAD,
            f"{len(values)} initial parameters, {values.dtype}, arrived where {covered} are trained",
        )
    return plan


def payload(message: Message) -> Tensor:
    """Return a message's tensor; raise `RefusedMessage` if it has none."""
    if message.tensor is None:
        raise _bare(message)
    return message.tensor


def _bare(message: Message) -> RefusedMessage:
    return RefusedMessage(Reason.PAYLOAD, f"a {message.kind.name} arrived without its tensor")
