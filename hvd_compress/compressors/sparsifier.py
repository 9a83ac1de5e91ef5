"""What all compressors have in common that send some of the elements."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvd_compress.base import Compressor
from hvd_compress.errors import UnsupportedError
from hvd_compress.schedule import Steps
from hvd_compress.settings import is_number
from hvd_compress.step import TensorSpec


@dataclass(frozen=True, eq=False)
class Sparsifier(Compressor):
    """Base of the compressors that send ``ceil(ratio * n)`` elements of each tensor.

    Args:
        ratio: the part of the elements that is sent, above 0 and at most 1; or a schedule:
            :class:`~hvd_compress.schedule.Steps`, such as ``warm_up(0.001, steps=1000)``, or,
            under PyTorch, any function that returns the ratio of a step.
        feedback, min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    ratio: float | Steps | Callable[[int], float]

    def __post_init__(self) -> None:
        for ratio in self.ratio.stages() if isinstance(self.ratio, Steps) else [self.ratio]:
            number = is_number(ratio) and 0 < ratio <= 1  # type: ignore[operator]
            self._require(number or callable(ratio), "ratio", "a number in (0, 1]")
        super().__post_init__()

    def kept(self, spec: TensorSpec) -> int:
        """Return how many elements of such a tensor are sent."""
        # 0.1 * 30 is a little above 3: what is a whole number but for rounding must not be rounded up.
        exact = self._number * spec.numel
        kept: int = max(1, math.ceil(exact * (1 - 1e-15)))
        return kept

    @property
    def _number(self) -> Any:
        if isinstance(self.ratio, numbers.Real):
            return self.ratio
        kind = type(self).__name__
        raise UnsupportedError(f"expected a compressor of one step, as {kind}.at(step) returns, got {self}")

    def stage(self, number: int) -> int:
        """Return the position of the ratio of this step."""
        return self.ratio.stage(number) if isinstance(self.ratio, Steps) else 0

    @property
    def stages(self) -> Sequence[Compressor]:
        """One compressor for each ratio."""
        if isinstance(self.ratio, Steps):
            ratios = self.ratio.stages()
            stages: Any = self.derived("stages", lambda: [replace(self, ratio=ratio) for ratio in ratios])
            return stages  # type: ignore[no-any-return]
        if callable(self.ratio):
            raise UnsupportedError(
                f"{type(self).__name__} expected a number or hvd_compress.Steps as ratio, since a graph is made once "
                "for all steps; got a function"
            )
        return (self,)

    def at(self, number: int) -> Compressor:
        """Return the compressor of this step."""
        if callable(self.ratio):
            ratio = self.ratio(number)
            # All parameters of a step ask for the same; keeping those of all steps would fill the memory.
            at_last: dict[Any, Compressor] = self.derived("at last", dict)
            if ratio not in at_last:
                made = replace(self, ratio=ratio)
                at_last.clear()
                at_last[ratio] = made
            return at_last[ratio]
        return super().at(number)
