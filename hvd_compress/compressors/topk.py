"""Top-k sparsification.

S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018;
A. F. Aji, K. Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_compress.base import Compressor, Payload, TensorSpec
from hvd_compress.feedback import ErrorFeedback
from hvd_compress.ops.base import Array, Ops
from hvd_compress.wire import ArraySection, IndexSection, Section

logger = logging.getLogger("hvd_compress")


@dataclass(frozen=True, eq=False)
class TopK(Compressor):
    """Send the ``ceil(ratio * n)`` elements of largest magnitude of each tensor.

    The selection is exact; of equal magnitudes the lower position wins.  Values travel in
    the gradient's dtype, positions Elias-Fano coded, at ``ratio=0.001`` in about 12 bits.
    It is a contraction, ``||a - C(a)||^2 <= (1 - k/n) ||a||^2``, so it needs feedback to
    converge, and has it by default.

    Args:
        ratio: the part of the elements that is sent, above 0 and at most 1.
        feedback: ``ErrorFeedback()`` by default; None drops for good what is not sent.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.

    Example::

        opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(), compression=TopK(0.001))
    """

    ratio: float
    feedback: ErrorFeedback | None = field(default=ErrorFeedback(), kw_only=True)

    def __post_init__(self) -> None:
        number = isinstance(self.ratio, numbers.Real) and not isinstance(self.ratio, bool)
        self._require(number and 0 < self.ratio <= 1, "ratio", "a number in (0, 1]")
        super().__post_init__()
        if isinstance(self.ratio, int):
            logger.warning("TopK(1) sends every element, and its position with it; for 1 % write TopK(0.01)")

    def kept(self, spec: TensorSpec) -> int:
        """Return how many elements of such a tensor are sent."""
        # 0.1 * 30 is a little above 3: what is a whole number but for rounding must not be rounded up.
        exact = self.ratio * spec.numel
        return max(1, math.ceil(exact * (1 - 1e-15)))

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Positions, then values."""
        k = self.kept(spec)
        return IndexSection(spec.numel, k), ArraySection(spec.dtype, k)

    def encode(self, x: Array, spec: TensorSpec, ops: Ops) -> Payload:
        """Select, and round the values to the gradient's dtype."""
        indices = ops.top_k(x, self.kept(spec))
        values = ops.astype_finite(ops.take(x, indices), spec.dtype)
        # NaN and infinity are the largest magnitudes, so if there are any, one was selected.
        return Payload((indices, values), ops.all_finite(values))

    def combine(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Add up in rank order; positions are distinct within a rank."""

        def add(total: Array, indices: Array, values: Array) -> Array:
            return ops.scatter_add_(total, indices, ops.astype(values, spec.accumulator))

        return ops.fold(add, ops.zeros(spec.numel, spec.accumulator, arrays[1]), arrays)

    def add_(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops, sign: int) -> Array:
        """Add the values that receivers decode, at their positions."""
        indices, values = payload.arrays
        exact = ops.astype(values, spec.accumulator)
        return ops.scatter_add_(x, indices, exact if sign > 0 else -exact)
