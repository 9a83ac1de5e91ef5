"""Exact top-k of both ``Ops`` against a stable sort, and that nothing is slow on unusual data."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.torch import TorchOps

NUMPY, TORCH = NumpyOps(), TorchOps()
FLOATS = ["float16", "float32", "float64"]
NAN, INF = float("nan"), float("inf")
EXTREMES = [NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 6e-8, -6e-8]


def tensor(values, dtype):
    return torch.from_numpy(np.asarray(values, np.float64)).to(getattr(torch, dtype))


def raw(x):
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def same(a, b):
    b = b.numpy() if isinstance(b, torch.Tensor) else b
    assert a.dtype == b.dtype == np.int32
    np.testing.assert_array_equal(a, b)


def brute_force(x, k):
    """Sort by class (NaN, infinity, number), magnitude, position; independent of bit patterns."""
    wide = x.astype(np.float64)
    kind = np.where(np.isnan(wide), 2, np.where(np.isinf(wide), 1, 0))
    magnitude = np.where(kind == 0, np.abs(wide), 0)
    order = np.lexsort((np.arange(len(x)), -magnitude, -kind))
    return np.sort(order[:k]).astype(np.int32)


def check_top_k(x, k):
    """Compare in every dtype; rounding ``x`` to it comes first."""
    for dtype in [*FLOATS, "bfloat16"]:
        t = tensor(x, dtype)
        before, expected = raw(t), brute_force(t.double().numpy(), k)
        same(expected, TORCH.top_k(t, k))
        if dtype in FLOATS:
            same(expected, NUMPY.top_k(t.numpy(), k))
        assert raw(t) == before


N = 1000
RNG = np.random.default_rng(5)
DATA = {
    "normal": RNG.standard_normal(N),
    "ties": RNG.integers(-3, 4, N).astype(float),
    "all equal": np.full(N, -2.5),
    "zeros": np.zeros(N),
    "zeros of both signs": np.where(RNG.random(N) < 0.5, 0.0, -0.0),
    "mostly zero": np.where(RNG.random(N) < 0.01, RNG.standard_normal(N), 0.0),
    "nan": np.where(RNG.random(N) < 0.1, NAN, RNG.standard_normal(N)),
    "all nan": np.where(RNG.random(N) < 0.5, NAN, -NAN),
    "extremes": RNG.choice(EXTREMES, N),
    "huge offset": 3e4 + RNG.standard_normal(N),
    "negative": -np.abs(RNG.standard_normal(N)),
    "subnormal": RNG.integers(-20, 21, N) * 2.0**-149,
    "descending": np.linspace(5, -5, N),
    "one": np.array([-0.0]),
}


@pytest.mark.parametrize("k", [1, 2, 10, 333, N - 1, N])
@pytest.mark.parametrize("data", DATA)
def test_top_k_is_exact(data, k):
    check_top_k(DATA[data], min(k, len(DATA[data])))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_top_k_property(dtype, data):
    width = 8 * np.dtype(dtype).itemsize
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, INF, -INF, NAN])
    x = data.draw(arrays(dtype, st.integers(1, 60), elements=st.one_of(few, st.floats(width=width))))
    x[np.isnan(x)] = NAN  # which of two NaN is the larger is left open
    k = data.draw(st.integers(1, len(x)))
    expected = brute_force(x, k)
    same(expected, NUMPY.top_k(x, k))
    same(expected, TORCH.top_k(torch.from_numpy(x), k))


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_top_k_of_a_strided_array(ops):
    x = np.arange(20, dtype=np.float32)[::-2]
    y = x if ops is NUMPY else torch.arange(20.0).flip(0)[::2]
    same(brute_force(x, 3), ops.top_k(y, 3))


# --- Time -----------------------------------------------------------------------------

LARGE = 4_000_000


def large(kind):
    rng = np.random.default_rng(0)
    if kind == "constant":
        return np.full(LARGE, 3, np.float32)
    if kind == "mostly zero":
        x = np.zeros(LARGE, np.float32)
        x[rng.integers(0, LARGE, LARGE // 1000)] = 1
        return x
    x = rng.standard_normal(LARGE, np.float32)
    return {"normal": x, "ascending": np.sort(np.abs(x)), "descending": np.sort(np.abs(x))[::-1].copy()}[kind]


@pytest.fixture(scope="module")
def unusual():
    return {kind: large(kind) for kind in ("normal", "constant", "mostly zero", "ascending", "descending")}


CALLS = {
    "top_k": lambda ops, x, i: ops.top_k(x, len(i)),
    "top_k of half": lambda ops, x, i: ops.top_k(x, LARGE // 2),
    "add": lambda ops, x, i: ops.add(x, x),
    "all_finite": lambda ops, x, i: ops.all_finite(x),
    "astype_finite": lambda ops, x, i: ops.astype_finite(x, "float16"),
    "take": lambda ops, x, i: ops.take(x, i),
    "scatter_add_": lambda ops, x, i: ops.scatter_add_(x, i, ops.take(x, i)),
}


def seconds(call, *args):
    """Return the median of three runs, in processor time, which others on the machine do not add to."""
    times = []
    for _ in range(3):
        start = time.process_time()
        call(*args)
        times.append(time.process_time() - start)
    return sorted(times)[1]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_no_data_is_much_slower_than_normal_data(ops, call, unusual):
    """``np.partition``, for one, is: it takes seconds on mostly zero data."""
    indices = np.arange(0, LARGE, 1000, dtype=np.int32)
    times = {}
    for kind, data in unusual.items():
        x = data.copy()
        inputs = (x, indices) if ops is NUMPY else (torch.from_numpy(x), torch.from_numpy(indices))
        times[kind] = seconds(CALLS[call], ops, *inputs)
    # A factor of 10, and 10 ms for what takes no time at all, leave room for a busy machine.
    limit = 10 * times["normal"] + 0.01
    assert max(times.values()) <= limit, times
