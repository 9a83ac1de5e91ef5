"""What the ranks must agree on before they can read each other's bytes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvd_compress import wire
from hvd_compress.errors import HandshakeError
from hvd_compress.transport.base import Transport

Entry = tuple[str, tuple[int, ...], str, tuple[wire.Section, ...]]


@dataclass(frozen=True)
class Layout:
    """Settings, and the tensors of one exchange in order of their names."""

    settings: dict[str, Any]
    entries: tuple[Entry, ...]
    digest: bytes

    @classmethod
    def of(cls, settings: dict[str, Any], entries: Sequence[Entry]) -> Layout:
        """Build a layout of ``(name, shape, dtype, sections)`` entries."""
        text = json.dumps([settings, _plain(entries)], sort_keys=True)
        return cls(settings, tuple(entries), hashlib.sha256(text.encode()).digest()[:8])

    @property
    def sections(self) -> list[wire.Section]:
        """All sections, in order."""
        return [section for _, _, _, sections in self.entries for section in sections]

    @property
    def variable(self) -> bool:
        """Whether the length of a message's body depends on the data."""
        return wire.is_variable(self.sections)

    @property
    def body_bytes(self) -> int:
        """Bytes of a message's body, at most if it varies."""
        return sum(section.nbytes for section in self.sections)

    def names(self) -> str:
        """Describe the tensors in a few words."""
        names = [name for name, *_ in self.entries]
        shown = ", ".join(repr(name) for name in names[:3])
        return f"{len(names)} tensors ({shown}{', ...' if len(names) > 3 else ''})"


def check_agreement(transport: Transport, layout: Layout, what: str) -> int:
    """Make sure that all ranks have the same layout; return the bytes this rank sent.

    One allgather of 8 bytes if they do.

    Raises:
        HandshakeError: on every rank, naming the first rank that differs from rank 0, the
            setting or tensor, and both values.
    """
    digests = transport.allgather(np.frombuffer(layout.digest, np.uint8), f"the handshake before {what}")
    if (digests == digests[0]).all():
        return len(layout.digest)
    mine = describe(layout.settings, layout.entries)
    compare(transport.allgather_any(mine, f"the handshake before {what}"))
    raise HandshakeError("ranks do not agree, though their layouts read alike; do all ranks have the same package?")


class Pending(Protocol):
    """Byte strings of all ranks that are being gathered."""

    def ready(self) -> bool:
        """Tell whether :meth:`result` would return at once."""

    def result(self, what: str) -> list[bytes]:
        """Wait for the strings and return them in rank order."""


class Declaration:
    """What each rank is going to train, compared as soon as all ranks have said it.

    An optimizer that has a parameter more on one rank than on the others would wait in
    Horovod for ever, before anything is exchanged.
    """

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending
        self._difference: str | None = None

    def meet(self, seconds: float) -> None:
        """Wait until all ranks have said it, but no longer than so many seconds.

        A rank that went on at once could be waiting in Horovod for what another one, which
        knows of the difference already, is not going to send.  It is not waited for ever,
        since loops in several threads may meet their optimizers in another order elsewhere.
        """
        end = time.monotonic() + seconds
        while self._pending is not None and not self._pending.ready() and time.monotonic() < end:
            time.sleep(1e-3)

    def check(self, wait: bool) -> None:
        """Compare what has been gathered; without ``wait`` only if that is there already.

        Raises:
            HandshakeError: ranks disagree; raised every time once that is known.
        """
        if self._difference is not None:
            raise HandshakeError(self._difference)
        if self._pending is None or not (wait or self._pending.ready()):
            return
        pending, self._pending = self._pending, None
        try:
            compare(pending.result("the comparison of what all ranks train"))
        except HandshakeError as error:
            self._difference = str(error)
            raise


def describe(settings: dict[str, Any], entries: Sequence[Entry]) -> bytes:
    """Return settings and tensors as text for :func:`compare`."""
    return json.dumps({"settings": settings, "tensors": _plain(entries)}).encode()


def compare(descriptions: list[bytes]) -> None:
    """Compare the descriptions of all ranks.

    Raises:
        HandshakeError: naming the first rank that differs from rank 0, the setting or
            tensor, and both values.
    """
    ranks = [json.loads(text) for text in descriptions]
    for rank, theirs in enumerate(ranks):
        difference = _difference(ranks[0], theirs)
        if difference:
            subject, first, other = difference
            raise HandshakeError(
                f"rank {rank} does not agree with rank 0: {subject} is {first} on rank 0 and {other} on rank {rank}"
            )


def _plain(entries: Sequence[Entry]) -> list[list[Any]]:
    return [[name, list(shape), dtype, [repr(s) for s in sections]] for name, shape, dtype, sections in entries]


def _difference(first: dict[str, Any], other: dict[str, Any]) -> tuple[str, str, str] | None:
    for key in sorted({*first["settings"], *other["settings"]}):
        a, b = first["settings"].get(key, "absent"), other["settings"].get(key, "absent")
        if a != b:
            return key, str(a), str(b)
    tensors = [{name: values for name, *values in side["tensors"]} for side in (first, other)]
    for name in sorted({*tensors[0], *tensors[1]}):
        if name not in tensors[0] or name not in tensors[1]:
            words = ["present" if name in side else "absent" for side in tensors]
            return f"parameter {name!r}", words[0], words[1]
        for label, a, b in zip(("shape", "dtype", "payload"), tensors[0][name], tensors[1][name], strict=True):
            if a != b:
                return f"the {label} of parameter {name!r}", str(a), str(b)
    return None
