"""Quantisation to evenly spaced levels, with stochastic rounding.

D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: communication-efficient SGD via
gradient quantization and encoding", NIPS 2017; W. Wen et al., "TernGrad: ternary gradients to
reduce communication in distributed deep learning", NIPS 2017.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hvd_compress.base import Compressor
from hvd_compress.ops.base import Array, Ops
from hvd_compress.settings import is_number, is_whole
from hvd_compress.step import FIRST, RESIDUAL, Payload, Step, TensorSpec
from hvd_compress.wire import ArraySection, Section

if TYPE_CHECKING:
    from hvd_compress.kernels.work import Work

NORMS = ("max", "l2")
# What is smaller is sent as zero: the reciprocal would overflow.
_SMALLEST = 2.0**-100


@dataclass(frozen=True, eq=False)
class Levels(Compressor):
    """Base of the quantisers to ``2 * s + 1`` levels from ``-norm`` to ``norm``, ``s = 2**(bits-1) - 1``.

    Rounding is stochastic, so the result is unbiased; the noise is independent on ranks and
    averages out.  A code takes exactly ``bits`` bits.  A bucket of zeros stays zero.
    """

    @abc.abstractmethod
    def _width(self) -> int:
        """Return the bits of a code."""

    @abc.abstractmethod
    def _bucket(self, spec: TensorSpec) -> int:
        """Return how many elements share a norm."""

    def _norm(self, rows: Array, ops: Ops) -> Array:
        """Return what the levels are multiples of, ``s`` being one."""
        return ops.max(ops.abs(rows))

    def _prepared(self, x: Array, ops: Ops) -> Array:
        return x

    @property
    def unbiased(self) -> bool:
        """As the papers prove."""
        return True

    def _variance(self, spec: TensorSpec) -> float:
        """Return a bound of ``E ||C(x) - x||^2 / ||x||^2``.

        An element of ``a < 1`` levels has the variance ``a (1 - a)``, larger ones have no more.
        In a bucket of ``d`` one has ``s`` levels and no variance, and the worst is that all
        others have equal ``a``; what is left is to find the worst ``a``.
        """
        levels = (1 << (self._width() - 1)) - 1
        return (math.sqrt(1 + (self._bucket(spec) - 1) / levels**2) - 1) / 2

    def delta(self, spec: TensorSpec) -> float:
        """In expectation; 0 where the variance may exceed the tensor."""
        return max(0.0, 1 - self._variance(spec))

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Packed codes, then norms."""
        buckets = -(-spec.numel // self._bucket(spec))
        packed = (spec.numel * self._width() + 7) // 8
        return ArraySection("uint8", packed), ArraySection(spec.accumulator, buckets)

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Round to levels."""
        n, width, bucket = spec.numel, self._width(), self._bucket(spec)
        levels = (1 << (width - 1)) - 1
        rows = ops.rows(self._prepared(x, ops), bucket)
        norms = self._norm(rows, ops)
        usable = norms > _SMALLEST
        # PyTorch divides a number by a tensor in these two steps, of which each is rounded, so all must.
        factors = ops.select(usable, (1.0 / ops.select(usable, norms, 1.0)) * levels, 0.0)
        noise = ops.rows(ops.uniform(n, step.keys(self.seed, "rounding"), x), bucket)
        magnitudes = ops.floor(ops.abs(rows) * factors + ops.astype(noise, spec.accumulator))
        magnitudes = ops.clip(magnitudes, 0.0, float(levels))
        signed = ops.select(rows < 0, -magnitudes, magnitudes)
        codes = ops.astype(ops.first(ops.flatten(signed + levels), n), "uint8")
        norms = ops.flatten(ops.select(usable, norms, 0.0 * norms))
        return Payload((ops.pack(codes, width), norms), ops.all_finite(norms))

    @property
    def fuses(self) -> bool:
        """Where the norm is the largest magnitude."""
        return True

    def encode_fused(self, work: Work, spec: TensorSpec, ops: Ops, step: Step) -> Payload:
        """Round while accumulating."""
        keys = step.keys(self.seed, "rounding")
        found = work.quantise(self._bucket(spec), self._width(), _SMALLEST, keys)
        packed, norms = ops.from_host(list(found), ["uint8", spec.accumulator], step.memory[RESIDUAL])
        return Payload((packed, norms), ops.all_finite(norms))

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return the levels."""
        packed, norms = arrays
        n, width, bucket = spec.numel, self._width(), self._bucket(spec)
        levels = (1 << (width - 1)) - 1
        codes = ops.astype(ops.unpack(packed, n, width), spec.accumulator)
        rows = ops.rows(codes - levels, bucket) * (ops.reshape(norms, (-1, 1)) * (1 / levels))
        return ops.first(ops.flatten(rows), n)


@dataclass(frozen=True, eq=False)
class QSGD(Levels):
    """Send each element in ``bits`` bits, rounded stochastically to levels of its bucket's norm.

    Unbiased.  With ``norm="max"`` an element is off by less than one level; with ``"l2"``, the
    paper's, most elements become zero and the variance is at most
    ``min(d / s^2, sqrt(d) / s) ||x||^2`` for buckets of ``d`` elements and ``s`` levels.

    Args:
        bits: of a code, 2 to 8, the sign included.
        bucket: elements that share a norm.
        norm: ``"max"`` or ``"l2"``.
        feedback: None by default, since rounding is unbiased.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    bits: int = 4
    bucket: int = field(default=512, kw_only=True)
    norm: str = field(default="max", kw_only=True)

    def __post_init__(self) -> None:
        whole = is_whole(self.bits, 2, 8)
        self._require(whole, "bits", "a whole number from 2 to 8")
        _require_bucket(self, self.bucket)
        self._require(self.norm in NORMS, "norm", f"one of {', '.join(map(repr, NORMS))}")
        super().__post_init__()

    @property
    def fuses(self) -> bool:
        """Unless the norm is a sum, whose order would differ."""
        return self.norm == "max"

    def _width(self) -> int:
        return self.bits

    def _bucket(self, spec: TensorSpec) -> int:
        return min(self.bucket, max(spec.numel, 1))

    def _variance(self, spec: TensorSpec) -> float:
        if self.norm == "max":
            return super()._variance(spec)
        size, levels = self._bucket(spec), (1 << (self.bits - 1)) - 1
        return min(size / levels**2, math.sqrt(size) / levels)

    def _norm(self, rows: Array, ops: Ops) -> Array:
        largest = super()._norm(rows, ops)
        if self.norm == "max":
            return largest
        # Squares of large elements would overflow.
        scaled = rows / ops.select(largest > _SMALLEST, largest, 1.0)
        return ops.sqrt(ops.sum(scaled * scaled)) * largest


@dataclass(frozen=True, eq=False)
class Int8(Levels):
    """Send each element in 8 bits: 127 levels to either side of zero, of its bucket's largest magnitude.

    Unbiased: rounding is stochastic.

    Args:
        bucket: elements that share a scale.
        feedback: None by default.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    bucket: int = 512

    def __post_init__(self) -> None:
        _require_bucket(self, self.bucket)
        super().__post_init__()

    def _width(self) -> int:
        return 8

    def _bucket(self, spec: TensorSpec) -> int:
        return min(self.bucket, max(spec.numel, 1))


@dataclass(frozen=True, eq=False)
class TernGrad(Levels):
    """Send each element as -1, 0 or 1 times the tensor's largest magnitude, in 2 bits.

    Elements are limited to ``clip`` standard deviations from zero first, which costs a little
    bias and saves much variance; rounding is stochastic.

    Args:
        clip: in standard deviations; None does not limit, and is unbiased.
        feedback: None by default.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    clip: float | None = 2.5

    def __post_init__(self) -> None:
        number = is_number(self.clip)
        valid = self.clip is None or (number and math.isfinite(self.clip) and self.clip > 0)
        self._require(valid, "clip", "a positive number or None")
        super().__post_init__()

    @property
    def unbiased(self) -> bool:
        """Unless elements are limited."""
        return self.clip is None

    @property
    def fuses(self) -> bool:
        """Unless elements are limited, by a sum whose order would differ."""
        return self.clip is None

    def delta(self, spec: TensorSpec) -> float:
        """Nothing is proven of limited elements."""
        return super().delta(spec) if self.clip is None else 0.0

    def _width(self) -> int:
        return 2

    def _bucket(self, spec: TensorSpec) -> int:
        return max(spec.numel, 1)

    def _prepared(self, x: Array, ops: Ops) -> Array:
        if self.clip is None:
            return x
        # Around zero, which gradients are around in the paper: of data far from it nothing would be left otherwise.
        largest = ops.max(ops.abs(x))
        # Squares of large elements would overflow, those of small ones vanish.
        scale = ops.select(largest > 0, largest, 1.0)
        scaled = x / scale
        limit = ops.sqrt(ops.sum(scaled * scaled) * (1 / ops.shape(x)[0])) * scale * self.clip
        return ops.clip(x, -limit, limit)


def _require_bucket(compressor: Compressor, bucket: int) -> None:
    whole = is_whole(bucket, 1)
    compressor._require(whole, "bucket", "a whole number, 1 or more")
