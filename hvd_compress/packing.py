"""Arrays that are kept in 8 bits between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_compress.ops.base import LARGEST, Array, Ops

#: The dtype of slots that are kept so.
PACKED = "int8"
#: Elements that share a scale.
BUCKET = 256
_LEVELS = 127
_ZERO = 128


@dataclass(frozen=True)
class Packed:
    """Numbers as whole multiples, from -127 to 127, of the scale of their bucket.

    Rounding is stochastic: numbers far smaller than the largest of their bucket, which rounding to
    the nearest would turn into zero in every step, are right on average.

    To what handles states it looks like the array of float32 or float64 that it stands for.

    Attributes:
        codes: uint8, the multiples plus 128.
        scales: one for each bucket.
        keys: of the noise.
        ops: the operations of the framework that the arrays belong to.
    """

    codes: Array
    scales: Array
    keys: Any
    ops: Ops

    @classmethod
    def of(cls, x: Array, keys: Any, ops: Ops) -> Packed:
        """Pack a flat array of finite numbers."""
        count, dtype = ops.shape(x)[0], ops.dtype(x)
        rows = ops.rows(x, BUCKET)
        # Rounded up it could be the scale of what is infinite.
        scales = ops.clip(_short(ops.max(ops.abs(rows)) / float(_LEVELS)), 0.0, LARGEST[dtype] / _ZERO)
        exact = rows / ops.select(scales > 0, scales, 1.0)
        below = ops.floor(exact)
        noise = ops.rows(ops.astype(ops.uniform(count, keys, x), dtype), BUCKET)
        levels = below + ops.astype(noise < exact - below, dtype)
        codes = ops.astype(ops.clip(levels, -float(_LEVELS), float(_LEVELS)) + float(_ZERO), "uint8")
        return cls(ops.first(ops.flatten(codes), count), ops.flatten(scales), keys, ops)

    def unpack(self) -> Array:
        """Return the numbers."""
        ops, dtype = self.ops, self.ops.dtype(self.scales)
        rows = ops.rows(ops.astype(self.codes, dtype) - float(_ZERO), BUCKET)
        return ops.first(ops.flatten(rows * ops.reshape(self.scales, (-1, 1))), self.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        return self.ops.shape(self.codes)

    @property
    def dtype(self) -> str:
        """Of the array that it stands for."""
        return self.ops.dtype(self.scales)

    def clone(self) -> Array:
        """Return the numbers, which checkpoints hold."""
        return self.unpack()

    def __mul__(self, factor: float) -> Packed:
        """Return the multiple."""
        return Packed(self.codes, self.scales * factor, self.keys, self.ops)

    def clip(self, low: float, high: float) -> Packed:
        """Limit the numbers."""
        return Packed(self.codes, self.scales.clip(low / _ZERO, high / _ZERO), self.keys, self.ops)


def _short(x: Array) -> Array:
    """Drop the last seven bits, so that multiples by whole numbers below 128 are exact.

    What is packed again without having changed then stays what it is.
    """
    small = x / 256.0  # the product could overflow
    product = small * 129.0
    return (product - (product - small)) * 256.0


def unpacked(x: Any, dtype: str, ops: Ops) -> Array:
    """Return what is kept as an array of this dtype."""
    return ops.astype(x.unpack() if isinstance(x, Packed) else x, dtype)


def packed_like(x: Array, kept: Any, ops: Ops) -> Any:
    """Return an array as ``kept`` is kept."""
    return Packed.of(x, kept.keys, ops) if isinstance(kept, Packed) else ops.astype(x, ops.dtype(kept))


def kept_as(x: Array, dtype: str, keys: Any, ops: Ops) -> Any:
    """Return an array as it is kept in a slot of this dtype; what is beyond its range becomes its ends."""
    return Packed.of(x, keys, ops) if dtype == PACKED else ops.astype_finite(x, dtype)
