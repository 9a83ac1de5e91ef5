"""Exchange through Horovod's own named allgather."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from hvd_compress.errors import TransportError
from hvd_compress.transport.base import Transport, timeout_limit


class HorovodTransport(Transport):
    """Named ``hvd.allgather`` of bytes, over MPI, Gloo or NCCL, whatever Horovod runs on.

    Args:
        process_set: Horovod's process set.
        label: the operations' name, the same on all ranks and for no other exchange that
            could be under way at the same time.
        framework: ``"torch"`` or ``"tensorflow"``, whichever Horovod was initialised for.

    Raises:
        TransportError: the process set belongs to another framework's Horovod.
    """

    name = "horovod"

    def __init__(self, process_set: Any, label: str, framework: str = "torch") -> None:
        timeout_limit()  # a bad setting is reported before anything is started
        self._calls: Any = _TorchCalls() if framework == "torch" else _TensorFlowCalls()
        _check_known(process_set, framework)
        self._process_set = process_set
        self._label = label
        self.rank = process_set.rank()
        self.size = process_set.size()

    def allgather(self, message: np.ndarray, what: str) -> np.ndarray:
        """Gather messages of one length."""
        gathered = self._finish(self._start(message, self._label), what)
        if gathered.size != self.size * message.size:
            raise TransportError(
                f"expected {self.size} messages of {message.size} bytes in {what}, got {gathered.size} bytes in all"
            )
        return gathered.reshape(self.size, message.size)

    def allgather_any(self, data: bytes, what: str) -> list[bytes]:
        """Gather byte strings, each behind its length."""
        return self.start_allgather_any(data).result(what)

    def start_allgather_any(self, data: bytes) -> PendingAllgather:
        """Start gathering byte strings.

        Horovod pairs operations by name, so this, unlike an MPI collective, may be started
        at different points of the program on different ranks.
        """
        framed = np.frombuffer(len(data).to_bytes(8, "little") + data, np.uint8)
        return PendingAllgather(self, self._start(framed, f"{self._label}.strings"))

    def _start(self, data: np.ndarray, name: str) -> Any:
        self._check_length(data.nbytes)
        return self._calls.start(data, name, self._process_set)

    def _finish(self, handle: Any, what: str) -> np.ndarray:
        self.wait(lambda: self._calls.done(handle), what)
        gathered: np.ndarray = self._calls.result(handle)
        return gathered

    def check_alive(self) -> None:
        """Nothing to do: Horovod itself fails the operation when a rank leaves."""

    def abort(self, message: str) -> None:
        """Return: an error that ends this process makes Horovod fail on all others."""


class _TorchCalls:
    """The asynchronous calls of ``horovod.torch``."""

    def __init__(self) -> None:
        self._hvd = importlib.import_module("horovod.torch")
        self._torch = importlib.import_module("torch")

    def start(self, data: np.ndarray, name: str, process_set: Any) -> Any:
        tensor = self._torch.from_numpy(np.array(data))
        return self._hvd.allgather_async(tensor, name=name, process_set=process_set)

    def done(self, handle: Any) -> bool:
        return bool(self._hvd.poll(handle))

    def result(self, handle: Any) -> np.ndarray:
        gathered: np.ndarray = self._hvd.synchronize(handle).numpy()
        return gathered


class _TensorFlowCalls:
    """Eager ``horovod.tensorflow`` calls in threads of their own."""

    def __init__(self) -> None:
        self._hvd = importlib.import_module("horovod.tensorflow")
        self._tf = importlib.import_module("tensorflow")

    def start(self, data: np.ndarray, name: str, process_set: Any) -> Future[np.ndarray]:
        def gather() -> np.ndarray:
            with self._tf.device("CPU:0"):
                gathered: np.ndarray = self._hvd.allgather(
                    self._tf.constant(data), name=name, process_set=process_set
                ).numpy()
            return gathered

        return in_fresh_thread(gather)

    def done(self, handle: Future[np.ndarray]) -> bool:
        return handle.done()

    def result(self, handle: Future[np.ndarray]) -> np.ndarray:
        return handle.result()


def in_fresh_thread(work: Callable[[], Any]) -> Future[Any]:
    """Start ``work`` in a thread of its own, where TensorFlow is eager whatever is being traced elsewhere.

    The thread is a daemon: one that waits for a rank that is gone must not keep the process from ending.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class PendingAllgather:
    """Byte strings that are being gathered."""

    def __init__(self, transport: HorovodTransport, handle: Any) -> None:
        self._transport = transport
        self._handle = handle

    def ready(self) -> bool:
        """Tell whether :meth:`result` would return at once."""
        return bool(self._transport._calls.done(self._handle))

    def result(self, what: str) -> list[bytes]:
        """Wait for the strings and return them in rank order."""
        gathered = self._transport._finish(self._handle, what).tobytes()
        strings, start = [], 0
        while start < len(gathered):
            stop = start + 8 + int.from_bytes(gathered[start : start + 8], "little")
            strings.append(gathered[start + 8 : stop])
            start = stop
        return strings


def _check_known(process_set: Any, framework: str) -> None:
    """Refuse a process set that is not in the framework's table.

    Each framework's Horovod has its own table; ``hvd.add_process_set``, whichever module it
    is called through, writes into that of the framework that was imported last.
    """
    number = process_set.process_set_id
    if number == 0:
        return
    known = importlib.import_module(f"horovod.{framework}.mpi_ops")._basics._get_process_set_ids_and_ranks()
    if number not in known:
        raise TransportError(
            f"expected a process set of horovod.{framework}, got {process_set}, which it does not know; "
            f"where several frameworks are imported Horovod adds a process set to the last one only: "
            f"import horovod.{framework} last"
        )


def horovod_is_running(framework: str = "torch") -> bool:
    """Tell, without communicating, whether Horovod's background thread still runs.

    ``hvd.is_initialized()`` stays true after another rank has left.  What changes is the
    table of process sets: the global one loses its list of ranks.
    """
    basics = importlib.import_module(f"horovod.{framework}.mpi_ops")._basics
    if not basics.is_initialized():
        return False
    try:
        ranks = basics._get_process_set_ids_and_ranks()[0]
    except (KeyError, RuntimeError, ValueError):
        return False
    return len(ranks) < 2 or ranks[-1] != 0
