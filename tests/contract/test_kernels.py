"""Compiled loops have the results of the generic operations, bit for bit."""

import importlib.util

import numpy as np
import pytest
import torch

import hvd_compress as hc
from hvd_compress import kernels
from hvd_compress.codec import encode_step
from hvd_compress.feedback import MomentumCorrection
from hvd_compress.ops.torch import TorchOps

OPS = TorchOps()

if importlib.util.find_spec("numba") is None:
    pytest.skip("Numba is not installed", allow_module_level=True)


def normal(rng, n):
    return rng.standard_normal(n)


DATA = {
    "normal": normal,
    "heavy tails": lambda rng, n: rng.standard_t(1.2, n),
    "constant": lambda rng, n: np.full(n, -0.25),
    "zeros of both signs": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "mostly zero": lambda rng, n: np.where(rng.random(n) < 0.999, 0.0, normal(rng, n)),
    "few values": lambda rng, n: rng.integers(-2, 3, n) / 4,
    "ascending": lambda rng, n: np.linspace(-1, 1, n),
    "one block holds all": lambda rng, n: np.where(np.arange(n) < n // 50, 1e3, 1.0) * normal(rng, n),
    "denormal": lambda rng, n: normal(rng, n) * 1e-42,
    "tiny": lambda rng, n: normal(rng, n) * 1e-33,
    "huge": lambda rng, n: normal(rng, n) * 1e36,
}
COMPRESSORS = {
    "TopK": hc.TopK(0.01),
    "TopK of one": hc.TopK(1e-9),
    "TopK of half": hc.TopK(0.5),
    "TopK of all": hc.TopK(1.0),
    "TopK without feedback": hc.TopK(0.01, feedback=None),
    "TopK with decay": hc.TopK(0.01, feedback=hc.ErrorFeedback(decay=0.9)),
    "TopK in bfloat16": hc.TopK(0.01, feedback=hc.ErrorFeedback(dtype="bfloat16")),
    "TopK in 8 bits": hc.TopK(0.01, feedback=hc.ErrorFeedback(dtype="int8")),
    "TopK of Int8": hc.TopK(0.01, values=hc.Int8(64)),
    "DGC": hc.DGC(0.01),
    "DGC with Nesterov": hc.DGC(0.01, nesterov=True),
    "DGC without masking": hc.DGC(0.01, masking=False),
    "Int8": hc.Int8(),
    "Int8 with feedback": hc.Int8(feedback=hc.ErrorFeedback()),
    "Int8 with momentum": hc.Int8(feedback=MomentumCorrection()),
    "QSGD 4": hc.QSGD(4, feedback=hc.ErrorFeedback()),
    "QSGD 3": hc.QSGD(3, bucket=37, feedback=hc.ErrorFeedback(0.5)),
    "QSGD 2": hc.QSGD(2, bucket=513),
    "QSGD 5, one bucket": hc.QSGD(5, bucket=1 << 20, feedback=hc.ErrorFeedback()),
    "TernGrad": hc.TernGrad(None, feedback=hc.ErrorFeedback()),
}


def bits(x):
    if not isinstance(x, torch.Tensor):  # int8 residuals
        return [bits(x.codes), bits(x.scales)]
    return x.contiguous().view(torch.uint8).tolist()


def train(compressor, gradients, spec, monkeypatch, fused):
    monkeypatch.setenv(kernels.SWITCH, str(int(fused)))
    memory, hints, results = {}, {}, []
    for number, gradient in enumerate(gradients):
        exact = {name: x.unpack() if hasattr(x, "unpack") else x.to(hc_dtype(spec)) for name, x in memory.items()}
        step = hc.Step("w", number, 1, 4, exact, hints=hints)
        payload, new = encode_step(compressor, gradient, spec, OPS, step, in_place=True)
        memory.update(new)
        results.append(
            ([bits(x) for x in payload.arrays], bool(payload.finite), {k: bits(x) for k, x in memory.items()})
        )
    return results, hints


def hc_dtype(spec):
    return getattr(torch, spec.accumulator)


@pytest.fixture
def used(monkeypatch):
    """Count how often compiled loops were used."""
    calls, start = [], kernels.start

    def counted(*args):
        work = start(*args)
        calls.append(work is not None)
        return work

    monkeypatch.setattr(kernels, "start", counted)
    return calls


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_same_bits(name, data, dtype, monkeypatch, used):
    compressor, rng = COMPRESSORS[name], np.random.default_rng(7)
    n = 5003
    spec = hc.TensorSpec((n,), dtype)
    gradients = [torch.tensor(DATA[data](rng, n)).to(getattr(torch, dtype)) for _ in range(4)]
    expected, _ = train(compressor, [g.clone() for g in gradients], spec, monkeypatch, False)
    assert not used
    got, _ = train(compressor, gradients, spec, monkeypatch, True)
    finite = all(bool(g.isfinite().all()) for g in gradients)
    assert len(used) == 4 and (all(used) or data == "huge"), (used, finite)
    assert got == expected


SIGNS = {
    "EFSign": hc.EFSign(),
    "EFSign in buckets": hc.EFSign(bucket=100),
    "OneBit": hc.OneBit(),
    "OneBit in odd buckets": hc.OneBit(bucket=37),
    "OneBit with momentum": hc.OneBit(feedback=MomentumCorrection()),
    "EFSign with decay": hc.EFSign(feedback=hc.ErrorFeedback(0.5)),
    "OneBit without feedback": hc.OneBit(feedback=None),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("data", ["normal", "heavy tails", "constant", "zeros of both signs", "few values", "tiny"])
@pytest.mark.parametrize("name", SIGNS)
def test_same_signs(name, data, dtype, monkeypatch, used):
    """Bits are the same; means are sums, whose order differs."""
    compressor, rng, n = SIGNS[name], np.random.default_rng(7), 5003
    spec = hc.TensorSpec((n,), dtype)
    memory = {}
    for number in range(3):
        gradient = torch.tensor(DATA[data](rng, n)).to(getattr(torch, dtype))
        results = []
        for fused in "01":
            monkeypatch.setenv(kernels.SWITCH, fused)
            step = hc.Step("w", number, 1, 4, memory)
            results.append(encode_step(compressor, gradient, spec, OPS, step))
        (expected, kept), (got, kept_too) = results
        assert len(used) == number + 1 and all(used)
        assert torch.equal(expected.arrays[0], got.arrays[0])
        for mean, other in zip(expected.arrays[1:], got.arrays[1:], strict=True):
            assert mean.dtype == other.dtype
            torch.testing.assert_close(mean, other, rtol=2e-6, atol=0)
        assert kept.keys() == kept_too.keys()
        for slot, x in kept.items():
            # What is kept may be all that rounding leaves of a difference.
            largest = max(float(y.abs().max()) for y in (x, *expected.arrays[1:]))
            torch.testing.assert_close(x, kept_too[slot], rtol=1e-5, atol=1e-5 * largest)
        memory = kept
