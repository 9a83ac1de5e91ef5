"""One step's payloads, exchanged together.

``compress`` only queues; nothing is ever sent from there, because MPI pairs collectives by
call order and Horovod's hooks fire in another order on every rank.  The first ``collect`` of
a step sends all that is queued, sorted by name, in a single allgather.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_compress import wire
from hvd_compress.errors import HandshakeError, TransportError, WireFormatError
from hvd_compress.layout import Declaration, Layout, check_agreement
from hvd_compress.ops.base import Array, Ops
from hvd_compress.telemetry import Telemetry
from hvd_compress.transport.base import Transport


@dataclass
class Item:
    """One tensor of a step.

    Attributes:
        name: the same on all ranks.
        shape, dtype: of the tensor, compared between ranks.
        sections: what its payload consists of; none for a tensor that travels otherwise
            and is only watched for NaN and infinity.
        arrays: the payload, one array for each section, on the tensor's device.
        finite: 0-d boolean on the tensor's device.
        give_back: returns to the residual what this item took out of it.
        counted: called with the payload's bytes, for one whose size varies.
        waiting, join: for a tensor of which it depends on others what is sent: before the
            exchange, ``join`` gets what is ``waiting`` of all of them and returns more items.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sections: Sequence[wire.Section]
    arrays: Sequence[Array]
    finite: Array
    give_back: Callable[[], None]
    counted: Callable[[int], None] | None = None
    waiting: Any = None
    join: Callable[[list[Any]], list[Item]] | None = None


@dataclass(frozen=True)
class Gathered:
    """All ranks' payloads of one tensor: an array of shape ``(ranks, count)`` a section."""

    arrays: Sequence[Array]
    ranks: int


