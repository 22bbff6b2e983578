"""Every compressor, found by itself: what it promises of any vector, and what its paper promises of it alone."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial

import pytest
import torch

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.compression.compressor import COMPRESSORS, RESIDUAL, Place
from polyrhythm.compression.compressors.power_sgd import orthonormal
from polyrhythm.compression.compressors.random_k import drawn
from polyrhythm.compression.in_pieces import Uniforms
from polyrhythm.compression.layout import Layout
from polyrhythm.compression.residual_memory import ResidualMemory
from polyrhythm.compression.sparse import largest
from polyrhythm.errors import RequestError
from polyrhythm.specs import build, choices

VARIATIONS = [
    "qsgd(code=elias)",
    "qsgd(norm=two, levels=100, bucket=64)",
    "qsgd(levels=1, bucket=7)",
    "fp8(form=e5m2)",
    "dorefa(bits=1)",
    "dorefa(bits=8)",
    "random_k(scaled=True, density=0.3)",
    "top_k(density=1.0)",
    "dgc(density=0.1, nesterov=True, clip=1.0)",
    "power_sgd(rank=1)",
]
ALL = [*choices(COMPRESSORS), *VARIATIONS]
SIZES = [0, 1, 5, 7, 8, 9, 100, 513, 1025, 3000]
SHAPES = [(64, 30), (64,), (4, 3, 3, 3), (10, 64), (10,)]
SIZE = sum(math.prod(shape) for shape in SHAPES)
EXACT = {"top_k", "dgc", "random_k"}
"""Those whose entries are copies or zero."""


vector_place = partial(Place, 1)


def compressor(spec):
    return build("compressor", spec, COMPRESSORS)


def random(numbers, seed=0):
    return torch.randn(numbers, generator=torch.Generator().manual_seed(seed))


def sent(made, vector, place=None):
    place = place or vector_place(vector.numel())
    payload = made.encode(vector, place)
    assert payload.dtype is torch.uint8
    assert payload.dim() == 1
    assert made.nbytes(place) in (None, payload.numel())
    return made.decode(payload, place)


def of_vectors(specs):
    """Gives those that encode vectors of any length, which a matrix's factors are not."""
    return [spec for spec in specs if not spec.startswith("power_sgd")]


@pytest.mark.parametrize("numbers", SIZES)
@pytest.mark.parametrize("spec", of_vectors(ALL))
def test_any_length_comes_back_in_the_declared_bytes(spec, numbers):
    made = compressor(spec)
    found = sent(made, random(numbers))
    assert found.shape == (numbers,)
    assert bool(found.isfinite().all())
    assert (
        made.nbytes(vector_place(numbers)) is None
        or numbers < 100
        or made.nbytes(vector_place(numbers)) <= 8 * numbers + 4
    )


@pytest.mark.parametrize("spec", of_vectors(ALL))
def test_zeros_stay_zeros_but_where_only_signs_travel(spec):
    made = compressor(spec)
    found = sent(made, torch.zeros(100))
    if made.votes:
        assert torch.equal(found, torch.ones(100))  # a tie counts as +1
    else:
        assert torch.equal(found, torch.zeros(100))


@pytest.mark.parametrize("spec", of_vectors(ALL))
def test_a_constant_vector_is_not_mistaken_for_another(spec):
    made = compressor(spec)
    found = sent(made, torch.full((640,), 0.25))
    if made.votes:
        assert torch.equal(found, torch.ones(640))
    elif made.name == "terngrad":  # clipped to deviations, of which there are none
        assert torch.equal(found, torch.zeros(640))
    elif made.name == "threshold":
        assert torch.equal(found, torch.full((640,), made.size))
    else:
        shown = found[found != 0]
        assert shown.numel() > 0
        assert float((shown - 0.25).abs().max()) < 0.26 * max(1.0, 640 / max(1, shown.numel()) * 16)


