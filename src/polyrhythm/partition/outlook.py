"""Forecast of a pipeline before it runs (time, idle share, memory of each rank), and the best cuts.

    stage s, n images of a step of N      K share_s n / N steps of its rank; a third of it is the forward pass
    cut behind stage s                    latency + n (numbers per image over the cut) bytes / bandwidth
    step                                  end of the last unit of a batch; without a flush, time per further batch

`fastest` searches the cut with the shortest step among those that fit the ranks' memory: all cuts, if they
are few; else it starts from the evenest cuts and from that of PipeDream's dynamic program (`planned`), and
moves cuts as long as that gains. With a flush the makespan counts and not the slowest stage alone, which the
program minimizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, combinations, pairwise, permutations, product
from math import comb
from time import perf_counter
from typing import Any

import torch
from torch import nn

from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.partition.chain import Chain
from polyrhythm.partition.pipeline_pass import FORWARD_SHARE
from polyrhythm.partition.schedule import Schedule, StageTimes, Timetable, timetable
from polyrhythm.partition.stage import Bounds, balanced, shares
from polyrhythm.partition.stage_memory import RankBytes
from polyrhythm.training.model_sizes import PieceSize

EXHAUSTIVE = 3000
"""Cuts that are all tried."""
_TRIALS = 3
"""Trials of a measurement; the shortest counts, since the first one of a process is far longer."""


@dataclass(frozen=True)
class Pace:
    """Speed of the ranks and their links.

    Attributes:
        step_s: seconds of a step of the whole network on each rank, with a worker's own batch; of the slowest
            copy.
        latency_s: latency in seconds of the link from each rank to the next one, cyclically.
        bytes_per_s: bandwidth of the same links; infinite where it is not known.
    """

    step_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    bytes_per_s: tuple[float, ...]


def even_pace(ranks: int, step_s: float = 1.0) -> Pace:
    """Return the pace of equal ranks with links that take no time."""
    return Pace((step_s,) * ranks, (0.0,) * ranks, (float("inf"),) * ranks)


@dataclass(frozen=True)
class Work:
    """Work of a pipeline.

    Attributes:
        schedule: the order of units.
        microbatches: M.
        images: images of a step, of all microbatches.
        number_bytes: bytes of a number that goes over a cut.
        recomputes: whether activations are computed again.
        copies: copies of every rank's stage, where microbatches are dealt out among them; empty: one each.
    """

    schedule: Schedule
    microbatches: int
    images: int
    number_bytes: int = 4
    recomputes: bool = False
    copies: tuple[int, ...] = ()


def stage_times(work: Work, pieces: Sequence[PieceSize], bounds: Bounds, pace: Pace) -> list[StageTimes]:
    """Return the seconds of a microbatch in every stage."""
    parts, ranks = shares(pieces), len(pace.step_s)
    workers = sum(work.copies) or ranks
    found = []
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        rank = stage % ranks
        seconds = workers * sum(parts[start:stop]) * pace.step_s[rank] / work.microbatches
        backward = seconds * (1 - FORWARD_SHARE)
        split = work.schedule.splits_backward
        again = seconds * FORWARD_SHARE if work.recomputes else 0.0
        numbers = pieces[stop - 1].outputs
        sent = sum(numbers) * work.number_bytes * work.images / work.microbatches + HEADER_BYTES * len(
            numbers
        )
        found.append(
            StageTimes(
                seconds * FORWARD_SHARE,
                (backward / 2 if split else backward) + again,
                backward / 2,
                sent / pace.bytes_per_s[rank],
                pace.latency_s[rank],
            )
        )
    return found


def step_of(work: Work, times: Sequence[StageTimes], ranks: int) -> tuple[float, float]:
    """Return the seconds of a step, and which share of them ranks are idle on average."""
    schedule, count = work.schedule, work.microbatches

    def table(microbatches: int) -> Timetable:
        return timetable(schedule, ranks, microbatches, times, work.copies)

    if schedule.flushes:
        whole = table(count)
        return whole.makespan_s, whole.bubble
    # Once it is full, each batch takes as long as the next.
    filled = 2 * ranks + count
    seconds = table(filled + 4 * count).makespan_s - table(filled).makespan_s
    computed = sum(each.forward + each.backward for each in times) * count / ranks
    return seconds / 4, max(0.0, 1 - computed / (seconds / 4)) if seconds else 0.0


def fastest(
    pieces: Sequence[PieceSize],
    stages: int,
    work: Work,
    pace: Pace,
    fits: Callable[[Bounds], bool] = lambda bounds: True,
) -> Bounds | None:
    """Return the bounds of the stages with the shortest step that fit; of several, with the least that is sent.

    Args:
        pieces: pieces of the network; at least as many as stages.
        stages: number of stages.
        work: work of the pipeline.
        pace: pace of the ranks.
        fits: whether all ranks have the memory; asked of candidates only, best first.

    Returns:
        None where none fits.
    """
    ranks = len(pace.step_s)
    known: dict[Bounds, tuple[float, int]] = {}

    def cost(bounds: Bounds) -> tuple[float, int]:
        if bounds not in known:
            seconds, _ = step_of(work, stage_times(work, pieces, bounds, pace), ranks)
            known[bounds] = round(seconds, 12), sum(sum(pieces[cut - 1].outputs) for cut in bounds[1:-1])
        return known[bounds]

    last = len(pieces)
    if comb(last - 1, stages - 1) <= EXHAUSTIVE:
        for cuts in combinations(range(1, last), stages - 1):
            cost((0, *cuts, last))
    else:
        for start in _first_guesses(pieces, stages, work, pace):
            _descend(start, cost)
    for bounds in sorted(known, key=known.__getitem__):
        if fits(bounds):
            return bounds
    return None


def best_copies(
    pieces: Sequence[PieceSize],
    workers: int,
    work_of: Callable[[tuple[int, ...]], Work],
    pace_of: Callable[[tuple[int, ...]], Pace],
) -> tuple[int, ...]:
    """Return how many copies each stage best has, of two stages or more, for the shortest step.

    All ways to share the workers out are tried where they are few (`EXHAUSTIVE`), each with the cut that makes the
    slowest stage least; else the search begins with equally many copies, and with those of PipeDream's program, and
    moves a few at a time. With a flush the makespan counts, and the copies' exchange of gradients after it, which the
    program takes as hidden.

    Args:
        pieces: pieces of the network; at least two.
        workers: workers to share out; at least two.
        work_of: returns what passes through stages of given copies.
        pace_of: returns how fast their ranks are.
    """
    most = min(len(pieces), workers)
    known: dict[tuple[int, ...], float] = {}

    def cost(copies: tuple[int, ...]) -> float:
        if copies not in known:
            known[copies] = _seconds_of_copies(pieces, copies, work_of(copies), pace_of(copies))
        return known[copies]

    if 2 ** (workers - 1) <= EXHAUSTIVE:
        for stages in range(2, most + 1):
            for cuts in combinations(range(1, workers), stages - 1):
                cost(tuple(stop - start for start, stop in pairwise((0, *cuts, workers))))
    else:
        starts = [
            tuple(workers * (stage + 1) // stages - workers * stage // stages for stage in range(stages))
            for stages in range(2, min(most, _MOST_SEARCHED) + 1)
        ]
        plan = _by_programming(pieces, workers, work_of(starts[0]), pace_of(starts[0]))
        for start in [*starts, plan] if len(plan) > 1 else starts:
            _pass_on(start, cost)
    return min(known, key=lambda copies: (round(known[copies], 12), len(copies), copies))


_MOST_SEARCHED = 8
"""Largest number of stages for the search among many workers; with more, the program's result is used."""


