"""The reference implementation of :class:`~hvd_compress.ops.base.Ops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_compress.errors import UnsupportedError
from hvd_compress.ops.hashing import hash32


class NumpyOps:
    """Operations on NumPy arrays of float16, float32 and float64."""

    name = "numpy"

    def dtype(self, x: np.ndarray) -> str:
        """Return the dtype's name."""
        return x.dtype.name

    def shape(self, x: np.ndarray) -> tuple[int, ...]:
        """Return the shape."""
        return x.shape

    def flatten(self, x: np.ndarray) -> np.ndarray:
        """Return all elements in row-major order."""
        return x.reshape(-1)

    def reshape(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return ``x`` in another shape."""
        return x.reshape(shape)

    def astype(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """Convert where necessary."""
        _check(dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(x.astype(dtype, copy=False))

    def astype_finite(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """Convert; finite values beyond the range become its ends."""
        _check(dtype)
        if x.dtype.name == dtype:
            return x
        largest = np.finfo(dtype).max
        clipped = np.where(np.isfinite(x), np.clip(x, -largest, largest), x)
        return np.asarray(clipped.astype(dtype))

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return ``a + b``."""
        with np.errstate(over="ignore", invalid="ignore"):
            total: np.ndarray = a + b
        return total

    def scale_(self, x: np.ndarray, factor: Any) -> np.ndarray:
        """Multiply in place."""
        with np.errstate(over="ignore", invalid="ignore"):
            x *= np.asarray(factor, dtype=x.dtype)
        return x

    def zeros(self, n: int, dtype: str, like: np.ndarray) -> np.ndarray:
        """Return ``n`` zeros."""
        return np.zeros(n, dtype)

    def where(self, condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Choose one of two arrays."""
        chosen: np.ndarray = a if condition else b
        return chosen

    def all_finite(self, x: np.ndarray) -> np.ndarray:
        """Tell whether all elements are finite."""
        return np.asarray(np.isfinite(x).all())

    def top_k(self, x: np.ndarray, k: int) -> np.ndarray:
        """Select exactly, in linear time for any data.

        A radix select on the bit pattern of ``abs(x)``, which orders like the magnitude
        and puts infinity and then NaN last.  ``np.partition`` is no substitute: it took
        13 s on 40 million mostly zero elements.
        """
        bits = _magnitude_bits(x)
        threshold, above = _kth_largest(bits, k)
        chosen = bits > threshold
        ties = np.flatnonzero(bits == threshold)
        chosen[ties[: k - above]] = True
        return np.flatnonzero(chosen).astype(np.int32)

    def above(self, x: np.ndarray, threshold: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Select by a threshold."""
        magnitudes = np.abs(x)
        chosen = np.flatnonzero(~(magnitudes <= threshold[0]))
        if not 1 <= len(chosen) <= capacity:
            chosen = self.top_k(x, 1 if not len(chosen) else capacity)
        indices, values = np.zeros(capacity, np.int32), np.zeros(capacity, x.dtype)
        indices[: len(chosen)], values[: len(chosen)] = chosen, x[chosen]
        return np.array([len(chosen)], np.int32), indices, values

    def take(self, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Return ``x[indices]``."""
        taken: np.ndarray = x[indices]
        return taken

    def scatter_add_(self, x: np.ndarray, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Add at distinct positions."""
        with np.errstate(over="ignore", invalid="ignore"):
            np.add.at(x, indices, values)
        return x

    def fold(
        self, function: Callable[..., np.ndarray], initial: np.ndarray, arrays: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Fold over the leading axis."""
        for row in zip(*arrays, strict=True):
            initial = function(initial, *row)
        return initial

    def to_host(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays; they are on the host already."""
        return [np.asarray(x) for x in arrays]

    def from_host(self, arrays: list[np.ndarray], dtypes: list[str], like: np.ndarray) -> list[np.ndarray]:
        """Return the arrays."""
        return arrays

    def shared(self, x: np.ndarray) -> np.ndarray | None:
        """Return None: this is what compiled loops are held against."""
        return None

    def move_like(self, x: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Return ``x``; there is one device."""
        return x

    def copy(self, x: np.ndarray) -> np.ndarray:
        """Return an independent copy."""
        return x.copy()

    def abs(self, x: np.ndarray) -> np.ndarray:
        """Return the magnitudes."""
        return np.asarray(np.abs(x))

    def floor(self, x: np.ndarray) -> np.ndarray:
        """Round down."""
        return np.asarray(np.floor(x))

    def sqrt(self, x: np.ndarray) -> np.ndarray:
        """Return the square roots."""
        return np.asarray(np.sqrt(x))

    def log(self, x: np.ndarray) -> np.ndarray:
        """Return the natural logarithms."""
        return np.asarray(np.log(x))

    def exp(self, x: np.ndarray) -> np.ndarray:
        """Return the exponentials."""
        return np.asarray(np.exp(x))

    def clip(self, x: np.ndarray, low: Any, high: Any) -> np.ndarray:
        """Limit to a range."""
        return np.asarray(np.clip(x, low, high))

    def select(self, condition: np.ndarray, a: np.ndarray, b: Any) -> np.ndarray:
        """Choose element by element."""
        return np.asarray(np.where(condition, a, np.asarray(b, a.dtype)))

    def sum(self, x: np.ndarray) -> np.ndarray:
        """Sum over the last axis."""
        return np.asarray(x.sum(axis=-1, keepdims=True))

    def max(self, x: np.ndarray) -> np.ndarray:
        """Maximum over the last axis."""
        return np.asarray(x.max(axis=-1, keepdims=True))

    def rows(self, x: np.ndarray, width: int) -> np.ndarray:
        """Return rows of ``width`` elements."""
        return np.pad(x, (0, -len(x) % width)).reshape(-1, width)

    def first(self, x: np.ndarray, count: int) -> np.ndarray:
        """Return the first elements."""
        return x[:count]

    def concat(self, arrays: Sequence[np.ndarray], axis: int = 0) -> np.ndarray:
        """Join arrays."""
        return np.concatenate(arrays, axis)

    def cumsum(self, x: np.ndarray) -> np.ndarray:
        """Sum up."""
        return np.asarray(np.cumsum(x, axis=-1))

    def argmax(self, x: np.ndarray) -> np.ndarray:
        """Return positions of maxima."""
        return np.asarray(x.argmax(axis=-1).astype(np.int32))

    def pick(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return one element of each row."""
        return np.asarray(np.take_along_axis(x, positions[:, None].astype(np.int64), axis=1)[:, 0])

    def take_rows(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return rows."""
        return np.asarray(x[positions])

    def clear_rows(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return a copy with zeros in some rows."""
        cleared = x.copy()
        cleared[positions] = 0
        return cleared

    def add_rows(self, x: np.ndarray, positions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Add to some rows."""
        x[positions] += rows
        return x

    def svd(self, a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the singular value decomposition."""
        u, s, vt = np.linalg.svd(a, full_matrices=False)
        return u, s, vt

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Multiply matrices."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(a @ b)

    def transpose(self, a: np.ndarray) -> np.ndarray:
        """Return the transpose."""
        return np.swapaxes(a, -1, -2)

    def pack(self, codes: np.ndarray, width: int) -> np.ndarray:
        """Pack codes into bytes."""
        if width == 8:
            return codes
        bits = (codes[:, None] >> np.arange(width, dtype=np.uint8)) & np.uint8(1)
        return np.packbits(bits, bitorder="little")

    def unpack(self, packed: np.ndarray, count: int, width: int) -> np.ndarray:
        """Return codes."""
        if width == 8:
            return packed
        bits = np.unpackbits(packed, count=count * width, bitorder="little").reshape(count, width)
        return np.packbits(bits, axis=1, bitorder="little")[:, 0]

    def uniform(self, n: int, keys: Any, like: np.ndarray) -> np.ndarray:
        """Return random numbers in [0, 1)."""
        hashed = hash32(np.arange(n, dtype=np.uint32), keys) >> np.uint32(8)
        return hashed.astype(np.float32) * np.float32(2**-24)

    def float_bits(self, x: np.ndarray) -> np.ndarray:
        """Return the bits as int64."""
        return x.view(np.uint32).astype(np.int64)

    def from_float_bits(self, bits: np.ndarray) -> np.ndarray:
        """Return the numbers that have these bits."""
        return bits.astype(np.uint32).view(np.float32)


def _check(dtype: str) -> None:
    if dtype == "bfloat16":
        raise UnsupportedError("NumPy has no bfloat16; use float32, or torch tensors")


def _magnitude_bits(x: np.ndarray) -> np.ndarray:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    sign = unsigned.type(1 << (8 * unsigned.itemsize - 1))
    bits: np.ndarray = np.ascontiguousarray(x).view(unsigned) & ~sign
    return bits


def _kth_largest(bits: np.ndarray, k: int) -> tuple[int, int]:
    """Return the k-th largest value, and how many are larger than it."""
    candidates, above, prefix = bits, 0, 0
    for shift in range(8 * bits.itemsize - 16, -1, -16):
        digits = (candidates >> bits.dtype.type(shift)).astype(np.uint16)
        from_top = np.bincount(digits, minlength=1 << 16)[::-1].cumsum()
        position = int(np.searchsorted(from_top, k - above))
        digit = (1 << 16) - 1 - position
        if position:
            above += int(from_top[position - 1])
        prefix |= digit << shift
        candidates = candidates[digits == digit]
    return bits.dtype.type(prefix), above
