"""Mistakes that implementations of these methods have made; each could have been made here."""

import numpy as np
import pytest
import torch
from group import NUMPY, TORCH, Group, once
from methods import ALL, name

import hvd_compress as h
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.step import Step, TensorSpec

RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 64))
SPEC = TensorSpec(X.shape, "float32")
BOTH = pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])


def test_the_first_step_is_scaled_as_all_others():
    for compressor in (h.EFSign(), h.OneBit(), h.TopK(1.0), h.PowerSGD(2)):
        first = np.linalg.norm(Group(compressor, X.shape).step([X]))
        assert first <= 1.01 * np.linalg.norm(X)


def test_ranks_are_averaged_not_added_up():
    for compressor in (h.EFSign(), h.TopK(1.0), h.FP16(), h.Int8()):
        one, four = (Group(compressor, X.shape, "float32", size=size).step([X] * size) for size in (1, 4))
        assert np.linalg.norm(four) == pytest.approx(np.linalg.norm(one), rel=0.01)


@pytest.mark.parametrize("compressor", [h.SignSGD(), h.EFSign(), h.OneBit()], ids=name)
def test_one_bit_is_one_bit(compressor):
    assert sum(s.nbytes for s in compressor.sections(TensorSpec((800, 10), "float32"))) <= 1000 + 8


@pytest.mark.parametrize("compressor", [h.EFSign(), h.OneBit()], ids=name)
def test_zero_has_one_sign_in_what_is_sent_and_in_the_residual(compressor):
    group = Group(compressor, (1, 4))
    group.step([np.array([[0.0, 3.0, -1.0, 0.0]])])
    np.testing.assert_allclose(group.decoded() + group.kept(), [[0, 3, -1, 0]], atol=1e-12)
    assert group.decoded()[0, 0] == group.decoded()[0, 1]


def test_random_positions_do_not_depend_on_the_order_of_calls():
    compressor = h.RandomK(0.1)
    forth = [compressor.positions(SPEC, Step(key), 3).tolist() for key in ("a", "b")]
    back = [compressor.positions(SPEC, Step(key), 3).tolist() for key in ("b", "a")]
    assert forth == back[::-1]


def test_names_of_the_same_letters_have_other_positions():
    compressor = h.RandomK(0.1)
    assert compressor.positions(SPEC, Step("ab"), 0).tolist() != compressor.positions(SPEC, Step("ba"), 0).tolist()


@pytest.mark.parametrize("compressor", ALL, ids=name)
def test_global_random_generators_are_left_alone(compressor):
    torch.manual_seed(1)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    Group(compressor, X.shape, "float32", TORCH).step([X])
    assert torch.equal(before, torch.get_rng_state())
    assert (numpy_before == np.random.get_state()[1]).all()


@pytest.mark.parametrize("settings", [{}, {"block": 5}, {"order": "rolling"}], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 17, 1000])
def test_random_positions_are_distinct_and_in_range(n, settings):
    spec = TensorSpec((1, n), "float32")
    for ratio in (0.3, 1.0):
        for number in range(20):
            places = h.RandomK(ratio, **settings).positions(spec, Step("w"), number)
            assert len(set(places.tolist())) == len(places)
            assert places.min() >= 0 and places.max() < n


def test_random_k_is_scaled_only_without_feedback():
    assert once(h.RandomK(0.25), np.ones((8, 8))).max() == 4
    assert Group(h.RandomK(0.25, feedback=h.ErrorFeedback()), (8, 8)).step([np.ones((8, 8))]).max() == 1


def test_power_sgd_starts_from_the_step_before():
    matrix = np.outer(np.arange(1.0, 41), np.arange(1.0, 31)) + 0.1 * RNG.standard_normal((40, 30))
    group = Group(h.PowerSGD(1, feedback=None), matrix.shape)
    errors = [np.linalg.norm(group.step([matrix]) - matrix) for _ in range(6)]
    best = np.sqrt((np.linalg.svd(matrix)[1][1:] ** 2).sum())
    assert errors[0] > 2 * best
    assert errors[-1] < 1.0001 * best


def test_power_sgd_starts_alike_on_all_ranks_whatever_their_generators():
    group = Group(h.PowerSGD(2), X.shape, "float32", TORCH, size=3)
    group.step([X, 2 * X, -X])
    known = [payload.common[0].numpy() for payload in group.payloads]
    assert (known[0] == known[1]).all() and (known[0] == known[2]).all()


@BOTH
@pytest.mark.parametrize("compressor", ALL, ids=name)
def test_a_gradient_of_zeros_gives_no_nan_and_the_next_one_comes_through(compressor, ops):
    if ops is NUMPY and ("BF16" in repr(compressor) or "bfloat16" in repr(compressor)):
        pytest.skip("NumPy has no bfloat16")
    group = Group(compressor, X.shape, "float32", ops, size=2)
    for _ in range(2):
        assert not group.step([np.zeros(X.shape)] * 2).any()
    outs = [group.step([X, X]) for _ in range(4)]
    assert np.isfinite(outs).all()
    assert all(out.any() for out in outs)


def test_a_row_of_zeros_gives_no_nan():
    x = X.copy()
    x[::2] = 0
    for compressor in (h.QSGD(bucket=64), h.Int8(64), h.EFSign(64), h.OneBit(64), h.PowerSGD(4), h.VectorQuantizer()):
        out = once(compressor, x, "float32")
        assert np.isfinite(out).all()


