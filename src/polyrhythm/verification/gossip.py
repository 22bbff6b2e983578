"""Gossip: nothing is lost or doubled when workers mix their parameters, in turns or in pairs.

In turns (`MatrixMixing`) workers hold what the matrices of their topology give, computed as whole matrices in
float64:

    gradient first    X(t+1) = P_t (X(t) - G(t)),  a(t+1) = P_t a(t),  z = X/a       push-sum
    else              X(t+1) = P_t X(t) - G(t)                                       D-PSGD

X = the parameters of all workers times their masses a, G = their gradients, P_t = the matrix of turn t.

Workers that begin again, when one is lost or joins, do so at the mean of what each held after its steps, by their
masses, with or without the gradient of the step that broke. From there on the rule holds again. If all workers are
lost that held anything, the others begin at what one of them had handed on.

In pairs (`Exchanges`, AD-PSGD) the messages alone show everything. A worker that answers with half a difference d to
parameters x shows its own, x - 2d before and x - d after; from one answer to the next they change by its own gradients
only. A worker that asks changes by the answers that it is given and by its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.gossip.mixing.turns import made_again
from polyrhythm.strategies.gossip.pairing.keeper import Place, place_of
from polyrhythm.strategies.topology import Topology
from polyrhythm.verification.invariant import (
    Conditions,
    Delivered,
    Ended,
    Invariant,
    Regrouped,
    Stepped,
    Violation,
)

Gradient = Callable[[int, int], Tensor]
"""Return the gradient, `(numbers,)`, of a worker's index and step."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Starting point of a member.

    Attributes:
        worker: index of the worker in the run.
        step: step that it takes first.
        learned: whether the gradient of that step is in its parameters already.
    """

    worker: int
    step: int = 0
    learned: bool = False


class RuleOfTurns:
    """Members that begin at one point, each at a step of its own, and mix from the latest of these steps on.

    Args:
        places: places of the members, in order.
        matrices: matrices of one period.
        point: `(numbers,)`, where all begin, with a mass of 1.
        gradient_first: whether gradients are applied before mixing, and parameters divided by their mass.
        delay: steps after which what was sent is taken, with gradients first.
    """

    def __init__(
        self,
        places: Sequence[Start],
        matrices: Sequence[Tensor],
        point: Tensor,
        *,
        gradient_first: bool,
        delay: int,
    ) -> None:
        self.places = places
        self._matrices = matrices
        self._first = gradient_first
        self._delay = delay
        self._mixes_from = max(place.step for place in places)
        self._done = min(place.step for place in places)
        self._values = point.double().repeat(len(places), 1)
        self._mass = torch.ones(len(places), 1, dtype=torch.float64)
        self._under_way: list[tuple[Tensor, Tensor]] = []
        self._after = {self._done: (self._values, self._mass)}

    def held(self, member: int, steps: int, gradient: Gradient) -> tuple[Tensor, Tensor]:
        """Return a member's state after `steps` steps: its parameters times their mass, and the mass.

        Args:
            member: place of the member.
            steps: number of steps done.
            gradient: gradient of all workers.
        """
        while self._done < steps:
            self._turn(gradient)
        values, mass = self._after[max(steps, min(self._after))]
        return values[member], mass[member]

    def _turn(self, gradient: Gradient) -> None:
        step = self._done
        gradients = torch.stack([self._learned(place, step, gradient) for place in self.places])
        alone, matrix = step < self._mixes_from, self._matrices[step % len(self._matrices)]
        if alone:
            self._values = self._values - gradients
        elif self._first:
            self._push(matrix, self._values - gradients)
        else:
            self._values = matrix @ self._values - gradients
        self._done += 1
        self._after[self._done] = (self._values, self._mass)
        self._after.pop(self._done - len(self.places) - 1, None)  # no worker is that far behind its neighbors

    def _learned(self, place: Start, step: int, gradient: Gradient) -> Tensor:
        if step < place.step or (step == place.step and place.learned):
            return torch.zeros_like(self._values[0])
        return gradient(place.worker, step).double()

    def _push(self, matrix: Tensor, values: Tensor) -> None:
        kept = torch.diag(matrix.diag())
        sent = matrix - kept
        self._under_way.append((sent @ values, sent @ self._mass))
        self._values, self._mass = kept @ values, kept @ self._mass
        if len(self._under_way) > self._delay:
            arrived, mass = self._under_way.pop(0)
            self._values, self._mass = self._values + arrived, self._mass + mass


_TOLERANCE = 1e-4
"""Tolerance of sums in float32, relative to the largest number; a lost or doubled gradient exceeds it by far."""
_MOST_TRIED = 1 << 12


@dataclass(frozen=True)
class _Share:
    """Possible share of a worker: parameters times mass, the mass, whether a broken step's gradient is in."""

    values: Tensor
    mass: Tensor
    learned: bool


