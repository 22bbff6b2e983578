"""The bytes that a run counts are those that the strategy declares: payload, and 64 bytes of header a message.

Symbols: N workers, S servers, R replicas of a group, G groups, n parameters of e bytes, B buckets.
"""

from functools import partial
from itertools import pairwise, permutations

import pytest
import torch

from conformance.jobs import (
    CLASSES,
    PARAMETERS,
    make_job,
    named,
    played,
    reads_newest,
    simulated,
    strategies,
    strategy,
)
from polyrhythm.communication.collectives.library import Library
from polyrhythm.compression.layout import Layout
from polyrhythm.cost.all_reduce import travels_whole
from polyrhythm.data.dealing import batch_images
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.specs import choices
from polyrhythm.strategies import FAMILIES
from polyrhythm.training.flat_parameters import TAIL, FlatParameters, shards

HEADER, LIBRARY = 64, Library()


def all_reduce(members, payload, buckets, collective=LIBRARY):
    """Every rank sends the vector to all others, or 2(N-1) slices of a bucket, 2M(N-1)/N bytes in the mean."""
    if collective == LIBRARY and travels_whole(payload, members):
        return members * (members - 1) * (payload + HEADER * buckets)
    return 2 * (members - 1) * payload + 2 * members * (members - 1) * HEADER * buckets


def compressed(strategy, workers, size):
    """Each worker's payload to all others; of dense ones a slice to each, and the sum of its own slice to all."""
    made, dtype = strategy.compress, torch.float32 if size == 4 else torch.float64
    layout = Layout.of([(5, 16), (5,), (3, 5), (3,)], made)
    if made.sparse or workers == 2:
        return workers * (workers - 1) * (layout.nbytes(made, dtype) + HEADER)
    slices = [
        layout.part(made, part.start, part.stop).nbytes(made, dtype) for part in shards(PARAMETERS, workers)
    ]
    return 2 * (workers - 1) * (sum(slices) + workers * HEADER)


def synchronous(strategy, workers, size, buckets):
    if strategy.compress is not None:
        return compressed(strategy, workers, size)
    if strategy.transfer != "full":  # what is no gradient is apart, as whole numbers of eight bytes
        return all_reduce(workers, PARAMETERS * 2, buckets) + all_reduce(workers, TAIL * 8, 1)
    return all_reduce(workers, (PARAMETERS + TAIL) * size, buckets, strategy.collective)


def lazy_synchronous(strategy, workers, size, buckets):
    times = 2 * buckets if buckets > 1 else 0
    return all_reduce(workers, (PARAMETERS + TAIL + times) * size, buckets)


def pieces(start, stop):
    """Cut a shard where a tensor of the network ends, as there is a bucket for each."""
    cuts = [start, *(cut for cut in (80, 85, 100) if start < cut < stop), stop]
    return list(pairwise(cuts))


def parameter_server(strategy, workers, size, buckets):
    """A push and its answer; where another server keeps a shard: whose push it is, the push, its acknowledgement.

    A shard that lies in P > 1 buckets is pushed in P parts, and P come back behind the answer's own header. Parts are
    relayed as they are, each with its acknowledgement.
    """
    model, headers = PARAMETERS * size, strategy.servers * HEADER
    cut = [[(part.start, part.stop)] for part in shards(PARAMETERS, strategy.servers)]
    if buckets > 1 and workers > 1 and getattr(strategy, "overlaps", False):
        cut = [pieces(part.start, part.stop) for part in shards(PARAMETERS, strategy.servers)]
    if getattr(strategy, "compress", None) is not None:  # the same layout both ways
        made, dtype = strategy.compress, torch.float32 if size == 4 else torch.float64
        layout = Layout.of([(5, 16), (5,), (3, 5), (3,)], made)
        model = 0
        for part, ends in zip(shards(PARAMETERS, strategy.servers), cut, strict=True):
            own = layout.part(made, part.start, part.stop)
            for start, stop in ends:
                whole = len(ends) == 1
                held = own if whole else own.stretch(made, start - part.start, stop - part.start)
                model += held.nbytes(made, dtype)
    more = sum(len(ends) - 1 for ends in cut) * HEADER
    kept = (getattr(strategy, "replicas", 1) - 1) * (model + 3 * headers + 2 * more)
    headers += more + sum(len(ends) > 1 for ends in cut) / 2 * HEADER
    return workers * (2 * (model + headers) + kept)


