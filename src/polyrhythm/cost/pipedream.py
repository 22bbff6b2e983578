"""Where to cut, and how many copies each stage gets: PipeDream's dynamic programme, for pipelines without a flush.

Narayanan, Harlap, Phanishayee and others, "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
arXiv 1806.03377, section 3.1.

    T(i..j, r) = 1/r max(sum of seconds of layers i..j, 2 (r-1)/r weights of layers i..j / bandwidth)
    A(j, p, r) = min over i, r' of max(A(i, p - r, r'), 2 outputs of layer i / (min(r, r') bandwidth), T(i+1..j, r))

A(j, p, r) is the least time between two minibatches with the first j layers on p ranks, r of them on the last stage. A
pipeline that never empties takes as long for a minibatch as its slowest stage or link.

Departure: the paper's state does not have the copies of the last stage, by which the time of a transfer is divided
here. With a flush, what counts is the makespan of a batch (`partition/schedule.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs.

    Attributes:
        seconds: of its forward and backward pass of one minibatch, on one rank.
        weight_bytes: of its parameters.
        output_bytes: of what it passes on of one minibatch.
    """

    seconds: float
    weight_bytes: float
    output_bytes: float


@dataclass(frozen=True)
class StagePlan:
    """Stages, and the ranks that each has.

    Attributes:
        bounds: the first layer of every stage, and at the end the number of layers.
        copies: ranks of every stage.
        seconds: between two minibatches.
    """

    bounds: tuple[int, ...]
    copies: tuple[int, ...]
    seconds: float


def planned(layers: Sequence[LayerCost], ranks: int, bandwidth_bytes_per_s: float) -> StagePlan:
    """Return the plan that takes the least time for a minibatch; of several, one with the fewest stages.

    Args:
        layers: in order; at least one.
        ranks: that are there; all are used.
        bandwidth_bytes_per_s: of every link.
    """
    count = len(layers)
    seconds = [0.0, *accumulate(layer.seconds for layer in layers)]
    weights = [0.0, *accumulate(layer.weight_bytes for layer in layers)]

    def stage(start: int, stop: int, copies: int) -> float:
        exchanged = 2 * (copies - 1) / copies * (weights[stop] - weights[start]) / bandwidth_bytes_per_s
        return max(seconds[stop] - seconds[start], exchanged) / copies

    best: dict[tuple[int, int, int], StagePlan] = {}
    for stop in range(1, count + 1):
        for used in range(1, ranks + 1):
            for copies in range(1, used + 1):
                found: StagePlan | None = None
                if copies == used:
                    found = StagePlan((0, stop), (copies,), stage(0, stop, copies))
                for start in range(1, stop):
                    own = stage(start, stop, copies)
                    sent = 2 * layers[start - 1].output_bytes / bandwidth_bytes_per_s
                    for others in range(1, used - copies + 1):
                        before = best.get((start, used - copies, others))
                        if before is None:
                            continue
                        slowest = max(before.seconds, sent / min(copies, others), own)
                        if found is None or (slowest, len(before.copies) + 1) < (
                            found.seconds,
                            len(found.copies),
                        ):
                            found = StagePlan((*before.bounds, stop), (*before.copies, copies), slowest)
                if found is not None:
                    best[stop, used, copies] = found
    plans = [best[count, ranks, copies] for copies in range(1, ranks + 1) if (count, ranks, copies) in best]
    return min(plans, key=lambda plan: (plan.seconds, len(plan.copies)))


def seconds_of(
    layers: Sequence[LayerCost], bounds: Sequence[int], copies: Sequence[int], bandwidth_bytes_per_s: float
) -> float:
    """Return the seconds between two minibatches of given stages."""
    found = []
    for (start, stop), ranks in zip(pairwise(bounds), copies, strict=True):
        own = layers[start:stop]
        exchanged = 2 * (ranks - 1) / ranks * sum(each.weight_bytes for each in own) / bandwidth_bytes_per_s
        found.append(max(sum(each.seconds for each in own), exchanged) / ranks)
    for cut, pair in zip(bounds[1:-1], pairwise(copies), strict=True):
        found.append(2 * layers[cut - 1].output_bytes / bandwidth_bytes_per_s / min(pair))
    return max(found)
