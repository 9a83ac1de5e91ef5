"""Ranks that are threads, driven as the adapters drive them, and what they should arrive at."""

import numpy as np
import torch

from hvd_compress import Step, TensorSpec, TopK
from hvd_compress.adapters.torch.encoding import encode as _encode
from hvd_compress.codec import encode_step, give_back
from hvd_compress.exchange import Exchange, Item
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.torch import TorchOps
from hvd_compress.state import ParameterState
from hvd_compress.telemetry import Telemetry
from hvd_compress.transport.base import Transport

NUMPY, TORCH = NumpyOps(), TorchOps()
SHAPES = {"conv": (8, 3, 2, 2), "fc": (5, 7), "head": (2, 50)}


class Spy(Transport):
    """Count what goes over another transport, and spoil it.

    ``spoil(message, call)`` returns what is sent instead in the call of that number, from 0;
    ``corrupt(rows, call)`` what is received instead.
    """

    name = "spy"

    def __init__(self, inner, spoil=None, corrupt=None):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.spoil, self.corrupt = spoil, corrupt
        self.bytes, self.calls = 0, 0

    def allgather(self, message, what):
        self.bytes += message.nbytes
        self.calls += 1
        if self.spoil is not None:
            message = self.spoil(message.copy(), self.calls - 1)
        rows = self.inner.allgather(message, what)
        return rows if self.corrupt is None else self.corrupt(rows.copy(), self.calls - 1)

    def allgather_any(self, data, what):
        self.bytes += len(data)
        return self.inner.allgather_any(data, what)

    def abort(self, message):
        self.inner.abort(message)


class Rank:
    """One rank's exchange, compressor and residuals; ``reports`` are the calls of ``on_nonfinite``."""

    def __init__(self, transport, compressor=None, *, ops=NUMPY, dtype="float32", settings=None, **options):
        self.spy = Spy(transport, options.pop("spoil", None), options.pop("corrupt", None))
        self.compressor = compressor or TopK(0.1)
        self.ops, self.dtype = ops, dtype
        self.telemetry = Telemetry()
        self.states, self.reports, self.connections = {}, [], 0
        report = options.pop("on_nonfinite", self.reports.append)
        settings = settings or self.compressor.settings()
        self.exchange = Exchange(self._connect, ops, settings, self.telemetry, report, **options)

    def _connect(self):
        self.connections += 1
        return self.spy

    def residuals(self):
        """Return copies by name."""
        return {name: np.array(state.residual.tolist()) for name, state in self.states.items()}

    def submit(self, name, gradient):
        """Compress a float64 gradient and queue it, as the adapters do."""
        spec = TensorSpec(gradient.shape, self.dtype)
        state = self.states.setdefault(name, ParameterState(name))
        if self.ops is TORCH:
            item = _encode(
                self.compressor, torch.from_numpy(gradient).to(getattr(torch, self.dtype)), spec, name, state
            )
        else:
            item = self._encode(name, gradient.astype(self.dtype), spec, state)
        self.exchange.submit(item)
        self.telemetry.count(name, sum(section.nbytes for section in item.sections), gradient.size * spec_size(spec))

    def _encode(self, name, gradient, spec, state):
        compressor = self.compressor
        payload, new = encode_step(compressor, gradient, spec, NUMPY, Step(name, state.steps, memory=state.memory()))
        state.store(new)

        def restore():
            if payload.finite:
                state.store(give_back(compressor, state.memory(), payload, spec, NUMPY))

        sections = compressor.sections(spec)
        return Item(name, spec.shape, spec.dtype, sections, payload.arrays, payload.finite, restore)

    def collect(self, name, shape):
        """Return the sum of all ranks as a NumPy array."""
        spec = TensorSpec(shape, self.dtype)
        gathered = self.exchange.collect(name)
        assert gathered.ranks == self.spy.size
        return np.asarray(self.compressor.combine(gathered.arrays, spec, self.ops))

    def step(self, gradients, order=None):
        """Submit in ``order``, collect in the opposite one; return the sums by name."""
        names = order or sorted(gradients)
        for name in names:
            self.submit(name, gradients[name])
        return {name: self.collect(name, gradients[name].shape) for name in reversed(names)}


def spec_size(spec):
    return torch.empty(0, dtype=getattr(torch, spec.dtype)).element_size()


def gradients_of(rank, step, names=SHAPES):
    rng = np.random.default_rng([rank, step])
    return {name: rng.integers(-1000, 1001, SHAPES[name]).astype(np.float64) for name in names}


def attempt(call):
    """Return what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


class Simulation:
    """All ranks in one, in float64, by sorting."""

    def __init__(self, size, ratio=0.1):
        self.size, self.ratio, self.residuals = size, ratio, {}

    def step(self, gradients):
        return {name: self._one(name, [g[name].ravel() for g in gradients]) for name in gradients[0]}

    def _one(self, name, gradients):
        total = np.zeros(gradients[0].size)
        for rank, gradient in enumerate(gradients):
            a = self.residuals.get((rank, name), 0) + gradient
            k = max(1, round(np.ceil(self.ratio * a.size - 1e-9)))
            kept = np.argsort(-np.abs(a), kind="stable")[:k]
            total[kept] += a[kept]
            a[kept] = 0
            self.residuals[rank, name] = a
        return total
