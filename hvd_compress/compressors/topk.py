"""Top-k sparsification.

S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018;
A. F. Aji, K. Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hvd_compress.base import Compressor, is_quantiser
from hvd_compress.compressors.sparsifier import Sparsifier
from hvd_compress.errors import ConfigError
from hvd_compress.feedback import ErrorFeedback, Feedback
from hvd_compress.ops.base import Array, Ops
from hvd_compress.step import EXACT, FIRST, RESIDUAL, Payload, Step, TensorSpec
from hvd_compress.wire import ArraySection, IndexSection, Section

if TYPE_CHECKING:
    from hvd_compress.kernels.work import Work

SCOPES = ("tensor", "model")

logger = logging.getLogger("hvd_compress")


@dataclass(frozen=True, eq=False)
class TopK(Sparsifier):
    """Send the ``ceil(ratio * n)`` elements of largest magnitude of each tensor.

    The selection is exact; of equal magnitudes the lower position wins.  Values travel in
    the gradient's dtype, positions Elias-Fano coded, at ``ratio=0.001`` in about 12 bits.
    It is a contraction, ``||a - C(a)||^2 <= (1 - k/n) ||a||^2``, so it needs feedback to
    converge, and has it by default.

    Args:
        ratio: the part of the elements that is sent, above 0 and at most 1, or a schedule;
            see :class:`~hvd_compress.compressors.sparsifier.Sparsifier`.
        values: how the values are compressed in their turn, such as ``Int8()``, ``QSGD(bits=2)``
            or ``EFSign()``; None sends them as they are.  Feedback keeps what both drop.
        scope: ``"tensor"``, or ``"model"`` to send the largest elements of all tensors together,
            ``ratio`` of all their elements (PyTorch optimizers only, and without ``values``).
        feedback: ``ErrorFeedback()`` by default; None drops for good what is not sent.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.

    Example::

        opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(), compression=TopK(0.001))
    """

    values: Compressor | None = field(default=None, kw_only=True)
    scope: str = field(default="tensor", kw_only=True)
    feedback: Feedback | None = field(default=ErrorFeedback(), kw_only=True)

    def __post_init__(self) -> None:
        self._require(self.values is None or is_quantiser(self.values), "values", "a quantiser such as Int8(), or None")
        self._require(self.scope in SCOPES, "scope", f"one of {', '.join(map(repr, SCOPES))}")
        if self.scope == "model" and self.values is not None:
            raise ConfigError(f"{type(self).__name__} expected values=None with scope='model', got {self.values!r}")
        super().__post_init__()
        if isinstance(self.ratio, int):
            logger.warning("TopK(1) sends every element, and its position with it; for 1 % write TopK(0.01)")

    def delta(self, spec: TensorSpec) -> float:
        """``k / n``, times what compressing the values leaves of it."""
        values = EXACT[spec.dtype] if self.values is None else self.values.delta(self._selected(spec))
        return self.kept(spec) / spec.numel * values

    @property
    def selects_over_model(self) -> bool:
        """Whether the largest elements of all tensors together are sent."""
        return self.scope == "model"

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Positions, then values."""
        positions = IndexSection(spec.numel, self.kept(spec))
        if self.values is None:
            return positions, ArraySection(spec.dtype, positions.k)
        return positions, *self.values.sections(self._selected(spec))

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Select, and round the values to the gradient's dtype, or compress them."""
        return self._sent(x, ops.top_k(x, self.kept(spec)), spec, ops, step)

    @property
    def fuses(self) -> bool:
        """Always, but where what is selected depends on other tensors."""
        return self.scope == "tensor"

    def encode_fused(self, work: Work, spec: TensorSpec, ops: Ops, step: Step) -> Payload:
        """Select while accumulating."""
        (indices,) = ops.from_host([work.top_k(self.kept(spec))], ["int32"], step.memory[RESIDUAL])
        x = step.memory[RESIDUAL]
        payload = self._sent(x, indices, spec, ops, step)
        if work.plan.keeps:
            self.add_(x, payload, spec, ops, -1)
        return payload

    def _sent(self, x: Array, indices: Array, spec: TensorSpec, ops: Ops, step: Step) -> Payload:
        taken = ops.take(x, indices)
        # NaN and infinity are the largest magnitudes, so if there are any, one was selected.
        if self.values is None:
            values = ops.astype_finite(taken, spec.dtype)
            return Payload((indices, values), ops.all_finite(values))
        compressed = self.values.encode(taken, self._selected(spec), ops, step)
        return Payload((indices, *compressed.arrays), compressed.finite)

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return zeros, but for the values that were sent."""
        indices, *values = arrays
        zeros = ops.zeros(spec.numel, spec.accumulator, indices)
        return ops.scatter_add_(zeros, indices, self._decoded(values, spec, ops))

    def combine(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Add up in rank order; positions are distinct within a rank."""

        def add(total: Array, indices: Array, *values: Array) -> Array:
            return ops.scatter_add_(total, indices, self._decoded(values, spec, ops))

        return ops.fold(add, ops.zeros(spec.numel, spec.accumulator, arrays[1]), arrays)

    def add_(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops, sign: int) -> Array:
        """Add the values that receivers decode, at their positions."""
        indices, *values = payload.arrays
        exact = self._decoded(values, spec, ops)
        return ops.scatter_add_(x, indices, exact if sign > 0 else -exact)

    def clear(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops) -> Array:
        """Return ``x`` with zeros at the positions that were sent."""
        indices = payload.arrays[0]
        return ops.scatter_add_(x, indices, -ops.take(x, indices))

    def _selected(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of the values as they are selected."""
        return TensorSpec((self.kept(spec),), spec.accumulator)

    def _decoded(self, values: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        if self.values is None:
            return ops.astype(values[0], spec.accumulator)
        return self.values.decode(values, self._selected(spec), ops)
