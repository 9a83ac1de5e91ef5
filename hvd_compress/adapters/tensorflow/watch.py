"""Exchanges inside TensorFlow's graphs that take too long.

While Horovod gathers a message nothing of this package runs, and no error can be raised in
the graph.  So a thread looks, and ends the process if it has been told to.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from hvd_compress.transport import base
from hvd_compress.transport.base import gives_up, still_waits, timeout_limit


class Watch:
    """The messages that this process has handed over and not got back.

    Raises:
        ConfigError: ``HVD_COMPRESS_TIMEOUT`` is no positive number.
    """

    def __init__(self, interval: float = 0.5) -> None:
        self._interval = interval
        self._limit = timeout_limit()
        self._since: dict[Any, tuple[float, str, Any]] = {}
        self._started = False
        self._lock = threading.Lock()

    def begin(self, key: Any, name: str, process_set: Any) -> None:
        """Note that a message is on its way; ``key`` is its own, ``name`` is shown."""
        with self._lock:
            self._since[key] = (time.monotonic(), name, process_set)
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="hvd_compress-watch", daemon=True).start()

    def end(self, key: Any) -> None:
        """Note that it has come back."""
        with self._lock:
            self._since.pop(key, None)

    def _run(self) -> None:
        warn_at = base.WARN_AFTER_S
        while True:
            time.sleep(self._interval)
            with self._lock:
                oldest = min(self._since.values(), key=lambda one: one[0], default=None)
            if oldest is None:
                warn_at = base.WARN_AFTER_S
                continue
            since, name, process_set = oldest
            waited, what = time.monotonic() - since, f"the exchange of {name!r}"
            if self._limit is not None and waited > self._limit:
                gives_up(process_set.rank(), process_set.size(), what, waited)
                self.stop()
            if waited > warn_at:
                still_waits(process_set.rank(), process_set.size(), what, waited)
                warn_at = waited + base.WARN_AFTER_S

    def stop(self) -> None:
        """End the process at once: a graph that waits cannot be interrupted.  The launcher ends the other ranks."""
        os._exit(1)
