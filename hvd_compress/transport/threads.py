"""Ranks that are threads of one process, for tests and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from hvd_compress.errors import TransportError
from hvd_compress.transport.base import Transport

Result = TypeVar("Result")


class _Group:
    """What the threads of one group share: a slot for each, and a generation counter."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[bytes | None] = [None] * size
        self.arrived = threading.Barrier(size)
        self.left = threading.Barrier(size)


class ThreadTransport(Transport):
    """One rank of a group made by :func:`thread_group`."""

    name = "threads"

    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size

    def allgather(self, message: np.ndarray, what: str) -> np.ndarray:
        """Gather messages of one length."""
        gathered = self.allgather_any(message.tobytes(), what)
        if any(len(data) != message.nbytes for data in gathered):
            raise TransportError(f"messages differ in length in {what}: {[len(data) for data in gathered]} bytes")
        return np.frombuffer(b"".join(gathered), np.uint8).reshape(self.size, message.nbytes)

    def allgather_any(self, data: bytes, what: str) -> list[bytes]:
        """Gather byte strings of any lengths."""
        group = self._group
        group.slots[self.rank] = data
        try:
            group.arrived.wait()
            gathered = [slot for slot in group.slots if slot is not None]
            group.left.wait()
        except threading.BrokenBarrierError:
            raise TransportError(f"another rank has failed during {what}") from None
        return gathered

    def abort(self, message: str) -> None:
        """Break the group, so that no thread waits for ever."""
        self._group.arrived.abort()
        self._group.left.abort()


def thread_group(size: int) -> list[ThreadTransport]:
    """Return ``size`` connected transports, one for each thread."""
    group = _Group(size)
    return [ThreadTransport(group, rank) for rank in range(size)]


def run_ranks(size: int, work: Callable[[ThreadTransport], Result]) -> list[Result]:
    """Run ``work(transport)`` as ``size`` ranks; return their results in rank order.

    The first error of any rank is raised after all have ended.
    """
    errors: list[BaseException] = []

    def guarded(transport: ThreadTransport) -> Result:
        try:
            return work(transport)
        except BaseException as error:
            errors.append(error)
            transport.abort("failed")
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, transport) for transport in thread_group(size)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