def _pass_on(copies: tuple[int, ...], cost: Callable[[tuple[int, ...]], float]) -> None:
    """Move copies from stage to stage, one or a few at a time, as long as that gains.

    One alone may not, since microbatches divide among some numbers of copies only.
    """
    best, moved = cost(copies), True
    while moved:
        moved = False
        for (giver, taker), by in product(permutations(range(len(copies)), 2), (1, 2, 4)):
            tried = tuple(
                each + by * ((stage == taker) - (stage == giver)) for stage, each in enumerate(copies)
            )
            if min(tried) > 0 and cost(tried) < best:
                copies, best, moved = tried, cost(tried), True


def _seconds_of_copies(pieces: Sequence[PieceSize], copies: tuple[int, ...], work: Work, pace: Pace) -> float:
    """Return the seconds of a step with the evenest cut for given copies, exchanges of gradients with it."""
    if max(copies) > work.microbatches:
        return float("inf")  # some would have nothing to do
    bounds = balanced(pieces, len(copies), copies)
    seconds, _ = step_of(work, stage_times(work, pieces, bounds, pace), len(copies))
    exchanged = [
        2
        * (each - 1)
        / each
        * sum(piece.parameters for piece in pieces[start:stop])
        * work.number_bytes
        / speed
        for each, (start, stop), speed in zip(copies, pairwise(bounds), pace.bytes_per_s, strict=True)
    ]
    return seconds + max(exchanged)


