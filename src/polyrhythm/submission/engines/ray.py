"""Ray: an actor a rank, in a placement group, on the nodes of a cluster that runs.

    this process (a Ray driver): the store, `placed_run.py`
       ├─ actor of rank 0 ─▶ local_ranks ─▶ the rank, a process of its own
       └─ actor of rank 1 ─▶ …

An actor that dies with its node is made again where Ray puts its bundle of the group, and its rank calls for its
place as any lost rank does. `examples/ray_train.py` shows the other way, from inside Ray Train's own workers.
"""

from __future__ import annotations

import queue
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field

from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, host_store
from polyrhythm.errors import RequestError
from polyrhythm.launch.signals import asked_to_stop
from polyrhythm.submission.engine import Engine, Outcome, Submission
from polyrhythm.submission.local_ranks import reach
from polyrhythm.submission.placed_run import PlacedRun, print_line

PLAN = "ray-plan.txt"
_LISTEN_S = 2.0
_PLACED_S = 60.0


class Ray(Engine):
    """A Ray cluster that runs; the run folder and the data must be on a file system that its nodes share.

    Attributes:
        address: address of the cluster, as ray.init takes it; `local` starts one in this process.
        cpus: CPUs of a rank, as Ray counts them.
        gpus: GPUs of a rank.
        placement: PACK (few nodes), SPREAD (many), STRICT_PACK (one) or STRICT_SPREAD (a node a rank).
        restarts: number of times that a failed rank is restarted.
    """

    address: str = "auto"
    cpus: Annotated[float, Field(gt=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    restarts: Annotated[int, Field(ge=0)] = 3

    def texts(self, submission: Submission) -> Mapping[str, str]:
        gpus = f", {self.gpus:g} GPU" if self.gpus else ""
        lines = [
            f"cluster {self.address}, placement group {self.placement} of {submission.ranks} bundles of "
            f"{self.cpus:g} CPU{gpus}",
            f"an actor in each starts: polyrhythm {' '.join(submission.words)}",
        ]
        return {PLAN: "\n".join(lines) + "\n"}

    def submit(self, submission: Submission, notify: Callable[[str], None], wait: bool) -> Outcome:
        if why := self._out_of_reach():
            raise self._no_answer(why)
        ray = _ray()
        started = not ray.is_initialized()
        if started:
            more = {"include_dashboard": False} if self.address == "local" else {}
            try:
                ray.init(self.address, log_to_driver=False, logging_level="error", **more)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise self._no_answer(str(error).splitlines()[0]) from None
        try:
            return self._carried_out(ray, submission, notify)
        finally:
            if started:
                ray.shutdown()

    def _out_of_reach(self) -> str:
        """Return why nothing listens at the address, if it is one; Ray itself would look for a minute and more."""
        found = re.fullmatch(r"([^:/]+):(\d{1,5})", self.address)
        return reach(found[1], int(found[2])) if found else ""

    def _no_answer(self, why: str) -> RequestError:
        return RequestError(
            f"no Ray cluster answers at {self.address} ({why:.200}): start one with `ray start --head`, or use "
            "ray(address=local)"
        )

    def _carried_out(self, ray: Any, submission: Submission, notify: Callable[[str], None]) -> Outcome:
        from ray.util.placement_group import placement_group, remove_placement_group

        bundle = {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}
        no_place = RequestError(
            f"the cluster has no place for {submission.ranks} ranks of {_text(bundle)} each ({self.placement}): it has "
            f"{_text(ray.cluster_resources())} in all, {_text(ray.available_resources())} free"
        )
        if any(
            ray.cluster_resources().get(key, 0) < count * submission.ranks for key, count in bundle.items()
        ):
            raise no_place
        group = placement_group([bundle] * submission.ranks, strategy=self.placement)
        try:
            if not group.wait(_PLACED_S):
                raise no_place
            address = LOOPBACK if _on_one_machine(ray) else ray.util.get_node_ip_address()
            store = host_store(0, address)
            messages: queue.Queue[tuple[int, Mapping[str, Any]]] = queue.Queue()
            places = [
                _Actor(ray, index, group, bundle, str(submission.directory), messages)
                for index in range(submission.ranks)
            ]
            nodes = [place.node() for place in places]
            for place, node in zip(places, nodes, strict=True):
                place.name = f"node {node[:8]}"
            known = sorted(set(nodes), key=nodes.index)
            run = PlacedRun(
                places,
                range(submission.ranks),
                messages,
                [submission.words] * submission.ranks,
                (address, store.port),
                self.restarts,
                print_line,
                notify,
                hosts=[known.index(node) for node in nodes],
            )
            try:
                with asked_to_stop(lambda: run.stop(signal.SIGINT), lambda: run.stop(signal.SIGTERM)):
                    status = run.carry_out()
            finally:
                for place in places:
                    place.close()
        finally:
            remove_placement_group(group)
        return Outcome(submission.name, status, f"the run is in {submission.folder}")


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise RequestError("the engine ray needs Ray: pip install 'polyrhythm[ray]'") from None
    return ray


def _text(resources: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{resources.get(key, 0):g} {key}" for key in ("CPU", "GPU") if key in resources)
        or "nothing"
    )


def _on_one_machine(ray: Any) -> bool:
    """Return whether all nodes that live have loopback addresses, as those of a cluster on one machine may."""
    return all(node["NodeManagerAddress"].startswith("127.") for node in ray.nodes() if node["Alive"])


class _Actor:
    """A bundle of the group, and the actor in it."""

    def __init__(
        self,
        ray: Any,
        index: int,
        group: Any,
        bundle: Mapping[str, float],
        directory: str,
        messages: queue.Queue[tuple[int, Mapping[str, Any]]],
    ) -> None:
        self.name = f"bundle {index}"
        self._ray, self._index, self._group, self._bundle = ray, index, group, bundle
        self._directory, self._messages = directory, messages
        self._actor = self._made()

    def _made(self) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from polyrhythm.submission.local_ranks import LocalRanks

        class Rank(LocalRanks):
            """`LocalRanks`, which also knows its node; it goes into the actor by value."""

            def node(self) -> str:
                """Return the node's name in the cluster."""
                import ray as inside

                return str(inside.get_runtime_context().get_node_id())

        remote = self._ray.remote(Rank).options(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            max_concurrency=2,  # calls arrive for its output, and to start ranks
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, self._index),
        )
        actor = remote.remote(self._directory)
        threading.Thread(target=self._listen, args=(actor,), daemon=True).start()
        return actor

    def _listen(self, actor: Any) -> None:
        try:
            while True:
                for what in self._ray.get(actor.next_messages.remote(_LISTEN_S)):
                    self._messages.put((self._index, what))
        except Exception as error:  # Ray's, of an actor or a cluster that is gone
            if actor is self._actor:
                self._actor = None
                self._messages.put((self._index, {"gone": str(error).splitlines()[0][:200]}))

    def node(self) -> str:
        """Return the name of the node on which the actor is."""
        return str(self._ray.get(self._actor.node.remote()))

    def start(self, rank: int, environment: Mapping[str, str], words: Sequence[str]) -> None:
        if self._actor is None:
            self._actor = self._made()
        # Ray itself decides when a bundle has a node again: nothing is waited for here.
        self._actor.start.remote(rank, dict(environment), list(words))

    def signal(self, number: int) -> None:
        if self._actor is not None:
            self._actor.signal.remote(int(number))

    def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(Exception):
                self._ray.get(actor.close.remote(), timeout=15.0)
            self._ray.kill(actor)
