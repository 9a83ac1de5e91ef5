"""Sparsification by thresholds, fixed or fitted to the gradient.

N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech
2015 (fixed); A. M. Abdelmoniem, A. Elzanaty, M.-S. Alouini, M. Canini, "An efficient statistical-based
gradient compression technique for distributed training systems", MLSys 2021 (fitted).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvd_compress.base import Compressor
from hvd_compress.compressors.sparsifier import Sparsifier
from hvd_compress.feedback import ErrorFeedback, Feedback
from hvd_compress.ops.base import Array, Ops
from hvd_compress.ops.hashing import permuted
from hvd_compress.settings import is_number
from hvd_compress.step import FIRST, Payload, Step, TensorSpec
from hvd_compress.wire import CountedSection, CountSection, Section

FITS = ("exponential", "gamma", "pareto", "sample")
# Every stage keeps about this part of what the stage before has kept.
_STAGE = 0.25
# How many elements more than wanted are sent when the fit is off.
_SLACK = 1.3
_REFINEMENTS = 3


class _Thresholded(Compressor):
    """What both kinds do alike: a count, positions and values, whose number varies."""

    def _capacity(self, spec: TensorSpec) -> int:
        raise NotImplementedError

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """How many, positions, then values."""
        capacity = self._capacity(spec)
        return (
            CountSection(capacity),
            CountedSection("indices", capacity, spec.numel),
            CountedSection(spec.dtype, capacity),
        )

    def _selected(self, x: Array, threshold: Array, spec: TensorSpec, ops: Ops) -> Payload:
        # NaN and infinity are above any threshold, and selected first if there is not room for all.
        count, indices, values = ops.above(x, threshold, self._capacity(spec))
        values = ops.astype_finite(values, spec.dtype)
        return Payload((count, indices, values), ops.all_finite(values))

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return zeros, but for the values that were sent."""
        _, indices, values = arrays
        zeros = ops.zeros(spec.numel, spec.accumulator, values)
        return ops.scatter_add_(zeros, indices, ops.astype(values, spec.accumulator))

    def combine(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Add up in rank order."""

        def add(total: Array, _: Array, indices: Array, values: Array) -> Array:
            return ops.scatter_add_(total, indices, ops.astype(values, spec.accumulator))

        return ops.fold(add, ops.zeros(spec.numel, spec.accumulator, arrays[2]), arrays)

    def add_(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops, sign: int) -> Array:
        """Add the values at their positions."""
        _, indices, values = payload.arrays
        exact = ops.astype(values, spec.accumulator)
        return ops.scatter_add_(x, indices, exact if sign > 0 else -exact)

    def clear(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops) -> Array:
        """Return ``x`` with zeros at the positions that were sent."""
        count, indices, _ = payload.arrays
        positions = ops.cumsum(ops.zeros(self._capacity(spec), spec.accumulator, x) + 1.0)
        # What pads the positions marks nothing.
        marks = ops.astype(positions <= ops.astype(count, spec.accumulator), spec.accumulator)
        sent = ops.scatter_add_(ops.zeros(spec.numel, spec.accumulator, x), indices, marks)
        return ops.select(sent > 0, 0.0 * x, x)


@dataclass(frozen=True, eq=False)
class Threshold(_Thresholded):
    """Send the elements whose magnitude is above ``tau``, at least the largest one.

    How many that are differs between steps and ranks, so the ranks exchange the lengths of
    their messages first.

    Args:
        tau: in units of the gradient (with feedback, of gradient plus residual), above 0.
        max_ratio: the part of the elements that is sent at most, the largest ones.
        feedback: ``ErrorFeedback()`` by default; None drops for good what is not sent.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    tau: float
    max_ratio: float = field(default=0.1, kw_only=True)
    feedback: Feedback | None = field(default=ErrorFeedback(), kw_only=True)

    def __post_init__(self) -> None:
        for name, low, high, expected in (
            ("tau", 0, math.inf, "a positive number"),
            ("max_ratio", 0, 1.0000001, "a number in (0, 1]"),
        ):
            value = getattr(self, name)
            self._require(is_number(value) and low < value < high, name, expected)
        super().__post_init__()

    def _capacity(self, spec: TensorSpec) -> int:
        return max(1, math.ceil(self.max_ratio * spec.numel))

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Select what is above the threshold."""
        threshold = ops.zeros(1, spec.accumulator, x) + float(self.tau)
        return self._selected(x, threshold, spec, ops)


@dataclass(frozen=True, eq=False)
class AdaptiveThreshold(_Thresholded, Sparsifier):
    """Send about ``ratio * n`` elements: those above a threshold that is fitted to the gradient.

    The threshold is found from sums over all elements, in stages: a distribution is fitted to
    the magnitudes, and gives the threshold that a quarter of them exceed; then one to what
    exceeds it, and so on down to ``ratio``.  At last the number of exceeding elements is
    counted and the threshold corrected.  No sorting is needed, and it fits any distribution
    whose tail is smooth.

    Args:
        ratio: the part of the elements that is sent, above 0 and at most 1, or a schedule; at most
            1.3 times as many are sent.
        fit: ``"exponential"``; ``"gamma"``, in the first stage, and generalised Pareto after it;
            ``"pareto"``, in all stages; or ``"sample"``: the quantile of a random sample.
        feedback: ``ErrorFeedback()`` by default; None drops for good what is not sent.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    fit: str = field(default="exponential", kw_only=True)
    feedback: Feedback | None = field(default=ErrorFeedback(), kw_only=True)

    def __post_init__(self) -> None:
        self._require(self.fit in FITS, "fit", f"one of {', '.join(map(repr, FITS))}")
        super().__post_init__()

    def _capacity(self, spec: TensorSpec) -> int:
        return min(spec.numel, math.ceil(_SLACK * self.kept(spec)))

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Fit, correct, and select."""
        sizes = ops.abs(x)
        threshold = self._sampled(sizes, spec, ops, step) if self.fit == "sample" else self._fitted(sizes, spec, ops)
        for _ in range(_REFINEMENTS):
            threshold = self._corrected(sizes, threshold, spec, ops)
        return self._selected(x, threshold, spec, ops)

    def _fitted(self, sizes: Array, spec: TensorSpec, ops: Ops) -> Array:
        target = self.kept(spec) / spec.numel
        stages = max(1, round(math.log(target) / math.log(_STAGE)))
        part = target ** (1 / stages)
        threshold = ops.zeros(1, spec.accumulator, sizes)
        for stage in range(stages):
            count, mean, variance, log_mean = _excess(sizes, threshold, ops)
            if self.fit == "exponential":
                step = mean * -math.log(part)
            elif self.fit == "gamma" and stage == 0:
                step = _gamma_quantile(mean, log_mean, part, ops)
            else:
                step = _pareto_quantile(mean, variance, part, ops)
            threshold = threshold + ops.select(count > 0, step, 0.0)
        return threshold

    def _sampled(self, sizes: Array, spec: TensorSpec, ops: Ops, step: Step) -> Array:
        n, target = spec.numel, self.kept(spec) / spec.numel
        count = min(n, max(math.ceil(0.01 * n), math.ceil(20 / target)))

        def places(number: int) -> np.ndarray:
            keys = Step(step.key, number, step.rank).keys(self.seed, "sample")
            return np.sort(permuted(count, n, keys)).astype(np.int32)

        sample = ops.take(sizes, step.on_host(places, "int32", (count,), ops, sizes))
        largest = ops.take(sample, ops.top_k(sample, max(1, round(target * count))))
        return -ops.max(-largest)

    def _corrected(self, sizes: Array, threshold: Array, spec: TensorSpec, ops: Ops) -> Array:
        """Move the threshold as far as a power law with Hill's exponent says, which every smooth tail is locally."""
        above = sizes > threshold
        count = ops.sum(ops.astype(above, spec.accumulator))
        usable = threshold > 0
        relative = ops.select(above, sizes, 1.0) / ops.select(usable, threshold, 1.0)
        logs = ops.sum(ops.select(above, ops.log(relative), 0.0)) / ops.clip(count, 1.0, math.inf)
        change = logs * ops.log(ops.clip(count, 1.0, math.inf) / float(self.kept(spec)))
        moved = threshold * ops.exp(ops.clip(change, -3.0, 3.0))
        # Where nothing is above it, it was far too high.
        return ops.select(count > 0, ops.select(usable, moved, threshold), threshold * 0.5)


def _excess(sizes: Array, threshold: Array, ops: Ops) -> tuple[Array, Array, Array, Array]:
    """Return number, mean, variance and mean logarithm of what exceeds a threshold, by how much."""
    above = sizes > threshold
    marks = ops.astype(above, ops.dtype(sizes))
    excess = ops.select(above, sizes - threshold, 0.0)
    count = ops.sum(marks)
    some = ops.clip(count, 1.0, math.inf)
    mean = ops.sum(excess) / some
    variance = ops.sum(excess * excess) / some - mean * mean
    logs = ops.sum(ops.log(ops.select(above, sizes - threshold, 1.0))) / some
    return count, mean, variance, logs


def _pareto_quantile(mean: Array, variance: Array, part: float, ops: Ops) -> Array:
    """Return what a part of a generalised Pareto distribution with these moments exceeds."""
    squared = mean * mean
    ratio = squared / ops.select(variance > 0, variance, 1.0)
    # The shape that has this ratio of moments; near 0 it is the exponential distribution.
    shape = (1.0 - ops.select(variance > 0, ratio, 1.0)) * 0.5
    shape = ops.clip(shape, -0.5, 0.45)
    scale = mean * (1.0 - shape)
    near = ops.abs(shape) < 1e-3
    safe = ops.select(near, 0.0 * shape + 1.0, shape)
    curved = scale * (ops.exp(safe * -math.log(part)) - 1.0) / safe
    return ops.select(near, mean * -math.log(part), curved)


def _gamma_quantile(mean: Array, log_mean: Array, part: float, ops: Ops) -> Array:
    """Return about what a part of a gamma distribution with these means exceeds."""
    s = ops.clip(ops.log(ops.select(mean > 0, mean, 1.0)) - log_mean, 1e-3, 1e3)
    shape = (3.0 - s + ops.sqrt((s - 3.0) * (s - 3.0) + 24.0 * s)) / (12.0 * s)
    shape = ops.clip(shape, 0.05, 1.0)
    scale = mean / shape
    # Gamma(shape) by Stirling's series at shape + 3; its tail is that of the exponential times x^(shape-1).
    z = shape + 3.0
    log_gamma = (z - 0.5) * ops.log(z) - z + 0.9189385 + 1.0 / (12.0 * z)
    log_gamma = log_gamma - ops.log(shape * (shape + 1.0) * (shape + 2.0))
    return ops.clip(-scale * (math.log(part) + log_gamma), 0.0, math.inf)
