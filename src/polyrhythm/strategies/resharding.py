"""Resharding: a checkpoint of one number of workers becomes the start of another.

    checkpoint of N workers ─▶ count: which of their steps count ─▶ the rest of the epoch is dealt out among K
    ─▶ merge: what K workers and the servers start from, field by field, and a summary for people

The conversions of the fields of a strategy determine the value of each (see `strategies.state`). Where these do not
suffice (SGP divides by mass, `hybrid` joins what its workers had cut), a function takes their place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from polyrhythm.strategies.state import COMMON, OF_SERVER, Part, Start, State, StateField, below, reset
from polyrhythm.training.optimizer_state import mean_optimizer, weighted_mean


@dataclass(frozen=True)
class Held:
    """State of a strategy in a checkpoint.

    Attributes:
        parameters: flat vector of rank 0, `(n,)`.
        steps: number of steps reported by each worker; 0 without a report.
        workers: states of the workers' parts, by index, where one was reported; for `replicated` parts, that of rank 0.
        servers: the states of all servers.
    """

    parameters: Tensor
    steps: tuple[int, ...]
    workers: dict[int, State]
    servers: list[State]


@dataclass(frozen=True)
class Merged:
    """Checkpoint converted to a different number of workers.

    Attributes:
        held: converted checkpoint; workers without a state in it begin as at a run's start.
        text: user-readable description of the merged and dropped state.
    """

    held: Held
    text: str


STEPS = StateField("steps", tuple[int, ...], reset(lambda start: start.step, "pusher"))
"""How many steps a server knows of each pusher."""
EVERYTHING = StateField("", Part)
EVERYTHING_OF_SERVER = StateField("", Part, OF_SERVER)
"""All entries that no field before it covers."""


def mean_of_optimizers(name: str, states: Sequence[State], weights: Sequence[float]) -> State:
    """Return the mean of packed optimizer states: tensors below `name.`, and a fact of that name."""
    prefix = f"{name}."
    packed = [(below(prefix, tensors), facts[name]) for tensors, facts in states]
    tensors, facts = mean_optimizer(packed, weights)
    return {prefix + key: value for key, value in tensors.items()}, {name: facts}


def lockstep(held: Held) -> list[int]:
    """Return worker 0's steps for every worker, since all take the same steps."""
    return [held.steps[0]] * len(held.steps)


def own_steps(held: Held) -> list[int]:
    """Return each worker's own steps; worker 0's for a worker without a saved state."""
    return [steps if worker in held.workers else held.steps[0] for worker, steps in enumerate(held.steps)]


def steps_of_servers(held: Held) -> list[int]:
    """Count those that the server knows of that knows of most; for servers that count steps by worker."""
    return [max(known) for known in steps_known(held.servers)]


def steps_known(servers: Sequence[State]) -> list[tuple[int, ...]]:
    """Return, for each worker, how many of its steps every server knows of."""
    return list(zip(*(facts["steps"] for _, facts in servers), strict=True))


WorkerStates = Callable[[Held, int], dict[int, State]]
"""Return the states of the workers that there are now, by index, from what a checkpoint held and their first step."""


