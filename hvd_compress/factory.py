"""Compressors by name, and what a compressor will do to a model."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from hvd_compress.base import Compressor
from hvd_compress.compressors import ALL
from hvd_compress.errors import ConfigError
from hvd_compress.feedback import ErrorFeedback, MomentumCorrection

logger = logging.getLogger("hvd_compress")


def make(name: str, **settings: Any) -> Compressor:
    """Return a compressor by its name, as in ``make("topk", ratio=0.01)``.

    Args:
        name: of the class; case, ``-`` and ``_`` do not matter.
        settings: of the class.

    Raises:
        ConfigError: there is no such compressor, naming the nearest one, or no such setting.
    """
    plain = str(name).lower().replace("-", "").replace("_", "")
    plain = "none" if plain == "nocompression" else plain
    if plain not in ALL:
        near = difflib.get_close_matches(plain, ALL, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"expected a compressor among {', '.join(ALL)}, got {name!r}{hint}")
    kind: Callable[..., Compressor] = ALL[plain]
    try:
        return kind(**settings)
    except TypeError as error:
        raise ConfigError(f"{ALL[plain].__name__} cannot be made of {settings}: {error}") from error


_GRACE = {
    "none": ("none", {}),
    "fp16": ("fp16", {}),
    "topk": ("topk", {"compress_ratio": "ratio"}),
    "randomk": ("randomk", {"compress_ratio": "ratio"}),
    "threshold": ("threshold", {"threshold": "tau"}),
    "dgc": ("dgc", {"compress_ratio": "ratio", "momentum": "momentum"}),
    "signsgd": ("signsgd", {}),
    "signum": ("signum", {"momentum": "beta"}),
    "efsignsgd": ("efsign", {}),
    "onebit": ("onebit", {}),
    "natural": ("natural", {}),
    "terngrad": ("terngrad", {}),
    "qsgd": ("qsgd", {}),
    "powersgd": ("powersgd", {"compress_rank": "rank"}),
}
_GRACE_MEMORIES = ("none", "residual", "dgc", "powersgd", "efsignsgd")


def from_grace(params: Mapping[str, Any]) -> Compressor:
    """Return the compressor that a ``params`` dict of the GRACE package describes.

    ``compressor``, ``memory``, ``compress_ratio``, ``threshold``, ``quantum_num``, ``momentum``
    and ``compress_rank`` are understood; ``communicator``, ``model`` and ``world_size`` are not
    needed here, and ``gradient_clipping`` is left out with a warning.

    Raises:
        ConfigError: the compressor or memory has no counterpart.
    """
    kind, memory = str(params.get("compressor", "none")), str(params.get("memory", "none"))
    if kind not in _GRACE:
        near = difflib.get_close_matches(kind, _GRACE, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"expected a compressor among {', '.join(_GRACE)}, got {kind!r}{hint}")
    if memory not in _GRACE_MEMORIES:
        raise ConfigError(f"expected a memory among {', '.join(_GRACE_MEMORIES)}, got {memory!r}")
    name, renamed = _GRACE[kind]
    settings = {ours: params[theirs] for theirs, ours in renamed.items() if theirs in params}
    if kind == "qsgd":
        # So many levels to either side of zero.
        levels = int(params.get("quantum_num", 127))
        settings.update(bits=min(8, max(2, levels.bit_length() + 1)), norm="l2")
    if kind == "dgc" and params.get("gradient_clipping"):
        logger.warning(
            "GRACE's gradient_clipping limits elements to the norm of their whole tensor, which has no counterpart and "
            "is left out; to clip norms, as the paper does, use DGC(..., clip_norm=...)"
        )
    if kind != "dgc":
        if memory in ("residual", "powersgd", "efsignsgd"):
            settings["feedback"] = ErrorFeedback()
        elif memory == "dgc":
            settings["feedback"] = MomentumCorrection(float(params.get("momentum", 0.9)))
        elif kind in ("topk", "threshold", "efsignsgd", "onebit", "powersgd"):
            settings["feedback"] = None
    return make(name, **settings)
