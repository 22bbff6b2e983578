"""Ten thousand garbage connections to every port that a run opens: does it serve on, and what do they cost?

    python benchmarks/garbage/study.py [--count 10000] [--seed 0] [--out DIR]

The attacks are those of the tests (`test_hostile_connections.py`, `test_hostile_frames.py`, `test_connecting.py`,
`test_door.py`). The store's port is PyTorch's own (`TCPStore`): what is told of it is what that does.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # whose attacks these are

import torch.distributed as dist

from on_processes import test_hostile_connections as tcp
from on_processes import test_hostile_frames as memory
from on_processes.live_server import SERVER, LiveServer
from polyrhythm.communication.transports.between_hosts.connections import Place, connect_all
from polyrhythm.communication.transports.shared_memory.links import Card
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store
from polyrhythm.launch.joining.connections import Address
from polyrhythm.launch.joining.join_client import JoinClient
from polyrhythm.launch.joining.join_server import Entrance, Inside
from unit.communication.transports.between_hosts import test_connecting as meeting
from unit.launch.joining import test_door as door

_MAGIC = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")
"""With which a client of `TCPStore` begins."""


def open_files() -> int:
    """Return how many this process has open."""
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def links(count: int, random: Random, shared_memory: bool) -> dict[str, Any]:
    """Attack a server's port for links; workers push before and after."""
    run = LiveServer(shared_memory=shared_memory)
    run.begin()
    try:
        if shared_memory:
            card = Card.from_text(run.store.get(f"card/{SERVER}/0").decode())
            assert card is not None
            attack = lambda many: memory.attack(card, random, many)  # noqa: E731
        else:
            attack = lambda many: tcp.attack(tcp.card_of(run, SERVER), random, many)  # noqa: E731
        attack(100)
        cost = costs(lambda: attack(count))
        refused = run.homes[SERVER].refused
        tcp.wait_for(lambda: refused.total() >= count + 100, "the last refusal")
        assert run.end().total() == count + 100
        return cost | {"refused": dict(refused)}
    finally:
        run.close()


def meetings(count: int, random: Random) -> dict[str, Any]:
    """Attack a member that waits for another, which comes behind them all."""
    store, over = meeting.Store(2), threading.Event()
    cost: dict[str, Any] = {}

    def disturbed(word: str) -> Any:
        words = store.exchange_texts(0, word)
        port = json.loads(words[0])[1]

        def disturb() -> None:
            cost.update(costs(lambda: meeting.claim_wrongly(port, random, count)))
            over.set()

        threading.Thread(target=disturb).start()
        return words

    def late(word: str) -> Any:
        words = store.exchange_texts(1, word)
        assert over.wait(60)
        return words

    places = [Place(member, meeting.LOOPBACK, b"key", meeting.never) for member in range(2)]
    found = meeting.together(
        [lambda: connect_all(places[0], disturbed), lambda: connect_all(places[1], late)]
    )
    assert [list(each) for each in found] == [[1], [0]], found
    found[0][1].close()
    found[1][0].close()
    return cost


def join_server(count: int, random: Random) -> dict[str, Any]:
    """Attack the port where workers join; half of the strangers know the token. A worker joins behind them."""
    entrance = Entrance(Address("127.0.0.1", 0), door.TOKEN)
    entrance.offer = door.OFFER
    server = entrance.open()
    server.open(Inside(Address("127.0.0.1", 1), door.CAST, "start"))
    made = door.Door(server)
    try:
        made.server.begin(parameters=7)
        door.knock(made, random)
        cost = costs(lambda: [door.knock(made, random) for _ in range(count)])
        with closing(JoinClient(made.server.address, door.KEY)) as guest:
            assert guest.take_place().peer.rank == 2
        return cost | {"refused": dict(made.refused)}
    finally:
        made.close()
        entrance.close()
        with suppress(queue.Empty):
            made.heard()


def store(count: int, random: Random) -> dict[str, Any]:
    """Attack PyTorch's store, whose keys a rank reads before and after."""
    kept = host_store()
    kept.set("key", "value")

    def one() -> None:
        with socket.create_connection(("127.0.0.1", kept.port)) as stranger, suppress(OSError):
            size = random.choice([3, 2**33, 2**62, random.getrandbits(64)]).to_bytes(8, "little")
            command = bytes([random.randrange(20)]) + size + random.randbytes(random.choice([0, 9, 100]))
            stranger.sendall(random.choice([random.randbytes(random.choice([1, 32, 500])), _MAGIC + command]))

    cost = costs(lambda: [one() for _ in range(count)])
    client = dist.TCPStore(
        "127.0.0.1", kept.port, None, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False
    )
    assert client.get("key") == b"value"
    return cost | {"keys": kept.num_keys()}


def costs(attack: Callable[[], object]) -> dict[str, Any]:
    """Return what an attack costs the process that bears it."""
    files, resident, began_s = open_files(), resident_bytes(), time.monotonic()
    attack()
    seconds = time.monotonic() - began_s
    deadline_s = time.monotonic() + 10
    while open_files() > files and time.monotonic() < deadline_s:
        time.sleep(0.05)
    grown = (resident_bytes() - resident) / 2**20
    return {"seconds": round(seconds, 1), "files": open_files() - files, "mebibytes": round(grown, 1)}


PORTS: dict[str, Callable[[int, Random], dict[str, Any]]] = {
    "links over TCP": lambda count, random: links(count, random, shared_memory=False),
    "links through shared memory (a socket)": lambda count, random: links(count, random, shared_memory=True),
    "meetings of hosts, for sums": meetings,
    "joining": join_server,
    "the store (PyTorch's)": store,
}


def main() -> None:
    """Attack every port, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    chosen = parser.parse_args()
    rows = []
    print("| port | garbage | seconds | refused as | memory | open files |\n|---|---|---|---|---|---|")
    for name, attack in PORTS.items():
        found = attack(chosen.count, Random(chosen.seed))
        rows.append({"port": name, "count": chosen.count} | found)
        refused = (
            ", ".join(f"{why} {number:,}" for why, number in sorted(found.get("refused", {}).items())) or "–"
        )
        print(
            f"| {name} | {chosen.count:,} | {found['seconds']} | {refused} | {found['mebibytes']:+} MiB "
            f"| {found['files']:+} |",
            flush=True,
        )
    (chosen.out / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
