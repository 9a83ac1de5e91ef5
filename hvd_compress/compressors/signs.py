"""Signs, in one bit an element.

J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar, "signSGD: compressed optimisation
for non-convex problems", ICML 2018; S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error
feedback fixes SignSGD and other gradient compression schemes", ICML 2019; F. Seide, H. Fu,
J. Droppo, G. Li, D. Yu, "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014.

Everywhere here zero counts as positive, and a tensor of zeros stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hvd_compress.base import Compressor
from hvd_compress.feedback import ErrorFeedback, Feedback
from hvd_compress.ops.base import Array, Ops
from hvd_compress.settings import is_number, is_whole
from hvd_compress.step import FIRST, RESIDUAL, Payload, Slot, Step, TensorSpec
from hvd_compress.wire import ArraySection, Section

if TYPE_CHECKING:
    from hvd_compress.kernels.work import Work


def _packed_signs(x: Array, ops: Ops) -> Array:
    return ops.pack(ops.astype(x >= 0, "uint8"), 1)


def _signs(packed: Array, spec: TensorSpec, ops: Ops) -> Array:
    """Return 1 and -1."""
    return ops.astype(ops.unpack(packed, spec.numel, 1), spec.accumulator) * 2.0 - 1.0


@dataclass(frozen=True, eq=False)
class SignSGD(Compressor):
    """Send signs; the result is the sign that most ranks have (*majority vote*), 0 where they are equally many.

    The result's magnitude is 1 everywhere, so the learning rate must be small, about 1e-4.

    Args:
        feedback: None, as in the paper; :class:`EFSign` is the variant with feedback.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.
    """

    additive = False

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Bits, and whether any element was not zero."""
        return ArraySection("uint8", (spec.numel + 7) // 8), ArraySection(spec.accumulator, 1)

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Take the signs."""
        largest = ops.max(ops.abs(x))
        votes = ops.select(largest > 0, 0.0 * largest + 1.0, 0.0 * largest)
        return Payload((_packed_signs(x, ops), votes), ops.all_finite(x))

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return this rank's votes."""
        packed, votes = arrays
        return _signs(packed, spec, ops) * votes

    def combine(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return the majority's sign, times the number of ranks, which the average is going to divide by."""
        total = super().combine(arrays, spec, ops)
        ones = ops.zeros(1, spec.accumulator, total)
        ranks = ops.fold(lambda count, *_: count + 1.0, ones, arrays)
        sign = ops.select(total > 0, 0.0 * total + 1.0, ops.select(total < 0, 0.0 * total - 1.0, 0.0 * total))
        return sign * ranks


@dataclass(frozen=True, eq=False)
class Signum(SignSGD):
    """:class:`SignSGD` of a moving average ``m = beta * m + (1 - beta) * g`` of the gradient.

    Args:
        beta: in [0, 1).
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: ``beta`` is out of range.
    """

    beta: float = 0.9

    def __post_init__(self) -> None:
        number = is_number(self.beta)
        self._require(number and 0 <= self.beta < 1, "beta", "a number in [0, 1)")
        super().__post_init__()

    def slots(self, spec: TensorSpec) -> Sequence[Slot]:
        """The moving average."""
        return (Slot("average", spec.numel, spec.accumulator),)

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Take the signs of the moving average."""
        average = step.memory["average"] * self.beta + x * (1 - self.beta)
        sent = super().encode(average, spec, ops, step)
        return Payload(sent.arrays, sent.finite, memory={"average": average})


@dataclass(frozen=True, eq=False)
class EFSign(Compressor):
    """Send signs and their mean magnitude, ``||a||_1 / n``, with error feedback.

    That scale is the best in least squares; the error is ``1 - ||a||_1^2 / (n ||a||_2^2)`` of
    ``||a||^2``, so it is a contraction.

    Args:
        bucket: elements that share a magnitude; None: all of a tensor.
        feedback: ``ErrorFeedback()`` by default, and needed.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    bucket: int | None = None
    feedback: Feedback | None = field(default=ErrorFeedback(), kw_only=True)

    def __post_init__(self) -> None:
        whole = is_whole(self.bucket, 1)
        self._require(self.bucket is None or whole, "bucket", "a whole number, 1 or more, or None")
        super().__post_init__()

    def _width(self, spec: TensorSpec) -> int:
        return max(spec.numel, 1) if self.bucket is None else min(self.bucket, max(spec.numel, 1))

    def delta(self, spec: TensorSpec) -> float:
        """One over the elements of a bucket: the worst is that one element is all there is."""
        return 1 / self._width(spec)

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Bits, then magnitudes."""
        buckets = -(-spec.numel // self._width(spec))
        return ArraySection("uint8", (spec.numel + 7) // 8), ArraySection(spec.accumulator, buckets)

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Take signs and mean magnitudes."""
        sums = ops.sum(ops.rows(ops.abs(x), self._width(spec)))
        means = ops.flatten(sums / _counts(x, self._width(spec), spec, ops))
        return Payload((_packed_signs(x, ops), means), ops.all_finite(means))

    @property
    def fuses(self) -> bool:
        """Always."""
        return True

    def encode_fused(self, work: Work, spec: TensorSpec, ops: Ops, step: Step) -> Payload:
        """Take signs and means while accumulating."""
        return self._fused(work, spec, ops, step, both=False)

    def _fused(self, work: Work, spec: TensorSpec, ops: Ops, step: Step, both: bool) -> Payload:
        arrays = work.signs(self._width(spec), both)[: 3 if both else 2]
        dtypes = ["uint8", spec.accumulator, spec.accumulator][: len(arrays)]
        found = ops.from_host(list(arrays), dtypes, step.memory[RESIDUAL])
        return Payload(tuple(found), ops.all_finite(found[1]))

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return signs times magnitudes."""
        packed, means = arrays
        rows = ops.rows(_signs(packed, spec, ops), self._width(spec)) * ops.reshape(means, (-1, 1))
        return ops.first(ops.flatten(rows), spec.numel)


@dataclass(frozen=True, eq=False)
class OneBit(EFSign):
    """Send one bit an element, and the means of the elements on either side of zero, with error feedback.

    Args:
        bucket: elements that share the two means; None: all of a tensor.
        feedback: ``ErrorFeedback()`` by default, and needed.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Bits, the means of what is not negative, and of what is."""
        bits, means = super().sections(spec)
        return bits, means, means

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Take signs and the means of both kinds."""
        width = self._width(spec)
        upper = ops.astype(x >= 0, spec.accumulator)
        above = ops.sum(ops.rows(ops.select(x >= 0, x, 0.0), width))
        below = ops.sum(ops.rows(ops.select(x < 0, x, 0.0), width))
        count = ops.sum(ops.rows(upper, width))
        others = _counts(x, width, spec, ops) - count
        means = [above / ops.clip(count, 1.0, float(width)), below / ops.clip(others, 1.0, float(width))]
        # Sums of what is finite may overflow; NaN is on neither side of zero, and receivers must see it.
        finite = ops.all_finite(x) & ops.all_finite(above) & ops.all_finite(below)
        means = [ops.where(finite, mean, mean * math.nan) for mean in map(ops.flatten, means)]
        return Payload((_packed_signs(x, ops), *means), finite)

    def encode_fused(self, work: Work, spec: TensorSpec, ops: Ops, step: Step) -> Payload:
        """Take signs and means of both kinds while accumulating."""
        return self._fused(work, spec, ops, step, both=True)

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return the mean of each element's side."""
        packed, above, below = arrays
        upper = ops.rows(ops.astype(ops.unpack(packed, spec.numel, 1), spec.accumulator), self._width(spec))
        rows = upper * ops.reshape(above, (-1, 1)) + (1.0 - upper) * ops.reshape(below, (-1, 1))
        return ops.first(ops.flatten(rows), spec.numel)


def _counts(x: Array, width: int, spec: TensorSpec, ops: Ops) -> Array:
    """Return how many elements each bucket has."""
    return ops.sum(ops.rows(ops.zeros(spec.numel, spec.accumulator, x) + 1.0, width))
