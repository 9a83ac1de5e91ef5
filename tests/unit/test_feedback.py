"""Error feedback is an identity: what was applied plus what is kept is what there was.

Most gradients here are whole numbers small enough that every sum, product and rounding error
is exact in float32.  The identity then has to hold exactly, and no tolerance can hide a bug.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import ErrorFeedback, Step, TensorSpec, TopK
from hvd_compress.adapters.torch.encoding import encode as _encode
from hvd_compress.codec import encode_step
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.torch import TorchOps
from hvd_compress.state import ParameterState

NUMPY, TORCH = NumpyOps(), TorchOps()
NAN, INF = float("nan"), float("inf")


class Rank:
    """One rank's residual, driven as the adapters do it."""

    def __init__(self, compressor, spec, ops):
        self.compressor, self.spec, self.ops = compressor, spec, ops
        self.state = ParameterState("w")

    def encode(self, gradient):
        """Compress; for PyTorch with the adapter itself."""
        if self.ops is TORCH:
            item = _encode(self.compressor, gradient, self.spec, "w", self.state)
            return item.arrays, item.finite
        step = Step("w", self.state.steps, memory=self.state.memory())
        payload, new = encode_step(self.compressor, gradient, self.spec, self.ops, step)
        self.state.store(new)
        return payload.arrays, payload.finite

    def residual(self):
        return np.asarray(self.state.residual, np.float64)


def as_gradient(values, dtype, ops):
    """Return a matrix of one row in ``dtype``."""
    if ops is NUMPY:
        return np.asarray(values).astype(dtype)[None]
    return torch.from_numpy(np.asarray(values, np.float64)).to(getattr(torch, dtype))[None]


def stack(arrays, ops):
    return np.stack(arrays) if ops is NUMPY else torch.stack(list(arrays))


def exchange(ranks, gradients):
    """One step of all ranks; return the float64 sum that every rank decodes."""
    first = ranks[0]
    sent = [rank.encode(g)[0] for rank, g in zip(ranks, gradients, strict=True)]
    gathered = [stack(arrays, first.ops) for arrays in zip(*sent, strict=True)]
    total = first.compressor.combine(gathered, first.spec, first.ops)
    return np.asarray(total, np.float64)


BACKENDS = [
    (NUMPY, "float16", 2048),
    (NUMPY, "float32", 10**5),
    (NUMPY, "float64", 10**9),
    (TORCH, "float16", 2048),
    (TORCH, "bfloat16", 256),
    (TORCH, "float32", 10**5),
    (TORCH, "float64", 10**9),
]


@pytest.mark.parametrize(("ops", "dtype", "largest"), BACKENDS, ids=lambda v: getattr(v, "name", str(v)))
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 40),
    ranks=st.integers(1, 4),
    steps=st.integers(1, 6),
    ratio=st.floats(0.001, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_applied_plus_residuals_is_the_sum_of_the_gradients(ops, dtype, largest, n, ranks, steps, ratio, seed):
    rng = np.random.default_rng(seed)
    spec = TensorSpec((1, n), dtype)
    group = [Rank(TopK(ratio), spec, ops) for _ in range(ranks)]
    # Whole numbers, exact in dtype; after 6 steps of 4 ranks below 2**24, so exact in float32 too.
    gradients = rng.integers(-largest, largest + 1, (steps, ranks, n)).astype(np.float64)
    applied = sum(exchange(group, [as_gradient(g, dtype, ops) for g in step]) for step in gradients)
    kept = sum(rank.residual() for rank in group)
    np.testing.assert_array_equal(applied + kept, gradients.sum((0, 1)))


@pytest.mark.parametrize(("ops", "dtype"), [(NUMPY, "float32"), (TORCH, "float32"), (TORCH, "bfloat16")])
def test_the_identity_for_real_numbers(ops, dtype):
    rng, n, steps, size = np.random.default_rng(3), 500, 50, 3
    group = [Rank(TopK(0.02), TensorSpec((1, n), dtype), ops) for _ in range(size)]
    applied, due, largest = np.zeros(n), np.zeros(n), 0.0
    for _ in range(steps):
        gradients = [as_gradient(rng.standard_normal(n), dtype, ops) for _ in range(size)]
        due += sum(np.asarray(g[0] if ops is NUMPY else g[0].double(), np.float64) for g in gradients)
        applied += exchange(group, gradients)
        largest = max([largest, *(np.abs(rank.residual()).max() for rank in group)])
    kept = sum(rank.residual() for rank in group)
    # A step and rank rounds three times in float32: residual + gradient, its difference to what
    # is sent, and the sum over ranks; none of these exceeds size times the largest value.
    tolerance = 3 * steps * size * 2**-24 * size * (largest + 5)
    np.testing.assert_allclose(applied + kept, due, rtol=0, atol=tolerance)
    assert tolerance < 0.05 * np.abs(kept).max(), "the tolerance would hide a lost residual"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_residual_keeps_what_rounding_to_16_bits_loses(dtype):
    rank = Rank(TopK(1.0), TensorSpec((1, 2), dtype), TORCH)
    rank.state.residual = torch.tensor([2.0**-14, 1.0])
    (_, values), _ = rank.encode(as_gradient([1.0, 1.0], dtype, TORCH))
    # 1 + 2**-14 is no 16-bit number; it is sent as 1, and the rest stays.
    assert values.tolist() == [1.0, 2.0]
    assert rank.state.residual.tolist() == [2.0**-14, 0.0]
    assert rank.state.residual.dtype == torch.float32


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
@pytest.mark.parametrize("sign", [1, -1])
def test_fp16_saturates_and_the_residual_keeps_the_rest(ops, sign):
    rank = Rank(TopK(0.5), TensorSpec((1, 2), "float16"), ops)
    rank.encode(as_gradient([0, 0], "float16", ops))
    rank.state.residual[0] = sign * 50000.0
    (indices, values), finite = rank.encode(as_gradient([sign * 60000.0, 1.0], "float16", ops))
    assert bool(finite)
    assert (indices.tolist(), values.tolist()) == ([0], [sign * 65504.0])
    assert rank.residual().tolist() == [sign * (110000 - 65504), 1.0]


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 4, 9])
def test_what_is_not_finite_leaves_the_residual_as_it_was(ops, dtype, bad, place):
    rank = Rank(TopK(0.3), TensorSpec((1, 10), dtype), ops)
    rank.encode(as_gradient(np.arange(10), dtype, ops))
    before = rank.residual().copy()
    assert before.any()
    values = np.arange(10.0)
    values[place] = bad
    (indices, sent), finite = rank.encode(as_gradient(values, dtype, ops))
    assert not bool(finite)
    assert place in indices.tolist()
    assert not np.isfinite(np.asarray(sent, np.float64)).all(), "the other ranks must see it too"
    np.testing.assert_array_equal(rank.residual(), before)
    _, finite = rank.encode(as_gradient(np.arange(10), dtype, ops))
    assert bool(finite)


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_a_first_gradient_that_is_not_finite_leaves_zeros(ops):
    rank = Rank(TopK(0.3), TensorSpec((1, 4), "float32"), ops)
    rank.encode(as_gradient([1, NAN, 2, 3], "float32", ops))
    assert rank.residual().tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("feedback", [ErrorFeedback(), None], ids=["ef", "none"])
