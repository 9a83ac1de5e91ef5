"""Names of parameters that mean the same, though they read differently.

Keras numbers what has no name (``dense_3``), by how many a process has made before, and a saved
``Sequential`` loses its own name, so ``sequential_8/dense_3/kernel`` may come back as
``dense_3/kernel``, or be ``sequential/dense/kernel`` in another process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# dense_3, and kernel#2 where two have the same name.
_NUMBER = re.compile(r"(_\d+|#\d+)+$")


def counterparts(names: Sequence[str], others: Sequence[str]) -> dict[str, str] | None:
    """Return for each of ``names`` the one of ``others`` that means the same.

    Equal names are preferred; then names of which one ends with the other, if that is
    unambiguous; then, if there are as many, the names at the same place that are equal but for
    numbers.

    Args:
        names: distinct, in the order of the model.
        others: distinct, in the order of the model.

    Returns:
        A one-to-one mapping, or None if these are names of different models.
    """
    if set(names) <= set(others):
        return {name: name for name in names}
    found = {name: [other for other in others if _ends_alike(name.split("/"), other.split("/"))] for name in names}
    if all(len(matches) == 1 for matches in found.values()):
        pairs = {name: matches[0] for name, matches in found.items()}
        if len(set(pairs.values())) == len(pairs):
            return pairs
    if len(names) == len(others) and all(map(alike, names, others)):
        return dict(zip(names, others, strict=True))
    return None


def alike(name: str, other: str) -> bool:
    """Return whether one name ends with the other, but for numbers."""
    return _ends_alike(_unnumbered(name), _unnumbered(other))


def _ends_alike(parts: list[str], others: list[str]) -> bool:
    shorter = min(len(parts), len(others))
    return parts[-shorter:] == others[-shorter:]


def _unnumbered(name: str) -> list[str]:
    return [_NUMBER.sub("", part) for part in name.split("/")]