class Exchange:
    """The exchange of one optimizer, or of the direct calls, over one process set.

    Args:
        connect: opens the transport; called once, at the first exchange.
        ops: the framework's operations.
        settings: compared between ranks at the first exchange.
        telemetry: where bytes are counted.
        on_nonfinite: called on every rank with ``[(rank, name), ...]`` after residuals have
            been restored, when a rank's tensor holds NaN or infinity; may raise.
        watch_dense: exchange the finiteness of dense tensors even if nothing else is sent.
        declaration: a comparison between ranks that is under way; looked at in passing, and
            waited for before the first exchange.
        on_start: called in the first step, once all tensors are there; may raise.
        direct: compare the settings at the first call even if nothing is sent.
    """

    def __init__(
        self,
        connect: Callable[[], Transport],
        ops: Ops,
        settings: dict[str, Any],
        telemetry: Telemetry,
        on_nonfinite: Callable[[list[tuple[int, str]]], None],
        watch_dense: bool = False,
        declaration: Declaration | None = None,
        on_start: Callable[[], None] | None = None,
        direct: bool = False,
    ) -> None:
        self._connect = connect
        self._ops = ops
        self._settings = settings
        self._telemetry = telemetry
        self._on_nonfinite = on_nonfinite
        self._watch_dense = watch_dense
        self._declaration = declaration
        self._direct = direct
        self._on_start = on_start or nothing
        self._started = False
        self._transport: Transport | None = None
        self._agreed: dict[str, Layout] = {}
        self._steps: dict[str, int] = {}
        self._pending: dict[str, Item] = {}
        self._gathered: dict[str, Gathered] = {}
        self._uncollected: dict[str, Item] = {}
        self._sent: list[Item] = []
        # Whether this step has been exchanged; a step ends when the next tensor is queued.
        self._settled = True
        self._void = False
        self._unnamed = 0
        # On GPUs Horovod's hooks run on one autograd thread for each device.
        self._lock = threading.Lock()

    @property
    def begun(self) -> bool:
        """Whether something of the current step is queued already."""
        return bool(self._pending)

    @property
    def busy(self) -> bool:
        """Whether something is queued that has been taken out of what is remembered."""
        return any(item.sections or item.join is not None for item in self._pending.values())

    @property
    def void(self) -> bool:
        """Whether the last exchange has shown NaN or infinity on some rank, so that its step does not count."""
        return self._void

    @property
    def settled(self) -> bool:
        """Whether this step has been exchanged."""
        return self._settled

    def begin(self) -> None:
        """Note that a step is under way, though nothing may be queued in it."""
        self._settled = False

    def has(self, name: str) -> bool:
        """Whether ``name`` is queued already."""
        return name in self._pending

    def next_unnamed(self) -> int:
        """Number the calls without a name, whose order is the same on all ranks, since Horovod pairs them by it."""
        with self._lock:
            self._unnamed += 1
            return self._unnamed - 1

    def submit(self, item: Item) -> None:
        """Queue a tensor for the next exchange.

        Raises:
            HandshakeError: ranks are found to disagree.
        """
        if self._declaration is not None:
            try:
                self._declaration.check(wait=False)
            except HandshakeError:
                item.give_back()
                raise
        with self._lock:
            abandoned = self._pending.pop(item.name, None)
            self._pending[item.name] = item
            self._settled = False
        if abandoned is not None:
            # A step that an error ended before it was exchanged: nothing of it may be lost.
            abandoned.give_back()

    def collect(self, name: str, slot: str = "") -> Gathered:
        """Return what all ranks sent for ``name``, exchanging first if it is still queued.

        ``slot`` names a sequence of exchanges whose layout usually stays the same.

        Raises:
            HandshakeError: ranks disagree; raised on all of them.
            WireFormatError: a message is malformed.
            TransportError: the exchange failed.
        """
        self.settle(slot)
        if name not in self._gathered:
            raise TransportError(f"nothing was exchanged for {name!r}: decompress was called without compress")
        self._uncollected.pop(name, None)
        return self._gathered.pop(name)

    def taken(self, name: str) -> None:
        """Note that what Horovod has reduced of ``name`` is applied, so that it is not given back."""
        self._uncollected.pop(name, None)

    def settle(self, slot: str = "") -> None:
        """Exchange what is queued, if anything; once a step, collective over the process set.

        Ranks that exchanged tensors in the last step expect an exchange in this one, even
        if none of them is left.
        """
        if not self._settled:
            self._settled = True
            self._flush(slot)

    def undo(self) -> None:
        """Put what was sent in the last step back into the residuals; the step is not applied."""
        sent, self._sent, self._uncollected = self._sent, [], {}
        for item in sent:
            item.give_back()

    def abandon(self) -> None:
        """Forget what is queued and what was sent: the residuals are about to be replaced."""
        with self._lock:
            self._pending.clear()
        self._sent, self._uncollected, self._gathered = [], {}, {}

    def _flush(self, slot: str) -> None:
        with self._lock:
            items = [self._pending[name] for name in sorted(self._pending)]
            self._pending.clear()
        self._gathered, self._void = {}, False
        for item in self._uncollected.values():
            # Exchanged in a step that was given up before it was applied.
            item.give_back()
        self._uncollected, self._sent = {}, []
        agreed = self._agreed.get(slot)
        expected = agreed is not None and agreed.body_bytes
        try:
            if not self._started:
                if self._declaration is not None:
                    self._declaration.check(wait=True)
                self._on_start()
                self._started = True
            items = self._join(items)
            if not (expected or self._watch_dense or any(item.sections for item in items)):
                if self._direct and self._transport is None:
                    # Of calls of what Horovod adds up this is all that is ever compared.
                    self._transport = self._connect()
                    sent = check_agreement(self._transport, Layout.of(self._settings, ()), "the first call")
                    self._telemetry.handshake_bytes += sent
                self._sent, self._uncollected = items, {item.name: item for item in items}
                return
            gathered, finite, bad = self._exchange(items, slot)
        except BaseException:
            for item in items:
                item.give_back()
            raise
        self._void = bool(bad)
        if bad:
            # The step will be skipped, or is lost: what finite ranks sent must not be.
            for item, is_finite in zip(items, finite, strict=True):
                if is_finite:
                    item.give_back()
            self._on_nonfinite(bad)
        else:
            self._sent, self._uncollected = items, {item.name: item for item in items}
        self._gathered = gathered

    def _join(self, items: list[Item]) -> list[Item]:
        """Find out what is sent of tensors of which it depends on others; the same order on all ranks."""
        joining: dict[Any, list[Item]] = {}
        for item in items:
            if item.join is not None:
                joining.setdefault(item.join, []).append(item)
        found: list[Item] = []
        try:
            for join in sorted(joining, key=lambda join: str(join.__module__)):
                found += join([item.waiting for item in joining[join]])
        except BaseException:
            for item in found:
                item.give_back()
            raise
        for waited in joining.values():
            for item in waited:
                # They would keep the optimizer alive.
                item.waiting, item.join, item.give_back = None, None, nothing
        return sorted([*items, *found], key=lambda item: item.name)

    def _exchange(self, items: list[Item], slot: str) -> tuple[dict[str, Gathered], list[bool], list[tuple[int, str]]]:
        layout = Layout.of(self._settings, [(i.name, i.shape, i.dtype, tuple(i.sections)) for i in items])
        *payload, finite = self._to_host(items)
        rows = self._gather(layout, payload, finite, slot)
        headers = [wire.decode_header(row) for row in rows]
        if layout.variable:
            self._count(items, payload)
            arrays = wire.decode_bodies([row[wire.HEADER_BYTES :] for row in rows], layout.sections)
        else:
            arrays = wire.decode_body(np.asarray(rows), layout.sections)
        names = [item.name for item in items]
        for rank, header in enumerate(headers):
            _check_header(header, layout, rank)
        bad = [(rank, names[h.first_nonfinite]) for rank, h in enumerate(headers) if h.first_nonfinite >= 0]
        return self._to_device(items, arrays), finite.tolist(), bad

    def _to_host(self, items: list[Item]) -> list[np.ndarray]:
        arrays = [array for item in items for array in item.arrays]
        flags = [self._ops.reshape(item.finite, (1,)) for item in items]
        host = self._ops.to_host(arrays + flags)
        return [*host[: len(arrays)], np.concatenate([np.ones(0, bool), *host[len(arrays) :]])]

    def _count(self, items: list[Item], payload: list[np.ndarray]) -> None:
        start = 0
        for item in items:
            stop = start + len(item.sections)
            if item.counted is not None:
                item.counted(wire.encode_body(item.sections, payload[start:stop]).nbytes)
            start = stop

    def _to_device(self, items: list[Item], arrays: list[np.ndarray]) -> dict[str, Gathered]:
        gathered, start = {}, 0
        sending = [item for item in items if item.sections]
        if not sending:
            return {}
        dtypes = [section.dtype for item in sending for section in item.sections]
        moved = self._ops.from_host(arrays, dtypes, sending[0].arrays[0])
        for item in sending:
            stop = start + len(item.sections)
            gathered[item.name] = Gathered(moved[start:stop], len(arrays[start]))
            start = stop
        return gathered

    def _gather(self, layout: Layout, payload: list[np.ndarray], finite: np.ndarray, slot: str) -> Sequence[np.ndarray]:
        if self._transport is None:
            self._transport = self._connect()
        transport, step = self._transport, self._steps.get(slot, 0)
        self._steps[slot] = step + 1
        what = f"exchange {step} of {layout.names()}"
        agreed = self._agreed.get(slot)
        if agreed is not None:
            # The layout agreed last fixes the length, so that ranks whose layout has
            # changed can say so to those whose layout has not.
            changed = agreed.digest != layout.digest
            kind = wire.Kind.LAYOUT_CHANGED if changed else wire.Kind.DATA
            message = self._message(kind, agreed, step, payload, finite)
            rows = self._send(transport, message, agreed.variable, what)
            headers = [wire.decode_header(row) for row in rows]
            _check_steps(headers)
            if all(header.kind is wire.Kind.DATA for header in headers):
                return rows
            self._telemetry.overhead_bytes += message.nbytes - wire.HEADER_BYTES
        sent = check_agreement(transport, layout, what)
        self._telemetry.handshake_bytes += sent
        self._agreed[slot] = layout
        message = self._message(wire.Kind.DATA, layout, step, payload, finite)
        return self._send(transport, message, layout.variable, what)

    def _message(
        self, kind: wire.Kind, layout: Layout, step: int, payload: list[np.ndarray], finite: np.ndarray
    ) -> np.ndarray:
        data = kind is wire.Kind.DATA
        first_bad = -1 if not data or finite.all() else int(np.argmin(finite))
        if layout.variable:
            body = wire.encode_body(layout.sections, payload) if data else np.empty(0, np.uint8)
            return wire.frame(wire.Header(kind, layout.digest, step, body.nbytes, first_bad), body)
        length = layout.body_bytes
        header = wire.Header(kind, layout.digest, step, length if data else 0, first_bad)
        sections = layout.sections if data else ()
        return wire.encode_message(header, sections, payload if data else (), wire.HEADER_BYTES + length)

    def _send(self, transport: Transport, message: np.ndarray, variable: bool, what: str) -> Sequence[np.ndarray]:
        rows: Sequence[np.ndarray]
        if variable:
            rows = [np.frombuffer(data, np.uint8) for data in transport.allgather_any(message.tobytes(), what)]
        else:
            rows = transport.allgather(message, what)  # type: ignore[assignment]
        self._telemetry.exchanges += 1
        self._telemetry.exchange_bytes += message.nbytes
        self._telemetry.overhead_bytes += wire.HEADER_BYTES
        return rows


def nothing() -> None:
    """Give back nothing: nothing was taken out of what is remembered, or it belongs to another item."""


def _check_header(header: wire.Header, layout: Layout, rank: int) -> None:
    if header.layout != layout.digest:
        raise WireFormatError(f"expected layout {layout.digest.hex()}, got {header.layout.hex()} from rank {rank}")
    if header.first_nonfinite >= len(layout.entries):
        raise WireFormatError(
            f"expected a position below {len(layout.entries)}, got {header.first_nonfinite} from rank {rank}"
        )


def _check_steps(headers: list[wire.Header]) -> None:
    steps = [header.step for header in headers]
    if len(set(steps)) > 1:
        raise HandshakeError(f"ranks are at different steps: exchanges done so far, by rank, are {steps}")
