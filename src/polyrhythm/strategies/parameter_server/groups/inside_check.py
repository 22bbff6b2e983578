"""What cannot go on inside a group, and why."""

from __future__ import annotations

from polyrhythm.errors import RequestError
from polyrhythm.strategies.offer import Offer
from polyrhythm.strategies.parameter_server.rules.merge_rule import MergeRule
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.strategy import Strategy


def check_inside(inside: Strategy, members: int, consistency: Consistency, merge: MergeRule) -> None:
    """Refuses what cannot be.

    Args:
        inside: how a group goes on.
        members: of a group.
        consistency: between groups.
        merge: what servers make of what comes late.

    Raises:
        RequestError: with the reason and what would work.
    """
    inside.check(members)
    if inside.offers is Offer.NOTHING:
        raise RequestError(
            f"mixed(inside={inside}): {_reason(inside)}: use synchronous, or a strategy whose workers meet in "
            "rounds, such as local_sgd"
        )
    if inside.offers is Offer.GRADIENTS:
        return
    if consistency.drops:
        raise RequestError(
            f"mixed(inside={inside}): with {consistency} a late group would lose a whole round: use another "
            "consistency, or inside=synchronous"
        )
    if merge.remembers:
        raise RequestError(
            f"mixed(inside={inside}): {merge} corrects a gradient with its own square, and a round of several "
            "steps is none: use merge=staleness_aware, or inside=synchronous"
        )


def _reason(inside: Strategy) -> str:
    """Says why a strategy has nothing for servers above it."""
    if inside.server_count:
        return "it has servers of its own, and those of mixed are for all groups"
    if not inside.in_step(2) or (inside.round_steps(2) == 1 and not inside.agrees(2)):
        return "its workers never hold the same model"
    if inside.round_steps(2) == 0:
        return "its workers meet in the end only"
    if inside.round_steps(2) == 1:
        return "its gradients travel while the next forward pass runs, which begins with what servers answer"
    return (
        "its rounds begin at points, or at times, of their own, and servers would put the workers elsewhere"
    )
