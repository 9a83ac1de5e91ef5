"""Every ``Ops`` method, of NumPy and of PyTorch, against each other; top-k is in ``test_ops_top_k.py``."""

import numpy as np
import pytest
import torch

from hvd_compress.errors import UnsupportedError
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.torch import TorchOps

NUMPY, TORCH = NumpyOps(), TorchOps()
FLOATS = ["float16", "float32", "float64"]
TORCH_FLOATS = [*FLOATS, "bfloat16"]
NAN, INF = float("nan"), float("inf")
EXTREMES = [NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 6e-8, -6e-8]


def tensor(values, dtype):
    return torch.tensor(np.asarray(values, np.float64)).to(getattr(torch, dtype))


def bits(x):
    """Return what an array or tensor is made of, so that -0.0 and NaN compare."""
    if isinstance(x, torch.Tensor):
        x = x.detach()
        x = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return x.dtype.itemsize, x.shape, np.ascontiguousarray(x).tobytes()


def same(a, b):
    """Compare by bits, except that any NaN equals any other."""
    if isinstance(b, torch.Tensor):
        b = b.detach().numpy()
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    clean = [np.where(np.isnan(x), x.dtype.type(0), x) for x in (a, b)]
    assert (np.isnan(a) == np.isnan(b)).all()
    assert bits(clean[0]) == bits(clean[1])


