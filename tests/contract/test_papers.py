"""What each paper claims of its method, on data."""

import numpy as np
import pytest
from group import TORCH, Group, once
from methods import CODEBOOK

import hvd_compress as h
from hvd_compress import wire
from hvd_compress.step import Step, TensorSpec

RNG = np.random.default_rng(0)
GAUSSIAN = RNG.standard_normal((16, 64))
TAILS = GAUSSIAN * np.exp(2 * np.abs(RNG.standard_normal((16, 64))))
SPARSE = np.where(RNG.random((16, 64)) < 0.02, GAUSSIAN, 0.0)
DATA = pytest.mark.parametrize("x", [GAUSSIAN, TAILS, SPARSE], ids=["gaussian", "tails", "sparse"])


def error(compressor, x, draws=1):
    """Return the mean of ``||C(x) - x||^2 / ||x||^2``."""
    made = [once(compressor, x, "float64", number=i, key=f"w{i}") for i in range(draws)]
    return np.mean([((y - x) ** 2).sum() for y in made]) / (x**2).sum()


@DATA
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("bucket", [32, 1024])
def test_qsgd_has_the_variance_of_lemma_3_1(x, bits, bucket):
    s = 2 ** (bits - 1) - 1
    bound = min(bucket / s**2, bucket**0.5 / s)
    assert error(h.QSGD(bits, bucket=bucket, norm="l2"), x, 20) <= 1.1 * bound


@DATA
def test_natural_has_a_variance_of_an_eighth_at_most(x):
    assert 0.01 < error(h.Natural(), x, 40) <= 1 / 8


def test_natural_is_exact_for_powers_of_two():
    x = np.array([[2.0**e * s for e in range(-108, 19, 7) for s in (1, -1)]])
    np.testing.assert_array_equal(once(h.Natural(), x), x)


@DATA
@pytest.mark.parametrize("bucket", [None, 64])
def test_ef_sign_has_the_error_of_its_formula(x, bucket):
    rows = x.reshape(-1, bucket or x.size)
    density = np.abs(rows).sum(axis=1) ** 2 / rows.shape[1]
    assert error(h.EFSign(bucket, feedback=None), x) == pytest.approx(1 - density.sum() / (x**2).sum())


@DATA
def test_one_bit_keeps_the_means_of_both_sides(x):
    decoded = once(h.OneBit(feedback=None), x)
    for side in (x >= 0, x < 0):
        np.testing.assert_allclose(decoded[side], x[side].mean())
    assert decoded.sum() == pytest.approx(x.sum())


def test_terngrad_sends_three_values():
    decoded = once(h.TernGrad(None), GAUSSIAN)
    assert set(np.unique(decoded)) == {-np.abs(GAUSSIAN).max(), 0, np.abs(GAUSSIAN).max()}


@DATA
def test_random_k_has_its_variance(x):
    ratio, n = 1 / 16, x.size
    assert error(h.RandomK(ratio), x, 600) == pytest.approx(1 / ratio - 1, rel=0.35)
    assert error(h.RandomK(ratio, feedback=h.ErrorFeedback()), x, 600) == pytest.approx(1 - ratio, rel=0.1)
    assert n == 1024


@pytest.mark.parametrize("settings", [{}, {"block": 3}, {"block": 8}, {"order": "rolling"}], ids=str)
def test_random_k_chooses_every_element_equally_often(settings):
    spec, compressor, draws = TensorSpec((5, 21), "float32"), h.RandomK(0.1, **settings), 3000
    counts = np.zeros(spec.numel)
    for i in range(draws):
        places = compressor.positions(spec, Step(f"w{i}"), i)
        assert len(set(places.tolist())) == compressor.kept(spec) == len(places)
        counts[places] += 1
    p = compressor.kept(spec) / spec.numel
    # 105 elements, each within 5 standard deviations.
    assert np.abs(counts - p * draws).max() < 5 * np.sqrt(draws * p * (1 - p))


def test_rolling_covers_all_elements_before_any_comes_twice():
    spec, compressor = TensorSpec((5, 20), "float32"), h.RandomK(0.1, order="rolling")
    rounds = [compressor.positions(spec, Step("w"), number) for number in range(20)]
    assert (np.bincount(np.concatenate(rounds), minlength=100) == 2).all()


def low_rank(rows, columns, values):
    left, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((rows, len(values))))
    right, _ = np.linalg.qr(np.random.default_rng(2).standard_normal((columns, len(values))))
    return left * np.asarray(values) @ right.T


@pytest.mark.parametrize("alternating", [True, False])
@pytest.mark.parametrize("shape", [(30, 40), (40, 30)])
def test_power_sgd_converges_to_the_best_approximation(shape, alternating):
    matrix = low_rank(*shape, [8.0, 5.0, 1.0, 0.5, 0.2])
    best = low_rank(*shape, [8.0, 5.0, 0, 0, 0])
    group = Group(h.PowerSGD(2, alternating=alternating, feedback=None), shape)
    errors = [np.linalg.norm(group.step([matrix]) - best) for _ in range(16)]
    assert errors[0] > 0.5
    assert errors[-1] < 1e-6


