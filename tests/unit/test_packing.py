"""Arrays that are kept in 8 bits."""

import numpy as np
import pytest
import torch

from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.torch import TorchOps
from hvd_compress.packing import BUCKET, Packed

NUMPY, TORCH = NumpyOps(), TorchOps()


def drawn(count, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * np.exp(2 * rng.standard_normal(count))).astype(np.float32)


@pytest.mark.parametrize("count", [1, BUCKET - 1, BUCKET, 3 * BUCKET + 7])
def test_every_number_is_next_to_the_one_it_stands_for(count):
    x = drawn(count)
    packed = Packed.of(x, (1, 2), NUMPY)
    assert packed.shape == (count,) and packed.codes.dtype == np.uint8
    steps = np.repeat(packed.scales, BUCKET)[:count]
    assert (np.abs(packed.unpack().astype(np.float64) - x) <= steps * (1 + 1e-4)).all()
    buckets = np.array([np.abs(x[i : i + BUCKET]).max() for i in range(0, count, BUCKET)])
    np.testing.assert_allclose(packed.scales, buckets / 127, rtol=1e-4)


def test_rounding_is_right_on_average():
    """Numbers a thousand times smaller than the largest of their bucket are not lost."""
    x = np.full(BUCKET, 1e-3, np.float32)
    x[0] = 1.0
    mean = np.mean([Packed.of(x, (number, 7), NUMPY).unpack() for number in range(4000)], axis=0)
    assert abs(mean[1:].mean() - 1e-3) < 3e-5
    assert mean[0] == pytest.approx(1.0, rel=1e-4)


def test_what_has_not_changed_stays_what_it_is():
    packed = Packed.of(drawn(5000), (1, 2), NUMPY)
    for number in range(50):
        again = Packed.of(packed.unpack(), (number, 3), NUMPY)
        np.testing.assert_array_equal(again.codes, packed.codes)
        np.testing.assert_array_equal(again.scales, packed.scales)


def test_frameworks_keep_the_same():
    x = drawn(1000)
    ours, theirs = Packed.of(x, (5, 6), NUMPY), Packed.of(torch.from_numpy(x), (5, 6), TORCH)
    np.testing.assert_array_equal(ours.codes, theirs.codes.numpy())
    np.testing.assert_array_equal(ours.unpack(), theirs.unpack().numpy())


def test_zeros_and_extremes():
    assert not Packed.of(np.zeros(300, np.float32), (1, 2), NUMPY).unpack().any()
    largest = np.finfo(np.float32).max
    for x in ([largest, -largest, 0.0], [1e-44, -3e-45, 0.0]):
        unpacked = Packed.of(np.array(x, np.float32), (1, 2), NUMPY).unpack()
        assert np.isfinite(unpacked).all() and unpacked[2] == 0
    scaled = Packed.of(np.array([1e38, 0.0], np.float32), (1, 2), NUMPY) * 100.0
    assert np.isfinite(scaled.clip(-largest, largest).unpack()).all()
