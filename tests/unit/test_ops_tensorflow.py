"""TensorFlow's ``Ops`` against NumPy's, eager and in a graph."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_compress import TensorSpec, TopK
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.tensorflow import TensorFlowOps

NUMPY, TF = NumpyOps(), TensorFlowOps()
NAN, INF = float("nan"), float("inf")
RNG = np.random.default_rng(0)
N = 20_011

DATA = {
    "normal": RNG.standard_normal(N),
    "rounded": np.round(RNG.standard_normal(N), 1),
    "constant": np.full(N, -2.5),
    "zeros of both signs": np.where(RNG.random(N) < 0.5, 0.0, -0.0),
    "mostly zero": np.where(RNG.random(N) < 0.01, RNG.standard_normal(N), 0.0),
    "ascending": np.linspace(-5, 5, N),
    "descending": np.linspace(5, -5, N),
    "one block holds all": np.where(np.arange(N) < 300, 1e6 + np.arange(N), RNG.standard_normal(N)),
    "tail": np.where(np.arange(N) >= N - 7, 9.0, 1.0),
    "infinite": np.where(RNG.random(N) < 0.1, -INF, RNG.standard_normal(N)),
    "nan": np.where(RNG.random(N) < 0.1, NAN, RNG.standard_normal(N)),
}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 7, 20, 300, N // 2, N])
@pytest.mark.parametrize("data", DATA)
def test_top_k_is_exact(data, k, dtype, graph):
    x = DATA[data].astype(dtype)
    function = tf.function(lambda t: TF.top_k(t, k)) if graph else lambda t: TF.top_k(t, k)
    got = function(tf.constant(x))
    assert got.dtype == tf.int32
    np.testing.assert_array_equal(got.numpy(), NUMPY.top_k(x, k))


@pytest.mark.parametrize("n", [2**15, 2**15 + 2**5, 2**15 + 2, 2**15 + 1])
@pytest.mark.parametrize("name", ["nan", "rounded", "constant"])
def test_top_k_as_on_a_gpu(name, n, monkeypatch):
    """There without integers; here whatever the blocks' width, which depends on what divides ``n``."""
    x = np.resize(DATA[name], n).astype("float32")
    expected = [NUMPY.top_k(x, k) for k in (3, 33, 1000)]
    for where in ("CPU", "GPU"):
        monkeypatch.setattr("hvd_compress.ops.tensorflow._HOST", where if where == "CPU" else "nowhere")
        for k, right in zip((3, 33, 1000), expected, strict=True):
            np.testing.assert_array_equal(TF.top_k(tf.constant(x), k).numpy(), right)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_top_k_property(data):
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, NAN])
    x = data.draw(arrays("float32", st.integers(1, 60), elements=st.one_of(few, st.floats(-100, 100, width=32))))
    k = data.draw(st.integers(1, len(x)))
    # Few elements take the short way; repeated, they take the way by blocks.
    for times in (1, 200):
        y = np.tile(x, times)
        np.testing.assert_array_equal(TF.top_k(tf.constant(y), k).numpy(), NUMPY.top_k(y, k))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_finite_stays_finite(dtype):
    x = tf.constant([1e30, -3.4e38, 3.4e38, INF, -INF, NAN, 1.5], tf.float32)
    got = tf.cast(TF.astype_finite(x, dtype), tf.float32).numpy()
    assert np.isfinite(got[[0, 1, 2, 6]]).all() and got[6] == 1.5
    assert got[3] == INF and got[4] == -INF and np.isnan(got[5])
    assert (np.sign(got[:3]) == [1, -1, 1]).all()
    limit = float(tf.as_dtype(dtype).max)
    assert got[2] == limit or dtype == "bfloat16"


@pytest.mark.parametrize("known", [True, False], ids=["3 ranks", "any number of ranks"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_combine_has_the_bits_of_numpy(dtype, known):
    spec, compressor, ranks = TensorSpec((3000,), dtype), TopK(0.01), 3
    payloads = [
        compressor.encode(RNG.standard_normal(3000).astype(spec.accumulator), spec, NUMPY) for _ in range(ranks)
    ]
    arrays_ = [np.stack([p.arrays[i] for p in payloads]) for i in range(2)]
    signature = [tf.TensorSpec([ranks if known else None, None], a.dtype) for a in arrays_]

    @tf.function(input_signature=signature)
    def combine(indices, values):
        return compressor.combine([indices, values], spec, TF)

    expected = compressor.combine(arrays_, spec, NUMPY)
    assert combine(*map(tf.constant, arrays_)).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_encode_and_subtract_have_the_bits_of_numpy(dtype):
    spec, compressor = TensorSpec((5000,), dtype), TopK(0.01)
    x = RNG.standard_normal(5000).astype(spec.accumulator)
    mine, theirs = compressor.encode(tf.constant(x), spec, TF), compressor.encode(x, spec, NUMPY)
    for a, b in zip(mine.arrays, theirs.arrays, strict=True):
        assert a.numpy().tobytes() == b.tobytes()
    rest = compressor.add_(tf.constant(x), mine, spec, TF, -1).numpy()
    assert rest.tobytes() == compressor.add_(x.copy(), theirs, spec, NUMPY, -1).tobytes()


def test_host_and_back():
    x = [tf.constant([1.5, -2.0], tf.bfloat16), tf.constant([3], tf.int32)]
    host = TF.to_host(x)
    assert [h.dtype.name for h in host] == ["uint16", "int32"]
    back = TF.from_host(host, ["bfloat16", "int32"], x[0])
    assert [b.dtype for b in back] == [tf.bfloat16, tf.int32]
    assert tf.reduce_all(back[0] == x[0]) and tf.reduce_all(back[1] == x[1])


def test_small_operations():
    x = tf.constant([[1.0, -2.0], [3.0, 4.0]])
    assert (TF.dtype(x), TF.shape(x)) == ("float32", (2, 2))
    flat = TF.flatten(x)
    assert TF.add(flat, flat).numpy().tolist() == [2, -4, 6, 8]
    assert TF.scale_(flat, 0.5).numpy().tolist() == [0.5, -1, 1.5, 2]
    assert TF.scale_(flat, tf.constant([2.0], tf.float64)).dtype == tf.float32
    assert TF.where(tf.constant(False), flat, TF.zeros(4, "float32", flat)).numpy().tolist() == [0] * 4
    assert TF.take(flat, tf.constant([3, 0])).numpy().tolist() == [4, 1]
    assert bool(TF.all_finite(flat)) and not bool(TF.all_finite(tf.constant([1.0, NAN])))
    assert TF.reshape(flat, (4, 1)).shape == (4, 1)
    assert TF.move_like(flat, x) is flat and TF.copy(flat) is flat