def mixed(strategy, workers, size, buckets, steps):
    whole = (PARAMETERS + TAIL) * size
    groups = [min(strategy.replicas, workers - first) for first in range(0, workers, strategy.replicas)]
    in_buckets = buckets if strategy.traits(workers).exchange_every == 1 else 1
    inside = sum(
        all_reduce(members, whole, in_buckets) + (members - 1) * (whole + HEADER) for members in groups
    )
    of_a_round = inside + len(groups) * 2 * (PARAMETERS * size + strategy.servers * HEADER)
    return steps // strategy.traits(workers).exchange_every * of_a_round


def local_sgd(strategy, workers, size, buckets, steps):
    if getattr(strategy, "compress", None) is not None:
        return steps // strategy.steps * compressed(strategy, workers, size)
    return steps // strategy.steps * all_reduce(workers, (PARAMETERS + TAIL) * size, 1)


def scaffold(strategy, workers, size, buckets, steps):
    rounds = steps // strategy.steps
    return local_sgd(strategy, workers, size, buckets, steps) + rounds * all_reduce(
        workers, PARAMETERS * size, 1
    )


def periodic_averaging(strategy, workers, size, buckets, steps):
    exchanges = -(-steps // strategy.steps)
    return exchanges * workers * 2 * (PARAMETERS * size + strategy.servers * HEADER)


def parallel_sgd(strategy, workers, size, buckets, steps):
    return 0


def post_local_sgd(strategy, workers, size, buckets, steps):
    together, whole = min(strategy.after, steps), (PARAMETERS + TAIL) * size
    models = (steps - together) // strategy.steps * all_reduce(workers, whole, 1)
    return together * all_reduce(workers, whole, buckets) + models


def hierarchical_averaging(strategy, workers, size, buckets, steps):
    whole = (PARAMETERS + TAIL) * size
    of_all = steps // strategy.steps_between
    groups = [min(strategy.group, workers - first) for first in range(0, workers, strategy.group)]
    inside = sum(all_reduce(members, whole, 1) for members in groups)
    return of_all * all_reduce(workers, whole, 1) + inside * (steps // strategy.steps - of_all)


def hybrid(strategy, workers, size, buckets, steps):
    """Of a network of 16 features, 5 hidden neurons and 3 classes: all but the wish to stop is about these layers."""
    hidden, classes = (
        [len(range(width)[width * k // workers : width * (k + 1) // workers]) for k in range(workers)]
        for width in (5, 3)
    )
    epochs, images = 2, 53
    total = 0
    for step in range(steps // epochs):
        batches = [batch_images(images, step, worker, workers, 4) for worker in range(workers)]
        for source, to in permutations(range(workers), 2):
            examples = 16 * batches[source]
            outputs = sum(batches) * hidden[source] + batches[to] * classes[source]
            gradients = sum(batches) * hidden[to] + batches[source] * classes[to]
            swapped = [sum(batches) * hidden[source], batches[to] * classes[source]]
            swapped += [sum(batches) * hidden[to], batches[source] * classes[to]]
            total += (examples + outputs + gradients) * size + HEADER * (1 + sum(map(bool, swapped)))
        total += all_reduce(workers, TAIL * size, 1)
    # At the end of an epoch, to worker 0: weights and biases of each layer.
    owned = [(hidden[worker] * 17, classes[worker] * 6) for worker in range(1, workers)]
    whole = sum(numbers * size + 2 * HEADER * bool(numbers) for layers in owned for numbers in layers)
    return epochs * (total + whole)


def pipeline(strategy, workers, size, buckets, steps):
    """All cuts have 5 values of a picture; a microbatch without pictures does not travel, but for the first."""
    epochs, images, total = 2, 53, 0
    for step in range(steps // epochs):
        left = sum(batch_images(images, step, worker, workers, 4) for worker in range(workers))
        messages = min(strategy.microbatches, left)
        total += (workers - 1) * 2 * (5 * left * size + HEADER * messages)
    # At the end of an epoch worker 0, which has the first layer, is told the parameters of the second.
    whole = (CLASSES * (5 + 1) * size + HEADER) * (workers > 1)
    return epochs * (total + whole)


def d_psgd(strategy, workers, size, buckets):
    degrees = (len(strategy.topology.targets(worker, workers)) for worker in range(workers))
    payload = PARAMETERS * size
    if strategy.compress is not None:
        dtype = torch.float32 if size == 4 else torch.float64
        payload = Layout.of([(5, 16), (5,), (3, 5), (3,)], strategy.compress).nbytes(strategy.compress, dtype)
    return sum(degrees) * (payload + HEADER)


def ad_psgd(strategy, workers, size, buckets):
    """One worker of two or three asks: M there and M back, and what workers say to their own keepers."""
    asking = workers // 2
    own = (2 * workers + asking) * HEADER if workers > 1 else 0
    return asking * 2 * (PARAMETERS * size + HEADER) + own


def sgp(strategy, workers, size, buckets):
    return workers * (PARAMETERS * size + HEADER) if workers > 1 else 0


def elastic(strategy, workers, size, buckets, steps):
    exchanges = -(-steps // strategy.tau)
    return exchanges * parameter_server(strategy, workers, size, buckets)


def downpour(strategy, workers, size, buckets, steps):
    message = PARAMETERS * size + strategy.servers * HEADER
    if strategy.compress is not None:
        made, dtype = strategy.compress, torch.float32 if size == 4 else torch.float64
        layout = Layout.of([(5, 16), (5,), (3, 5), (3,)], made)
        cut = [layout.part(made, part.start, part.stop) for part in shards(PARAMETERS, strategy.servers)]
        message = sum(part.nbytes(made, dtype) + HEADER for part in cut)
    pushes = sum(step % strategy.n_push == 0 or step + 1 == steps for step in range(steps))
    fetches, headers = steps // strategy.n_fetch, strategy.servers * HEADER
    relayed = (
        pushes * (message + 2 * headers) + fetches * 3 * headers
    )  # whose it is, itself, its acknowledgement
    return workers * (pushes * message + fetches * (message + headers) + (strategy.replicas - 1) * relayed)


def decoupled_diloco(strategy, workers, size, buckets, steps):
    """A fragment goes up when due, is asked for at each step until it is merged (here at most four), and comes."""
    pushes = [
        sum(strategy.due(fragment, step) for step in range(steps)) for fragment in range(strategy.servers)
    ]
    lengths = [part.stop - part.start for part in shards(PARAMETERS, strategy.servers)]
    return workers * sum(
        count * (2 * length * size + HEADER + 4 * 2 * HEADER)
        for count, length in zip(pushes, lengths, strict=True)
    )


def sandblaster(strategy, workers, size, buckets, steps):
    batches = steps // strategy.portions
    return batches * workers * 2 * (PARAMETERS * size + strategy.servers * HEADER)


def hierarchical(strategy, workers, size, buckets):
    """A push to a leaf and its answer, and of each group one to the roots; in parts as `parameter_server`."""
    groups = min(strategy.groups, workers)
    below, above = PARAMETERS * size + HEADER, PARAMETERS * size + strategy.servers * HEADER
    if buckets > 1 and workers > 1:
        in_parts = [
            sum(len(pieces(part.start, part.stop)) - 1 / 2 for part in shards(PARAMETERS, servers))
            for servers in (1, strategy.servers)
        ]
        below, above = below + in_parts[0] * HEADER, above + in_parts[1] * HEADER
    return 2 * (workers * below + groups * above)


def gaia(strategy, workers, size, buckets):
    sites, message = min(strategy.sites, workers), PARAMETERS * size + strategy.servers * HEADER
    announcements = sites * (sites - 1) * strategy.servers * HEADER
    return (2 * workers + sites * (sites - 1)) * message + announcements


def hogwild(strategy, workers, size, buckets):
    return 0


DECLARED = {
    "synchronous": synchronous,
    "lazy_synchronous": lazy_synchronous,
    **dict.fromkeys(
        ("parameter_server", "dc_asgd", "staleness_aware", "softsync", "backup_workers", "ssp"),
        parameter_server,
    ),
    "d_psgd": d_psgd,
    "ad_psgd": ad_psgd,
    "sgp": sgp,
    "hogwild": hogwild,
    "gaia": gaia,
    "hierarchical": hierarchical,
}
"""Bytes that all ranks together send while every worker takes one step; at most, where answers may be empty."""

DECLARED_OF_A_RUN = {
    "local_sgd": local_sgd,
    "post_local_sgd": post_local_sgd,
    "parallel_sgd": parallel_sgd,
    "periodic_averaging": periodic_averaging,
    "hierarchical_averaging": hierarchical_averaging,
    "ng_sgd": local_sgd,
    "bmuf": local_sgd,
    "slowmo": local_sgd,
    "admm": local_sgd,
    "scaffold": scaffold,
    "diloco": local_sgd,
    "easgd": elastic,
    "eamsgd": elastic,
    "downpour": downpour,
    "decoupled_diloco": decoupled_diloco,
    "sandblaster": sandblaster,
    "mixed": mixed,
    "hybrid": hybrid,
    "pipeline": pipeline,
}
"""The same of so many steps, where not all are alike: means of models are one bucket."""


def declared_per_step(spec, workers, size, buckets, steps):
    built = strategy(spec)
    if built.name in DECLARED_OF_A_RUN:
        return DECLARED_OF_A_RUN[built.name](built, workers, size, buckets, steps) / steps / workers
    return DECLARED[built.name](built, workers, size, buckets) / workers


def assert_bytes(spec, workers, found, declared):
    if reads_newest(spec, workers):
        assert found == pytest.approx(declared, rel=1e-12)
    else:  # half of it goes up, at every step
        assert declared / 2 <= found <= declared


def test_every_strategy_declares_its_bytes():
    assert DECLARED.keys() | DECLARED_OF_A_RUN.keys() == {
        name for family in FAMILIES for name in choices(family)
    }


POSSIBLE = [
    (spec, workers, dtype)
    for spec in strategies()
    for workers, dtype in (
        (1, torch.float32),
        (2, torch.float32),
        (3, torch.float32),
        (3, torch.float64),
        (5, torch.float32),
    )
    if (workers < 5 or not strategy(spec).traits(workers).pipelines)
    and (dtype is torch.float32 or spec in named([spec]))
]
"""The network has four layers, and so no more stages. The size of a number is a factor, for any number of workers."""


@pytest.mark.parametrize(("spec", "workers", "dtype"), POSSIBLE, ids=str)
def test_counted_bytes_are_the_declared_ones(spec, workers, dtype):
    same = {} if dtype is torch.float32 else {"dtype": dtype}
    result = played(spec, workers, **same).result
    declared = declared_per_step(spec, workers, dtype.itemsize, 1, result["steps"])
    assert_bytes(spec, workers, result["bytes_sent_per_step"], declared)


@pytest.mark.parametrize("spec", named(strategies()))
def test_bytes_sent_in_the_background_of_the_backward_pass_count(spec, monkeypatch):
    monkeypatch.setattr("polyrhythm.roles.replica.FlatParameters", partial(FlatParameters, bucket_bytes=16))
    result = simulated(make_job(spec, 3), ConstantCluster(bandwidth_bytes_per_s=1e5)).result
    declared = declared_per_step(spec, 3, 4, 4, result["steps"])
    assert_bytes(spec, 3, result["bytes_sent_per_step"], declared)


@pytest.mark.parametrize("spec", [spec for spec in named(strategies()) if reads_newest(spec, 3)])
def test_the_length_of_the_run_does_not_change_the_bytes_of_a_step(spec):
    rounds = max(1, strategy(spec).traits(3).exchange_every)
    short, long = (
        played(spec, 3, ConstantCluster(), epochs=epochs, train=24).result["bytes_sent_per_step"]
        for epochs in (rounds, 4 * rounds)
    )
    assert short == long
