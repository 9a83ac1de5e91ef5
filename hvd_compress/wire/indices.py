"""Elias-Fano coding of index sets, in a size that depends on ``n`` and ``k`` alone."""

from __future__ import annotations

import numpy as np

from hvd_compress.errors import WireFormatError
from hvd_compress.wire import bits


def _low_width(n: int, k: int) -> int:
    return (n // k).bit_length() - 1


def _high_length(n: int, k: int) -> int:
    return k + ((n - 1) >> _low_width(n, k))


def index_bytes(n: int, k: int) -> int:
    """Return the bytes that ``k`` of ``n`` positions take (``1 <= k <= n``)."""
    return bits.bits_to_bytes(k * _low_width(n, k)) + bits.bits_to_bytes(_high_length(n, k))


def encode_indices(indices: np.ndarray, n: int) -> np.ndarray:
    """Encode ascending distinct int32 positions below ``n`` into uint8."""
    k = len(indices)
    width = _low_width(n, k)
    positions = indices.astype(np.int64)
    low = (positions & ((1 << width) - 1)).astype(np.uint32)
    flags = np.zeros(_high_length(n, k), np.uint8)
    flags[(positions >> width) + np.arange(k)] = 1
    return np.concatenate([bits.pack(low, width), np.packbits(flags, bitorder="little")])


def decode_indices(rows: np.ndarray, n: int, k: int) -> np.ndarray:
    """Decode one index set from every row of uint8 ``rows``.

    Returns int32 of shape ``(len(rows), k)``, ascending in every row.

    Raises:
        WireFormatError: wrong number of positions, a position out of range or out of
            order, or padding that is not zero.
    """
    width = _low_width(n, k)
    low_bytes = bits.bits_to_bytes(k * width)
    low = bits.unpack(rows[:, :low_bytes], k, width)
    flags = np.unpackbits(rows[:, low_bytes:], axis=1, bitorder="little")
    length = _high_length(n, k)
    if flags[:, length:].any():
        raise WireFormatError("expected zero padding after the high bits of an index set, got a bit that is set")
    counts = flags.sum(axis=1, dtype=np.int64)
    if (counts != k).any():
        row = int(np.flatnonzero(counts != k)[0])
        raise WireFormatError(f"expected {k} positions in the index set of rank {row}, got {counts[row]}")
    high = np.nonzero(flags)[1].reshape(len(rows), k) - np.arange(k)
    positions = (high << width) | low.astype(np.int64)
    largest = positions.max(axis=1)
    if (largest >= n).any():
        row = int(np.flatnonzero(largest >= n)[0])
        raise WireFormatError(f"expected positions below {n} in the index set of rank {row}, got {largest[row]}")
    if (np.diff(positions, axis=1) <= 0).any():
        raise WireFormatError("expected ascending positions in an index set, got one that does not ascend")
    return positions.astype(np.int32)
