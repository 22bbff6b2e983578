"""How many control messages does the most loaded rank handle in a step, in real runs and in virtual time?

    python benchmarks/many-workers/messages.py [--real 8 32 128] [--simulated 1024 10000] [--steps 24] [--saves 10steps]

Control messages are all that ranks send outside of training: reports, states, requests of the coordinator and its
answers. Each rank's sent and received ones are counted. The rows are written to messages.json.
"""

from __future__ import annotations

import argparse
import json
import mmap
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyrhythm.api.simulate import simulate
from polyrhythm.api.train import train
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.forwarding import ForwardingCommunicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.roles.world import World

RESULTS = Path(__file__).with_name("messages.json")
CLUSTER = """
name: many
hosts:
  - {{name: node, count: {workers}, cores: 1}}
nic: {{latency_s: 5.0e-5, bandwidth_bytes_per_s: 1.25e9}}
inside: {{latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e10}}
step_time: log_normal(mean=0.1, sigma=0.1)
"""
EPOCH = "1epoch"
KINDS = [kind.name for kind in Kind]


class Counted(ForwardingCommunicator):
    """Counts its rank's messages by kind, in memory that forks share."""

    def __init__(self, inner: Communicator, counts: memoryview) -> None:
        super().__init__(inner)
        first = inner.rank * len(KINDS)

        def note(message: Message) -> None:
            counts[first + KINDS.index(message.kind.name)] += 1

        def sending(send: Callable[..., Any]) -> Callable[..., Any]:
            def counted(to: int, message: Message) -> Any:
                note(message)
                return send(to, message)

            return counted

        def receiving(receive: Callable[..., Any]) -> Callable[..., Any]:
            def counted(source: int | None = None, tag: int = 0) -> Any:
                found = receive(source, tag)
                if found is not None:
                    note(found[1])
                return found

            return counted

        self.send, self.start_send = sending(inner.send), sending(inner.start_send)
        self.receive, self.poll = receiving(inner.receive), receiving(inner.poll)


def row(world: str, workers: int, steps: int, saves: str) -> dict[str, object]:
    """Return the messages of the most loaded rank in a run of so many workers."""
    memory = memoryview(mmap.mmap(-1, 8 * workers * len(KINDS))).cast("q")
    own_control = World.control
    World.control = lambda self: Counted(own_control(self), memory)  # type: ignore[method-assign, assignment]
    folder = Path(tempfile.mkdtemp())
    try:
        if world == "real":
            run = train(
                data="digits",
                model="mlp",
                strategy="synchronous",
                workers=workers,
                batch_size=2,
                balance="off",
                updates=steps,
                checkpoint_every=saves,
                out=folder / "run",
                start_method="fork",
            )
            lost = 0 if run is None else run.figures["workers_lost"]
        else:
            (folder / "many.yaml").write_text(CLUSTER.format(workers=workers))
            simulate(
                cluster=folder / "many.yaml",
                strategy=f"local_sgd(steps={steps}, collective=binomial_tree)",  # its own messages are not counted
                workers=workers,
                gradients="none",
                steps=steps,
                out=folder / "run",
            )
            lost = 0
    finally:
        World.control = own_control  # type: ignore[method-assign]
        shutil.rmtree(folder, ignore_errors=True)
    counts = [memory[rank * len(KINDS) : (rank + 1) * len(KINDS)].tolist() for rank in range(workers)]
    most = max(range(workers), key=lambda rank: sum(counts[rank]))
    others = sorted(sum(counts[rank]) for rank in range(workers) if rank != most)
    return {
        "world": world,
        "workers": workers,
        "steps": steps,
        **({"saves": saves} if world == "real" and saves != EPOCH else {}),
        "rank": most,
        "messages_per_step": round(sum(counts[most]) / steps, 2),
        "kinds": {kind: count for kind, count in zip(KINDS, counts[most], strict=True) if count},
        "most_of_others": others[-1],
        "lost": lost,
    }


def main() -> None:
    """Measure, and add the rows."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--real", nargs="*", type=int, default=[])
    options.add_argument("--simulated", nargs="*", type=int, default=[])
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--saves", default=EPOCH, help="interval of checkpoints in real runs")
    chosen = options.parse_args()
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for world in ("real", "simulated"):
        for workers in getattr(chosen, world):
            found = row(world, workers, chosen.steps, chosen.saves)
            print(found, flush=True)
            rows = [each for each in rows if _key(each) != _key(found)] + [found]
            RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, sorted(rows, key=_key))) + "\n]\n")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["world"], row["workers"], row["steps"], row.get("saves", EPOCH)


if __name__ == "__main__":
    main()
