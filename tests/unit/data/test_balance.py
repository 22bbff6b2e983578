"""Parts of a global batch: largest remainders, and a controller against simulated machines whose ideal is known."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from polyrhythm.data.balance import BALANCES, Controller, Shape, split
from polyrhythm.errors import RequestError
from polyrhythm.specs import build

WORKERS, BATCH, STEPS = 4, 256, 120
SLOW = range(40, 80)
SLOWED, FACTOR = 1, 4.0


def ideal_s(shapes: list[Shape], factors: list[float], batch: int) -> float:
    """The time at which all end together, if images could be cut."""
    rates = [1 / (factor * shape.per_image) for factor, shape in zip(factors, shapes, strict=True)]
    fixed = sum(shape.fixed / shape.per_image for shape in shapes)
    return (batch + fixed) / sum(rates)


def followed(seed: int, noise: float, shapes: list[Shape], *, known: bool) -> tuple[list[float], list[int]]:
    """Return each step's ideal time over its real one, and the steps after which parts changed."""
    random, controller = Random(seed), Controller(BATCH, WORKERS, shapes=shapes if known else ())
    efficiency, changes = [], []
    for step in range(STEPS):
        factors = [FACTOR if step in SLOW and worker == SLOWED else 1.0 for worker in range(WORKERS)]
        real = [f * s.seconds(b) for f, s, b in zip(factors, shapes, controller.sizes, strict=True)]
        efficiency.append(ideal_s(shapes, factors, BATCH) / max(real))
        measured = [seconds * random.lognormvariate(0, noise) for seconds in real]
        if controller.observe(measured, controller.sizes):
            changes.append(step)
        assert sum(controller.sizes) == BATCH
        assert min(controller.sizes) >= 1
    return efficiency, changes


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("fixed", [0.0, 0.2])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_worker_that_slows_down_and_recovers_is_followed_within_five_steps(fixed, noise, known):
    shapes = [Shape(fixed, (1 - fixed) * WORKERS / BATCH)] * WORKERS
    for seed in range(100):
        efficiency, changes = followed(seed, noise, shapes, known=known)
        assert min(efficiency[SLOW.start + 5 : SLOW.stop]) > 0.9
        assert min(efficiency[SLOW.stop + 5 :]) > 0.9
        assert not [step for step in changes if step < SLOW.start], "even machines keep equal parts"
        # no oscillation: some steps to follow, then rest
        assert len([step for step in changes if SLOW.start + 12 <= step < SLOW.stop]) <= 1
        assert len([step for step in changes if step >= SLOW.stop + 12]) <= 1


@pytest.mark.parametrize("slowed", [(1.1, 1.3), (1.3, 1.1)])
def test_after_a_slow_while_parts_go_back_to_where_all_end_together(slowed):
    # As measured on two cores of which one is mostly taken: milliseconds of a step of so many images.
    shapes, factors = [Shape(1.2, 0.235), Shape(4.5, 0.97)], [1.0, 1.0]
    best_s = ideal_s(shapes, factors, 128)
    for seed in range(20):
        random, controller = Random(seed), Controller(128, 2)
        for decision in range(60):
            now = slowed if 10 <= decision < 17 else factors
            real = [f * s.seconds(b) for f, s, b in zip(now, shapes, controller.sizes, strict=True)]
            controller.observe([each * random.lognormvariate(0, 0.01) for each in real], controller.sizes)
        taken_s = max(shape.seconds(size) for shape, size in zip(shapes, controller.sizes, strict=True))
        assert taken_s < 1.025 * best_s  # an image more or less is 2 %


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_noise_gives_even_machines_no_unequal_parts_however_many_there_are(workers):
    lost = []
    for seed in range(8):
        random, controller = Random(seed), Controller(64 * workers, workers)
        for _ in range(80):
            measured = [size * random.lognormvariate(0, 0.1) for size in controller.sizes]
            controller.observe(measured, controller.sizes)
            lost.append(max(controller.sizes) / 64 - 1)
    assert sum(lost) / len(lost) < 0.03


