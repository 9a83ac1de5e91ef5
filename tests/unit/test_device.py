"""The PyTorch path neither waits for a GPU nor copies whole gradients to the host.

There is no GPU in the tests.  What would make one wait can be seen without: every operation
that needs a value on the host, or whose result's shape depends on data, has a name.  A
dispatch mode refuses them; PyTorch's fake tensors, which have no data at all, are a second
and independent witness.
"""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_compress import TensorSpec, TopK
from hvd_compress.adapters.torch.encoding import encode as _encode
from hvd_compress.ops.torch import TorchOps
from hvd_compress.state import ParameterState

OPS = TorchOps()
SHAPE = (64, 50)
RANKS = 3

SYNCHRONISING = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "unique_consecutive",
    "unique_dim",
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr("hvd_compress.ops.torch._NOTHING_TO_WAIT_FOR", set())


INDEXING = {"_index_put_impl_", "index", "index_put", "index_put_"}


class SynchronisesError(Exception):
    """An operation that a GPU would have to be waited for."""


class NoSynchronisation(TorchDispatchMode):
    """Refuse operations that wait, and copies between devices of more than ``limit`` elements."""

    def __init__(self, limit=0):
        super().__init__()
        self.limit = limit
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.seen.append(name)
        if name in SYNCHRONISING:
            raise SynchronisesError(str(func))
        if name in INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            raise SynchronisesError(f"{func} with a boolean mask")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise SynchronisesError(f"{func} without an output size")
        if name in ("_to_copy", "copy_"):
            source, target = (args[1], args[0].device) if name == "copy_" else (args[0], kwargs.get("device"))
            if target is not None and torch.device(target) != source.device and source.numel() > self.limit:
                raise SynchronisesError(f"{func} of {source.numel()} elements to {target}")
        return func(*args, **kwargs)


def gradient(dtype, device, step=0):
    if device != "cpu":
        return torch.empty(SHAPE, dtype=dtype, device=device)
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)).to(dtype)


def whole_step(compressor, gradients):
    """Compress a parameter step by step, then combine as if other ranks had sent the same."""
    spec = TensorSpec(SHAPE, OPS.dtype(gradients[0]))
    state = ParameterState("weight")
    for g in gradients:
        item = _encode(compressor, g, spec, "weight", state)
    gathered = [array.unsqueeze(0).expand(RANKS, -1) for array in item.arrays]
    total = compressor.combine(gathered, spec, OPS)
    return item, state, OPS.reshape(OPS.astype(OPS.scale_(total, 1 / RANKS), spec.dtype), SHAPE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("compressor", [TopK(0.01), TopK(0.01, feedback=None), TopK(1.0)], ids=["ef", "none", "all"])
@pytest.mark.parametrize("where", ["cpu", "fake cpu", "fake meta"])
def test_a_step_never_waits(where, compressor, dtype):
    fake = FakeTensorMode() if where.startswith("fake") else nullcontext()
    device = where.removeprefix("fake ")
    with fake:
        gradients = [gradient(dtype, device, step) for step in range(3)]
        with NoSynchronisation() as mode:
            item, state, mean = whole_step(compressor, gradients)
    # The mode has seen the work, and everything stayed where the gradient is.
    assert {"topk", "nonzero_static", "index_select", "index_add_"} <= set(mode.seen)
    kept = [] if compressor.feedback is None else [state.residual]
    assert {x.device.type for x in [*item.arrays, item.finite, mean, *kept]} == {device}
    assert (mean.dtype, tuple(mean.shape)) == (dtype, SHAPE)
    assert sum(x.numel() for x in item.arrays) == 2 * compressor.kept(TensorSpec(SHAPE, "float32"))


def test_a_gradient_that_is_not_finite_does_not_make_it_wait_either():
    bad = gradient(torch.float32, "cpu")
    bad[3, 4] = float("nan")
    with NoSynchronisation():
        item, _, _ = whole_step(TopK(0.01), [gradient(torch.float32, "cpu"), bad])
    assert not item.finite


@pytest.mark.parametrize("layout", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.expand(3, *SHAPE)])
def test_a_gradient_of_any_layout_does_not_make_it_wait(layout):
    g = layout(gradient(torch.float32, "cpu"))
    with NoSynchronisation():
        _encode(TopK(0.01), g, TensorSpec(tuple(g.shape), "float32"), "weight", ParameterState("weight"))


def test_a_residual_that_has_to_move_is_moved_once():
    """After ``model.to(...)`` the residual follows; only then is a whole tensor copied."""
    spec, state = TensorSpec(SHAPE, "float32"), ParameterState("weight")
    with FakeTensorMode():
        state.residual = torch.empty(spec.numel)
        g = gradient(torch.float32, "meta")
        with NoSynchronisation(), pytest.raises(SynchronisesError, match=f"of {spec.numel} elements to meta"):
            _encode(TopK(0.01), g, spec, "weight", state)
        with NoSynchronisation(limit=spec.numel):
            _encode(TopK(0.01), g, spec, "weight", state)
        with NoSynchronisation():
            _encode(TopK(0.01), g, spec, "weight", state)


# --- Negative controls: the witnesses do see what they should ------------------------------

X = torch.arange(12.0)

WAITING = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "nonzero": lambda x: x.nonzero(),
    "where of one argument": lambda x: torch.where(x > 3),
    "masked_select": lambda x: x.masked_select(x > 3),
    "mask": lambda x: x[x > 3],
    "assignment by mask": lambda x: x.clone().index_put_((x > 3,), torch.ones(8)),
    "byte mask": lambda x: torch.ops.aten.index(x, [(x > 3).to(torch.uint8)]),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "equal": lambda x: torch.equal(x, x),
    "is_nonzero": lambda x: torch.is_nonzero(x[1]),
    "repeat_interleave": lambda x: torch.repeat_interleave(torch.ones(12, dtype=torch.int64)),
    "to": lambda x: x.to("meta"),
    "copy_": lambda x: torch.empty(12, device="meta").copy_(x),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", WAITING)
def test_the_mode_sees_what_waits(name):
    with NoSynchronisation(limit=11), pytest.raises(SynchronisesError):
        WAITING[name](X)


# Fake tensors know nothing of devices, and not that an assignment by mask counts its bits first.
UNSEEN = {"to", "copy_", "assignment by mask", "byte mask"}
# On CPU tensors these are no operations at all, so that only fake tensors can witness them.
UNDISPATCHED = {"tolist": lambda x: x.tolist(), "numpy": lambda x: x.numpy()}


@pytest.mark.parametrize("call", [WAITING[name] for name in sorted(set(WAITING) - UNSEEN)] + [*UNDISPATCHED.values()])
def test_fake_tensors_see_what_waits(call):
    with FakeTensorMode() as fake, pytest.raises(RuntimeError, match=r"aten|numpy"):
        call(fake.from_tensor(X))


def test_the_mode_lets_a_payload_pass():
    with NoSynchronisation(limit=12):
        X.to("meta")
        X.to(torch.float64)
        X[torch.tensor([1, 2])]
        X.index_select(0, torch.tensor([1, 2]))
