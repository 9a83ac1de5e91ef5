"""Random sparsification with positions that all ranks know.

S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018;
T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD", NeurIPS 2019 (blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvd_compress.base import Collective
from hvd_compress.compressors.sparsifier import Sparsifier
from hvd_compress.feedback import Feedback
from hvd_compress.ops.base import Array, Ops
from hvd_compress.ops.hashing import permuted
from hvd_compress.settings import is_whole
from hvd_compress.step import FIRST, Payload, Step, TensorSpec
from hvd_compress.wire import ArraySection, Section

ORDERS = ("random", "rolling")


@dataclass(frozen=True, eq=False)
class RandomK(Sparsifier):
    """Send about ``ratio * n`` elements at positions drawn anew in every step.

    The positions follow from seed, parameter and step, so they need not be sent: the values
    alone travel, in Horovod's own allreduce, and traffic does not grow with the ranks.
    Without feedback the values are multiplied by ``n / k``, which makes the result unbiased,
    with variance ``(n / k - 1) ||x||^2``.  With feedback they are not, for the result would
    be no contraction.

    Args:
        ratio: the part of the elements that is sent, above 0 and at most 1, or a schedule.
        block: elements that are neighbours and chosen together; large blocks are much faster.
        order: ``"random"``; or ``"rolling"``: one run of elements that moves on in every step,
            so that all are sent equally often.
        feedback: None by default.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    block: int = field(default=1, kw_only=True)
    order: str = field(default="random", kw_only=True)
    feedback: Feedback | None = field(default=None, kw_only=True)

    collective = Collective.ALLREDUCE

    def __post_init__(self) -> None:
        whole = is_whole(self.block, 1)
        self._require(whole, "block", "a whole number, 1 or more")
        self._require(self.order in ORDERS, "order", f"one of {', '.join(map(repr, ORDERS))}")
        if self.order == "rolling":
            self._require(self.block == 1, "block", "1 with order='rolling', which sends one run of elements")
        super().__post_init__()

    @property
    def unbiased(self) -> bool:
        """Without feedback."""
        return self.feedback is None

    def delta(self, spec: TensorSpec) -> float:
        """``k / n`` in expectation, with feedback; without it the result can be much larger than the tensor."""
        return 0.0 if self.feedback is None else self.kept(spec) / spec.numel

    def kept(self, spec: TensorSpec) -> int:
        """Return how many elements of such a tensor are sent: whole blocks."""
        width, blocks = self._blocks(spec)
        return width * blocks

    def _blocks(self, spec: TensorSpec) -> tuple[int, int]:
        wanted = super().kept(spec)
        width = wanted if self.order == "rolling" else min(self.block, spec.numel)
        return width, min(-(-wanted // width), spec.numel // width)

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Values alone, in the accumulation dtype: they are going to be added up."""
        return (ArraySection(spec.accumulator, self.kept(spec)),)

    def positions(self, spec: TensorSpec, step: Step, number: int) -> np.ndarray:
        """Return the positions of a step, ascending, as int32."""
        n, (width, count) = spec.numel, self._blocks(spec)
        same_for_all = Step(step.key, 0 if self.order == "rolling" else number)
        keys = same_for_all.keys(self.seed, "positions", shared=True)
        # Blocks lie on a circle that starts anywhere, so that every element is equally likely.
        start = keys[0] * n >> 32
        if self.order == "rolling":
            blocks, start = np.zeros(1, np.int64), start + number * width
        else:
            blocks = permuted(count, n // width, keys)
        places: np.ndarray = (blocks[:, None] * width + np.arange(width) + start % n) % n
        return np.sort(places.reshape(-1)).astype(np.int32)

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Take the values."""
        shape = (self.kept(spec),)
        indices = step.on_host(lambda number: self.positions(spec, step, number), "int32", shape, ops, x)
        values = ops.take(x, indices)
        if self.feedback is None:
            values = values * (spec.numel / self.kept(spec))
        return Payload((values,), ops.all_finite(x), (indices,))

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return zeros, but for the values that were sent."""
        values, indices = arrays
        return ops.scatter_add_(ops.zeros(spec.numel, spec.accumulator, values), indices, values)

    def add_(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops, sign: int) -> Array:
        """Add the values at their positions."""
        (values,), (indices,) = payload.arrays, payload.common
        return ops.scatter_add_(x, indices, values if sign > 0 else -values)

    def clear(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops) -> Array:
        """Return ``x`` with zeros at the positions that were sent."""
        (indices,) = payload.common
        return ops.scatter_add_(x, indices, -ops.take(x, indices))
