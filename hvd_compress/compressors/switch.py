"""Another compressor from some step on."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.ops.base import Array, Ops
from hvd_compress.settings import is_whole
from hvd_compress.step import FIRST, Payload, Step, TensorSpec


@dataclass(frozen=True, eq=False)
class Switch(Compressor):
    """Change the compressor during training, as in ``Switch({0: NoCompression(), 1000: PowerSGD(4)})``.

    Residuals are carried over from one compressor to the next where both keep any.  Under
    TensorFlow a graph has a branch for each of them, and what they remember under one name must
    be of one size.

    Args:
        compressors: ``{first step: compressor}``, with one for step 0.
        transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: the steps are no whole numbers, or none is 0, or a value is no compressor.
    """

    compressors: dict[int, Compressor]

    def __post_init__(self) -> None:
        given = self.compressors
        whole = isinstance(given, dict) and all(is_whole(n) and isinstance(c, Compressor) for n, c in given.items())
        if not whole or 0 not in given or any(isinstance(c, Switch) for c in given.values()):
            raise ConfigError(f"Switch expected {{first step: compressor}} with one for step 0, got {given!r}")
        self._leave_to_members()
        super().__post_init__()

    def choose(self, name: str | None, spec: TensorSpec) -> Compressor:
        """Return the changes of one parameter, where a ``Policy`` is among them."""
        chosen = {first: c.choose(name, spec) for first, c in self.compressors.items()}
        if all(chosen[first] is c for first, c in self.compressors.items()):
            return self
        # A policy keeps what it chooses, so no other can get the same id.
        key = tuple((first, id(c)) for first, c in sorted(chosen.items()))
        switch: Compressor = self.derived(key, lambda: Switch(chosen))
        return switch

    def compresses(self, spec: TensorSpec) -> bool:
        """Whether any of them ever does."""
        return any(c.compresses(spec) for c in self.compressors.values())

    @property
    def stages(self) -> Sequence[Compressor]:
        """All stages of all compressors."""
        return [stage for first in sorted(self.compressors) for stage in self.compressors[first].stages]

    def stage(self, number: int) -> int:
        """Count the stages before, and those of the compressor whose turn it is."""
        firsts = sorted(self.compressors)
        turn = bisect.bisect_right(firsts, number) - 1
        before = sum(len(self.compressors[first].stages) for first in firsts[:turn])
        return before + self.compressors[firsts[turn]].stage(number - firsts[turn])

    def at(self, number: int) -> Compressor:
        """Return the compressor of this step."""
        first = max(n for n in self.compressors if n <= number)
        return self.compressors[first].at(number - first)

    @property
    def has_momentum(self) -> bool:
        """Whether any of them accumulates momentum."""
        return any(c.has_momentum for c in self.compressors.values())

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Refuse: :meth:`at` says who does it."""
        raise UnsupportedError("Switch does not compress itself; use at(step)")

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Refuse: :meth:`at` says who does it."""
        raise UnsupportedError("Switch does not decompress itself; use at(step)")
