"""Fixed-width integers packed into bits, lowest bit first."""

from __future__ import annotations

import numpy as np

from hvd_compress.errors import WireFormatError


def bits_to_bytes(count: int) -> int:
    """Return how many bytes hold ``count`` bits."""
    return (count + 7) // 8


def pack(values: np.ndarray, width: int) -> np.ndarray:
    """Pack uint32 ``values`` (shape ``(k,)``, each below ``2**width``) into uint8."""
    if width == 0:
        return np.empty(0, np.uint8)
    as_bytes = values.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4)
    bits = np.unpackbits(as_bytes, axis=1, bitorder="little")[:, :width]
    return np.packbits(bits, axis=None, bitorder="little")


def unpack(rows: np.ndarray, count: int, width: int) -> np.ndarray:
    """Read ``count`` values of ``width`` bits from every row of uint8 ``rows``.

    Returns uint32 of shape ``(len(rows), count)``.

    Raises:
        WireFormatError: a padding bit is set.
    """
    if width == 0:
        return np.zeros((len(rows), count), np.uint32)
    bits = np.unpackbits(rows, axis=1, bitorder="little")
    if bits[:, count * width :].any():
        raise WireFormatError("expected zero padding after the low bits of an index set, got a bit that is set")
    words = np.zeros((len(rows), count, 32), np.uint8)
    words[:, :, :width] = bits[:, : count * width].reshape(len(rows), count, width)
    return np.packbits(words, axis=2, bitorder="little").view("<u4")[:, :, 0]