def test_the_gradient_is_never_changed_nor_kept(ops, dtype, feedback):
    rank = Rank(TopK(0.5, feedback=feedback), TensorSpec((1, 6), dtype), ops)
    gradient = as_gradient([3, -1, 4, 1, -5, 9], dtype, ops)
    for _ in range(3):
        arrays, _ = rank.encode(gradient)
        assert gradient.tolist() == [[3, -1, 4, 1, -5, 9]]
        kept = None if feedback is None else rank.residual().copy()
        sent = [a.tolist() for a in arrays]
        gradient[:] = 7  # as zero_grad() and the next backward pass write into the same memory
        assert [a.tolist() for a in arrays] == sent
        if kept is not None:
            np.testing.assert_array_equal(rank.residual(), kept)
        gradient = as_gradient([3, -1, 4, 1, -5, 9], dtype, ops)


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
@pytest.mark.parametrize(("dtype", "accumulator"), [("float16", "float32"), ("float32", "float32"), ("float64",) * 2])
def test_compensate_returns_a_new_flat_array_in_the_accumulator(ops, dtype, accumulator):
    gradient = as_gradient([1, 2, 3, 4], dtype, ops)
    for residual in (None, ops.astype(ops.flatten(as_gradient([10, 20, 30, 40], "float64", ops)), accumulator)):
        memory = {} if residual is None else {"residual": residual}
        x, _ = ErrorFeedback().compensate(gradient, TensorSpec((1, 4), dtype), ops, Step(memory=memory))
        assert (ops.dtype(x), ops.shape(x)) == (accumulator, (4,))
        assert x.tolist() == ([1, 2, 3, 4] if residual is None else [11, 22, 33, 44])
        x[:] = 0
        assert gradient.tolist() == [[1, 2, 3, 4]]
        assert residual is None or residual.tolist() == [10, 20, 30, 40]


def test_the_residual_stays_bounded():
    """With ``||g|| <= G`` the residual of a contraction by ``1 - d`` stays below ``2 G / d`` (Karimireddy et al.)."""
    n, ratio, rng = 200, 0.05, np.random.default_rng(0)
    rank = Rank(TopK(ratio), TensorSpec((1, n), "float64"), NUMPY)
    norms = []
    for _ in range(1000):
        g = rng.standard_normal(n)
        rank.encode(as_gradient(g / np.linalg.norm(g), "float64", NUMPY))
        norms.append(np.linalg.norm(rank.residual()))
    assert max(norms) < 2 / ratio
    assert max(norms) > 1, "nothing was dropped, so nothing was tested"
    assert math.isclose(np.mean(norms[500:750]), np.mean(norms[750:]), rel_tol=0.1), "it still grows"