@pytest.mark.parametrize("spec", ALL)
def test_what_was_sent_and_what_is_kept_add_up(spec):
    """decode(encode(g + e)) + e' = g + e: to the bit where entries are copies or zero, else to rounding."""
    made = compressor(spec)
    layout = Layout.of(SHAPES, made)
    memory = ResidualMemory(made, layout, rank=1)
    applied = torch.zeros(SIZE)
    for step in range(6):
        gradient = random(SIZE, step)
        before = memory.residual if memory.residual is not None else torch.zeros(SIZE)
        payload = memory.encode(gradient, step)
        memory.commit()
        declared = layout.nbytes(made, torch.float32, step)
        assert declared in (None, payload.numel())
        assert torch.equal(layout.decode(made, payload, torch.float32, 1), memory.decoded)
        if not made.feedback:
            assert memory.residual is None
            continue
        if made.name == "dgc":
            continue  # its residual holds momenta, which has tests of its own
        both, whole = memory.decoded + memory.residual, gradient + before
        if made.name in EXACT:
            assert torch.equal(both, whole)
        else:
            assert torch.allclose(both, whole, atol=2e-6)
        applied += memory.decoded
    if made.feedback and made.name != "dgc":
        told = sum(random(SIZE, step) for step in range(6))
        assert torch.allclose(applied + memory.residual, told, atol=1e-5)


@pytest.mark.parametrize("spec", ALL)
def test_a_vector_that_did_not_arrive_leaves_nothing_behind(spec):
    made = compressor(spec)
    layout = Layout.of(SHAPES, made)
    memory, other = ResidualMemory(made, layout), ResidualMemory(made, layout)
    for each in (memory, other):
        each.encode(random(SIZE, 0), 0)
        each.commit()
    memory.encode(random(SIZE, 8), 1)
    memory.forget()
    assert torch.equal(memory.encode(random(SIZE, 1), 1), other.encode(random(SIZE, 1), 1))


@pytest.mark.parametrize("spec", ALL)
def test_a_state_that_was_saved_goes_on_to_the_bit(spec):
    made = compressor(spec)
    layout = Layout.of(SHAPES, made)
    memory = ResidualMemory(made, layout)
    for step in range(2):
        memory.encode(random(SIZE, step), step, rate=0.1)
        memory.commit()
    resumed = ResidualMemory(made, layout)
    resumed.load_state(memory.state())
    assert torch.equal(
        memory.encode(random(SIZE, 2), 2, rate=0.05), resumed.encode(random(SIZE, 2), 2, rate=0.05)
    )


def test_a_residual_counts_for_what_it_was_worth_at_its_learning_rate():
    made = compressor("top_k(density=0.1)")
    layout = Layout.of([(20, 20)], made)
    memory, halved = ResidualMemory(made, layout), ResidualMemory(made, layout)
    for each in (memory, halved):
        each.encode(random(400), 0, rate=0.2)
        each.commit()
    residual = memory.residual
    memory.encode(torch.zeros(400), 1, rate=0.1)
    memory.commit()
    assert torch.equal(memory.decoded + memory.residual, 2 * residual)
    halved.encode(torch.zeros(400), 1, rate=0.0)  # of no worth: it stays as it is
    halved.commit()
    assert torch.equal(halved.decoded + halved.residual, residual)