def test_uneven_machines_of_different_shapes_end_together():
    shapes = [Shape(0.5, 0.010), Shape(0.1, 0.020), Shape(0.0, 0.050)]
    controller = Controller(120, 3, shapes=shapes)
    assert controller.observe(
        [s.seconds(b) for s, b in zip(shapes, controller.sizes, strict=True)], (40,) * 3
    )
    assert sum(controller.sizes) == 120
    slowest = max(s.seconds(b) for s, b in zip(shapes, controller.sizes, strict=True))
    best = min(
        max(shapes[0].seconds(a), shapes[1].seconds(b), shapes[2].seconds(120 - a - b))
        for a, b in itertools.product(range(1, 119), repeat=2)
        if a + b < 120
    )
    assert slowest <= best * 1.02
    assert not controller.observe(
        [s.seconds(b) for s, b in zip(shapes, controller.sizes, strict=True)], controller.sizes
    )


def test_the_shape_of_a_worker_is_learned_from_its_changes():
    """Proportional parts alone would approach the ideal by the fixed share's part a step."""
    shapes = [Shape(2.0, 0.01), Shape(2.0, 0.04)]
    controller = Controller(200, 2)
    for _ in range(3):
        sizes = controller.sizes
        controller.observe([s.seconds(b) for s, b in zip(shapes, sizes, strict=True)], sizes)
    slowest = max(s.seconds(b) for s, b in zip(shapes, controller.sizes, strict=True))
    assert ideal_s(shapes, [1, 1], 200) / slowest > 0.98


def test_memory_limits_hold_and_others_take_the_rest():
    controller = Controller(100, 4)
    controller.most = [20, float("inf"), float("inf"), float("inf")]
    assert controller.observe([1.0, 1.0, 1.0, 1.0], controller.sizes)
    assert controller.sizes == (20, 27, 27, 26)
    controller.most = [20, 30, 10, 30]  # 90 in all: nobody can hold the rest, which is spread
    controller.observe([1.0] * 4, controller.sizes)
    assert sum(controller.sizes) == 100


@pytest.mark.parametrize("seed", range(20))
def test_largest_remainders(seed):
    random = Random(seed)
    weights = [random.random() * 10 for _ in range(random.randint(1, 9))]
    total = random.randrange(200)
    parts = split(total, weights)
    exact = [total * weight / sum(weights) for weight in weights]
    assert sum(parts) == total
    assert all(abs(part - each) < 1 for part, each in zip(parts, exact, strict=True))
    up = [each - int(each) for part, each in zip(parts, exact, strict=True) if part > int(each)]
    down = [each - int(each) for part, each in zip(parts, exact, strict=True) if part == int(each)]
    assert not up or not down or min(up) >= max(down) - 1e-12


@pytest.mark.parametrize(
    ("spec", "workers", "batch", "reason"),
    [
        ("given(weights=[3, 1])", 3, 96, "2 weights are not one for each of 3 workers: give 3"),
        ("given(weights=[3, 0])", 2, 96, "the weight 0 of worker 1 is not above 0"),
        ("given(weights=[3, -1])", 2, 96, "the weight -1 of worker 1 is not above 0"),
        ("given(weights=[1000, 1])", 2, 16, "worker 1 would have none of the 16 images"),
        ("measured", 4, 3, "a global batch of 3 cannot be shared by 4 workers: give at least 4 images"),
    ],
)
def test_what_cannot_work_is_refused(spec, workers, batch, reason):
    balance = build("balance", spec, BALANCES)
    with pytest.raises(RequestError, match=reason):
        balance.check(workers, batch)


def test_an_unknown_balance_is_refused():
    with pytest.raises(RequestError, match="auto, given, measured, off"):
        build("balance", "best", BALANCES)
