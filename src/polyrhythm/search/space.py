"""A search space: for every option of a run that is searched, the values that it may take.

    strategy: [synchronous, "local_sgd(steps={period})"]       a list: one of these
    period: {from: 2, to: 64, log: true}                       a range; used where another value names it in braces
    lr: {from: 0.001, to: 1, log: true}                        the optimizer's rate
    batch_size: {from: 32, to: 256, step: 32}
    label_smoothing: {from: 0.0, to: 0.2}                      numbers with a point: not only whole ones

A name in braces is only drawn where the value that was chosen has it, so a space may be a tree.

Where a search goes in it, by pure rules over the trials that have ended. `random`, `tpe` and the pruning rules of
Hyperband, successive halving and the median are Optuna's; here is what it lacks.

    evolution   E. Real, A. Aggarwal, Y. Huang, Q. Le, "Regularized evolution for image classifier
    architecture search",
                    AAAI 2019, arXiv:1802.01548: of the P youngest, the best of S drawn ones has a child that
                    differs in one
                    place; trials older than the P youngest are no parents any more, however good.
    pbt         M. Jaderberg and others, "Population based training of neural networks", 2017,
    arXiv:1711.09846: a
                    member among the worst fifth continues a checkpoint of one of the best fifth with other
                    parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError, unknown
from polyrhythm.user_files import parse_yaml, read_text

RATE = "lr"
"""The learning rate of whatever optimizer a run has; an option of a space, though none of a run."""
LEFT_OUT = ("seed", "until")
"""Options that a search sets by itself."""
_NAMED = re.compile(r"\{(\w+)\}")
METHODS = ("grid", "random", "tpe", "hyperband", "evolution", "pbt", "darts")
PRUNERS = ("none", "median", "halving", "curve")
_KEYS = {"from", "to", "log", "step"}


@dataclass(frozen=True)
class Values:
    """One of some values, in the order given."""

    values: tuple[Any, ...]

    def every(self) -> list[Any]:
        """Return all values, as for a grid."""
        return list(self.values)

    def draw(self, rng: Random) -> Any:
        """Return one of them, each as likely."""
        return rng.choice(self.values)

    def near(self, value: Any, rng: Random) -> Any:
        """Return a neighbor of a value in the list; numbers and texts alike."""
        if len(self.values) == 1:
            return value
        place = self.values.index(value)
        places = [each for each in (place - 1, place + 1) if 0 <= each < len(self.values)]
        return self.values[rng.choice(places)]


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included.

    Attributes:
        low: the least.
        high: the most.
        log: whether factors count, not differences.
        step: distance of the numbers, from `low` on; None: any.
        whole: whether they are whole numbers.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    def every(self) -> list[Any] | None:
        """Return all values, as for a grid; None where there is no end of them."""
        if self.log or (self.step is None and not self.whole):
            return None
        step = self.step or 1
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        return [self.fitted(self.low + number * step) for number in range(count)]

    def draw(self, rng: Random) -> Any:
        """Return a number, uniform in the range (in its logarithm with `log`)."""
        if self.log:
            return self.fitted(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return self.fitted(rng.uniform(self.low, self.high))

    def near(self, value: Any, rng: Random) -> Any:
        """Return 0.8 or 1.2 times a number, as in Jaderberg et al. 2017; another one where that is the same."""
        factor = rng.choice((0.8, 1.2))
        found = self.fitted(value * factor)
        if found == value and self.low < self.high:
            found = self.fitted(value + (1 if factor > 1 else -1) * (self.step or 1))
        return found

    def fitted(self, value: float) -> Any:
        """Return the nearest number that is in the range."""
        value = min(max(value, self.low), self.high)
        if self.step is not None:
            value = self.low + round((value - self.low) / self.step) * self.step
            value = value - self.step if value > self.high * (1 + 1e-12) else value
            value = float(f"{value:.12g}")
        return round(value) if self.whole else value


Domain = Values | Range
Pick = Callable[[str, Domain], Any]


@dataclass(frozen=True)
class Space:
    """Space of choices.

    Attributes:
        options: domains of a run's options, by name.
        inner: domains of names that stand in braces in values of others.
    """

    options: Mapping[str, Domain]
    inner: Mapping[str, Domain]

    @classmethod
    def read(cls, path: str | Path) -> Space:
        """Read a YAML file.

        Raises:
            RequestError: it is none, or names an option that is not one, or a domain is empty or impossible.
        """
        where = f"the space {path}"
        return cls.of(parse_yaml(read_text(Path(path), "the space"), where), where)

    @classmethod
    def of(cls, given: Any, where: str = "the space") -> Space:
        """Make a space of a mapping of names to lists, ranges or single values.

        Raises:
            RequestError: see `read`.
        """
        if not isinstance(given, Mapping) or not given or not all(isinstance(key, str) for key in given):
            raise RequestError(
                f"{where} must be lines of `option: [value, …]` or `option: {{from: 1, to: 9}}`"
            )
        domains = {key.replace("-", "_"): _domain(key, value) for key, value in given.items()}
        known = [name for name in (RATE, *RunConfig.model_fields) if name not in LEFT_OUT]
        used = {name for domain in domains.values() for name in _names_in(domain)}
        for name in domains:
            if name in LEFT_OUT:
                raise RequestError(f"{where}: {name} is no choice: a search sets it by itself")
            if name not in known and name not in used:
                if name in ("rate", "learning_rate"):
                    raise RequestError(
                        f"{where}: the optimizer's learning rate is called {RATE} (given {name})"
                    )
                raise unknown("option of the space", name, known)
        if missing := used - set(domains):
            name = min(missing)
            raise RequestError(f"{where} uses {{{name}}} and does not define it: add a line `{name}: …`")
        for name in used:
            if name in _reached(domains, name):
                raise RequestError(f"{where}: {name} names itself in its braces")
        return cls(
            {name: each for name, each in domains.items() if name not in used},
            {name: each for name, each in domains.items() if name in used},
        )

    def domain(self, name: str) -> Domain:
        """Return the domain of a name."""
        return self.options[name] if name in self.options else self.inner[name]

    def varies(self, name: str) -> bool:
        """Whether a name has more than one value."""
        return self._only(name) is None

    def draw(self, pick: Pick) -> dict[str, Any]:
        """Return parameters: what `pick` chooses for every name that matters, single values left out.

        Args:
            pick: function that returns a value, given a name and its domain.
        """
        chosen: dict[str, Any] = {}
        todo = list(self.options)
        while todo:
            name = todo.pop(0)
            if name not in chosen:
                only = self._only(name)
                chosen[name] = pick(name, self.domain(name)) if only is None else only[0]
                todo += _named(chosen[name])
        return {name: value for name, value in chosen.items() if self._only(name) is None}

    def run_options(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run's options of parameters, names in braces filled in; `lr` is one of them."""

        def value_of(name: str) -> Any:
            only = self._only(name)
            value = parameters[name] if only is None else only[0]
            if not isinstance(value, str):
                return value
            return _NAMED.sub(lambda match: str(value_of(match[1])), value)

        return {name: value_of(name) for name in self.options}

    def chosen_options(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a run's options that parameters decide, names in braces filled in."""
        return {
            name: value
            for name, value in self.run_options(parameters).items()
            if name in parameters or _names_in(self.options[name])
        }

    def every(self) -> list[dict[str, Any]]:
        """Return all parameters, as for a grid, the first option outermost.

        Raises:
            RequestError: there is no end of them.
        """
        endless = [name for name in (*self.options, *self.inner) if self.domain(name).every() is None]
        if endless:
            raise RequestError(
                f"a grid cannot try all of {endless[0]}: give a list, or a range with a step and without log"
            )
        found: list[dict[str, Any]] = []

        def extend(chosen: dict[str, Any]) -> None:
            undecided: list[tuple[str, Domain]] = []

            def pick(name: str, domain: Domain) -> Any:
                if name in chosen:
                    return chosen[name]
                if not undecided:
                    undecided.append((name, domain))
                return (domain.every() or [None])[0]

            parameters = self.draw(pick)
            if not undecided:
                found.append(parameters)
                return
            ((name, domain),) = undecided
            for value in domain.every() or ():
                extend({**chosen, name: value})

        extend({})
        return found

    def samples(self, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return parameters that together have every value of every list, and both ends of every range.

        Args:
            parameters: base values; one at a time is replaced.
        """
        found = [dict(parameters)]
        for name in (*self.options, *self.inner):
            domain = self.domain(name)
            ends = list(domain.values) if isinstance(domain, Values) else [domain.low, domain.high]
            for value in ends:

                def pick(other: str, at: Domain, name: str = name, value: Any = value) -> Any:
                    first = at.values[0] if isinstance(at, Values) else at.low
                    return value if other == name else parameters.get(other, first)

                found.append(self.draw(pick))
        return found

    def mutate(self, parameters: Mapping[str, Any], rng: Random) -> dict[str, Any]:
        """Return parameters that differ in one place, drawn again there; what hangs on it is drawn, too."""
        changeable = [name for name in parameters if len(self.domain(name).every() or [0, 0]) > 1]
        if not changeable:
            return dict(parameters)
        changed = rng.choice(sorted(changeable))

        def pick(name: str, domain: Domain) -> Any:
            if name != changed:
                return parameters[name] if name in parameters else domain.draw(rng)
            value = parameters[name]
            while value == parameters[name]:
                value = domain.draw(rng)
            return value

        return self.draw(pick)

    def explore(self, parameters: Mapping[str, Any], rng: Random) -> dict[str, Any]:
        """Return parameters that have all moved a little, or, one in four, are drawn again.

        M. Jaderberg and others, "Population based training of neural networks", 2017, arXiv:1711.09846.
        """

        def pick(name: str, domain: Domain) -> Any:
            if name not in parameters or rng.random() < 0.25:
                return domain.draw(rng)
            return domain.near(parameters[name], rng)

        return self.draw(pick)

    def _only(self, name: str) -> tuple[Any] | None:
        """Return the value of a name that has one alone; None if there is a choice."""
        domain = self.domain(name)
        return (domain.values[0],) if isinstance(domain, Values) and len(domain.values) == 1 else None


def _domain(name: str, given: Any) -> Domain:
    if isinstance(given, list):
        if not given:
            raise RequestError(f"{name} has no values: write a list of some, or a range")
        if any(isinstance(value, list | Mapping) for value in given):
            raise RequestError(f"{name}: a list holds numbers and texts (given {given!r:.100})")
        if len({(type(value), value) for value in given}) < len(given):
            raise RequestError(f"{name} has a value twice (given {given!r:.100})")
        return Values(tuple(given))
    if not isinstance(given, Mapping):
        return Values((given,))
    if not {"from", "to"} <= set(given) <= _KEYS:
        raise RequestError(f"{name}: a range is {{from: 1, to: 9}}, with log: true or step: 2 if need be")
    low, high, step, log = given["from"], given["to"], given.get("step"), given.get("log", False)
    numbers = [each for each in (low, high, step) if each is not None]
    if any(
        isinstance(each, bool) or not isinstance(each, int | float) or not math.isfinite(each)
        for each in numbers
    ):
        raise RequestError(f"{name}: from, to and step must be numbers (given {dict(given)!r:.100})")
    if not low < high or (step is not None and not 0 < step <= high - low):
        raise RequestError(f"{name}: from must be below to, and step at most their distance")
    if not isinstance(log, bool) or (log and (low <= 0 or step is not None)):
        raise RequestError(f"{name}: log is true or false, and needs numbers above 0 and no step")
    return Range(low, high, log, step, all(isinstance(each, int) for each in numbers))


def _named(value: Any) -> list[str]:
    return _NAMED.findall(value) if isinstance(value, str) else []


def _reached(domains: Mapping[str, Domain], name: str) -> set[str]:
    """Return the names that stand in braces in the values of a name, and in theirs."""
    found: set[str] = set()
    todo = list(_names_in(domains[name]))
    while todo:
        each = todo.pop()
        if each not in found:
            found.add(each)
            todo += _names_in(domains[each])
    return found


def _names_in(domain: Domain) -> set[str]:
    return (
        {name for value in domain.values for name in _named(value)} if isinstance(domain, Values) else set()
    )


@dataclass(frozen=True)
class Parent:
    """A trial that may have children.

    Attributes:
        number: number of the trial.
        parameters: parameters of the trial.
        value: value of the trial; more is better.
    """

    number: int
    parameters: Mapping[str, Any]
    value: float


def evolved(
    ended: Sequence[Parent], space: Space, population: int, sample: int, rng: Random
) -> dict[str, Any]:
    """Return the parameters of the next trial of regularized evolution.

    Args:
        ended: finished trials, in the order in which they ended.
        space: space of the parameters.
        population: number of the youngest that may be parents; while there are fewer, parameters are drawn.
        sample: number of them that are drawn; the best of those is the parent.
        rng: source of the random choices.
    """
    if len(ended) < population:
        return space.draw(lambda name, domain: domain.draw(rng))
    alive = list(ended[-population:])
    parent = max(rng.sample(alive, min(sample, len(alive))), key=lambda each: each.value)
    return space.mutate(parent.parameters, rng)


def succeeded(
    member: int, newest: Mapping[int, Parent], space: Space, rng: Random, share: float = 0.2
) -> tuple[Parent, dict[str, Any]]:
    """Return the trial that a member of a population continues, and its new parameters.

    Args:
        member: number of the member; it has a trial that has ended.
        newest: newest ended trial of every member that has one.
        space: space of the parameters.
        rng: source of the random choices.
        share: share of the members that are copied, and that copy.
    """
    own = newest[member]
    ranked = sorted(newest.values(), key=lambda each: (each.value, each.number))
    count = max(1, math.floor(share * len(ranked)))
    if len(ranked) < 2 or own not in ranked[:count]:
        return own, dict(own.parameters)
    better = [each for each in ranked[-count:] if each.value > own.value]
    if not better:
        return own, dict(own.parameters)
    parent = rng.choice(better)
    return parent, space.explore(parent.parameters, rng)