@dataclass(frozen=True)
class LayerCost:
    """Cost of a layer.

    Attributes:
        seconds: seconds of its forward and backward pass of one minibatch, on one rank.
        weight_bytes: bytes of its parameters.
        output_bytes: bytes of what it passes on of one minibatch.
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
        seconds: time between two minibatches.
    """

    bounds: tuple[int, ...]
    copies: tuple[int, ...]
    seconds: float


def planned(layers: Sequence[LayerCost], ranks: int, bandwidth_bytes_per_s: float) -> StagePlan:
    """Return the plan with the least time for a minibatch, without a flush; of several, that with the fewest stages.

    Narayanan, Harlap, Phanishayee and others, "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP
    2019, arXiv 1806.03377, section 3.1.

        T(i..j, r) = 1/r max(sum of seconds of layers i..j, 2 (r-1)/r weights of layers i..j / bandwidth)
        A(j, p, r) = min over i, r' of max(A(i, p - r, r'), 2 outputs of layer i / (min(r, r') bandwidth), T(i+1..j, r))

    A(j, p, r) is the least time between two minibatches with the first j layers on p ranks, r of them on the last
    stage. A pipeline that never empties takes as long for a minibatch as its slowest stage or link.

    Departure: the paper's state does not have the copies of the last stage, by which the time of a transfer is divided
    here.

    Args:
        layers: layers in order; at least one.
        ranks: ranks that are there; all are used.
        bandwidth_bytes_per_s: bandwidth in bytes/s of every link.
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


def _by_programming(pieces: Sequence[PieceSize], workers: int, work: Work, pace: Pace) -> tuple[int, ...]:
    """Return the stages' numbers of copies by PipeDream's dynamic program; the result may be a single stage."""
    step = max(pace.step_s) * workers / work.microbatches
    of_microbatch = work.images / work.microbatches * work.number_bytes
    layers = [
        LayerCost(
            share * step,
            piece.parameters * work.number_bytes / work.microbatches,  # exchanged once a batch
            sum(piece.outputs) * of_microbatch,
        )
        for piece, share in zip(pieces, shares(pieces), strict=True)
    ]
    return planned(_joined(layers, _PROGRAMME_LAYERS), workers, min(pace.bytes_per_s)).copies


_PROGRAMME_LAYERS = 24
"""To which neighboring layers are put together, since the program takes the square of them."""


def _joined(layers: Sequence[LayerCost], most: int) -> list[LayerCost]:
    """Return neighboring layers joined, evenly by their number, into at most `most` layers."""
    count = min(most, len(layers))
    groups = [
        layers[len(layers) * number // count : len(layers) * (number + 1) // count] for number in range(count)
    ]
    return [
        LayerCost(
            sum(each.seconds for each in group),
            sum(each.weight_bytes for each in group),
            group[-1].output_bytes,
        )
        for group in groups
    ]


def _first_guesses(pieces: Sequence[PieceSize], stages: int, work: Work, pace: Pace) -> list[Bounds]:
    """Return the cuts of the rules that consider stages alone."""
    found = [balanced(pieces, stages), tuple(len(pieces) * stage // stages for stage in range(stages + 1))]
    slowest_link, step = min(pace.bytes_per_s), max(pace.step_s)
    if slowest_link < float("inf") and len(pieces) * stages <= 400:
        of_microbatch = work.images / work.microbatches * work.number_bytes
        layers = [
            # Weights that are never exchanged: a stage has one rank here.
            LayerCost(share * step * len(pace.step_s), 1e30, sum(piece.outputs) * of_microbatch)
            for piece, share in zip(pieces, shares(pieces), strict=True)
        ]
        plan = planned(layers, stages, slowest_link)
        if len(plan.bounds) == stages + 1:
            found.append(plan.bounds)
    return found


def _descend(bounds: Bounds, cost: Callable[[Bounds], tuple[float, int]]) -> None:
    """Move cuts, neighbors together, as long as that gains."""
    best = cost(bounds)
    moves = [
        (first, last, by)
        for first in range(1, len(bounds) - 1)
        for last in range(first, len(bounds) - 1)
        for by in (-8, -3, -2, -1, 1, 2, 3, 8)
    ]
    moved = True
    while moved:
        moved = False
        for first, last, by in moves:  # neighboring cuts together
            tried = tuple(cut + by * (first <= number <= last) for number, cut in enumerate(bounds))
            if list(tried) == sorted(set(tried)) and tried[0] == 0 and cost(tried) < best:
                bounds, best, moved = tried, cost(tried), True


def measured_pieces(chain: Chain, rows: int, now: Callable[[], float]) -> list[float]:
    """Measure the seconds of each piece for a microbatch forward and backward; the network stays as it is.

    Args:
        chain: the network, with its numbers, in training.
        rows: images of the microbatch.
        now: returns the time in seconds.
    """
    found = []
    device = chain.parameters(0, len(chain.pieces))[0].device
    for place in range(len(chain.pieces)):
        stage = chain.stage(place, place + 1)
        shapes = [chain.image_shape] if stage.before is None else stage.before.shapes
        values = [
            torch.ones(rows, *shape, dtype=chain.dtype, device=device, requires_grad=place > 0)
            for shape in shapes
        ]
        # Copies of the buffers, so that a trial counts in no running statistics.
        buffers = {name: value.clone() for name, value in stage.module.named_buffers()}
        wanted = [each for each in (*values, *stage.module.parameters()) if each.requires_grad]
        times = []
        for _ in range(_TRIALS):
            before = now()
            outputs = torch.func.functional_call(stage.module, buffers, tuple(values))
            trained = [each for each in outputs if each.requires_grad]
            if trained and wanted:
                torch.autograd.grad(
                    trained, wanted, [torch.ones_like(each) for each in trained], allow_unused=True
                )
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(now() - before)
        found.append(min(times))
    return found


def seconds_of_pieces(
    make_model: Callable[[], nn.Module], image_shape: tuple[int, int, int], rows: int, device: str
) -> list[float]:
    """Make a network, and measure the seconds of each of its pieces on one thread, as `measured_pieces` does.

    Args:
        make_model: function that makes it.
        image_shape: (C, H, W) of an image.
        rows: images of a microbatch.
        device: device where it is computed.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model().to(device).train()
    image = next(model.parameters()).new_zeros(1, *image_shape)
    return measured_pieces(Chain(model, image), rows, perf_counter)


