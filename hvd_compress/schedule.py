"""Settings that change during training."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from hvd_compress.errors import ConfigError
from hvd_compress.settings import is_whole


@dataclass(frozen=True)
class Steps:
    """A value that changes at given steps of a parameter.

    Args:
        values: ``{first step: value}``, with one for step 0, such as ``{0: 0.25, 100: 0.01}``.

    Raises:
        ConfigError: the steps are no whole numbers, or none is 0.
    """

    values: dict[int, float]

    def __post_init__(self) -> None:
        whole = isinstance(self.values, dict) and all(is_whole(step) for step in self.values)
        if not whole or 0 not in self.values:
            raise ConfigError(f"Steps expected {{first step: value}} with one for step 0, got {self.values!r}")

    def __hash__(self) -> int:
        return hash(tuple(self.values.items()))

    def stage(self, number: int) -> int:
        """Return the position of the value of step ``number``, in the order of the steps."""
        return bisect.bisect_right(sorted(self.values), number) - 1

    def stages(self) -> list[float]:
        """Return the values in the order of their steps."""
        return [self.values[step] for step in sorted(self.values)]


def warm_up(ratio: float, steps: int, stages: int = 4, start: float = 0.25) -> Steps:
    """Return ratios that fall from ``start`` to ``ratio`` exponentially in ``stages`` stages, within ``steps`` steps.

    With 4 stages towards 0.001 they are 0.25, 0.0630, 0.0159, 0.0040 and then 0.001, as in Deep
    Gradient Compression.

    Raises:
        ConfigError: a setting is out of range.
    """
    if not (0 < ratio < start <= 1 and steps >= stages >= 1):
        raise ConfigError(
            f"warm_up expected 0 < ratio < start <= 1 and steps >= stages >= 1, got ratio={ratio!r}, steps={steps!r}, "
            f"stages={stages!r}, start={start!r}"
        )
    values = {steps * i // stages: start * (ratio / start) ** (i / stages) for i in range(stages)}
    return Steps({**values, steps: ratio})