def test_the_error_of_a_bucket_does_not_grow_with_the_tensor():
    small, large = (RNG.standard_normal((rows, 512)) for rows in (2, 200))
    errors = [np.linalg.norm(once(h.QSGD(4), x) - x) / np.linalg.norm(x) for x in (small, large)]
    assert errors[1] < 1.2 * errors[0]


def test_clipping_is_by_the_norm_and_not_element_by_element():
    group = Group(h.DGC(1.0, momentum=0.0, clip_norm=1.0), X.shape)
    sent = group.step([X])
    assert np.linalg.norm(sent) == pytest.approx(1)
    np.testing.assert_allclose(sent, X / np.linalg.norm(X))


def test_the_residual_is_of_what_is_sent_and_has_its_sign():
    for compressor in (h.EFSign(), h.OneBit(), h.TopK(0.01, values=h.Int8()), h.TopK(0.1, values=h.QSGD(2))):
        group = Group(compressor, X.shape)
        group.step([X])
        np.testing.assert_allclose(group.decoded() + group.kept(), X, atol=1e-12)


def test_top_k_sends_values_and_not_magnitudes():
    assert once(h.TopK(1 / 3, feedback=None), np.array([[1.0, -5.0, 2.0]])).tolist() == [[0, -5, 0]]


def test_top_k_sends_exactly_as_many_from_anywhere():
    rising = np.arange(1.0, 1001).reshape(1, -1)
    for x in (rising, rising[:, ::-1]):
        decoded = once(h.TopK(0.05, feedback=None), x)
        assert np.count_nonzero(decoded) == 50
        assert decoded[decoded > 0].min() == 951


def test_positions_beyond_those_of_float32_are_exact():
    n = 2**24 + 4
    x = np.zeros((1, n), np.float32)
    x[0, -3] = 1
    assert np.flatnonzero(once(h.TopK(1 / n, feedback=None), x)).tolist() == [n - 3]


@pytest.mark.parametrize("n", [1, 7, 8, 9, 63, 65])
def test_the_last_bits_are_of_the_tensor(n):
    x = np.where(np.arange(n) % 3, 1.0, -1.0).reshape(1, n)
    for compressor in (h.SignSGD(), h.EFSign(feedback=None), h.OneBit(feedback=None), h.QSGD(3), h.TernGrad()):
        np.testing.assert_allclose(once(compressor, x), x, atol=1e-12)


def test_small_ranges_are_resolved():
    for scale in (1e-8, 1e-12, 1e-28):
        x = X * scale
        for compressor in (h.Int8(), h.QSGD(8)):
            assert np.linalg.norm(once(compressor, x, "float32") - x) < 0.02 * np.linalg.norm(x)


def test_codes_do_not_wrap_around():
    x = np.array([[1e30, -1e30, 1e30 * (1 - 1e-7), 1e24] * 16])
    for compressor in (h.Int8(), h.QSGD(2), h.QSGD(8), h.TernGrad(None)):
        for number in range(10):
            decoded = once(compressor, x, "float32", number=number)
            assert np.abs(decoded).max() <= 1.0001e30
            assert (decoded[0, ::4] > 0).all() and (decoded[0, 1::4] < 0).all()


def test_data_far_from_zero_is_not_limited_to_nothing():
    x = 5 + 1e-3 * RNG.standard_normal((16, 16))
    np.testing.assert_allclose(once(h.TernGrad(), x), x, rtol=0.01)


def test_noise_differs_between_ranks_and_tensors_and_steps():
    x = np.full((8, 64), 0.3)
    x[0, 0] = 1
    for compressor in (h.QSGD(2), h.TernGrad(None), h.Natural()):
        group = Group(compressor, x.shape, size=2)
        group.step([x, x])
        here, there = group.decoded(0), group.decoded(1)
        others = [once(compressor, x, number=1), once(compressor, x, key="another")]
        assert all((here != other).any() for other in (there, *others))


def test_the_average_divides_by_the_process_set():
    group = Group(h.DGC(1.0, momentum=0.0), X.shape, size=3)
    np.testing.assert_allclose(group.step([X] * 3), X, atol=1e-12)


def test_counters_are_of_each_tensor():
    """A step is an argument: what other tensors do between does not count."""
    keys = [Step("w", 7).keys(0, "rounding") for _ in range(3)]
    assert len(set(keys)) == 1
    assert NumpyOps().uniform(4, keys[0], None).tolist() == NUMPY.uniform(4, keys[1], None).tolist()


def test_half_precision_sums_do_not_overflow():
    x = np.full((8, 64), 60000.0)
    np.testing.assert_allclose(Group(h.FP16(), x.shape, "float32", TORCH, size=8).step([x] * 8), x, rtol=1e-3)


def test_a_gradient_that_is_zero_at_first_is_learnt_later():
    group = Group(h.PowerSGD(2), (40, 30))
    group.step([np.zeros((40, 30))])
    matrix = np.outer(np.arange(40.0), np.arange(30.0))
    applied = sum(group.step([matrix]) for _ in range(4))
    np.testing.assert_allclose(applied, 4 * matrix, atol=1e-6)
