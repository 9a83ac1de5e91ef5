"""Counting what was sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counter:
    """Bytes and steps of one parameter, or of everything."""

    steps: int = 0
    bytes_sent: int = 0
    dense_bytes: int = 0

    def add(self, bytes_sent: int, dense_bytes: int) -> None:
        """Count one step."""
        self.steps += 1
        self.bytes_sent += bytes_sent
        self.dense_bytes += dense_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers; ``ratio`` is dense over sent bytes."""
        ratio = self.dense_bytes / self.bytes_sent if self.bytes_sent else None
        return {
            "steps": self.steps,
            "bytes_sent": self.bytes_sent,
            "dense_bytes": self.dense_bytes,
            "ratio": ratio,
        }


@dataclass
class Telemetry:
    """Counters by parameter, and the bytes of the exchanges themselves."""

    parameters: dict[str, Counter] = field(default_factory=dict)
    #: Steps that something else counts, with the bytes sent and dense of one step.
    counted: dict[str, tuple[Callable[[], int], int, int]] = field(default_factory=dict)
    exchanges: int = 0
    exchange_bytes: int = 0
    handshake_bytes: int = 0
    overhead_bytes: int = 0

    def count(self, name: str, bytes_sent: int, dense_bytes: int) -> None:
        """Count a tensor's step."""
        self.parameters.setdefault(name, Counter()).add(bytes_sent, dense_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers; see ``Compressor.stats``."""
        total = Counter()
        counters = dict(self.parameters)
        for name, (steps, sent, dense) in self.counted.items():
            done = steps()
            counters[name] = Counter(done, done * sent, done * dense)
        for counter in counters.values():
            total.steps = max(total.steps, counter.steps)
            total.bytes_sent += counter.bytes_sent
            total.dense_bytes += counter.dense_bytes
        total.bytes_sent += self.overhead_bytes
        return {
            **total.as_dict(),
            "exchanges": self.exchanges,
            "exchange_bytes": self.exchange_bytes,
            "handshake_bytes": self.handshake_bytes,
            "parameters": {name: counter.as_dict() for name, counter in sorted(counters.items())},
        }
