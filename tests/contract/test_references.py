"""Each algorithm against float64 NumPy written from its paper, over several steps and ranks."""

import numpy as np
import pytest
import references as ref
from group import NUMPY, TORCH, Group, noise
from methods import CODEBOOK

import hvd_compress as h

SHAPE, RANKS, STEPS = (9, 37), 3, 5
N = SHAPE[0] * SHAPE[1]
K = 17  # of a ratio of 0.05
BOTH = pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])


def gradients(seed=0, shape=SHAPE):
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((STEPS, RANKS, *shape)) * np.exp(rng.standard_normal((STEPS, RANKS, *shape)))
    drawn[rng.random(drawn.shape) < 0.05] = 0
    # Exact in float32, which some algorithms round to.
    return drawn.astype(np.float32).astype(np.float64)


def compare(compressor, reference, ops, *, combine=lambda sent: np.mean(sent, axis=0), tolerance=1e-10):
    """Run both; ``reference(rank)`` returns a function of gradient and step number."""
    group, twins = Group(compressor, SHAPE, "float64", ops, RANKS), [reference(rank) for rank in range(RANKS)]
    moved = False
    for number, drawn in enumerate(gradients()):
        out = group.step(drawn)
        expected = combine([twin(g.reshape(-1), number) for twin, g in zip(twins, drawn, strict=True)])
        np.testing.assert_allclose(out.reshape(-1), expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1))
        moved = moved or expected.any()
    assert moved, "nothing but zeros was compared"
    return group, twins


def stateless(compress):
    """Return a reference without memory; ``compress(x, rank, number)``."""
    return lambda rank: lambda g, number: compress(g, rank, number)


def remembering(make):
    """Return a reference with a memory for each rank; ``make(rank)`` has a method ``step``."""

    def reference(rank):
        twin = make(rank)
        return lambda g, number: twin.step(g)

    return reference


def with_feedback(compress, decay=1.0):
    """Return a reference with error feedback; ``compress(a, rank, number)``."""

    def reference(rank):
        now = [0]
        twin = ref.ErrorFeedback(N, lambda a: compress(a, rank, now[0]), decay)

        def step(g, number):
            now[0] = number
            return twin.step(g)

        return step

    return reference


def rounding(n, rank, number):
    return noise(n, "rounding", number, rank)


@BOTH
def test_top_k(ops):
    compare(h.TopK(0.05, feedback=None), stateless(lambda x, *_: ref.top_k(x, K)), ops)
    compare(h.TopK(0.05), with_feedback(lambda a, *_: ref.top_k(a, K)), ops)
    compare(h.TopK(0.05, feedback=h.ErrorFeedback(0.7)), with_feedback(lambda a, *_: ref.top_k(a, K), 0.7), ops)


@BOTH
def test_top_k_with_a_schedule(ops):
    kept = [167, 167, K, K, K]
    compressor = h.TopK(h.Steps({0: 0.5, 2: 0.05}))
    compare(compressor, with_feedback(lambda a, rank, number: ref.top_k(a, kept[number])), ops)


@BOTH
def test_top_k_with_values(ops):
    def int8(a, rank, number):
        return ref.quantised_top_k(a, K, lambda v: ref.qsgd(v, 127, 512, rounding(K, rank, number), "max"))

    def two_bits(a, rank, number):
        return ref.quantised_top_k(a, K, lambda v: ref.qsgd(v, 1, 5, rounding(K, rank, number), "max"))

    compare(h.TopK(0.05, values=h.Int8()), with_feedback(int8), ops)
    compare(h.TopK(0.05, values=h.QSGD(2, bucket=5)), with_feedback(two_bits), ops)
    signs = with_feedback(lambda a, *_: ref.quantised_top_k(a, K, lambda v: ref.ef_sign(v, K)))
    compare(h.TopK(0.05, values=h.EFSign()), signs, ops)