@dataclass(frozen=True, kw_only=True)
class Resharding:
    """A strategy's way from a checkpoint to another number of workers.

    Attributes:
        after: new number of workers.
        text: message on merged and dropped state, with `{states}` for the number of saved states and `{kept}`
            for the number of workers that continue with one.
        newcomers: message on `{new}` workers that begin without a state.
        remark: function that returns a further message for a checkpoint.
        workers: fields of a worker's state; the first that covers an entry applies, and an uncovered entry
            begins as at a run's start. Or a function.
        servers: fields of a server's state.
        count: function that returns the number of each worker's steps that count; the rest is repeated by
            others.
        fits: function that returns the workers with a state that matches the servers' records: they keep it,
            and all of their steps count.
        pushers: number of pushers of each server; None: all workers.
        weight: name of the fact that weights a state in a mean; empty: equal weights.
        parameters: the tensor of worker 0's state that is the run's parameters; empty: they stay.
    """

    after: int
    text: str
    newcomers: str = ""
    remark: Callable[[Held], str] = lambda held: ""
    workers: tuple[StateField, ...] | WorkerStates = ()
    servers: tuple[StateField, ...] = ()
    count: Callable[[Held], list[int]] = lockstep
    fits: Callable[[Held], Collection[int]] | None = None
    pushers: Callable[[int], int] | None = None
    weight: str = ""
    parameters: str = ""

    def counted(self, held: Held) -> list[int]:
        """Return the number of each worker's steps that count.

        Args:
            held: state in the checkpoint.
        """
        found = self.count(held)
        if self.fits is not None:
            for worker in self._staying(held):
                found[worker] = held.steps[worker]
        return found

    def merged(self, held: Held, step: int) -> Merged:
        """Return the workers' states after resharding.

        Args:
            held: state in the checkpoint.
            step: first step of all workers, in the new count of steps.
        """
        workers = self.worker_states(held, step)
        pushers = self.pushers or (lambda server: self.after)
        servers = [
            _kept(self.servers, state, Start(step, index, pushers(index))) if state[1] else state
            for index, state in enumerate(held.servers)
        ]
        parameters = workers[0][0][self.parameters] if self.parameters else held.parameters
        text = self.text.format(states=len(held.workers), kept=len(workers))
        if len(workers) < self.after:
            text += self.newcomers.format(new=self.after - len(workers))
        found = replace(held, parameters=parameters, workers=workers, servers=servers)
        return Merged(found, text + self.remark(held))

    def worker_states(self, held: Held, step: int) -> dict[int, State]:
        """Return the states of the workers, by index; see `merged`."""
        if not isinstance(self.workers, tuple):
            return self.workers(held, step)
        if all(field.conversion.per != "run" for field in self.workers):
            staying = self._staying(held) if self.workers else ()
            return {index: _kept(self.workers, held.workers[index], Start(step, index)) for index in staying}
        tensors, facts = self._common(held)
        found: dict[int, State] = {}
        for index in range(self.after):
            _, own = _kept(self.workers, ({}, {}), Start(step, index))
            found[index] = tensors, facts | own
        return found

    def _staying(self, held: Held) -> list[int]:
        fits = held.workers if self.fits is None else self.fits(held)
        return [worker for worker in fits if worker < self.after]

    def _common(self, held: Held) -> State:
        states = [held.workers[index] for index in sorted(held.workers)] or [({}, {})]
        weights = [float(facts[self.weight]) if self.weight else 1.0 for _, facts in states]
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {}
        assert isinstance(self.workers, tuple), "asked of fields"
        for field in self.workers:
            merge, kept = field.conversion.merge, _covered(self.workers, field, states[0])
            if merge == "keep" and field.conversion.per == "run":
                tensors |= kept[0]
                facts |= kept[1]
            elif merge == "mean" and field.kind is not Part:
                for name, like in kept[0].items():
                    tensors[name] = weighted_mean([own[name] for own, _ in states], weights, like)
            elif not isinstance(merge, str) or merge == "mean":
                join = mean_of_optimizers if isinstance(merge, str) else merge
                made, noted = join(field.name, states, weights)
                tensors |= made
                facts |= noted
        return tensors, facts


def by_fields(fields: tuple[StateField, ...], after: int, *, together: bool = True) -> Resharding:
    """Return the resharding of workers without servers, by the conversions of their fields.

    Args:
        fields: fields of a worker's state; the first may be its parameters. Means are weighted by a fact `weight`.
        after: new number of workers.
        together: whether all have done the same number of steps.
    """
    text, parameters = "all continue from worker 0's parameters and optimizer", ""
    if fields[0].conversion != COMMON:
        text = "all continue from the mean of {states} models and of their optimizers' momenta"
        parameters = fields[0].name

    def remark(held: Held) -> str:
        missing = 0 if together else len(held.steps) - len(held.workers)
        return f"; {missing} sent none, and are assumed to be at the step of worker 0" if missing else ""

    return Resharding(
        after=after,
        text=text,
        remark=remark,
        workers=fields,
        count=lockstep if together else own_steps,
        weight="weight" if any(field.name == "weight" for field in fields) else "",
        parameters=parameters,
    )


def same_for_all(after: int) -> Resharding:
    """For equal workers without servers: all begin with worker 0's state."""
    return by_fields((EVERYTHING,), after)


def _first(fields: Iterable[StateField], entry: str) -> StateField | None:
    return next((field for field in fields if field.covers(entry)), None)


def _covered(fields: Sequence[StateField], field: StateField, state: State) -> State:
    """Return those entries of a state that this field is the first to cover."""
    tensors, facts = (
        {name: value for name, value in entries.items() if _first(fields, name) is field} for entries in state
    )
    return tensors, facts


def _kept(fields: Sequence[StateField], state: State, start: Start) -> State:
    """Return a state with the entries that stay, and with the facts that are reset."""
    kept: list[dict[str, Any]] = [
        {
            name: value
            for name, value in entries.items()
            if (field := _first(fields, name)) is not None and _stays(field, name, start)
        }
        for entries in state
    ]
    tensors, facts = kept
    return tensors, facts | begun(fields, start)


def begun(fields: Iterable[StateField], start: Start) -> dict[str, Any]:
    """Return the facts that are reset, with their new values."""
    return {field.name: _begun(field, start) for field in fields if field.conversion.to is not None}


def _stays(field: StateField, entry: str, start: Start) -> bool:
    """Whether an entry of a field stays in the state that it was in."""
    if field.conversion.merge != "keep" or field.conversion.per == "run":
        return False
    number = entry.removeprefix(field.prefix)
    return field.conversion.per != "pusher" or not number.isdigit() or int(number) < start.pushers


def _begun(field: StateField, start: Start) -> Any:
    """Return the value that a fact begins with."""
    assert field.conversion.to is not None, f"{field.name} begins as at a run's start"
    value = field.conversion.to(start)
    return [value] * start.pushers if field.conversion.per == "pusher" else value
