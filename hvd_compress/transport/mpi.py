"""Exchange through mpi4py, on a communicator of its own."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_compress.transport.base import Transport

# As many as every MPI library has.
_TAGS = 2**15


class MPITransport(Transport):
    """Buffer collectives on a private mpi4py communicator.

    Args:
        comm: an intra-communicator that nobody else uses.  It is never freed: freeing is
            collective, and garbage is collected at different times on different ranks.
        check_alive: called while waiting; raises if the other ranks are known to be gone.
    """

    name = "mpi"

    def __init__(self, comm: Any, check_alive: Callable[[], None] | None = None) -> None:
        self._comm = comm
        self._check_alive = check_alive
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()

    @classmethod
    def for_ranks(
        cls, world_ranks: list[int], label: str, check_alive: Callable[[], None] | None = None
    ) -> MPITransport:
        """Build a communicator of these ranks of ``COMM_WORLD``; collective over them alone.

        MPI pairs the calls by ``label``, so that two threads may do it at the same time.
        """
        mpi: Any = importlib.import_module("mpi4py.MPI")
        group = mpi.COMM_WORLD.Get_group().Incl(world_ranks)
        return cls(mpi.COMM_WORLD.Create_group(group, tag=zlib.crc32(label.encode()) % _TAGS), check_alive)

    def allgather(self, message: np.ndarray, what: str) -> np.ndarray:
        """Gather messages of one length with a single ``MPI_Iallgather``."""
        self._check_length(message.nbytes)
        gathered = np.empty((self.size, message.nbytes), np.uint8)
        # Non-blocking, so that waiting can be reported and ended.
        request = self._comm.Iallgather(message, gathered)
        self.wait(request.Test, what)
        return gathered

    def allgather_any(self, data: bytes, what: str) -> list[bytes]:
        """Gather the lengths first, then the strings with ``MPI_Iallgatherv``."""
        lengths = self.allgather(np.array([len(data)], "<i8").view(np.uint8), what).view("<i8")[:, 0]
        self._check_length(int(lengths.sum()))
        gathered = np.empty(int(lengths.sum()), np.uint8)
        request = self._comm.Iallgatherv(np.frombuffer(data, np.uint8), [gathered, lengths.tolist()])
        self.wait(request.Test, what)
        ends = np.cumsum(lengths)
        return [gathered[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]

    def check_alive(self) -> None:
        """Ask whoever started this transport."""
        if self._check_alive is not None:
            self._check_alive()

    def abort(self, message: str) -> None:
        """End all ranks; the error alone would leave the others, and MPI_Finalize, waiting."""
        self._comm.Abort(1)