@BOTH
@pytest.mark.parametrize("settings", [{}, {"block": 4}, {"order": "rolling"}], ids=str)
def test_random_k(ops, settings):
    for feedback in (None, h.ErrorFeedback()):
        compressor = h.RandomK(0.05, feedback=feedback, **settings)
        group, drawn = Group(compressor, SHAPE, "float64", ops, RANKS), gradients()
        errors = np.zeros((RANKS, N))
        for number in range(STEPS):
            out = group.step(drawn[number]).reshape(-1)
            places = np.asarray(group.payloads[0].common[0])
            a = drawn[number].reshape(RANKS, N) + errors
            sent = np.array([ref.random_k(x, places, feedback is None) for x in a])
            np.testing.assert_allclose(out, sent.mean(axis=0), rtol=0, atol=1e-10 * np.abs(sent).max())
            errors = a - sent if feedback else errors


@BOTH
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bucket", [16, 512])
def test_qsgd(ops, bits, norm, bucket):
    levels = 2 ** (bits - 1) - 1

    def expected(x, rank, number):
        return ref.qsgd(x, levels, min(bucket, N), rounding(N, rank, number), norm)

    compare(h.QSGD(bits, bucket=bucket, norm=norm), stateless(expected), ops)
    if bits == 8 and norm == "max":
        compare(h.Int8(bucket), stateless(expected), ops)


@BOTH
@pytest.mark.parametrize("clip", [None, 2.5, 1.0])
def test_terngrad(ops, clip):
    compare(h.TernGrad(clip), stateless(lambda x, r, t: ref.terngrad(x, clip, rounding(N, r, t))), ops)


@BOTH
def test_natural(ops):
    compare(h.Natural(), stateless(lambda x, r, t: ref.natural(x, rounding(N, r, t))), ops)


@BOTH
def test_majority_vote(ops):
    def vote(signs):
        return np.sign(np.sum(signs, axis=0))

    compare(h.SignSGD(), stateless(lambda x, *_: ref.sign(x)), ops, combine=vote)
    compare(h.Signum(0.8), remembering(lambda _: ref.Signum(N, 0.8)), ops, combine=vote)


@BOTH
@pytest.mark.parametrize("bucket", [None, 50])
def test_signs_with_feedback(ops, bucket):
    compare(h.EFSign(bucket), with_feedback(lambda a, *_: ref.ef_sign(a, bucket or N)), ops)
    compare(h.OneBit(bucket), with_feedback(lambda a, *_: ref.one_bit(a, bucket or N)), ops)


