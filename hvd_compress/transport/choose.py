"""The choice of a transport that all ranks can use."""

from __future__ import annotations

import functools
import importlib
import json
from typing import Any

import numpy as np

from hvd_compress.errors import TransportError
from hvd_compress.transport.base import Transport, logger
from hvd_compress.transport.horovod import HorovodTransport, horovod_is_running
from hvd_compress.transport.mpi import MPITransport

CHOICES = ("auto", "mpi", "horovod")

# One rank's record, padded with blanks: a fixed size needs one collective instead of two.
_RECORD_BYTES = 512


def open_transport(choice: str, process_set: Any, label: str, framework: str = "torch") -> Transport:
    """Open the transport that all ranks of ``process_set`` can use; collective over them.

    Raises:
        TransportError: on every rank, if ranks ask for different transports, or if
            ``choice`` is ``"mpi"`` and one rank cannot use it.
    """
    fallback = HorovodTransport(process_set, label, framework)
    world_rank, obstacle = (-1, "") if choice == "horovod" else _mpi_rank(framework)
    record = json.dumps([choice, world_rank, obstacle]).encode().ljust(_RECORD_BYTES)
    records = fallback.allgather(np.frombuffer(record, np.uint8), f"the choice of a transport for {label}")
    ranks = [json.loads(row.tobytes()) for row in records]
    choices = [asked for asked, _, _ in ranks]
    if len(set(choices)) > 1:
        raise TransportError(f"expected the same transport= on all ranks, got, by rank, {choices}")
    if choice == "horovod":
        return fallback
    for rank, (_, _, why_not) in enumerate(ranks):
        if why_not:
            message = f"rank {rank} cannot exchange through mpi4py: {why_not}"
            if choice == "mpi":
                raise TransportError(f"transport='mpi' was asked for, but {message}")
            log = logger.warning if fallback.rank == 0 else logger.debug
            log("%s; exchanging through hvd.allgather instead", message)
            return fallback
    ranks_of_mpi = [world_rank for _, world_rank, _ in ranks]
    return MPITransport.for_ranks(ranks_of_mpi, label, functools.partial(_check_horovod, framework))


def _mpi_rank(framework: str) -> tuple[int, str]:
    """Return this process's rank in ``MPI.COMM_WORLD`` and, if MPI is unusable, why."""
    basics = importlib.import_module(f"horovod.{framework}")
    if not basics.mpi_enabled():
        return -1, "Horovod runs without MPI (horovodrun --gloo, or Horovod built without MPI)"
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        return -1, f"mpi4py cannot be imported ({str(error)[:100]}); install it with: pip install mpi4py"
    except RuntimeError as error:
        return -1, f"mpi4py finds no MPI library ({str(error)[:100]}); install Open MPI or MPICH"
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return -1, (
            "MPI was started without MPI_THREAD_MULTIPLE, but Horovod uses it from a thread of its own; "
            "unset HOROVOD_MPI_THREADS_DISABLE, use an MPI library with thread support, or import mpi4py.MPI first"
        )
    return mpi.COMM_WORLD.Get_rank(), ""


def _check_horovod(framework: str) -> None:
    """Raise if Horovod was shut down: a rank that leaves with an error tells Horovod, not MPI."""
    if not horovod_is_running(framework):
        internal_error = importlib.import_module("horovod.common.exceptions").HorovodInternalError
        raise internal_error("Horovod has been shut down while ranks were exchanging: another rank has left or failed")
