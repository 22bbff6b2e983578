"""A mix of faults drawn from a seed: such as real clusters have, and links of TCP let through."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from polyrhythm.data.dealing.seeding import seed_for
from polyrhythm.roles.world import LEADER
from polyrhythm.simulation.injection.fault import Fault
from polyrhythm.simulation.injection.faults.cut import Cut
from polyrhythm.simulation.injection.faults.delay import Delay
from polyrhythm.simulation.injection.faults.kill import Kill
from polyrhythm.simulation.injection.faults.slow import Slow
from polyrhythm.strategies.cast import Cast

_MOST = 3
_ALONE, _SETTLED = 0.5, 0.5
"""How often a needed rank has no successor; for which part of a run a successor is let be, to get its shards."""


def drawn_faults(
    cast: Cast, seed: int, length_s: float, *, spares: int, settle_s: float = 0.0
) -> tuple[Fault, ...]:
    """Draws one to three faults.

    Messages are neither dropped, doubled nor corrupted, since no strategy is meant to bear that.

    Args:
        cast: who does what.
        seed: of the draw.
        length_s: about how long the run takes.
        spares: how many workers may be missing at once; for the leader see `drawn_change_of_lead`.
        settle_s: that deaths which go on and on are apart on average, at least.
    """
    random = Random(seed_for("fault mix", seed))
    calm = [_slow, _delay, _cut]
    bounded = spares < len(cast.workers) - 1
    kills = [_kill, _kill, _kill if bounded else _kills] if len(cast.workers) > 1 else []
    found: list[Fault] = []
    for _ in range(random.randint(1, _MOST)):
        found.append(random.choice(calm + kills if spares > 0 else calm)(cast, random, length_s))
        if bounded and found[-1].name == Kill.name:
            spares -= 1
    return tuple(_apart(fault, settle_s) for fault in found)


def drawn_death(ranks: Sequence[int], seed: int, length_s: float) -> Kill:
    """Draws when one of some ranks dies, without a successor.

    Args:
        ranks: who may die.
        seed: of the draw.
        length_s: about how long the run takes.
    """
    random = Random(seed_for("death", seed))
    return Kill(rank=random.choice(ranks), at_s=_rounded(length_s * random.uniform(0.001, 1)))


def leaves_some(faults: Sequence[Fault], spares: int, *, to_hand_on: bool) -> bool:
    """Whether worker 0 may be lost beside what these faults kill.

    Args:
        faults: that have been drawn.
        spares: how many workers may be missing at once.
        to_hand_on: whether one of the others must hold what its successor goes on with, and so must never be lost.
    """
    kills = [fault for fault in faults if isinstance(fault, Kill)]
    endless = any(kill.every_s is not None for kill in kills)
    return len(kills) < spares and not (to_hand_on and endless)


def drawn_change_of_lead(seed: int, steps: int, length_s: float) -> tuple[Fault, ...]:
    """Draws, for every other seed, after which step worker 0 dies, and when its successor comes.

    Args:
        seed: of the draw.
        steps: that every worker takes.
        length_s: about how long the run takes.
    """
    random = Random(seed_for("change of lead", seed))
    if steps < 2 or random.random() < 0.5:
        return ()
    restart_s = random.choice([0.0, _rounded(length_s * random.uniform(0, 0.2))])
    return (Kill(rank=LEADER, after_step=random.randrange(1, steps), restart_after_s=restart_s),)


def drawn_deaths(ranks: Sequence[int], seed: int, length_s: float, settle_s: float) -> tuple[Fault, ...]:
    """Draws when one of some ranks dies; every other time it has a successor, and another dies some time after that.

    Args:
        ranks: who may die.
        seed: of the draw.
        length_s: about how long the run takes.
        settle_s: for which a successor is let be beside, since the links are no quicker.
    """
    first = drawn_death(ranks, seed, length_s)
    random = Random(seed_for("deaths", seed))
    if random.random() < _ALONE or first.at_s is None:
        return (first,)
    restart_s = _rounded(length_s * random.uniform(0, 0.2))
    others = [rank for rank in ranks if rank != first.rank]
    later_s = first.at_s + restart_s + settle_s + length_s * random.uniform(_SETTLED, 1)
    again = Kill(
        rank=random.choice(others), at_s=_rounded(later_s), restart_after_s=_restart(random, length_s)
    )
    return first.model_copy(update={"restart_after_s": restart_s}), again


def _rounded(seconds: float) -> float:
    """Gives a time that a command line can hold."""
    return float(f"{seconds:.3g}")


def _window(random: Random, length_s: float) -> tuple[float, float]:
    begin = random.uniform(0, length_s)
    return _rounded(begin), _rounded(begin + length_s * random.uniform(0.01, 0.3) + 1e-9)


def _slow(cast: Cast, random: Random, length_s: float) -> Fault:
    from_s, to_s = _window(random, length_s)
    factor = _rounded(random.uniform(1.5, 10))
    return Slow(rank=random.choice(cast.workers), factor=factor, from_s=from_s, to_s=to_s)


def _delay(cast: Cast, random: Random, length_s: float) -> Fault:
    seconds = _rounded(length_s * random.uniform(0.001, 0.1))
    return Delay(seconds=seconds, probability=_rounded(random.uniform(0.01, 0.3)))


def _cut(cast: Cast, random: Random, length_s: float) -> Fault:
    from_s, to_s = _window(random, length_s)
    return Cut(source=random.randrange(cast.size), from_s=from_s, to_s=to_s)


def _kill(cast: Cast, random: Random, length_s: float) -> Fault:
    rank = random.choice([rank for rank in cast.workers if rank != LEADER])
    at_s = _rounded(length_s * random.uniform(0.001, 1))
    return Kill(rank=rank, at_s=at_s, restart_after_s=_restart(random, length_s))


def _kills(cast: Cast, random: Random, length_s: float) -> Fault:
    every_s = _rounded(length_s * random.uniform(0.5, 1))  # so that a group gets through a step in between
    return Kill(rank="any", every_s=every_s, restart_after_s=_restart(random, length_s))


def _apart(fault: Fault, settle_s: float) -> Fault:
    """Gives those who are left the time to go on that the model takes on the links, before the next one dies."""
    if not isinstance(fault, Kill) or fault.every_s is None or fault.every_s >= settle_s:
        return fault
    return fault.model_copy(update={"every_s": _rounded(settle_s)})


def _restart(random: Random, length_s: float) -> float | None:
    """Gives when a successor comes: never, at once (before anyone has heard of the death), or later."""
    return random.choice([None, 0.0, _rounded(length_s * random.uniform(0, 0.2))])
