"""Low-rank approximation by one step of power iteration.

T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: practical low-rank gradient compression for
distributed optimization", NeurIPS 2019; "Practical low-rank communication compression in
decentralized deep learning", NeurIPS 2020 (alternating); L. Zhang, L. Zhang, S. Shi, X. Chu, B. Li,
"Evaluation and optimization of gradient compression for distributed deep learning", ICDCS 2023
(alternating, under an allreduce).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvd_compress.base import Collective, Compressor
from hvd_compress.compressors.casts import FP16
from hvd_compress.feedback import ErrorFeedback, Feedback
from hvd_compress.ops.base import Array, Ops
from hvd_compress.settings import is_number, is_whole
from hvd_compress.step import FIRST, Payload, Slot, Step, TensorSpec
from hvd_compress.wire import ArraySection, Section

# What is left of a vector after its part along others was taken out is noise below this.
_DEPENDENT = 1e-5
# The factor that is known and not sent.
_PHASES = ("right", "left")


@dataclass(frozen=True, eq=False)
class PowerSGD(Compressor):
    """Send factors of a matrix of rank ``rank`` that approximates the gradient.

    A gradient is taken as the matrix ``M`` of its first dimension by all others.

    With ``alternating=True`` steps take turns: in one the right factor of the step before,
    orthonormalised to ``Q``, is known to all ranks, which send ``P = M Q``; in the next the left
    one is, and ``Q = M^T P`` is sent.  So there is one allreduce a step, Horovod's own, during the
    backward pass, of half the bytes.

    With ``alternating=False`` each step makes a whole power iteration, as in the paper: ``P = M Q`` is added
    up over the ranks and orthonormalised, then ``Q = M^T P`` is.  That takes two allreduces, of all
    tensors together and at the end of the backward pass, and approximates better.  Matrices of one
    shape are treated together.

    Either way the subspace improves from step to step (*warm start*).  A rank's residual is what
    its own factor does not carry, ``M - P Q^T``; the mean of the residuals is that of the paper's,
    which subtract what all ranks have sent.  Random vectors take the place of what a factor lacks:
    of all of it in the first step, and of vectors that depend on others, as those of a gradient of
    zeros do.

    Args:
        rank: of the approximation; 1, 2 and 4 are usual.
        alternating: whether steps take turns.
        min_compression_rate: matrices whose two factors are not that much smaller travel dense.
        factors: ``FP16()`` to send factors in half precision; None sends float32.  Under TensorFlow
            the first of two rounds is float32 all the same, since its token must be exact.
        feedback: ``ErrorFeedback()`` by default, and needed.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    rank: int = 4
    alternating: bool = field(default=True, kw_only=True)
    min_compression_rate: float = field(default=2.0, kw_only=True)
    factors: FP16 | None = field(default=None, kw_only=True)
    feedback: Feedback | None = field(default=ErrorFeedback(), kw_only=True)
    phase: str = field(default="right", kw_only=True, repr=False)

    collective = Collective.ALLREDUCE

    def __post_init__(self) -> None:
        whole = is_whole(self.rank, 1)
        self._require(whole, "rank", "a whole number, 1 or more")
        self._require(isinstance(self.alternating, bool), "alternating", "True or False")
        number = is_number(self.min_compression_rate)
        valid = number and math.isfinite(self.min_compression_rate) and self.min_compression_rate > 0
        self._require(valid, "min_compression_rate", "a positive number")
        self._require(self.factors is None or isinstance(self.factors, FP16), "factors", "FP16() or None")
        self._require(self.phase in _PHASES, "phase", f"one of {', '.join(map(repr, _PHASES))}")
        super().__post_init__()

    @property
    def two_rounds(self) -> bool:
        """Whether both factors are sent in each step."""
        return not self.alternating

    @property
    def stages(self) -> Sequence[Compressor]:
        """One for either factor, if they take turns."""
        if not self.alternating:
            return (self,)
        return self.derived("stages", lambda: [replace(self, phase=phase) for phase in _PHASES])  # type: ignore[no-any-return]

    def stage(self, number: int) -> int:
        """Tell whose turn it is: the first step sends the left factor, the second the right one."""
        return number % 2 if self.alternating else 0

    def compresses(self, spec: TensorSpec) -> bool:
        """Matrices that are worth it."""
        if not super().compresses(spec):
            return False
        rows, columns, rank = self._sizes(spec)
        return rows * columns >= self.min_compression_rate * (rows + columns) * rank

    def _sizes(self, spec: TensorSpec) -> tuple[int, int, int]:
        rows = spec.shape[0]
        columns = spec.numel // max(rows, 1)
        return rows, columns, min(self.rank, rows, columns)

    def _count(self, spec: TensorSpec) -> int:
        rows, columns, rank = self._sizes(spec)
        # With turns, the same in every step, so that Horovod need not negotiate again.
        return (max(rows, columns) if self.alternating else columns) * rank

    def slots(self, spec: TensorSpec) -> Sequence[Slot]:
        """The factor that was reduced last, a vector after the other."""
        return (Slot("factor", self._count(spec), spec.accumulator, common=True),)

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """The factor that is sent last; with turns padded to the size of the larger one."""
        return (ArraySection(spec.accumulator if self.factors is None else "float16", self._count(spec)),)

    def prepared(self, spec: TensorSpec) -> Sequence[Section]:
        """The left factor, if both are sent."""
        if self.alternating:
            return ()
        rows, _, rank = self._sizes(spec)
        return (ArraySection(spec.accumulator if self.factors is None else "float16", rows * rank),)

    def prepare(self, xs: Sequence[Array], spec: TensorSpec, ops: Ops, steps: Sequence[Step]) -> list[Array]:
        """Return left factors ``M Q``, ``Q`` being the right factor of the step before."""
        rows, columns, rank = self._sizes(spec)
        known = _stacked([step.memory["factor"] for step in steps], (rank, columns), ops)
        noise = self._noise(rank * columns, (rank, columns), xs, spec, ops, steps)
        # Only its directions matter, and products with what is tiny or huge would vanish or overflow.
        largest = ops.max(ops.transpose(ops.max(ops.abs(known))))
        known = ops.select(largest > 0, known / ops.select(largest > 0, largest, 1.0), noise)
        factors = ops.matmul(known, ops.transpose(_stacked(xs, (rows, columns), ops)))
        flat = [ops.flatten(factors[i]) for i in range(len(xs))]
        return [self._sent(x, ops, step)[0] for x, step in zip(flat, steps, strict=True)]

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Project onto the known factor."""
        return self.encode_all([x], spec, ops, [step])[0]

    def encode_all(self, xs: Sequence[Array], spec: TensorSpec, ops: Ops, steps: Sequence[Step]) -> list[Payload]:
        """Project matrices of one shape together."""
        rows, columns, rank = self._sizes(spec)
        left = self.phase == "left" or not self.alternating
        width = rows if left else columns
        if self.alternating:
            factors = [ops.first(step.memory["factor"], rank * width) for step in steps]
        else:
            alone = [] if all(step.agreed is not None for step in steps) else self.prepare(xs, spec, ops, steps)
            sums = [alone[i] if alone else step.agreed for i, step in enumerate(steps)]
            factors = [ops.astype(x, spec.accumulator) for x in sums]
        # The same on all ranks.
        noise = self._noise(rank * width, (rank, width), xs, spec, ops, steps)
        known = orthonormal(_stacked(factors, (rank, width), ops), noise, ops)
        matrices = _stacked(xs, (rows, columns), ops)
        projected = ops.matmul(known, matrices if left else ops.transpose(matrices))
        payloads = []
        for i, (x, step) in enumerate(zip(xs, steps, strict=True)):
            flat = ops.flatten(projected[i])
            missing = self._count(spec) - ops.shape(flat)[0]
            if missing:
                flat = ops.concat([flat, ops.zeros(missing, spec.accumulator, flat)])
            # Products of what is finite may overflow, here or when the factors are multiplied.
            finite = ops.all_finite(x) & ops.all_finite(flat * float(rank))
            sent, scale = self._sent(flat, ops, step)
            payloads.append(Payload((sent,), finite, (known[i], *scale)))
        return payloads

    def _noise(
        self,
        count: int,
        shape: tuple[int, int],
        xs: Sequence[Array],
        spec: TensorSpec,
        ops: Ops,
        steps: Sequence[Step],
    ) -> Array:
        """Return random matrices, the same on all ranks."""
        drawn = [
            ops.uniform(count, s.keys(self.seed, "subspace", shared=True), x) for x, s in zip(xs, steps, strict=True)
        ]
        return _stacked([ops.astype(x, spec.accumulator) - 0.5 for x in drawn], shape, ops)

    def _sent(self, flat: Array, ops: Ops, step: Step) -> tuple[Array, tuple[float, ...]]:
        """Return a factor as it is sent, and what it was divided by."""
        if self.factors is None:
            return flat, ()
        half = self.factors.encode(flat, TensorSpec(ops.shape(flat), ops.dtype(flat)), ops, step)
        return half.arrays[0], half.common

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Multiply the factors."""
        rows, columns, rank = self._sizes(spec)
        sent, known, *scale = arrays
        if self.factors is not None:
            sent = self.factors.decode((sent, *scale), TensorSpec((self._count(spec),), spec.accumulator), ops)
        if self.phase == "left" or not self.alternating:
            factor = ops.reshape(ops.first(sent, rank * columns), (rank, columns))
            return ops.flatten(ops.matmul(ops.transpose(known), factor))
        factor = ops.reshape(ops.first(sent, rank * rows), (rank, rows))
        return ops.flatten(ops.matmul(ops.transpose(factor), known))

    def learn(self, reduced: Array, memory: Mapping[str, Array], spec: TensorSpec, ops: Ops) -> dict[str, Array]:
        """Keep what all ranks have sent, for the next step; its scale does not matter."""
        return {"factor": ops.copy(ops.astype(reduced, spec.accumulator))}