def sample(dtype, n=257, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
    x[: len(EXTREMES)] = EXTREMES
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", TORCH_FLOATS)
def test_dtype_and_shape(dtype):
    x = tensor([[1, 2, 3]], dtype)
    assert (TORCH.dtype(x), TORCH.shape(x)) == (dtype, (1, 3))
    if dtype in FLOATS:
        assert (NUMPY.dtype(x.numpy()), NUMPY.shape(x.numpy())) == (dtype, (1, 3))
    assert TORCH.dtype(torch.zeros(1, dtype=torch.complex64)) == "complex64"


LAYOUTS = {
    "contiguous": lambda x: x.reshape(6, 5, 4, 3),
    "transposed": lambda x: x.reshape(3, 4, 5, 6).permute(3, 2, 1, 0),
    "channels_last": lambda x: x.reshape(6, 5, 4, 3).contiguous(memory_format=torch.channels_last),
    "strided": lambda x: x.repeat_interleave(2)[::2].reshape(6, 5, 4, 3),
    "offset": lambda x: torch.cat([x, x])[7:367].reshape(6, 5, 4, 3),
    "expanded": lambda x: x[:1].expand(6, 5, 4, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flatten_is_in_logical_order_whatever_the_strides(layout):
    x = LAYOUTS[layout](torch.arange(360.0)).requires_grad_()
    expected = x.detach().numpy().copy().ravel(order="C")
    flat = TORCH.flatten(x)
    assert not flat.requires_grad
    same(expected, flat)
    same(expected, NUMPY.flatten(x.detach().numpy()))
    back = TORCH.reshape(flat, (6, 5, 4, 3))
    same(x.detach().numpy().copy(order="C"), back)
    same(back.numpy(), NUMPY.reshape(flat.numpy(), (6, 5, 4, 3)))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("float16", "float32"),
        ("float32", "float16"),
        ("float32", "float32"),
        ("float64", "float32"),
        ("float32", "float64"),
    ],
)
def test_astype_rounds_alike(source, target):
    x = sample(source)
    x[-1] = x[-1] if source == "float16" else 1e30
    before = bits(x)
    mine = NUMPY.astype(x, target)
    same(mine, TORCH.astype(torch.from_numpy(x), target))
    assert mine.dtype.name == target
    assert bits(x) == before


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_astype_returns_the_array_itself_where_it_can(ops):
    x = np.ones(3, np.float32) if ops is NUMPY else torch.ones(3)
    assert ops.astype(x, "float32") is x
    assert ops.astype_finite(x, "float32") is x
    assert ops.copy(x) is not x


@pytest.mark.parametrize("value", [65504, 65519, 65520, 7e4, 1e30, 3.4028234e38, INF, NAN, 1e-45, 1.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_astype_finite_keeps_finite_what_is_finite(value, sign, target):
    x = np.array([sign * value], np.float32)
    rounded = TORCH.astype_finite(torch.from_numpy(x), target)
    assert bool(torch.isfinite(rounded)) == bool(np.isfinite(x))
    if np.isfinite(value):
        largest = torch.finfo(getattr(torch, target)).max
        expected = tensor(np.clip(x, -largest, largest), target)
        assert bits(rounded) == bits(expected)
    if target == "float16":
        same(NUMPY.astype_finite(x, target), rounded)
    else:
        with pytest.raises(UnsupportedError, match="NumPy has no bfloat16"):
            NUMPY.astype_finite(x, target)


WIDER = [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64"), ("float16", "bfloat16")]


@pytest.mark.parametrize(("source", "target"), WIDER)
def test_astype_finite_to_a_wider_range(source, target):
    x = tensor([1.0, -2.5, INF], source)
    assert torch.equal(TORCH.astype_finite(x, target), x.to(getattr(torch, target)))
    if "bfloat16" not in (source, target):
        same(NUMPY.astype_finite(x.numpy(), target), x.to(getattr(torch, target)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arithmetic(dtype):
    a, b = sample(dtype, seed=1), sample(dtype, seed=2)[::-1].copy()
    before = bits(a), bits(b)
    ta, tb = torch.from_numpy(a.copy()), torch.from_numpy(b.copy())
    same(NUMPY.add(a, b), TORCH.add(ta, tb))
    assert (bits(a), bits(b)) == before == (bits(ta), bits(tb))
    for factor in (0.25, 1 / 3, 1e38):
        mine, theirs = a.copy(), ta.clone()
        assert NUMPY.scale_(mine, factor) is mine
        assert TORCH.scale_(theirs, factor) is theirs
        same(mine, theirs)
    mine, theirs = a.copy(), ta.clone()
    same(NUMPY.scale_(mine, np.array([1 / 3], dtype)), TORCH.scale_(theirs, tensor([1 / 3], dtype)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_copy_and_move(dtype):
    x = sample(dtype)
    same(NUMPY.zeros(7, dtype, x), TORCH.zeros(7, dtype, torch.from_numpy(x)))
    for ops, y in ((NUMPY, x.copy()), (TORCH, torch.from_numpy(x.copy()))):
        copied = ops.copy(y)
        y[:] = 0
        same(x, copied)
        assert ops.move_like(y, y) is y


@pytest.mark.parametrize(("bad", "finite"), [(None, True), (NAN, False), (INF, False), (-INF, False)])
@pytest.mark.parametrize("dtype", TORCH_FLOATS)
def test_all_finite_and_where(bad, finite, dtype):
    x = tensor(np.linspace(-1, 1, 50), dtype)
    if bad is not None:
        x[-1] = bad
    for ops in (NUMPY, TORCH) if dtype in FLOATS else (TORCH,):
        y = x.numpy() if ops is NUMPY else x
        flag = ops.all_finite(y)
        assert ops.shape(flag) == ()
        assert ops.dtype(flag) == "bool"
        assert bool(flag) is finite
        other = ops.zeros(50, dtype, y)
        assert bits(ops.where(flag, y, other)) == bits(y if finite else other)


@pytest.mark.parametrize("dtype", FLOATS)
def test_take_and_scatter_add(dtype):
    x = sample(dtype)
    indices = np.array([0, 3, 5, 100, 256], np.int32)
    values = np.array([1, 1, -2, 0.5, 3], dtype)
    tx, ti, tv = torch.from_numpy(x.copy()), torch.from_numpy(indices), torch.from_numpy(values)
    same(NUMPY.take(x, indices), TORCH.take(tx, ti))
    same(x[indices], TORCH.take(tx, ti))
    expected = x.copy()
    for i, v in zip(indices, values, strict=True):
        expected[i] += v
    mine = x.copy()
    assert NUMPY.scatter_add_(mine, indices, values) is mine
    assert TORCH.scatter_add_(tx, ti, tv) is tx
    same(expected, mine)
    same(expected, tx)


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_host_round_trip(ops):
    dtypes = [*FLOATS, "int32", "bool"] + (["bfloat16"] if ops is TORCH else [])
    xs = [tensor(np.arange(1, 2 + i), d) for i, d in enumerate(dtypes)]
    xs = [x.numpy() for x in xs] if ops is NUMPY else xs
    host = ops.to_host(xs)
    assert all(isinstance(x, np.ndarray) for x in host)
    assert [x.dtype.name for x in host] == [d.replace("bfloat16", "uint16") for d in dtypes]
    assert [bits(x) for x in host] == [bits(x) for x in xs]
    back = ops.from_host(host, dtypes, xs[0])
    assert [ops.dtype(x) for x in back] == dtypes
    assert [bits(x) for x in back] == [bits(x) for x in xs]


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_no_arrays_to_and_from_the_host(ops):
    like = np.zeros(1) if ops is NUMPY else torch.zeros(1)
    assert ops.to_host([]) == []
    assert ops.from_host([], [], like) == []


def test_from_host_keeps_the_axis_of_ranks():
    gathered = np.arange(6, dtype=np.uint16).reshape(2, 3)
    (x,) = TORCH.from_host([gathered], ["bfloat16"], torch.zeros(1))
    assert (x.dtype, tuple(x.shape)) == (torch.bfloat16, (2, 3))
    assert bits(x) == bits(gathered)
