"""Compiled loops: when they are used, and that nothing depends on it but time."""

import importlib.util
import logging
import subprocess
import sys

import pytest
import torch

import hvd_compress as hc
from hvd_compress import kernels
from hvd_compress.codec import encode_step
from hvd_compress.errors import ConfigError
from hvd_compress.ops.torch import TorchOps

OPS = TorchOps()
needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="Numba is not installed")


@pytest.fixture(autouse=True)
def fresh():
    kernels._available.cache_clear()
    yield
    kernels._available.cache_clear()


def encode(gradient, memory, hints=None, compressor=None, in_place=True):
    spec = hc.TensorSpec(tuple(gradient.shape), "float32")
    step = hc.Step("w", 1, memory=memory, hints={} if hints is None else hints)
    return encode_step(compressor or hc.TopK(0.01), gradient, spec, OPS, step, in_place=in_place)


def test_a_wrong_switch_is_refused(monkeypatch):
    monkeypatch.setenv(kernels.SWITCH, "off")
    with pytest.raises(ConfigError, match="HVD_COMPRESS_KERNELS must be 0 or 1, got 'off'"):
        kernels.available()


@needs_numba
@pytest.mark.parametrize("setting", ["0", "1"])
def test_the_switch(monkeypatch, setting):
    started = []
    monkeypatch.setenv(kernels.SWITCH, setting)
    start = kernels.start
    monkeypatch.setattr(kernels, "start", lambda *args: started.append(1) or start(*args))
    encode(torch.randn(2000), {})
    assert len(started) == int(setting)


def test_without_numba_it_is_said_once(monkeypatch, caplog):
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "hvd_compress"):
        payloads = [encode(torch.arange(2000.0), {})[0] for _ in range(3)]
    assert [r.getMessage() for r in caplog.records] == [
        "compression on the CPU takes several times longer without Numba; pip install numba"
    ]
    assert payloads[0].arrays[0].tolist() == list(range(1980, 2000))


@needs_numba
@pytest.mark.parametrize("hint", [0, 1, 2**30, 2**31 - 1, int(torch.tensor(2.5).view(torch.int32))])
def test_a_wrong_hint_changes_nothing(hint):
    gradient, residual = torch.randn(10_000), torch.randn(10_000)
    expected, kept = encode(gradient, {"residual": residual.clone()})
    got, kept_too = encode(gradient, {"residual": residual.clone()}, {"top 100": hint})
    assert all(torch.equal(a, b) for a, b in zip(expected.arrays, got.arrays, strict=True))
    assert torch.equal(kept["residual"], kept_too["residual"])


@needs_numba
def test_what_is_remembered_is_changed_only_in_place():
    gradient, residual = torch.randn(10_000), torch.randn(10_000)
    before, after = residual.clone(), encode(gradient, {"residual": residual}, in_place=False)[1]["residual"]
    assert torch.equal(residual, before) and after is not residual
    assert encode(gradient, {"residual": residual})[1]["residual"] is residual
    assert torch.equal(residual, after)


@needs_numba
@pytest.mark.parametrize("compressor", [hc.TopK(0.01), hc.DGC(0.01), hc.Int8(feedback=hc.ErrorFeedback())], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_leaves_everything_as_it_was(compressor, bad):
    hints = {}
    _, memory = encode(torch.randn(5000), {}, hints, compressor)
    before = {name: x.clone() for name, x in memory.items()}
    gradient = torch.randn(5000)
    gradient[4321] = bad
    payload, new = encode(gradient, memory, hints, compressor)
    assert not bool(payload.finite)
    assert all(torch.equal(new[name], x) for name, x in before.items())


@needs_numba
def test_momentum_that_is_about_to_overflow_takes_the_generic_way():
    hints, compressor = {}, hc.DGC(0.01)
    memory = {"residual": torch.full((5000,), 3e38), "momentum": torch.full((5000,), 3e38)}
    payload, new = encode(torch.randn(5000), memory, hints, compressor)
    assert not bool(payload.finite)
    assert torch.equal(new["residual"], torch.full((5000,), 3e38))


@needs_numba
def test_strided_gradients():
    gradient = torch.randn(100, 70)
    expected, _ = encode(gradient.T.contiguous(), {})
    got, _ = encode(gradient.T, {})
    assert all(torch.equal(a, b) for a, b in zip(expected.arrays, got.arrays, strict=True))


@needs_numba
def test_compiling_beforehand():
    finished = subprocess.run(
        [sys.executable, "-m", "hvd_compress.kernels"], capture_output=True, text=True, check=True
    )
    assert finished.stdout.startswith("compiled in ")