def _stacked(arrays: Sequence[Array], shape: tuple[int, int], ops: Ops) -> Array:
    """Return arrays as one row of matrices."""
    rows = [ops.reshape(x, (1, *shape)) for x in arrays]
    return rows[0] if len(rows) == 1 else ops.concat(rows)


def orthonormal(vectors: Array, spares: Array, ops: Ops) -> Array:
    """Return an orthonormal basis of the rows of each matrix; a row of ``spares`` replaces one that depends on others.

    Gram-Schmidt, done twice: what remains after the first time can be so small that rounding dominates it.
    """
    basis = vectors[..., :0, :]
    for i in range(ops.shape(vectors)[-2]):
        both = ops.concat([vectors[..., i : i + 1, :], spares[..., i : i + 1, :]], -2)
        # Factors of tiny gradients have squares that vanish, those of huge ones overflow.
        largest = ops.max(ops.abs(both))
        both = both / ops.select(largest > 0, largest, 1.0)
        before = ops.sqrt(ops.sum(both * both))
        for _ in range(2 if i else 0):
            both = both - ops.matmul(ops.matmul(both, ops.transpose(basis)), basis)
        length = ops.sqrt(ops.sum(both * both))
        both = both / ops.select(length > 0, length, 1.0)
        # A zero vector has length 0, which is not above 0.
        independent = length[..., :1, :] > before[..., :1, :] * _DEPENDENT
        basis = ops.concat([basis, ops.select(independent, both[..., :1, :], both[..., 1:, :])], -2)
    return basis
