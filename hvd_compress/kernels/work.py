"""One tensor's step on the CPU, in place."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_compress.kernels import cpu
from hvd_compress.kernels.plan import Plan

_BITS = {"float32": np.int32, "float64": np.int64}
# Without its sign a number is as large as its bits.
_MASKS = {"float32": np.int32(2**31 - 1), "float64": np.int64(2**63 - 1)}
# Whatever a residual is, adding less than this to it gives nothing infinite: it is less than half of the last digit
# of the largest number.
_SMALL = {"float32": 2.0**100, "float64": 2.0**900}
# Candidates of a top-k that there is room for: so many times what is selected, and so many more.
_ROOM, _MORE = 8, 1024
# By how much the last step's smallest selected magnitude is lowered to be this step's threshold: a sixteenth of the
# way to its half, so that what is selected is among the candidates though the tensor has changed.
_MARGIN = {"float32": 2**19, "float64": 2**48}
_SAMPLE = 4096


@dataclass
class Work:
    """A gradient and what it is accumulated into.

    Attributes:
        g: the gradient, flat.
        x: the accumulator, flat, which is changed; without feedback the gradient.
        u: the momentum, which is changed; empty if there is none.
        plan: how they are accumulated.
        hints: what was found in earlier steps; it saves time and changes no result.
    """

    g: np.ndarray
    x: np.ndarray
    u: np.ndarray
    plan: Plan
    hints: MutableMapping[str, float]

    def __post_init__(self) -> None:
        self.dtype = self.x.dtype.name
        self.bits = self.x.view(_BITS[self.dtype])
        self.mask = _MASKS[self.dtype]
        self.factor = self.x.dtype.type(self.plan.factor)

    def may_start(self) -> bool:
        """Tell whether no result can be infinite or NaN; otherwise the generic way must be gone, from the beginning."""
        limit, largest = _SMALL[self.dtype], self._largest(self.g)
        if not self.u.size:
            return largest < limit
        bound = self.hints.pop("momentum", None)
        if bound is None:
            bound = self._largest(self.u)
        if not (largest < limit and bound < limit):
            return False
        self.hints["momentum"] = self.plan.factor * (bound + largest) + largest
        return True

    def _largest(self, x: np.ndarray) -> float:
        bits = cpu.largest_magnitude(x.view(_BITS[self.dtype]), self.mask)
        return float(np.array([bits], _BITS[self.dtype]).view(x.dtype)[0])

    @property
    def _accumulation(self) -> tuple[int, Any]:
        return int(self.plan.mode), self.factor

    def top_k(self, k: int) -> np.ndarray:
        """Accumulate; return the positions that ``ops.top_k`` returns."""
        n = self.x.size
        out, room = np.empty(k, np.int32), min(n, _ROOM * k + _MORE)
        positions, found = np.empty(room, np.int32), np.empty(room, self.bits.dtype)
        threshold = self.bits.dtype.type(self._threshold(k))
        count = cpu.accumulate_and_collect(
            *self._accumulation, self.x, self.bits, self.u, self.g, self.mask, threshold, positions, found
        )
        width = 8 * self.x.itemsize - 1
        if k <= count <= room:
            candidates, positions = found[:count], positions[:count]
        else:
            candidates, positions = self.bits, positions[:0]
        lowest, above = cpu.kth_largest(candidates, self.mask, width, k)
        cpu.select(candidates, self.mask, candidates.dtype.type(lowest), above, k, positions, out)
        self.hints[f"top {k}"] = max(int(lowest) - _MARGIN[self.dtype], 0)
        return out

    def _threshold(self, k: int) -> int:
        """Guess bits that somewhat more than ``k`` magnitudes have."""
        hint = self.hints.get(f"top {k}")
        if hint is not None:
            return int(hint)
        n = self.x.size
        stride = max(1, n // _SAMPLE)
        sampled = np.empty(len(range(0, n, stride)), self.x.dtype)
        cpu.sample(*self._accumulation, self.x, self.u, self.g, stride, sampled)
        expected = k * sampled.size / n
        rank = min(sampled.size, int(expected + 3 * expected**0.5) + 2)
        lowest, _ = cpu.kth_largest(sampled.view(self.bits.dtype), self.mask, 8 * self.x.itemsize - 1, rank)
        return int(lowest)

    def quantise(
        self, bucket: int, width: int, smallest: float, keys: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Accumulate and round to levels as ``compressors.levels`` does; the accumulator keeps what is not sent."""
        packed = np.empty((self.x.size * width + 7) // 8, np.uint8)
        norms = np.empty(-(-self.x.size // bucket), self.x.dtype)
        cpu.quantise(
            *self._accumulation,
            self.x,
            self.bits,
            self.u,
            self.g,
            self.mask,
            self.plan.keeps,
            bucket,
            width,
            self.x.dtype.type(smallest),
            np.uint32(keys[0]),
            np.uint32(keys[1]),
            packed,
            norms,
        )
        return packed, norms

    def signs(self, bucket: int, both: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Accumulate; return packed signs and mean magnitudes as ``compressors.signs`` has them.

        Sums are made in another order than elsewhere, so their last digits may differ.
        """
        packed = np.empty((self.x.size + 7) // 8, np.uint8)
        buckets = -(-self.x.size // bucket)
        above, below = np.empty(buckets, self.x.dtype), np.empty(buckets, self.x.dtype)
        keeps = self.plan.keeps
        cpu.signs(*self._accumulation, self.x, self.u, self.g, keeps, both, bucket, packed, above, below)
        return packed, above, below
