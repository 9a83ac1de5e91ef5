"""What a ``state_dict`` looks like: made, checked, renamed, and shared among other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hvd_compress.errors import StateError
from hvd_compress.naming import counterparts
from hvd_compress.ops.base import ACCUMULATOR, Array
from hvd_compress.settings import is_whole
from hvd_compress.step import RESIDUAL

FORMAT = "hvd_compress.state"
VERSION = 1
# Slots that are sums over all ranks, but where Horovod has averaged them: EF21's.
_SUMS = ("estimates",)


def by_kind(slots: dict[str, Array], common: set[str]) -> dict[str, Any]:
    """Return slots by kind, leaving out what is empty."""
    kinds = {
        "memory": {name: x for name, x in slots.items() if name not in common},
        "common": {name: x for name, x in slots.items() if name in common},
    }
    return {kind: arrays for kind, arrays in kinds.items() if arrays}


def copied(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a ``state_dict`` with independent arrays."""
    copied = dict(entry)
    copied["residual"] = None if entry["residual"] is None else _copy(entry["residual"])
    for kind in ("memory", "common"):
        if kind in entry:
            copied[kind] = {name: _copy(x) for name, x in entry[kind].items()}
    return copied


def renamed(parameters: dict[str, dict[str, Any]], label: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return what was saved with the names of today where they mean the same."""
    prefix = f"{label}/"
    saved = [key.removeprefix(prefix) for key in parameters if key.startswith(prefix)]
    pairs = {f"{prefix}{old}": f"{prefix}{new}" for old, new in (counterparts(saved, names) or {}).items()}
    return {pairs.get(key, key): value for key, value in parameters.items()}


def checked(state: Any, compressor: str) -> dict[str, Any]:
    """Return ``state`` if it is what ``state_dict`` of such a compressor returns.

    Raises:
        StateError: it is something else.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        kind = state.get("format", "a dict without 'format'") if isinstance(state, dict) else type(state).__name__
        raise StateError(f"expected a dict from compression.state_dict(), got {kind}")
    if state.get("version") != VERSION:
        raise StateError(f"expected state version {VERSION}, got {state.get('version')}")
    missing = [field for field in ("compressor", "rank", "size", "parameters") if field not in state]
    if missing:
        raise StateError(f"expected a dict from compression.state_dict(), got one without {missing}")
    if state["compressor"] != compressor:
        raise StateError(f"expected the state of a {compressor}, got that of a {state['compressor']}")
    for key, entry in state["parameters"].items() if isinstance(state["parameters"], dict) else [("", None)]:
        _check_entry(key, entry)
    return state


def _check_entry(key: Any, entry: Any) -> None:
    """Raise StateError unless this is what ``state_dict`` writes for a parameter."""
    if not (isinstance(key, str) and "/" in key and isinstance(entry, dict) and {"residual", "steps"} <= entry.keys()):
        raise StateError(
            f"expected {{'optimizer0/name': {{'residual': ..., 'steps': ...}}}}, got {key!r}: {entry!r:.80}"
        )
    steps = entry["steps"]
    if not is_whole(steps):
        raise StateError(f"expected a whole number of steps for {key!r}, got {steps!r}")
    if entry["residual"] is not None:
        _check_array(RESIDUAL, key, entry["residual"])
    for kind in ("memory", "common"):
        if not isinstance(entry.get(kind, {}), dict):
            raise StateError(f"expected a dict of arrays as the {kind} of {key!r}, got {type(entry[kind]).__name__}")
        for name, array in entry.get(kind, {}).items():
            _check_array(str(name), key, array)


def _check_array(name: str, key: str, array: Any) -> None:
    dtype = str(getattr(array, "dtype", "")).removeprefix("torch.")
    if dtype not in ACCUMULATOR or len(array.shape) != 1:
        kind = f"{dtype} of shape {tuple(array.shape)}" if dtype else type(array).__name__
        raise StateError(f"expected a flat {name} of floating-point numbers for {key!r}, got {kind}")
    # They would stay for ever.
    if not bool((abs(array) < math.inf).all()):
        raise StateError(f"expected finite {name}s, got NaN or infinity in that of {key!r}")


def check_size(key: str, have: Array | None, loaded: Array | None) -> None:
    """Raise StateError if a loaded residual has another size than the one that is there."""
    if have is not None and loaded is not None and have.shape != loaded.shape:
        raise StateError(f"expected {have.shape[0]} elements in the residual of {key!r}, got {loaded.shape[0]}")


def redistribute(states: list[dict[str, Any]], rank: int, size: int) -> dict[str, dict[str, Any]]:
    """Share the residuals of all old ranks among ``size`` new ones.

    Averages divide by the number of ranks, so what is owed is the sum of the residuals over
    that number; the factor ``size / len(states)`` keeps it.
    """
    old_size = len(states)
    have = sorted((s["rank"], s["size"]) for s in states)
    if not have or have != [(r, old_size) for r in range(old_size)]:
        shown = ", ".join(f"rank {r} of {n}" for r, n in have) or "none"
        raise StateError(f"expected the states of all ranks of one run, each once, got {shown}")
    ordered = sorted(states, key=lambda s: int(s["rank"]))
    parameters: dict[str, dict[str, Any]] = {}
    keys = {key: None for old in ordered for key in old["parameters"]}
    for key in keys:
        for old in ordered:
            if key not in old["parameters"]:
                raise StateError(f"expected {key!r} in the states of all ranks, but rank {old['rank']} lacks it")
        entries = [old["parameters"][key] for old in ordered]
        mine, scale = entries[rank::size], size / old_size
        merged = {"residual": _merged([e["residual"] for e in mine], scale), "steps": entries[0]["steps"]}
        if "memory" in entries[0]:
            names = entries[0]["memory"]
            memory = {name: _merged([e["memory"][name] for e in mine], scale) for name in names}
            merged["memory"] = {name: x for name, x in memory.items() if x is not None}
        if "common" in entries[0]:
            # A sum over ranks must stay the sum of what each of them has now; averages stay as they are.
            averages = entries[0].get("averages", ())
            sums = set(_SUMS).difference(averages)
            merged["common"] = {name: x * scale if name in sums else x for name, x in entries[0]["common"].items()}
            if averages:
                merged["averages"] = list(averages)
        parameters[key] = copied(merged)
    return parameters


def _merged(arrays: Sequence[Array | None], scale: float) -> Array | None:
    total = None
    for array in arrays:
        if array is not None:
            total = array if total is None else total + array
    return None if total is None else total * scale


def _copy(x: Array) -> Array:
    """Copy a tensor (``clone``) or a NumPy array."""
    return x.clone() if hasattr(x, "clone") else x.copy()
