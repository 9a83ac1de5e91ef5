"""Compiled twins of what takes longest on the CPU, where Numba is installed.

Each does what the generic operations of ``ops`` do, with the same result, in one pass over memory.
``HVD_COMPRESS_KERNELS=0`` in the environment turns them off.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from hvd_compress.errors import ConfigError
from hvd_compress.kernels.plan import Mode, Plan

if TYPE_CHECKING:
    from hvd_compress.kernels.work import Work

__all__ = ["Mode", "Plan", "available", "start"]

SWITCH = "HVD_COMPRESS_KERNELS"

logger = logging.getLogger("hvd_compress")


def available() -> bool:
    """Tell whether compiled loops are to be used.

    Raises:
        ConfigError: ``HVD_COMPRESS_KERNELS`` is neither 0 nor 1.
    """
    return _available(os.environ.get(SWITCH, "1"))


@functools.lru_cache(8)
def _available(setting: str) -> bool:
    if setting not in ("0", "1"):
        raise ConfigError(f"{SWITCH} must be 0 or 1, got {setting!r}")
    if setting == "0":
        return False
    if importlib.util.find_spec("numba") is None:
        logger.warning("compression on the CPU takes several times longer without Numba; pip install numba")
        return False
    return True


def start(arrays: Sequence[Any], plan: Plan, hints: MutableMapping[str, float]) -> Work | None:
    """Return what works on gradient, accumulator and momentum, None if the generic way must be gone.

    See :class:`hvd_compress.kernels.work.Work`.
    """
    # Numba takes half a second to import.
    work: Work = importlib.import_module("hvd_compress.kernels.work").Work(*arrays, plan, hints)
    return work if work.may_start() else None
