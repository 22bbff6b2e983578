"""Any graph, from a file: an edge a line, as networkx and others write them.

    #     # sender, receiver, weight
    0 1 0.25
    1 2

Without weights, an undirected graph has Metropolis weights and a directed one gives every receiver an equal
part. With weights on all lines, a worker keeps the rest; a line `3 3 0.5` sets its own weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import isclose, isfinite
from pathlib import Path

from polyrhythm.errors import RequestError
from polyrhythm.strategies.topology import Topology

_Edges = dict[tuple[int, int], float | None]


class File(Topology):
    """A list of edges, one a line: two workers and perhaps a weight.

    Attributes:
        path: path of the file.
        directed: whether an edge leads from the first to the second worker only.
    """

    path: str
    directed: bool = False

    def targets(self, peer: int, peers: int, turn: int = 0) -> Sequence[int]:
        return _graph(self).targets.get(peer, ()) if peers > 1 else ()

    def sources(self, peer: int, peers: int, turn: int = 0) -> Sequence[int]:
        return _graph(self).sources.get(peer, ()) if peers > 1 else ()

    def weight(self, source: int, to: int, peers: int, turn: int = 0) -> float:
        """As the file has it, or by the rule for graphs without weights."""
        given = _graph(self).edges[source, to]
        if given is not None:
            return given
        if self.directed:
            return 1 / (1 + len(self.targets(source, peers, turn)))
        return super().weight(source, to, peers, turn)

    def check(self, peers: int) -> None:
        """Refuse a graph of other workers, one that falls apart, and weights that do not add up.

        Raises:
            RequestError: names the worker and the fix.
        """
        graph = _graph(self)
        if graph.peers > peers:
            raise RequestError(
                f"{self.path} has an edge of worker {graph.peers - 1}, and workers are 0 to {peers - 1}: "
                f"ask for {graph.peers} workers or take the edge out"
            )
        self.check_connected(peers)
        for peer in range(peers):
            kept = graph.edges.get((peer, peer))
            left = self.own_weight(peer, peers)
            if left < -1e-9 or (kept is not None and not isclose(kept, left, abs_tol=1e-6)):
                total = 1 - left + (kept or 0.0)
                raise RequestError(
                    f"{self.path}: what leaves worker {peer} adds up to {total:g} of its parameters"
                    f"{', its own share included' if kept is not None else ''}: its weights must add up to "
                    f"{'1' if kept is not None else 'at most 1'}"
                )


@dataclass(frozen=True)
class _Graph:
    edges: _Edges
    targets: dict[int, tuple[int, ...]]
    sources: dict[int, tuple[int, ...]]
    peers: int


@cache
def _graph(topology: File) -> _Graph:
    edges = _read(Path(topology.path), topology.directed)
    joined = sorted(edge for edge in edges if edge[0] != edge[1])
    peers = 1 + max((peer for edge in edges for peer in edge), default=-1)
    targets: dict[int, tuple[int, ...]] = {}
    sources: dict[int, tuple[int, ...]] = {}
    for source, to in joined:
        targets[source] = (*targets.get(source, ()), to)
        sources[to] = (*sources.get(to, ()), source)
    return _Graph(edges, targets, sources, peers)


def _read(path: Path, directed: bool) -> _Edges:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise RequestError(f"cannot read the topology {path}: {reason}") from None
    edges: _Edges = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            source, to, weight = _edge(f"{path}, line {number}", words)
            edges[source, to] = weight
            if not directed:
                edges[to, source] = weight
    if len({weight is None for (source, to), weight in edges.items()}) > 1:
        raise RequestError(
            f"{path}: some edges have a weight and some have none: give all of them one, or none"
        )
    return edges


def _edge(where: str, words: list[str]) -> tuple[int, int, float | None]:
    try:
        source, to = int(words[0]), int(words[1])
        weight = float(words[2]) if len(words) > 2 else None
        if len(words) > 3 or min(source, to) < 0 or (source == to and weight is None):
            raise ValueError
    except (ValueError, IndexError):
        raise RequestError(
            f"{where}: {' '.join(words)!r} is no edge: write two workers and perhaps a weight, as in 0 1 0.25"
        ) from None
    if weight is not None and not (isfinite(weight) and weight > 0):
        raise RequestError(
            f"{where}: weight {weight:g}: a weight is above 0; leave out an edge that carries nothing"
        )
    return source, to, weight
