"""Singular vectors.

H. Wang et al., "ATOMO: communication-efficient learning via atomic sparsification", NeurIPS 2018;
N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness", SIAM Review 53(2), 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_compress.base import Compressor
from hvd_compress.compressors.powersgd import orthonormal
from hvd_compress.feedback import ErrorFeedback, Feedback
from hvd_compress.ops.base import Array, Ops
from hvd_compress.settings import is_whole
from hvd_compress.step import FIRST, Payload, Step, TensorSpec
from hvd_compress.wire import ArraySection, Section

SAMPLINGS = ("none", "atomo")
# Rounds of finding which probabilities are 1; each settles at least one.
_FILLINGS = 12


@dataclass(frozen=True, eq=False)
class SVD(Compressor):
    """Send the gradient's largest singular vectors, or a random choice of all of them.

    A gradient is taken as the matrix of its first dimension by all others.  With
    ``sampling="none"`` the subspace of the ``rank`` largest singular values is found by
    randomised power iteration, and both factors are sent.  With ``sampling="atomo"`` a full
    decomposition is made, and exactly ``rank`` of its terms are drawn, with probabilities
    as near proportional to the singular values as possible; each is divided by its probability.
    That is unbiased, and of all such choices of the least variance; a decomposition takes
    time with the cube of the smaller dimension.

    Every rank sends factors of its own, so traffic grows with the number of ranks;
    :class:`~hvd_compress.compressors.powersgd.PowerSGD` is the method for many.

    Args:
        rank: number of terms.
        sampling: ``"none"`` or ``"atomo"``.
        iterations: of power iteration, for ``"none"``.
        feedback: ``ErrorFeedback()`` by default; none with ``"atomo"``.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    rank: int = 4
    sampling: str = field(default="none", kw_only=True)
    iterations: int = field(default=2, kw_only=True)
    feedback: Feedback | None = field(default=ErrorFeedback(), kw_only=True)

    def __post_init__(self) -> None:
        for name, low in (("rank", 1), ("iterations", 0)):
            value = getattr(self, name)
            whole = is_whole(value, low)
            self._require(whole, name, f"a whole number, {low} or more")
        self._require(self.sampling in SAMPLINGS, "sampling", f"one of {', '.join(map(repr, SAMPLINGS))}")
        if self.sampling == "atomo":
            object.__setattr__(self, "feedback", None)
        super().__post_init__()

    def _sizes(self, spec: TensorSpec) -> tuple[int, int, int]:
        rows = spec.shape[0]
        columns = spec.numel // max(rows, 1)
        return rows, columns, min(self.rank, rows, columns)

    def compresses(self, spec: TensorSpec) -> bool:
        """Matrices whose factors are smaller."""
        if not super().compresses(spec):
            return False
        rows, columns, rank = self._sizes(spec)
        return rows * columns > (rows + columns) * rank

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Left and right factors."""
        rows, columns, rank = self._sizes(spec)
        return ArraySection(spec.accumulator, rank * rows), ArraySection(spec.accumulator, rank * columns)

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Decompose."""
        rows, columns, rank = self._sizes(spec)
        finite = ops.all_finite(x)
        # What is not finite is not sent, and no decomposition ends with it.
        matrix = ops.reshape(ops.where(finite, x, ops.zeros(spec.numel, spec.accumulator, x)), (rows, columns))
        if self.sampling == "atomo":
            left, right = self._drawn(matrix, rank, ops, step)
            return self._payload(left, right, finite, ops)
        keys = step.keys(self.seed, "subspace", shared=True)
        right = ops.reshape(_noise(rank * columns, keys, spec, ops, x), (rank, columns))
        # Where the matrix has a smaller rank, any vectors will do.
        spares = ops.reshape(_noise(rank * rows, keys, spec, ops, x), (rank, rows))
        for _ in range(self.iterations + 1):
            left = orthonormal(ops.matmul(right, ops.transpose(matrix)), spares, ops)
            right = ops.matmul(left, matrix)
        return self._payload(left, right, finite, ops)

    def _payload(self, left: Array, right: Array, finite: Array, ops: Ops) -> Payload:
        """Return the factors, with NaN in them if the gradient holds any."""
        right = ops.flatten(right)
        # Products of what is finite may overflow, here or when the factors are multiplied.
        finite = finite & ops.all_finite(right * float(self.rank))
        return Payload((ops.flatten(left), ops.where(finite, right, right * math.nan)), finite)

    def _drawn(self, matrix: Array, rank: int, ops: Ops, step: Step) -> tuple[Array, Array]:
        """Draw terms by systematic sampling, which takes exactly as many as the probabilities add up to."""
        u, s, vt = ops.svd(matrix)
        probabilities = self._probabilities(s, rank, ops)
        dtype = ops.dtype(s)
        start = ops.astype(ops.uniform(1, step.keys(self.seed, "terms"), s), dtype)
        # A term is taken where the running sum passes start, start + 1, ...
        sums = ops.cumsum(probabilities)
        before = ops.floor(sums - probabilities - start)
        taken = ops.astype(ops.floor(sums - start) > before, dtype)
        # Rounding may make one too many or too few; the taken ones come first.
        chosen = ops.top_k(taken * 2.0 + probabilities, rank)
        scale = ops.take(taken * s / ops.select(probabilities > 0, probabilities, 1.0), chosen)
        left = ops.take_rows(ops.transpose(u), chosen)
        return left, ops.take_rows(vt, chosen) * ops.reshape(scale, (-1, 1))

    def _probabilities(self, s: Array, rank: int, ops: Ops) -> Array:
        """Return ``min(1, c * s)`` that add up to ``rank``, or to the number of terms that are not zero."""
        one = s * 0.0 + 1.0
        certain = s * 0.0
        for _ in range(min(_FILLINGS, rank)):
            left_over = ops.sum(s * (one - certain))
            budget = float(rank) - ops.sum(certain)
            share = budget / ops.select(left_over > 0, left_over, 1.0)
            certain = ops.select(s * share * (one - certain) >= 1.0, one, certain)
        left_over = ops.sum(s * (one - certain))
        share = (float(rank) - ops.sum(certain)) / ops.select(left_over > 0, left_over, 1.0)
        return ops.clip(ops.select(certain > 0, one, s * share), 0.0, 1.0)

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Multiply the factors."""
        rows, columns, rank = self._sizes(spec)
        left, right = ops.reshape(arrays[0], (rank, rows)), ops.reshape(arrays[1], (rank, columns))
        return ops.flatten(ops.matmul(ops.transpose(left), right))


def _noise(count: int, keys: Any, spec: TensorSpec, ops: Ops, like: Array) -> Array:
    """Return random numbers from -0.5 to 0.5."""
    return ops.astype(ops.uniform(count, keys, like), spec.accumulator) - 0.5