@dataclass
class _View:
    """A membership view.

    Attributes:
        members: generations by rank.
        rule: rule of their turns.
        begun: number of steps of each worker that has begun there.
        before: states that the others may still hold.
    """

    members: dict[int, int]
    rule: RuleOfTurns
    begun: dict[int, int] = field(default_factory=dict)
    before: dict[int, list[_Share]] = field(default_factory=dict)


class MatrixMixing(Invariant):
    """Every worker's parameters after every step are those that the matrices give.

    Args:
        conditions: conditions of the run; without known gradients nothing is checked.
        topology: topology of the mixing.
        check: function that raises `RequestError` for a number of workers that the topology does not allow.
        gradient_first: whether gradients are applied before mixing, and parameters divided by their mass.
        delay: steps after which a sent share is taken, with gradients first.
    """

    def __init__(
        self,
        conditions: Conditions,
        topology: Topology,
        check: Callable[[int], None],
        *,
        gradient_first: bool,
        delay: int = 0,
    ) -> None:
        self._workers = conditions.roles.workers
        self._topology = topology
        self._check = check
        self._first = gradient_first
        self._delay = delay
        self._gradient: Gradient | None = conditions.gradient
        if self._gradient is not None:
            places = [Start(worker=worker) for worker in range(len(self._workers))]
            nowhere = torch.zeros(conditions.numbers)
            self._view = _View(dict.fromkeys(self._workers, 0), self._rule(places, nowhere))
            self._nothing = _Share(nowhere.double(), torch.zeros(1, dtype=torch.float64), learned=False)
            self._view.before = {rank: [self._nothing] for rank in self._workers}  # until it has started

    def stepped(self, event: Stepped) -> None:
        view = self._view if self._gradient is not None else None
        if view is None or event.rank not in view.members:
            return
        assert self._gradient is not None, "looked at above"
        member = list(view.members).index(event.rank)
        values, mass = view.rule.held(member, event.step + 1, self._gradient)
        if not _near(values / mass, event.vector):
            raise Violation(
                f"parameters after step {event.step}",
                event.rank,
                event.time_s,
                expected="what mixing by the matrices gives",
                found=f"numbers that differ by up to {_away(values / mass, event.vector):g}",
            )
        view.begun[event.rank] = event.step + 1

    def regrouped(self, event: Regrouped) -> None:
        """Find shares that have the point as their mean; all others must begin at the same point."""
        if self._gradient is None:
            return
        if event.members != self._view.members or event.rank in self._view.begun:
            self._view = self._begun_again(event)
        self._view.begun[event.rank] = self._view.rule.places[list(event.members).index(event.rank)].step
        values, _ = self._view.rule.held(0, 0, self._gradient)
        if not _near(values, event.vector) and len(self._view.begun) > 1:
            self._refuse(event, "the point at which the others begin")

    def _begun_again(self, event: Regrouped) -> _View:
        shares = {rank: list(self._shares(rank, event.members[rank])) for rank in event.members}
        bringing = {rank: found for rank, found in shares.items() if found}
        tried = islice(product(*bringing.values()), _MOST_TRIED) if bringing else ()
        chosen = next((each for each in tried if _is_mean(each, event.vector)), None)
        certain = any(all(float(share.mass) for share in found) for found in bringing.values())
        if chosen is None and (certain or not self._was_passed_on(event.vector)):
            self._refuse(event, "the mean of the remaining workers, weighted by their masses")
        bring = zip(bringing, chosen, strict=True) if chosen is not None else ()
        learned = {rank: share.learned for rank, share in bring}
        places = [
            Start(worker=self._workers.index(rank), step=event.steps[rank], learned=learned.get(rank, False))
            for rank in event.members
        ]
        return _View(dict(event.members), self._rule(places, event.vector), before=shares)

    def _was_passed_on(self, point: Tensor) -> bool:
        """Return whether one of the members, which are all lost, may have held this."""
        members = self._view.members.items()
        return any(_is_mean((share,), point) for lost in members for share in self._shares(*lost))

    def _shares(self, rank: int, generation: int) -> Iterator[_Share]:
        """Yield the possible contributions of a worker; nothing if it has just joined."""
        view = self._view
        if view.members.get(rank) != generation:
            return
        assert self._gradient is not None, "asked only where gradients are known"
        member, steps = list(view.members).index(rank), self._steps(rank)
        values, mass = view.rule.held(member, steps, self._gradient)
        place = view.rule.places[member]
        learned = place.learned and place.step == steps
        yield _Share(values, mass, learned)
        if self._first and not learned:
            yield _Share(values - self._gradient(place.worker, steps).double(), mass, learned=True)
        if rank not in view.begun:  # one that had just joined, and has not taken the point, has nothing yet
            yield from view.before.get(rank) or [self._nothing]

    def _steps(self, rank: int) -> int:
        view = self._view
        place = view.rule.places[list(view.members).index(rank)]
        return view.begun.get(rank, place.step)

    def _rule(self, places: list[Start], point: Tensor) -> RuleOfTurns:
        peers = len(places)
        topology = made_again(self._topology, self._check, peers)
        matrices = [topology.matrix(peers, turn) for turn in range(topology.period(peers))]
        return RuleOfTurns(places, matrices, point, gradient_first=self._first, delay=self._delay)

    def _refuse(self, event: Regrouped, expected: str) -> None:
        raise Violation("its new start", event.rank, event.time_s, expected=expected, found="another point")


