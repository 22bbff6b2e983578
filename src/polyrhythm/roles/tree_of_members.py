"""Tree of the members of a view, along which messages to the coordinator are combined.

        0            the coordinator, first of the members
   ╱  ╱  ╲  ╲
  1  2    3  4       each has `FAN` children at most, so that none handles more messages than `FAN` + 1
 ╱│  …
5 6 …                place p: children `FAN` p + 1 to `FAN` p + `FAN`, as in a heap
"""

from __future__ import annotations

FAN = 4
"""Number of children of a member."""


def parent_of(place: int) -> int:
    """Return the place of a member's parent; 0 for the first."""
    return max(0, place - 1) // FAN


def children_of(place: int, members: int) -> range:
    """Return the places of the children of a member in a tree of `members`."""
    first = FAN * place + 1
    return range(min(first, members), min(first + FAN, members))


def below(place: int, members: int) -> list[int]:
    """Return the places of a member and of all below it in a tree of `members`."""
    found = [place]
    for each in found:
        found += children_of(each, members)
    return found


def pays(members: int) -> bool:
    """Return whether a tree of `members` has more than two levels."""
    return members > FAN + 1
