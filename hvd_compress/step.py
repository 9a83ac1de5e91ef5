"""What is known of a tensor and of the step when it is compressed, and what comes out of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_compress.ops.base import ACCUMULATOR, Array, Ops

#: The ``delta`` of rounding to a dtype from its accumulator; float16 limits large numbers, so it has none.
EXACT = {"float16": 0.0, "bfloat16": 1 - 2.0**-16, "float32": 1.0, "float64": 1.0}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype (by name) of a gradient."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def accumulator(self) -> str:
        """The dtype that sums and residuals of such gradients are kept in."""
        return ACCUMULATOR[self.dtype]


@dataclass(frozen=True)
class Slot:
    """An array that is remembered of every parameter between steps; it starts as zeros.

    Attributes:
        name: within the compressor or feedback.
        count: of elements.
        dtype: by name.
        common: all ranks hold the same.
    """

    name: str
    count: int
    dtype: str
    common: bool = False


@dataclass(frozen=True)
class Payload:
    """What is sent for one tensor.

    Attributes:
        arrays: one for each of the compressor's :meth:`~hvd_compress.base.Compressor.sections`;
            with a leading axis of ranks once gathered.
        finite: 0-d boolean: the tensor held neither NaN nor infinity.
        common: what receivers know without being sent it, such as positions that follow from the seed.
        memory: new values of the compressor's slots.
    """

    arrays: tuple[Array, ...]
    finite: Array
    common: tuple[Array, ...] = ()
    memory: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One step of one parameter on one rank.

    Attributes:
        key: the parameter's name, the same on all ranks.
        number: steps of this parameter so far; a tensor in a TensorFlow graph.
        rank, size: of the process set.
        memory: the compressor's slots, and those of its feedback.
        agreed: the sum over all ranks of what :meth:`~hvd_compress.base.Compressor.prepare` returned;
            None if there is one rank alone.
        hints: what was found in earlier steps, which saves time and changes no result.
    """

    key: str = ""
    number: Any = 0
    rank: int = 0
    size: int = 1
    memory: Mapping[str, Array] = field(default_factory=dict)
    agreed: Any = None
    hints: MutableMapping[str, float] = field(default_factory=dict, compare=False)

    def keys(self, seed: int, purpose: str, shared: bool = False) -> Any:
        """Return two 32-bit keys for :meth:`~hvd_compress.ops.base.Ops.uniform`.

        They follow from seed, parameter and step, and unless ``shared`` from the rank: the
        noise of stochastic rounding must be independent on ranks, for then it averages out.
        """
        return derive_keys(seed, purpose, self.key, self.number, None if shared else self.rank)

    def on_host(
        self, function: Callable[[int], np.ndarray], dtype: str, shape: tuple[int, ...], ops: Ops, like: Array
    ) -> Array:
        """Return what ``function(number)`` computes on the host, where ``like`` lives."""
        return ops.from_host([function(self.number)], [dtype], like)[0]


#: The slot that most kinds of feedback have.
RESIDUAL = "residual"

#: The first step of an unnamed parameter on the only rank.
FIRST = Step()


def derive_keys(seed: int, purpose: str, key: str, number: int, rank: int | None) -> tuple[int, int]:
    """Return two 32-bit numbers that differ between any two sets of arguments, for all practical purposes."""
    digest = hashlib.sha256(repr((seed, purpose, key, int(number), rank)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
