"""Smaller floating-point types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_compress.base import Collective, Compressor
from hvd_compress.ops.base import Array, Ops
from hvd_compress.step import EXACT, FIRST, Payload, Step, TensorSpec
from hvd_compress.wire import ArraySection, Section

_LARGEST_HALF = 65504.0


@dataclass(frozen=True, eq=False)
class NoCompression(Compressor):
    """Let every tensor travel as it is, through Horovod's own allreduce.

    For comparisons, for single parameters in a ``Policy``, and for the steps before
    compression starts.
    """

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """The elements."""
        return (ArraySection(spec.dtype, spec.numel),)

    @property
    def unbiased(self) -> bool:
        """Nothing is lost."""
        return True

    def delta(self, spec: TensorSpec) -> float:
        """Nothing is lost, but where the gradient's dtype is smaller than the accumulator's."""
        return EXACT[spec.dtype]

    def compresses(self, spec: TensorSpec) -> bool:
        """Nothing is compressed."""
        return False

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Return the tensor in its own dtype."""
        # A copy, since what is sent must not change with the gradient.
        values = ops.copy(x) if spec.dtype == spec.accumulator else ops.astype_finite(x, spec.dtype)
        return Payload((values,), ops.all_finite(values))

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return the tensor."""
        return ops.astype(arrays[0], spec.accumulator)


@dataclass(frozen=True, eq=False)
class FP16(Compressor):
    """Send half-precision numbers through Horovod's own allreduce.

    Unlike ``hvd.Compression.fp16`` it cannot overflow: each rank divides by the number of
    ranks (rounded up to a power of two, so that nothing is lost but range) before the sum, and
    limits what is still beyond the range.  Elements below about ``1e-7`` times the number of
    ranks become zero.

    Args:
        feedback: None by default; ``ErrorFeedback()`` keeps what rounding drops.
        min_numel: 0 by default: tensors of all sizes and dimensions are sent so.
        seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.
    """

    min_numel: int = field(default=0, kw_only=True)
    collective = Collective.ALLREDUCE

    def compresses(self, spec: TensorSpec) -> bool:
        """Everything but what is half precision already."""
        return spec.numel >= max(self.min_numel, 1) and spec.dtype != "float16"

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Two bytes an element."""
        return (ArraySection("float16", spec.numel),)

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Divide, and round to half precision."""
        divisor = float(1 << (step.size - 1).bit_length())
        values = ops.astype_finite(x / divisor, "float16")
        limit = _LARGEST_HALF / divisor
        finite = ops.all_finite(values)
        return Payload((ops.where(finite, ops.clip(values, -limit, limit), values),), finite, (divisor,))

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Multiply by what was divided by."""
        values, divisor = arrays
        return ops.astype(values, spec.accumulator) * divisor


@dataclass(frozen=True, eq=False)
class BF16(Compressor):
    """Send bfloat16 numbers: float32's range, 8 significant bits.

    Horovod has no such type and cannot add them up, so they are gathered and every rank adds
    them in float32, in rank order.  Traffic therefore grows with the number of ranks: on more
    than four, :class:`FP16` is less.

    Args:
        feedback: None by default; ``ErrorFeedback()`` keeps what rounding drops.
        min_numel: 0 by default: tensors of all sizes and dimensions are sent so.
        seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.
    """

    min_numel: int = field(default=0, kw_only=True)

    def compresses(self, spec: TensorSpec) -> bool:
        """Everything but float16, which would lose precision and save nothing."""
        return spec.numel >= max(self.min_numel, 1) and spec.dtype != "float16"

    def delta(self, spec: TensorSpec) -> float:
        """Rounding to 8 bits is off by one part in 256; nothing is proven beyond float32's range."""
        return EXACT["bfloat16"] if spec.accumulator == "float32" else 0.0

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Two bytes an element."""
        return (ArraySection("bfloat16", spec.numel),)

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Round to bfloat16."""
        values = ops.astype_finite(x, "bfloat16")
        return Payload((values,), ops.all_finite(x))

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return the numbers."""
        return ops.astype(arrays[0], spec.accumulator)
