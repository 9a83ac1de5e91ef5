"""Every compressor, with every kind of setting, keeps to the contracts of ``hvd_compress.testing``."""

import numpy as np
import pytest
from group import NUMPY, TORCH, Group
from methods import ALL, CLOSE, EXACT, name

import hvd_compress as h
from hvd_compress import compressors
from hvd_compress.testing import check_compressor

GRADIENTS = np.random.default_rng(0).standard_normal((3, 2, 40, 50)).astype(np.float32)


@pytest.mark.parametrize("compressor", ALL, ids=name)
def test_contracts(compressor):
    check_compressor(compressor)


def test_the_schedule_may_be_a_function():
    check_compressor(h.TopK(lambda number: 0.1 / (1 + number)))


def test_all_compressors_are_in_the_table():
    assert {type(c) for c in ALL} == {*compressors.ALL.values(), h.Switch}


def results(compressor, ops):
    """Return what two ranks decode and remember in three steps."""
    group = Group(compressor, GRADIENTS.shape[2:], "float32", ops, size=2)
    decoded = [group.step(gradients) for gradients in GRADIENTS]
    return [*decoded, *(group.kept(slot, rank) for rank in (0, 1) for slot in slots_of_full_size(group))]


def slots_of_full_size(group):
    return [slot for slot, x in sorted(group.memory[0].items()) if np.prod(x.shape) == group.spec.numel]


def able(compressor):
    """Tell whether NumPy, which has no bfloat16, can do it."""
    return "bfloat16" not in repr(compressor) and "BF16" not in repr(compressor)


@pytest.mark.parametrize("compressor", list(filter(able, EXACT)), ids=name)
def test_numpy_and_torch_agree_in_every_bit(compressor):
    for a, b in zip(results(compressor, NUMPY), results(compressor, TORCH), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("compressor", EXACT, ids=name)
def test_torch_and_tensorflow_agree_in_every_bit(compressor):
    pytest.importorskip("tensorflow")
    from hvd_compress.ops.tensorflow import TensorFlowOps

    for a, b in zip(results(compressor, TORCH), results(compressor, TensorFlowOps()), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("compressor", CLOSE, ids=name)
def test_all_frameworks_agree_up_to_the_order_of_sums(compressor):
    pytest.importorskip("tensorflow")
    from hvd_compress.ops.tensorflow import TensorFlowOps

    for ops in (TORCH, TensorFlowOps()):
        for a, b in zip(results(compressor, NUMPY), results(compressor, ops), strict=True):
            # Libraries decompose with errors of their own.
            tolerance = 1e-3 if "atomo" in repr(compressor) else 1e-5
            np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * np.abs(a).max())