@BOTH
def test_vector_quantisation(ops):
    book, count = CODEBOOK.astype(np.float64), -(-N // 8)

    def with_int8(a, rank, number):
        return ref.vector(a, book, lambda v: ref.qsgd(v, 127, 512, rounding(count, rank, number), "max"))

    compare(h.VectorQuantizer(8, 32, codebook=CODEBOOK), with_feedback(with_int8), ops)
    plain = h.VectorQuantizer(8, 32, codebook=CODEBOOK, values=h.NoCompression(), unbiased=True)
    compare(
        plain,
        stateless(lambda x, r, t: ref.vector_unbiased(x, book, noise(count, "codewords", t, r))),
        ops,
    )


@BOTH
@pytest.mark.parametrize(("nesterov", "masking"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("clip", [None, 5.0])
def test_dgc(ops, nesterov, masking, clip):
    settings = {"nesterov": nesterov, "masking": masking}
    compressor = h.DGC(0.05, momentum=0.8, clip_norm=clip, **settings)
    make = lambda _: ref.Dgc(N, K, 0.8, **settings, clip=clip, ranks=RANKS)  # noqa: E731
    group, _ = compare(compressor, remembering(make), ops)
    assert group.kept("momentum").any()


@BOTH
def test_ef21(ops):
    compressor = h.TopK(0.05, feedback=h.EF21())
    group, _ = compare(compressor, remembering(lambda _: ref.Ef21(N, lambda d: ref.top_k(d, K))), ops)
    total = sum(group.kept("estimate", rank) for rank in range(RANKS))
    np.testing.assert_allclose(group.kept("estimates"), total, atol=1e-12)
    compare(h.EFSign(feedback=h.EF21()), remembering(lambda _: ref.Ef21(N, lambda d: ref.ef_sign(d, N))), ops)


@BOTH
@pytest.mark.parametrize("shape", [(9, 37), (37, 9), (12, 3, 5, 2)])
@pytest.mark.parametrize("rank", [1, 3])
def test_power_sgd(ops, shape, rank):
    columns = int(np.prod(shape[1:]))
    start = noise(rank * columns, "subspace", 0, None).reshape(rank, columns).T - 0.5
    twin = ref.PowerSgd(shape[0], columns, start, RANKS)
    group = Group(h.PowerSGD(rank), shape, "float64", ops, RANKS)
    for drawn in gradients(3, shape):
        out = group.step(drawn)
        expected = twin.step(list(drawn.reshape(RANKS, shape[0], columns)))
        np.testing.assert_allclose(out.reshape(shape[0], columns), expected, rtol=0, atol=1e-9 * np.abs(expected).max())
    for r in range(RANKS):
        np.testing.assert_allclose(
            group.kept(rank=r).reshape(shape[0], columns), twin.errors[r], rtol=0, atol=1e-9 * 50
        )


@BOTH
@pytest.mark.parametrize("shape", [(9, 37), (37, 9), (12, 3, 5, 2)])
@pytest.mark.parametrize("rank", [1, 3])
def test_power_sgd_of_two_rounds(ops, shape, rank):
    columns = int(np.prod(shape[1:]))
    start = noise(rank * columns, "subspace", 0, None).reshape(rank, columns).T - 0.5
    twin = ref.PaperPowerSgd(start, RANKS)
    group = Group(h.PowerSGD(rank, alternating=False), shape, "float64", ops, RANKS)
    for drawn in gradients(3, shape):
        out = group.step(drawn)
        expected = twin.step(list(drawn.reshape(RANKS, shape[0], columns)))
        np.testing.assert_allclose(out.reshape(shape[0], columns), expected, rtol=0, atol=1e-9 * np.abs(expected).max())
    # The paper subtracts what all have sent, a rank here its own; the means are the same.
    mean = sum(group.kept(rank=r) for r in range(RANKS)).reshape(shape[0], columns) / RANKS
    np.testing.assert_allclose(mean, sum(twin.errors) / RANKS, rtol=0, atol=1e-9 * 50)


@BOTH
def test_half_precision(ops):
    # Three ranks divide by four; Horovod adds up in half precision.
    def sum_of_halves(sent):
        total = sent[0].astype(np.float16)
        for x in sent[1:]:
            total = total + x.astype(np.float16)
        return total.astype(np.float64) * 4 / RANKS

    compare(h.FP16(), stateless(lambda x, *_: x / 4), ops, combine=sum_of_halves)


def test_bfloat16():
    compare(h.BF16(), stateless(lambda x, *_: ref.bfloat16(x)), TORCH)
    compare(h.BF16(feedback=h.ErrorFeedback()), with_feedback(lambda a, *_: ref.bfloat16(a)), TORCH)


def test_float32_is_near_float64():
    """What was compared above is what runs in training, but for rounding."""
    for compressor in (h.TopK(0.05), h.EFSign(), h.OneBit(), h.PowerSGD(2), h.DGC(0.05), h.RandomK(0.05, block=3)):
        wide, usual = (Group(compressor, SHAPE, dtype, TORCH, RANKS) for dtype in ("float64", "float32"))
        for drawn in gradients():
            expected = wide.step(drawn)
            np.testing.assert_allclose(usual.step(drawn), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