@pytest.mark.parametrize("spec", of_vectors(ALL))
def test_noise_is_refused_or_a_vector_of_the_right_length(spec):
    made = compressor(spec)
    place = vector_place(100)
    payload = made.encode(random(100), place)
    for cut in (payload[:-1], payload[1:], torch.cat([payload, payload[:1]])):
        with pytest.raises(MalformedMessage):
            made.decode(cut, place)
    noise = torch.randint(
        0, 256, payload.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    with suppress(MalformedMessage):
        assert made.decode(noise, place).shape == (100,)


UNBIASED = [
    "qsgd",
    "qsgd(norm=two)",
    "qsgd(norm=two, levels=1, bucket=16)",
    "terngrad(clip=0)",
    "dorefa",
    "dorefa(bits=2)",
    "random_k(scaled=True, density=0.2)",
]


@pytest.mark.parametrize("spec", UNBIASED)
def test_the_mean_over_many_draws_is_right(spec):
    made, vector, draws = compressor(spec), random(64), 500
    found = torch.stack([sent(made, vector, vector_place(64, step=step)) for step in range(draws)])
    deviation = found.std(0).clamp_min(1e-3) / math.sqrt(draws)
    assert float(((found.mean(0) - vector) / deviation).abs().max()) < 5


def test_qsgd_has_the_variance_of_its_formula_and_of_its_bound():
    made, vector, draws = compressor("qsgd(norm=two, levels=3, bucket=64)"), random(64), 500
    found = torch.stack([sent(made, vector, vector_place(64, step=step)) for step in range(draws)])
    norm = float(vector.norm())
    fraction = (3 * vector.abs() / norm) % 1
    expected = (norm / 3) ** 2 * float((fraction * (1 - fraction)).sum())
    error = (found - vector).pow(2).sum(1)
    assert abs(float(error.mean()) - expected) < 5 * float(error.std()) / math.sqrt(draws)
    assert expected <= min(64 / 9, 8 / 3) * norm**2
    assert float((found != 0).sum(1).float().mean()) <= 3 * (3 + 8)


def test_terngrad_has_the_variance_of_its_formula():
    made, vector, draws = compressor("terngrad(clip=0)"), random(64), 500
    found = torch.stack([sent(made, vector, vector_place(64, step=step)) for step in range(draws)])
    scale = float(vector.abs().max())
    expected = float((vector.abs() * (scale - vector.abs())).sum())
    error = (found - vector).pow(2).sum(1)
    assert abs(float(error.mean()) - expected) < 5 * float(error.std()) / math.sqrt(draws)
    assert set(found.unique().tolist()) <= {-scale, 0.0, scale}


def test_elias_codes_carry_the_same_numbers():
    vector, place = random(3000), vector_place(3000)
    packed, coded = (
        compressor(f"qsgd(norm=two, levels=4, bucket=512, code={code})") for code in ("packed", "elias")
    )
    assert torch.equal(sent(packed, vector), sent(coded, vector))
    assert coded.encode(vector, place).numel() < packed.encode(vector, place).numel()


def test_random_k_draws_the_same_numbers_on_all_ranks_and_others_at_other_steps():
    made, vector = compressor("random_k(density=0.1)"), torch.ones(1000)
    one, other = (sent(made, vector, vector_place(1000, step=4, rank=rank)) for rank in (0, 3))
    assert torch.equal(one, other)
    assert not torch.equal(one, sent(made, vector, vector_place(1000, step=5)))
    assert int(one.sum()) == 100


@pytest.mark.parametrize(
    "spec",
    ["one_bit", "one_bit(bucket=12)", "qsgd", "qsgd(code=elias)", "qsgd(bucket=7)", "terngrad", "dorefa"],
)
def test_a_vector_in_pieces_is_encoded_as_one_in_one_piece(spec, monkeypatch):
    made, place = compressor(spec), vector_place(3001)
    whole = made.encode(random(3001), place)
    expected = made.decode(whole, place)
    monkeypatch.setattr("polyrhythm.compression.in_pieces._NUMBERS", 200)
    assert torch.equal(made.encode(random(3001), place), whole)
    assert torch.equal(made.decode(whole, place), expected)
    total = random(3001, 1)
    made.add_to(total, whole, place)
    assert torch.equal(total, random(3001, 1) + expected)


def test_a_malformed_code_in_any_piece_is_found(monkeypatch):
    monkeypatch.setattr("polyrhythm.compression.in_pieces._NUMBERS", 200)
    for spec in ("terngrad", "qsgd(levels=5)"):
        made, place = compressor(spec), vector_place(3000)
        payload = made.encode(random(3000), place)
        payload[-20] = 255
        with pytest.raises(MalformedMessage):
            made.decode(payload, place)


def test_random_numbers_are_even_and_without_a_pattern():
    numbers = Uniforms(torch.Generator().manual_seed(3), torch.device("cpu")).next(1 << 18)
    assert 0 < float(numbers.min()) < 2**-14
    assert 1 - 2**-14 < float(numbers.max()) < 1
    counts = torch.histc(numbers, 64, 0, 1)
    expected = len(numbers) / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * (2 * 63) ** 0.5  # chi squared
    centered = numbers.double() - 0.5
    for apart in (1, 2, 3, 4, 5):
        together = float((centered[:-apart] * centered[apart:]).mean()) * 12
        assert abs(together) < 5 / len(numbers) ** 0.5
    one, other = (Uniforms(torch.Generator().manual_seed(seed), torch.device("cpu")) for seed in (3, 3))
    assert torch.equal(torch.cat([one.next(8), one.next(5)]), other.next(13))


@pytest.mark.parametrize(("numbers", "count"), [(12, 1), (12, 2), (12, 3), (12, 7), (12, 12)])
def test_all_sets_of_indices_are_drawn_equally_often(numbers, count):
    draws, times = torch.Generator().manual_seed(0), 4000
    seen = torch.zeros(numbers)
    pairs = torch.zeros(numbers, numbers)
    for _ in range(times):
        chosen = drawn(numbers, count, draws)
        assert chosen.numel() == count
        assert bool((chosen[1:] > chosen[:-1]).all())
        seen[chosen] += 1
        pairs[chosen[:-1], chosen[1:]] += 1
    share = count / numbers
    assert float((seen / times - share).abs().max()) <= 5 * (share * (1 - share) / times) ** 0.5
    if count == 2:  # of 66 pairs
        chance = 1 / 66
        found = pairs[pairs > 0] / times
        assert found.numel() == 66
        assert float((found - chance).abs().max()) <= 5 * (chance / times) ** 0.5


def test_random_k_keeps_its_share_of_the_squared_norm():
    made, vector = compressor("random_k(density=0.1)"), random(1000)
    errors = [
        float((sent(made, vector, vector_place(1000, step=step)) - vector).pow(2).sum())
        for step in range(200)
    ]
    assert sum(errors) / 200 == pytest.approx(0.9 * float(vector.pow(2).sum()), rel=0.02)


@pytest.mark.parametrize("numbers", [10, 1 << 18])
def test_the_largest_are_those_of_a_full_sort(numbers):
    vector = random(numbers)
    for count in {1, 3, numbers // 100 or 1, numbers // 3, numbers}:
        order = vector.abs().argsort(descending=True, stable=True)[:count].sort().values
        assert torch.equal(largest(vector, count), order)


def test_of_equal_magnitudes_the_first_travel():
    vector = torch.tensor([1.0, -2.0, 2.0, 2.0, -1.0, 0.0])
    assert largest(vector, 2).tolist() == [1, 2]
    assert largest(torch.ones(1 << 18), 1000).tolist() == list(range(1000))


@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_top_k_contracts_by_its_density(density):
    made, vector = compressor(f"top_k(density={density})"), random(1000)
    left = float((vector - sent(made, vector)).pow(2).sum())
    assert left <= (1 - density) * float(vector.pow(2).sum())
    assert density < 1 or left == 0


def test_the_density_falls_in_five_stages():
    made = compressor("top_k(density=0.001, warm_up=8)")
    found = [round(100 * made.density_at(step), 1) for step in range(0, 10, 2)]
    assert found == [25.1, 6.3, 1.6, 0.4, 0.1]


def test_dgc_without_momentum_is_top_k_with_feedback_to_the_bit():
    layouts = [Layout.of(SHAPES, compressor(spec)) for spec in ("dgc", "top_k")]
    one = ResidualMemory(compressor("dgc(density=0.05, momentum=0)"), layouts[0])
    other = ResidualMemory(compressor("top_k(density=0.05)"), layouts[1])
    for step in range(5):
        for memory in (one, other):
            memory.encode(random(SIZE, step), step)
            memory.commit()
        assert torch.equal(one.decoded, other.decoded)


def test_dgc_without_masking_is_top_k_with_feedback_of_the_velocity():
    made = compressor("dgc(density=0.05, momentum=0.9, masking=False, dense_below=0)")
    one = ResidualMemory(made, Layout.of([(40, 40)], made))
    plain = compressor("top_k(density=0.05)")
    other = ResidualMemory(plain, Layout.of([(40, 40)], plain))
    velocity = torch.zeros(1600)
    for step in range(5):
        velocity = random(1600, step) + 0.9 * velocity
        one.encode(random(1600, step), step)
        other.encode(velocity, step)
        one.commit()
        other.commit()
        assert torch.equal(one.decoded, other.decoded)


def test_dgc_at_full_density_is_sgd_with_masking_and_momentum_without():
    for masking in (True, False):
        made = compressor(f"dgc(density=1.0, masking={masking})")
        memory = ResidualMemory(made, Layout.of([(40, 40)], made))
        velocity = torch.zeros(1600)
        for step in range(4):
            gradient = random(1600, step)
            velocity = gradient + 0.9 * velocity
            memory.encode(gradient, step)
            memory.commit()
            assert torch.allclose(memory.decoded, gradient if masking else velocity, atol=1e-6)


def test_dgc_keeps_the_momentum_of_what_travels_as_it_is():
    made = compressor("dgc(density=0.01)")
    memory = ResidualMemory(made, Layout.of([(40, 40), (40,)], made))
    velocity = torch.zeros(40)
    for step in range(3):
        gradient = random(1640, step)
        velocity = gradient[1600:] + 0.9 * velocity
        memory.encode(gradient, step)
        memory.commit()
        assert torch.allclose(memory.decoded[1600:], velocity, atol=1e-6)


def test_dgc_clips_before_it_adds_up():
    made = compressor("dgc(density=1.0, clip=0.5)")
    memory = ResidualMemory(made, Layout.of([(40, 40)], made))
    memory.encode(random(1600), 0)
    assert float(memory.decoded.norm()) == pytest.approx(0.5, rel=1e-5)


def test_one_bit_sends_the_means_of_its_groups_and_keeps_sums_of_zero():
    made, vector = compressor("one_bit(bucket=100)"), random(250)
    found = sent(made, vector)
    for bucket, seen in zip(vector.split(100), found.split(100), strict=True):
        for group in (bucket >= 0, bucket < 0):
            assert torch.allclose(seen[group], bucket[group].mean().expand(int(group.sum())), atol=1e-6)
            assert float((bucket - seen)[group].sum()) == pytest.approx(0, abs=1e-4)
    two = torch.where(vector >= 0, 0.5, -2.0)
    assert torch.equal(sent(made, two), two)


def test_ef_sign_sgd_has_the_error_of_its_formula():
    made, vector = compressor("ef_sign_sgd"), random(1000)
    left = float((vector - sent(made, vector)).pow(2).sum())
    squared = float(vector.pow(2).sum())
    assert left == pytest.approx(squared - float(vector.abs().sum()) ** 2 / 1000, rel=1e-4)
    assert left < squared


def test_threshold_sends_one_quantum_and_bounds_what_it_keeps():
    made = compressor("threshold(size=0.5)")
    memory = ResidualMemory(made, Layout.of([(40, 40)], made))
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        memory.encode(torch.rand(1600, generator=generator) - 0.5, step)
        memory.commit()
        assert set(memory.decoded.unique().tolist()) <= {-0.5, 0.0, 0.5}
        assert float(memory.residual.abs().max()) <= 0.5


def test_adacomp_sends_of_every_bin_and_the_newest_counts_twice():
    made = compressor("adacomp(bin=4, dense_below=0)")
    vector = torch.tensor([1.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 1.0])
    nothing_new = made.decode(made.encode(vector, vector_place(10), torch.zeros(10)), vector_place(10))
    scale = (3 + 0 + 5) / 3
    assert nothing_new.tolist() == pytest.approx([0, -scale, 0, 0, 0, 0, 0, 0, scale, 0])
    newest = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    found = made.decode(made.encode(vector, vector_place(10), newest), vector_place(10))
    assert found[2] == pytest.approx(scale)


def test_eight_bits_are_off_by_half_a_level_at_most():
    made, vector = compressor("int8(block=50)"), random(130) * 7
    for block, seen in zip(vector.split(50), sent(made, vector).split(50), strict=True):
        assert float((block - seen).abs().max()) <= float(block.abs().max()) / 127 / 2 * 1.001


@pytest.mark.parametrize(("form", "relative"), [("e4m3", 2**-4), ("e5m2", 2**-3)])
def test_eight_bits_of_floating_point_round_by_their_mantissa(form, relative):
    made = compressor(f"fp8(form={form})")
    vector = torch.cat([random(255), torch.tensor([1e4])])
    found = sent(made, vector)
    normal = vector.abs() > 1e4 * 2**-12 if form == "e5m2" else vector.abs() > 1e4 / 448 * 2**-6
    assert float(((found - vector) / vector).abs()[normal].max()) <= relative
    assert float(found[-1]) == 1e4


@pytest.mark.parametrize(("spec", "bound"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_two_bytes_round_to_nearest(spec, bound):
    vector = random(1000)
    found = sent(compressor(spec), vector)
    assert float(((found - vector) / vector).abs().max()) <= bound * 1.001
    assert torch.equal(sent(compressor(spec), found), found)
    assert bool(sent(compressor(spec), torch.tensor([3e38, -3e38])).isfinite().all())


def test_a_matrix_of_low_rank_is_exact_in_one_step():
    made = compressor("power_sgd(rank=2)")
    matrix = random(60).view(30, 2) @ random(40, 1).view(2, 20)
    found = sent(made, matrix.reshape(-1), Place(30, 20))
    assert torch.allclose(found.view(30, 20), matrix, atol=1e-5)


def test_at_full_rank_factors_are_dense_to_rounding():
    made = compressor("power_sgd(rank=12)")
    vector = random(240)
    assert torch.allclose(sent(made, vector, Place(12, 20)), vector, atol=1e-5)


def test_a_warm_start_goes_on_where_the_last_step_ended():
    made, place = compressor("power_sgd(rank=2)"), Place(30, 20)
    vector, factor, errors = random(600), None, []
    for _ in range(30):
        payload = made.encode(vector, Place(30, 20, factor=factor))
        errors.append(float((made.decode(payload, place) - vector).norm()))
        factor = made.factor_of(payload, place)
    best = torch.linalg.svdvals(vector.view(30, 20).double())[2:].pow(2).sum().sqrt()
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == pytest.approx(float(best), rel=1e-3)


def test_a_basis_is_orthonormal_also_of_zeros_and_of_what_repeats():
    columns = random(90).view(30, 3)
    basis = orthonormal(torch.cat([columns, columns[:, :1], torch.zeros(30, 1)], 1))
    assert torch.allclose(basis.t() @ basis, torch.diag(torch.tensor([1.0, 1, 1, 0, 0])), atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("top_k(density=0)", r"density should be greater than 0 \(given 0\)"),
        ("top_k(density=1.5)", r"density should be less than or equal to 1 \(given 1.5\)"),
        ("random_k(density=-1)", r"density should be greater than 0"),
        ("qsgd(levels=0)", r"levels should be greater than or equal to 1"),
        ("dorefa(bits=0)", r"bits should be greater than or equal to 1"),
        ("power_sgd(rank=0)", r"rank should be greater than or equal to 1"),
        ("top_k(feedback=False)", r"top_k without feedback never sends the omitted numbers"),
        ("power_sgd(feedback=False)", r"power_sgd without feedback never sends"),
        (
            "random_k(scaled=True, feedback=True)",
            r"random_k: feedback of scaled numbers would make them grow",
        ),
        ("qsgd(levels=1, feedback=True)", r"qsgd is unbiased, and adding its errors"),
        ("terngrad(feedback=True)", r"terngrad is unbiased"),
        ("power_sgd(per=whole)", r"power_sgd factors the matrix of each layer: leave per out"),
        ("zip", r"unknown compressor 'zip'"),
    ],
)
def test_what_would_be_wrong_is_refused_in_one_line(spec, complaint):
    with pytest.raises(RequestError, match=complaint) as refused:
        compressor(spec)
    assert "\n" not in str(refused.value)


def test_a_rank_above_every_matrix_is_refused():
    with pytest.raises(RequestError, match="compresses no tensor of this model"):
        Layout.of(SHAPES, compressor("power_sgd(rank=500)"))


def test_small_tensors_and_vectors_travel_as_they_are():
    made = compressor("top_k(density=0.01)")
    memory = ResidualMemory(made, Layout.of(SHAPES, made))
    memory.encode(random(SIZE), 0)
    memory.commit()
    dense = memory.layout.dense
    assert int(dense.sum()) == 64 + 108 + 10
    assert torch.equal(memory.decoded[dense], random(SIZE)[dense])
    assert int((memory.decoded[~dense] != 0).sum()) == 19 + 6


def test_the_whole_vector_has_one_choice_of_the_largest():
    made = compressor("top_k(density=0.01, per=whole)")
    layout = Layout.of(SHAPES, made)
    vector = random(SIZE)
    vector[:1920] *= 100  # all that is largest is in the first layer
    found = layout.decode(made, layout.encode(made, vector), torch.float32)
    assert int((found[:1920] != 0).sum()) == round(0.01 * (1920 + 640))
    assert not bool(found[2092:2732].any())


@pytest.mark.parametrize("spec", ["top_k(density=0.05)", "qsgd", "power_sgd(rank=1)", "int8"])
def test_parts_of_a_layout_cover_the_vector(spec):
    made = compressor(spec)
    layout = Layout.of(SHAPES, made)
    vector = random(SIZE)
    for start, stop in [(0, 700), (700, 2000), (2000, SIZE)]:
        part = layout.part(made, start, stop)
        assert part.size == stop - start
        assert sum(section.numbers for section in part.sections) == stop - start
        assert Layout.from_json(part.to_json()) == part
        assert part.decode(made, part.encode(made, vector[start:stop]), torch.float32).shape == (
            stop - start,
        )


def test_numbers_of_eight_bytes_are_kept_as_they_are():
    made = compressor("top_k(density=0.1)")
    memory = ResidualMemory(made, Layout.of([(40, 40)], made))
    vector = random(1600).double() / 3
    memory.encode(vector, 0)
    memory.commit()
    assert torch.equal(memory.decoded + memory.residual, vector)


def test_another_number_of_senders_rescales_what_is_kept():
    made = compressor("top_k(density=0.1)")
    memory = ResidualMemory(made, Layout.of([(40, 40)], made))
    memory.encode(random(1600), 0)
    memory.commit()
    before = memory.state()[RESIDUAL]
    memory.rescale(0.5)
    assert torch.equal(memory.residual, before / 2)
