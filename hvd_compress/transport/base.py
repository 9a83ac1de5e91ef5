"""The narrow interface of all transports, and how they wait."""

from __future__ import annotations

import abc
import logging
import os
import time
from collections.abc import Callable

import numpy as np

from hvd_compress.errors import ConfigError, ExchangeTimeoutError, TransportError

logger = logging.getLogger("hvd_compress")

#: MPI counts elements in a C int.
MAX_MESSAGE_BYTES = 2**31 - 1
#: Seconds after which a waiting rank says so, and between reminders.
WARN_AFTER_S = 60.0


class Transport(abc.ABC):
    """A group of ranks that exchange byte buffers; collectives pair by call order."""

    name: str
    rank: int
    size: int

    @abc.abstractmethod
    def allgather(self, message: np.ndarray, what: str) -> np.ndarray:
        """Gather uint8 messages of one length; return uint8 of shape ``(size, length)``.

        ``what`` says in words what is exchanged, for messages about waiting.
        """

    @abc.abstractmethod
    def allgather_any(self, data: bytes, what: str) -> list[bytes]:
        """Gather byte strings of any lengths."""

    @abc.abstractmethod
    def abort(self, message: str) -> None:
        """End the job because an exchange took too long; may return if only raising can."""

    def check_alive(self) -> None:  # noqa: B027 - optional
        """Raise if it is known that the other ranks will not answer; called while waiting."""

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait until ``done()``; warn once a minute.

        Raises:
            ExchangeTimeoutError: ``HVD_COMPRESS_TIMEOUT`` is set and has passed.
        """
        limit = timeout_limit()
        start = time.monotonic()
        warn_at, check_at = WARN_AFTER_S, 1.0
        while not done():
            waited = time.monotonic() - start
            # Spin at first, since most exchanges take well under a millisecond; then sleep ever longer.
            time.sleep(0.0 if waited < 1e-3 else min(waited / 20, 2e-3))
            if waited >= check_at:
                self.check_alive()
                check_at += 1.0
            if limit is not None and waited > limit:
                message = gives_up(self.rank, self.size, what, waited)
                self.abort(message)
                raise ExchangeTimeoutError(message)
            if waited > warn_at:
                still_waits(self.rank, self.size, what, waited)
                warn_at += WARN_AFTER_S

    def _check_length(self, nbytes: int) -> None:
        if nbytes > MAX_MESSAGE_BYTES:
            raise TransportError(
                f"expected at most {MAX_MESSAGE_BYTES} bytes a message, got {nbytes}; use a smaller ratio"
            )


_CAUSES = (
    "usual causes: a rank stopped, raised an error or called hvd.join(), ranks take different numbers of steps, "
    "or they run different code"
)


def still_waits(rank: int, size: int, what: str, waited: float) -> None:
    """Log that a rank has waited for some seconds."""
    logger.warning(
        "rank %d of %d has waited %.0f s for the other ranks in %s; %s. "
        "Set HVD_COMPRESS_TIMEOUT to a number of seconds to end the job instead.",
        rank,
        size,
        waited,
        what,
        _CAUSES,
    )


def gives_up(rank: int, size: int, what: str, waited: float) -> str:
    """Log, and return, that a rank waits no longer."""
    message = f"rank {rank} of {size} gave up on {what} after {waited:.0f} s (HVD_COMPRESS_TIMEOUT); {_CAUSES}"
    logger.error("%s", message)
    return message


def timeout_limit() -> float | None:
    """Return ``HVD_COMPRESS_TIMEOUT`` in seconds, None if it is not set.

    Raises:
        ConfigError: it is no positive number.
    """
    text = os.environ.get("HVD_COMPRESS_TIMEOUT", "")
    if not text:
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not limit > 0:
        raise ConfigError(f"HVD_COMPRESS_TIMEOUT must be a positive number of seconds, got {text!r}")
    return limit
