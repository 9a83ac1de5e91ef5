"""Sparsification at positions that all ranks agree on, so that their values can be added up.

C.-Y. Chen et al., "ScaleCom: scalable sparsified gradient compression for communication-efficient
distributed training", NeurIPS 2020 (a leader in turn); P. Sun et al., "Optimizing network
performance for distributed DNN training on GPU clusters: ImageNet/AlexNet training in 1.5 minutes",
arXiv 1902.06855, 2019 (chunks of largest summed norms).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvd_compress.base import Collective
from hvd_compress.compressors.sparsifier import Sparsifier
from hvd_compress.errors import ConfigError
from hvd_compress.feedback import ErrorFeedback, Feedback
from hvd_compress.ops.base import Array, Ops
from hvd_compress.settings import is_whole
from hvd_compress.step import FIRST, Payload, Slot, Step, TensorSpec
from hvd_compress.wire import ArraySection, Section

CHOICES = ("norms", "leader")
# Positions travel as two numbers, each of which floating-point sums and averages keep exactly.
_HALF = 1 << 12


@dataclass(frozen=True, eq=False)
class CoordinatedTopK(Sparsifier):
    """Send about ``ratio * n`` elements at positions that are large on all ranks together.

    All ranks send the same positions, so the values ride Horovod's own allreduce, and traffic
    does not grow with the number of ranks as that of :class:`TopK` does.  With the values of
    this step goes what the positions of the next one are chosen by, from what each rank still
    has to send; so there is one allreduce a step, and the choice is one gradient old.  The
    first step sends the first positions.

    Args:
        ratio: the part of the elements that is sent, above 0 and at most 1.
        by: ``"norms"``: the chunks with the largest sums of magnitudes over all ranks; or
            ``"leader"``: the largest elements of one rank, each in its turn.
        chunk: elements of a chunk, for ``"norms"``; every step sends ``n / chunk`` sums.
        feedback: ``ErrorFeedback()`` by default, and needed.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range, or the ratio a schedule.
    """

    by: str = field(default="norms", kw_only=True)
    chunk: int = field(default=512, kw_only=True)
    feedback: Feedback | None = field(default=ErrorFeedback(), kw_only=True)

    collective = Collective.ALLREDUCE

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ratio, (int, float)):
            raise ConfigError(
                f"CoordinatedTopK.ratio must be a number, since positions are chosen a step before, got {self.ratio!r}"
            )
        self._require(self.by in CHOICES, "by", f"one of {', '.join(map(repr, CHOICES))}")
        whole = is_whole(self.chunk, 1)
        self._require(whole, "chunk", "a whole number, 1 or more")

    def _chunks(self, spec: TensorSpec) -> tuple[int, int, int]:
        """Return elements of a chunk, the number of chunks, and how many are sent."""
        width = min(self.chunk, max(1, spec.numel)) if self.by == "norms" else 1
        count = -(-spec.numel // width)
        return width, count, min(count, -(-super().kept(spec) // width))

    def kept(self, spec: TensorSpec) -> int:
        """Return how many elements of such a tensor are sent: whole chunks."""
        width, _, sent = self._chunks(spec)
        return width * sent

    def slots(self, spec: TensorSpec) -> Sequence[Slot]:
        """What the next positions are chosen by."""
        _, count, sent = self._chunks(spec)
        if self.by == "norms":
            return (Slot("norms", count, spec.accumulator, common=True),)
        return (Slot("leaders", 2 * sent, spec.accumulator, common=True),)

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Values, and what the next positions are chosen by."""
        _, count, sent = self._chunks(spec)
        extra = count if self.by == "norms" else 2 * sent + 1
        return (ArraySection(spec.accumulator, self.kept(spec) + extra),)

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Take the values at the agreed positions, and say what should be sent next."""
        width, _, sent = self._chunks(spec)
        rows = ops.rows(x, width)
        if self.by == "norms":
            chosen = ops.top_k(step.memory["norms"], sent)
        else:
            chosen = self._led(step.memory["leaders"], spec, ops)
        values = ops.take_rows(rows, chosen)
        rest = ops.clear_rows(rows, chosen)
        if self.by == "norms":
            extra = ops.flatten(ops.sum(ops.abs(rest)))
        else:
            extra = self._proposal(ops.flatten(rest), spec, ops, step)
        return Payload((ops.concat([ops.flatten(values), extra]),), ops.all_finite(x), (chosen,))

    def _led(self, leaders: Array, spec: TensorSpec, ops: Ops) -> Array:
        """Return the positions that the leader has proposed."""
        _, _, sent = self._chunks(spec)
        leaders = ops.astype(leaders, "float64")  # float32 has no odd numbers beyond 2**24
        positions = ops.first(leaders, sent) * float(_HALF) + leaders[sent:]
        # Before the first proposal all are 0; positions must be distinct.
        start = ops.cumsum(ops.zeros(sent, "float64", leaders) + 1.0) - 1.0
        none = ops.max(leaders) <= 0
        return ops.astype(ops.select(none, start, positions), "int32")

    def _proposal(self, rest: Array, spec: TensorSpec, ops: Ops, step: Step) -> Array:
        """Return, on the leader, the largest positions as two halves and, on all, the unit they are in."""
        _, _, sent = self._chunks(spec)
        places = ops.astype(ops.top_k(rest, sent), "float64")
        upper = ops.floor(places * (1 / _HALF))
        halves = ops.astype(ops.concat([upper, places - upper * float(_HALF)]), spec.accumulator)

        def leads(number: int) -> np.ndarray:
            return np.array([number % step.size == step.rank], spec.accumulator)

        turn = step.on_host(leads, spec.accumulator, (1,), ops, rest)
        # Nothing is proposed where nothing is left.
        left = ops.astype(ops.max(ops.abs(rest)) > 0, spec.accumulator)
        return ops.concat([halves * turn * left, turn])

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return zeros, but for the values that were sent."""
        sent, chosen = arrays
        width, count, _ = self._chunks(spec)
        values = ops.reshape(ops.first(sent, self.kept(spec)), (-1, width))
        rows = ops.reshape(ops.zeros(count * width, spec.accumulator, sent), (count, width))
        return ops.first(ops.flatten(ops.add_rows(rows, chosen, values)), spec.numel)

    def clear(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops) -> Array:
        """Return ``x`` with zeros at the positions that were sent."""
        width, _, _ = self._chunks(spec)
        return ops.first(ops.flatten(ops.clear_rows(ops.rows(x, width), payload.common[0])), spec.numel)

    def learn(self, reduced: Array, memory: Mapping[str, Array], spec: TensorSpec, ops: Ops) -> dict[str, Array]:
        """Keep what the next positions are chosen by."""
        extra = reduced[self.kept(spec) :]
        if self.by == "norms":
            return {"norms": ops.copy(extra)}
        count = 2 * self._chunks(spec)[2]
        # All ranks but the leader have added zeros; its 1 has been scaled as its positions have.
        unit = extra[count:]
        places = ops.floor(ops.first(extra, count) / ops.select(unit > 0, unit, 1.0) + 0.5)
        return {"leaders": places}
