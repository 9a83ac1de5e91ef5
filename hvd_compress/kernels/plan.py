"""How a gradient is accumulated."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Mode(enum.IntEnum):
    """What becomes of the accumulator ``x``, with the momentum ``u`` and the gradient ``g``."""

    #: The gradient is compressed alone.
    NOTHING = 0
    #: ``x = g``
    SET = 1
    #: ``x += g``
    ADD = 2
    #: ``x = factor * x + g``
    DECAY = 3
    #: ``u = factor * u + g; x += u``
    MOMENTUM = 4
    #: ``u = factor * (u + g); x += u + g``
    NESTEROV = 5


@dataclass(frozen=True)
class Plan:
    """A mode and its factor."""

    mode: Mode
    factor: float = 1.0

    @property
    def keeps(self) -> bool:
        """Whether what is not sent is kept."""
        return self.mode is not Mode.NOTHING
