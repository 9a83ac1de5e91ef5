"""Exchange through Horovod's own named allgather."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from hvd_compress.errors import TransportError
from hvd_compress.transport.base import Transport


class HorovodTransport(Transport):
    """Named ``hvd.allgather`` of bytes, over MPI, Gloo or NCCL, whatever Horovod runs on.

    Args:
        process_set: Horovod's process set.
        label: the operations' name, the same on all ranks and for no other exchange that
            could be under way at the same time.
    """

    name = "horovod"

    def __init__(self, process_set: Any, label: str) -> None:
        self._hvd = importlib.import_module("horovod.torch")
        self._torch = importlib.import_module("torch")
        self._process_set = process_set
        self._label = label
        self.rank = process_set.rank()
        self.size = process_set.size()

    def allgather(self, message: np.ndarray, what: str) -> np.ndarray:
        """Gather messages of one length."""
        gathered = self._gather(message, self._label, what)
        if gathered.size != self.size * message.size:
            raise TransportError(
                f"expected {self.size} messages of {message.size} bytes in {what}, got {gathered.size} bytes in all"
            )
        return gathered.reshape(self.size, message.size)

    def allgather_any(self, data: bytes, what: str) -> list[bytes]:
        """Gather the lengths, then the strings."""
        length = np.array([len(data)], "<i8").view(np.uint8)
        lengths = self._gather(length, f"{self._label}.lengths", what).view("<i8")
        gathered = self._gather(np.frombuffer(data, np.uint8), f"{self._label}.strings", what)
        ends = np.cumsum(lengths)
        return [gathered[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]

    def _gather(self, data: np.ndarray, name: str, what: str) -> np.ndarray:
        self._check_length(data.nbytes)
        tensor = self._torch.from_numpy(np.array(data))
        handle = self._hvd.allgather_async(tensor, name=name, process_set=self._process_set)
        self.wait(lambda: self._hvd.poll(handle), what)
        gathered: np.ndarray = self._hvd.synchronize(handle).numpy()
        return gathered

    def check_alive(self) -> None:
        """Nothing to do: Horovod itself fails the operation when a rank leaves."""

    def abort(self, message: str) -> None:
        """Return: an error that ends this process makes Horovod fail on all others."""


def horovod_is_running() -> bool:
    """Tell, without communicating, whether Horovod's background thread still runs.

    ``hvd.is_initialized()`` stays true after another rank has left.  What changes is the
    table of process sets: the global one loses its list of ranks.
    """
    basics = importlib.import_module("horovod.torch.mpi_ops")._basics
    if not basics.is_initialized():
        return False
    try:
        ranks = basics._get_process_set_ids_and_ranks()[0]
    except (KeyError, RuntimeError, ValueError):
        return False
    return len(ranks) < 2 or ranks[-1] != 0
