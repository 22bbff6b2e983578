"""Who shares a host with whom."""

from polyrhythm.communication.transports.two_level import Levels


def test_who_shares_a_host_and_who_leads():
    levels = Levels.of(["a", "b", "a", "c", "b"])
    assert levels.hosts == ((0, 2), (1, 4), (3,))
    assert levels.leaders == (0, 1, 3)
    assert [levels.host(member) for member in range(5)] == [0, 1, 0, 2, 1]


def test_two_levels_need_several_hosts_and_one_with_several_members():
    assert Levels.of(["a", "b", "a"]).mixed
    assert not Levels.of(["a", "a"]).mixed
    assert not Levels.of(["a", "b"]).mixed