def test_power_sgd_loses_nothing_of_a_matrix_of_its_rank():
    for rank, kept in ((3, 3), (4, 3)):
        group, matrix = Group(h.PowerSGD(rank), (30, 40)), low_rank(30, 40, [3.0, 2.0, 1.0][:kept])
        outs = [group.step([matrix]) for _ in range(8)]
        # The first step projects on random vectors, and the second on all of what is there.
        np.testing.assert_allclose(sum(outs), 8 * matrix, atol=1e-8)
        np.testing.assert_allclose(group.kept(), 0, atol=1e-8)


def test_two_rounds_carry_all_of_a_matrix_of_their_rank_at_once():
    """And the mean of all ranks', exactly as if one rank had held it (lemma 3 of the paper)."""
    matrix = low_rank(30, 40, [3.0, 2.0, 1.0])
    group = Group(h.PowerSGD(3, alternating=False), (30, 40), size=3)
    parts = [matrix * weight for weight in (0.2, 0.3, 2.5)]
    np.testing.assert_allclose(group.step(parts), matrix, atol=1e-10)
    alone, gradients = Group(h.PowerSGD(2, alternating=False), (30, 40)), np.random.default_rng(4)
    together = Group(h.PowerSGD(2, alternating=False), (30, 40), size=3)
    for _ in range(4):
        drawn = gradients.standard_normal((3, 30, 40))
        np.testing.assert_allclose(together.step(drawn), alone.step([drawn.mean(axis=0)]), atol=1e-9)


def test_dgc_momentum_reaches_what_is_sent_late():
    """Without masking what is applied in the end is what momentum SGD applies."""
    rng, m = np.random.default_rng(3), 0.5
    group, u, dense = Group(h.DGC(0.1, momentum=m, masking=False), (4, 25)), np.zeros((4, 25)), np.zeros((4, 25))
    applied = np.zeros((4, 25))
    for _ in range(10):
        g = rng.standard_normal((4, 25))
        u = m * u + g
        dense += u
        applied += group.step([g])
    np.testing.assert_allclose(applied + group.kept(), dense, atol=1e-12)


def test_ef21_reaches_a_gradient_that_stays():
    group = Group(h.TopK(0.1, feedback=h.EF21()), (4, 25), size=2)
    gradients = np.random.default_rng(4).standard_normal((2, 4, 25))
    outs = [group.step(gradients) for _ in range(12)]
    np.testing.assert_allclose(outs[-1], gradients.mean(axis=0), atol=1e-12)
    estimates = np.mean([group.kept("estimate", rank) for rank in range(2)], axis=0)
    np.testing.assert_allclose(outs[-1], estimates, atol=1e-12)


def test_vector_quantisation_contracts_as_it_claims():
    compressor = h.VectorQuantizer(8, 32, codebook=CODEBOOK, feedback=None, values=h.NoCompression())
    delta = compressor.delta(TensorSpec((16, 64), "float64"))
    assert delta > 0.01
    # No vector is worse than the one along the smallest singular value; these are much better.
    assert error(compressor, GAUSSIAN) <= 1 - delta
    trained = h.train_codebook(GAUSSIAN, 8, 32)
    assert error(h.VectorQuantizer(8, 32, codebook=trained, feedback=None), GAUSSIAN) < error(compressor, GAUSSIAN)


def test_warm_up_falls_exponentially():
    steps = h.warm_up(0.001, 100)
    assert list(steps.values) == [0, 25, 50, 75, 100]
    np.testing.assert_allclose(steps.stages(), [0.25, 0.0629, 0.0158, 0.00398, 0.001], rtol=2e-3)
    assert [steps.stage(n) for n in (0, 24, 25, 99, 100, 10**9)] == [0, 0, 1, 3, 4, 4]


# --- Bytes ------------------------------------------------------------------------------

N = 1_000_000
SIZES = [
    (h.OneBit(), N / 8 + 64),
    (h.EFSign(), N / 8 + 64),
    (h.SignSGD(), N / 8 + 64),
    (h.Natural(), N + 64),
    (h.QSGD(4), N / 2 * 1.02),
    (h.Int8(), N * 1.02),
    (h.TopK(0.001, values=h.Int8()), 2.7 * N / 1000),
    (h.TernGrad(), N / 4 * 1.02),
    (h.FP16(), 2 * N + 64),
    (h.BF16(), 2 * N + 64),
    (h.TopK(0.001), 5.6 * N / 1000),
    (h.RandomK(0.001), 4 * N / 1000 + 64),
    (h.PowerSGD(4), 4 * 4 * 1000 + 64),
    (h.VectorQuantizer(), N / 16 * 2.05),
]


@pytest.mark.parametrize(("compressor", "most"), SIZES, ids=str)
def test_bytes_of_a_million_elements(compressor, most):
    spec = TensorSpec((1000, 1000), "float32")
    group = Group(compressor, spec.shape, "float32", TORCH)
    group.step([np.random.default_rng(0).standard_normal(spec.shape)])
    sections = compressor.sections(spec)
    body = sum(section.nbytes for section in sections)
    header = wire.Header(wire.Kind.DATA, bytes(8), 0, body)
    host = TORCH.to_host(list(group.payloads[0].arrays))
    message = wire.encode_message(header, sections, host, wire.HEADER_BYTES + body)
    assert message.nbytes == wire.HEADER_BYTES + body <= most
