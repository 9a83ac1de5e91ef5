"""The operations that quantisers, signs and factors are written in: PyTorch and TensorFlow against NumPy, by bits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.ops.hashing import hash32, permuted
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.torch import TorchOps
from hvd_compress.step import Step

NUMPY, TORCH = NumpyOps(), TorchOps()
NAN, INF = float("nan"), float("inf")
RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((7, 13))


def tensorflow_ops():
    pytest.importorskip("tensorflow")
    from hvd_compress.ops.tensorflow import TensorFlowOps

    return TensorFlowOps()


@pytest.fixture(params=["torch", "tensorflow"])
def other(request):
    return TORCH if request.param == "torch" else tensorflow_ops()


def moved(x, ops):
    if not isinstance(x, np.ndarray) or ops.name == "numpy":
        return x
    if ops.name == "torch":
        return torch.from_numpy(x.copy())
    import tensorflow as tf

    return tf.constant(x)


def check(other, method, *arguments, tolerance=0.0):
    """Compare a method of two frameworks; return what NumPy's returns."""
    mine = getattr(NUMPY, method)(*arguments)
    theirs = getattr(other, method)(*[moved(x, other) for x in arguments])
    (host,) = other.to_host([theirs])
    assert mine.dtype == host.dtype
    assert mine.shape == host.shape
    np.testing.assert_allclose(host, mine, rtol=tolerance, atol=tolerance)
    return mine


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_elementwise(other, dtype):
    x = MATRIX.astype(dtype)
    x[0, :3] = NAN, INF, -INF
    check(other, "abs", x)
    check(other, "floor", x)
    # PyTorch does not round every root correctly.
    check(other, "sqrt", np.abs(x), tolerance=2e-7 if dtype == "float32" else 4e-16)
    check(other, "clip", x, -0.5, 0.5)
    check(other, "clip", x, -np.abs(x[:, :1]), np.abs(x[:, :1]))
    check(other, "select", x > 0, x, 0.5)
    check(other, "select", x[:, :1] > 0, x, -x)
    check(other, "copy", x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_over_the_last_axis(other, dtype):
    x = MATRIX.astype(dtype)
    close = 1e-6 if dtype == "float32" else 1e-14
    assert check(other, "sum", x, tolerance=close).shape == (7, 1)
    assert check(other, "cumsum", x, tolerance=close).shape == (7, 13)
    x[2, 4], x[3, 5] = NAN, INF
    assert np.isnan(check(other, "max", x)[2, 0])
    whole = np.arange(12.0).astype(dtype)
    check(other, "sum", whole)
    assert check(other, "max", whole).shape == (1,)


def test_positions_in_rows(other):
    x = np.array([[1, 3, 3], [5, 0, 5], [-1, -1, -1]], np.float32)
    positions = check(other, "argmax", x)
    assert positions.tolist() == [1, 0, 0]
    assert positions.dtype == np.int32
    assert check(other, "pick", x, np.array([2, 1, 0], np.int32)).tolist() == [3, 0, -1]
    assert check(other, "take_rows", x, np.array([2, 2, 0, 1], np.int32)).shape == (4, 3)


@pytest.mark.parametrize("n", [1, 5, 6, 7])
def test_rows_are_padded_with_zeros(other, n):
    x = np.arange(1.0, n + 1).astype(np.float32)
    rows = check(other, "rows", x, 3)
    assert rows.shape == (-(-n // 3), 3)
    assert rows.sum() == x.sum()
    check(other, "first", rows.reshape(-1), n)


def test_joining_and_matrices(other):
    a, b = MATRIX.astype(np.float32), RNG.standard_normal((13, 4)).astype(np.float32)
    check(other, "transpose", a)
    check(other, "matmul", a, b, tolerance=1e-5)
    for parts in ([a[0], a[1, :5]], [a, a[:2]]):
        joined = other.concat([moved(part, other) for part in parts])
        np.testing.assert_array_equal(other.to_host([joined])[0], NUMPY.concat(parts))


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1001])
def test_codes_are_packed_alike_and_come_back(other, width, count):
    codes = RNG.integers(0, 1 << width, count).astype(np.uint8)
    codes[-1] = (1 << width) - 1
    packed = check(other, "pack", codes, width)
    assert packed.nbytes == (count * width + 7) // 8
    assert check(other, "unpack", packed, count, width).tolist() == codes.tolist()


def test_the_lowest_bits_come_first(other):
    assert check(other, "pack", np.array([1, 2, 3], np.uint8), 2).tolist() == [0b111001]
    assert check(other, "pack", np.array([1, 0, 1], np.uint8), 1).tolist() == [0b101]
    assert check(other, "pack", np.array([5, 6], np.uint8), 3).tolist() == [0b110101]


@pytest.mark.parametrize("keys", [(0, 0), (1, 2), (0xFFFFFFFF, 0x80000000), (0x7FFFFFFF, 0xDEADBEEF)])
def test_random_numbers_are_the_same_everywhere(other, keys):
    like = np.zeros(1, np.float32)
    drawn = check(other, "uniform", 3000, keys, like)
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0 and drawn.max() < 1
    assert (drawn * 2**24 == np.floor(drawn * 2**24)).all()


def test_random_numbers_are_uniform_and_independent():
    steps = [Step(key, number, rank) for key in ("w", "v") for number in range(8) for rank in range(3)]
    streams = [NUMPY.uniform(4096, step.keys(0, "rounding"), None).astype(np.float64) for step in steps]
    for stream in streams:
        counts = np.histogram(stream, 16, (0, 1))[0]
        # Chi-square with 15 degrees of freedom is above 50 once in 100,000.
        assert ((counts - 256) ** 2 / 256).sum() < 50
        assert abs(np.corrcoef(stream[1:], stream[:-1])[0, 1]) < 5 / 64
    between = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(between).max() < 5.5 / 64


def test_hashes_differ_with_both_keys():
    counters = np.arange(1000, dtype=np.uint32)
    made = {hash32(counters, keys).tobytes() for keys in ((0, 0), (0, 1), (1, 0), (1, 1), (1 << 31, 0))}
    assert len(made) == 5
    assert len(np.unique(hash32(counters, (3, 4)))) == 1000, "it is a bijection of the counter"


def test_bits_of_floats(other):
    x = np.array([0.0, -0.0, 1.0, -1.0, 1e-45, 3.4e38, INF, -INF], np.float32)
    bits = check(other, "float_bits", x)
    assert bits.dtype == np.int64
    assert bits[:4].tolist() == [0, 1 << 31, 0x3F800000, 0xBF800000]
    positive = bits[bits < 1 << 31]
    check(other, "from_float_bits", positive)
    assert NUMPY.from_float_bits(bits).tobytes() == x.tobytes()


# --- Permutations -----------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), part=st.floats(0, 1), keys=st.tuples(*[st.integers(0, 2**32 - 1)] * 2))
def test_permuted_places_are_distinct_and_in_range(n, part, keys):
    count = max(1, int(n * part))
    places = permuted(count, n, keys)
    assert places.dtype == np.int64
    assert len(set(places.tolist())) == count == len(places)
    assert places.min() >= 0
    assert places.max() < n


def test_all_of_a_permutation_is_a_permutation():
    for n in (1, 2, 3, 4, 5, 255, 256, 257, 5000):
        assert sorted(permuted(n, n, (9, n)).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [2, 3, 7, 16, 100])
def test_every_place_is_equally_likely(n):
    draws = 4000
    first = [permuted(min(2, n), n, (int(a), int(b))) for a, b in RNG.integers(0, 2**32, (draws, 2))]
    for position in range(min(2, n)):
        counts = np.bincount([places[position] for places in first], minlength=n)
        assert np.abs(counts - draws / n).max() < 5 * np.sqrt(draws / n)
