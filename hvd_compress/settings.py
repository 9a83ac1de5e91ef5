"""What settings may be, and how compressors and feedback are written down."""

from __future__ import annotations

import math
import numbers
from dataclasses import MISSING, fields
from typing import Any


def is_whole(value: Any, low: int = 0, high: float = math.inf) -> bool:
    """Tell whether this is a whole number in a range; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any) -> bool:
    """Tell whether this is a real number; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


class ShortRepr:
    """Give dataclasses a ``repr`` without the settings that have their default."""

    #: Whether the first setting is shown even if it has its default.
    shows_first = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A dataclass makes a repr of its own unless the class has one.
        if "__repr__" not in vars(cls):
            cls.__repr__ = ShortRepr.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Return what to write for an equal one."""
        shown: list[str] = []
        positional = True
        for setting in sorted(fields(self), key=lambda f: f.kw_only):  # type: ignore[arg-type,return-value]
            value, default = getattr(self, setting.name), setting.default
            if setting.default_factory is not MISSING:
                default = setting.default_factory()
            positional = positional and not setting.kw_only
            first = self.shows_first and positional and not shown and value is not None
            if setting.repr and (first or repr(value) != repr(default)):
                shown.append(repr(value) if positional else f"{setting.name}={value!r}")
            else:
                positional = False
        return f"{type(self).__name__}({', '.join(shown)})"
