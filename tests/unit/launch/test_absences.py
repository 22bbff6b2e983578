"""Who is gone, as the launcher keeps account of it."""

from __future__ import annotations

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.launch.succession import Absences
from polyrhythm.strategies.role_assignment import RoleAssignment

CAST = RoleAssignment((0, 1, 2), (3, 4))


def test_a_newcomer_is_told_of_all_but_its_own_predecessor() -> None:
    absences = Absences(CAST)
    for lost in (Peer(1, 0), Peer(3, 0)):
        absences.lose(lost)
    assert absences.news_for(Peer(1, 1)) == [Peer(3, 0)]
    assert absences.news_for(Peer(3, 1)) == [Peer(1, 0)]
    assert absences.news_for(Peer(2, 1)) == [Peer(1, 0), Peer(3, 0)]


def test_the_latest_loss_of_a_rank_counts() -> None:
    absences = Absences(CAST)
    absences.lose(Peer(4, 0))
    absences.fill(4)
    assert absences.servers == []
    absences.lose(Peer(4, 1))
    assert absences.servers == [4]
    assert absences.news_for(Peer(1, 1)) == [Peer(4, 1)]


def test_a_lost_worker_is_no_lost_server() -> None:
    absences = Absences(CAST)
    absences.lose(Peer(2, 0))
    assert absences.servers == []