def _is_mean(shares: tuple[_Share, ...], point: Tensor) -> bool:
    mass = torch.stack([share.mass for share in shares]).sum(0)
    if not float(mass):
        return False
    return _near(torch.stack([share.values for share in shares]).sum(0) / mass, point)


def _away(expected: Tensor, found: Tensor) -> float:
    return float((found.double() - expected).abs().max())


def _near(expected: Tensor, found: Tensor) -> bool:
    return _away(expected, found) <= _TOLERANCE * (1 + float(expected.abs().max()))


_Source = tuple[int, int]
"""A rank and its generation."""
"""Tolerance of sums in float32, relative to the largest number; a lost or doubled gradient exceeds it by far."""


@dataclass(frozen=True)
class _Question:
    to: _Source
    values: Tensor


@dataclass
class _Known:
    """One generation of a worker.

    Attributes:
        base: `(n,)`, its parameters without the gradients from `from_step` on; None if they are not known.
        from_step: first step with a gradient that is not in `base`.
        answers: step of the worker, and parameters before and after, by its count of averages.
    """

    base: Tensor | None
    from_step: int = 0
    answers: dict[int, tuple[int, Tensor, Tensor]] = field(default_factory=dict)


class Exchanges(Invariant):
    """Every question has one answer, and no average or update is lost or doubled.

    Args:
        conditions: conditions of the run; without known gradients, only questions and answers are counted.
        topology: topology of the averaging.
    """

    def __init__(self, conditions: Conditions, topology: Topology) -> None:
        workers = conditions.roles.workers
        self._places = {rank: place_of(topology, workers, index) for index, rank in enumerate(workers)}
        self._workers = workers
        self._gradient = conditions.gradient
        self._numbers = conditions.numbers
        self._open: dict[_Source, list[_Question]] = {}
        self._known: dict[_Source, _Known] = {}
        self._latest = dict.fromkeys(workers, 0)

    def delivered(self, event: Delivered) -> None:
        """Follow a question or an answer; messages of a worker to itself are no exchange."""
        self._latest[event.source] = max(self._latest[event.source], event.source_generation)
        if event.source == event.to or event.message.kind not in (Kind.VECTOR, Kind.DIFFERENCE):
            return
        if event.message.kind is Kind.VECTOR:
            self._check_question(event)
        else:
            self._answered(event)

    def _check_question(self, event: Delivered) -> None:
        place: Place = self._places[event.source]
        speaker = event.source, event.source_generation
        if not place.active or event.to not in place.partners:
            raise Violation(
                f"a question to rank {event.to}",
                event.source,
                event.time_s,
                expected=f"one to {place.partners}" if place.active else "none of a passive worker",
                found=f"one of step {event.message.step}",
            )
        assert event.message.tensor is not None, "a request contains parameters"
        question = _Question((event.to, event.to_generation), event.message.tensor.double())
        self._open.setdefault(speaker, []).append(question)

    def _answered(self, event: Delivered) -> None:
        asker = event.to, event.to_generation
        answerer = event.source, event.source_generation
        questions = self._open.pop(asker, [])  # all but the last went to workers that were lost
        if not questions or questions[-1].to != answerer:
            raise Violation(
                f"an answer of rank {event.source}",
                event.to,
                event.time_s,
                expected=f"one of rank {questions[-1].to[0]}, which was asked last" if questions else "none",
                found=f"one of step {event.message.step}",
            )
        if event.message.tensor is None or self._gradient is None:
            return
        half = event.message.tensor.double()
        mine = self._of(asker)
        if mine.base is not None:
            mine.base = mine.base - half
        sent = questions[-1].values
        self._follow(event, sent - 2 * half, sent - half)

    def _follow(self, event: Delivered, before: Tensor, after: Tensor) -> None:
        """Compare what two successive answers of a worker show of it."""
        theirs = self._of((event.source, event.source_generation))
        number = event.message.version
        theirs.answers[number] = event.message.step, before, after
        for later in (number, number + 1):
            if later in theirs.answers and later - 1 in theirs.answers:
                step, shown, _ = theirs.answers[later]
                from_step, _, left = theirs.answers.pop(later - 1)
                expected = left - self._gradients(event.source, from_step, step)
                self._compare(event.source, event.time_s, f"what answer {later} shows", shown, expected)

    def stepped(self, event: Stepped) -> None:
        if self._gradient is None or not self._places[event.rank].active:
            return
        known = self._of((event.rank, self._latest[event.rank]))
        found = event.vector.double()
        if known.base is not None:
            gradients = self._gradients(event.rank, known.from_step, event.step + 1)
            what = f"parameters after step {event.step}"
            self._compare(event.rank, event.time_s, what, found, known.base - gradients)
        known.base, known.from_step = found, event.step + 1

    def ended(self, event: Ended) -> None:
        """No survivor still waits for an answer of another."""
        for (rank, generation), questions in self._open.items():
            asked, asked_generation = questions[-1].to
            alive = {rank, asked} <= {*event.survivors}
            if alive and (generation, asked_generation) == (self._latest[rank], self._latest[asked]):
                raise Violation(
                    f"a question to rank {asked}",
                    rank,
                    event.time_s,
                    expected="an answer before the end",
                    found="none",
                )

    def _of(self, speaker: _Source) -> _Known:
        if speaker not in self._known:
            # The first process of a rank begins with zeros; a replacement with the values that its first step shows.
            self._known[speaker] = _Known(torch.zeros(self._numbers).double() if speaker[1] == 0 else None)
        return self._known[speaker]

    def _gradients(self, rank: int, from_step: int, to_step: int) -> Tensor:
        assert self._gradient is not None
        total = torch.zeros(self._numbers, dtype=torch.float64)
        for step in range(from_step, to_step):
            total += self._gradient(self._workers.index(rank), step).double()
        return total

    def _compare(self, rank: int, time_s: float, what: str, found: Tensor, expected: Tensor) -> None:
        error = float((found - expected).abs().max())
        if error > _TOLERANCE * (1 + float(expected.abs().max())):
            raise Violation(
                what,
                rank,
                time_s,
                expected="its parameters, changed by its gradients and by what it was answered",
                found=f"numbers that differ by up to {error:g}",
            )
