"""Works of a rank, one after the other."""

from polyrhythm.communication.all_reduce import one_by_one
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime


def play(body):
    time = VirtualTime()
    rank = SimulatedCluster(time, ConstantNetwork(time), 1).communicator(0)
    time.spawn("rank 0", lambda: body(time, rank.start))
    time.run()


def test_each_begins_when_those_before_it_have_ended():
    lines = []

    def body(time, start):
        turns = one_by_one()

        def work(name, seconds):
            lines.append((name, time.now()))
            time.sleep(seconds)
            return name

        handles = [
            turns(start, lambda name=name, seconds=seconds: work(name, seconds))
            for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 2.0))
        ]
        assert [handle.wait() for handle in handles] == ["a", "b", "c"]
        time.sleep(4.0)
        turns(start, lambda: work("d", 0.0)).wait()

    play(body)
    assert lines == [("a", 0.0), ("b", 3.0), ("c", 4.0), ("d", 10.0)]