@dataclass(frozen=True)
class PipelineForecast:
    """Forecast of a pipeline before it runs.

    Attributes:
        layers: the first and the last layer of every stage, in order.
        step_s: predicted seconds of a step; None where the speed of ranks is not known.
        bubble: idle share of the ranks' time.
        ranks: memory that each rank needs.
    """

    layers: tuple[tuple[str, str], ...]
    step_s: float | None
    bubble: float
    ranks: tuple[RankBytes, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as the figures of a run have it."""
        return {
            "stages": [{"first": first, "last": last} for first, last in self.layers],
            "predicted_step_s": self.step_s,
            "predicted_bubble": self.bubble,
            "memory": [asdict(each) | {"training": each.training, "most": each.most} for each in self.ranks],
        }

    @property
    def text(self) -> str:
        """One line for people."""
        chunks = len(self.layers) // len(self.ranks)
        names = [
            " and ".join(
                last if first == last else f"{first.removesuffix('#1')} to {last}"
                for first, last in self.layers[rank :: len(self.ranks)]
            )
            for rank in range(len(self.ranks))
        ]
        stages = "; ".join(
            f"{number}: {name}, {bytes_text(needs.most)}"
            for number, (name, needs) in enumerate(zip(names, self.ranks, strict=True))
        )
        what = "stages" if chunks == 1 else f"ranks of {chunks} stages"
        time = "" if self.step_s is None else f"{seconds_text(self.step_s)} a step, "
        idle = f"{100 * self.bubble:.0f} % of it idle"
        return f"pipeline of {len(self.ranks)} {what} ({stages}); {time}{idle}, by prediction"


def seconds_text(seconds: float) -> str:
    """Return a time in a unit that people read, as reports write it: `9.5 s`, `23 ms`."""
    return f"{1000 * seconds:.2g} ms" if seconds < 0.0995 else f"{seconds:.1f} s"


def bytes_text(count: int) -> str:
    """Return bytes in a unit that people read."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
