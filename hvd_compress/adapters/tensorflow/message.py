"""The message of one tensor."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress import wire
from hvd_compress.adapters.common import report_nonfinite, settings_of, shown_name
from hvd_compress.adapters.tensorflow.state import VariableState, after
from hvd_compress.adapters.tensorflow.target import Target, is_elastic
from hvd_compress.adapters.tensorflow.watch import Watch
from hvd_compress.base import Compressor
from hvd_compress.errors import HandshakeError, WireFormatError
from hvd_compress.layout import Layout
from hvd_compress.ops.base import ITEMSIZE
from hvd_compress.step import Payload, TensorSpec

_WATCH = Watch()


class Message:
    """The message of one tensor: written, gathered and read in the graph, by the host.

    Its functions are called by TensorFlow's threads, with NumPy arrays.
    """

    def __init__(
        self,
        compressor: Compressor,
        algorithm: Compressor,
        target: Target,
        spec: TensorSpec,
        state: VariableState | None,
    ) -> None:
        self.spec = spec
        self._state = state
        self._compressor = compressor
        self._channel = target.channel
        self._known = target.known
        self._name = target.known.name
        self._shown = shown_name(target.scope, target.known.kept)
        self._sections = list(algorithm.sections(spec))
        entry = (self._name, spec.shape, spec.dtype, tuple(self._sections))
        self._layout = Layout.of(settings_of(compressor), [entry])
        self._variable = self._layout.variable
        self._length = wire.HEADER_BYTES + self._layout.body_bytes

    def pack(self, payload: Payload) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the message, uint8 of shape ``(1, length)``, and the token.

        The token comes from the host too: a constant would be reduced once, by TensorFlow's
        optimiser, and equal tokens would be merged into one.
        """
        token = tf.float64 if self.spec.dtype == "float64" else tf.float32
        arrays = [tf.bitcast(x, tf.uint16) if x.dtype == tf.bfloat16 else x for x in payload.arrays]
        row, one = tf.numpy_function(self._pack, [payload.finite, *arrays], [tf.uint8, token])
        return tf.ensure_shape(row, [None] if self._variable else [1, self._length]), tf.ensure_shape(one, [1])

    def gather(self, row: tf.Tensor) -> tf.Tensor:
        """Return all ranks' messages, uint8 of shape ``(ranks, length)``, or one after the other if lengths vary."""
        channel = self._channel
        if channel.transport is None:
            hvd = importlib.import_module("horovod.tensorflow")
            operation = self._known.operation
            named = {} if operation is None else {"name": operation, "ignore_name_scope": True}
            rows = hvd.allgather(row, process_set=channel.process_set, **named)
        else:
            # A resource that all exchanges have in common makes TensorFlow run them one after the other.
            with after(channel.order.assign_add(1, read_value=False)):
                rows = tf.numpy_function(self._gather, [row], tf.uint8)
        return tf.ensure_shape(rows, [None] if self._variable else [self._ranks, row.shape[1]])

    @property
    def _ranks(self) -> int | None:
        """How many ranks there are, if that is known when the graph is made."""
        return None if is_elastic() else self._channel.process_set.size()

    def own(self, row: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Return the arrays that this rank has packed."""
        dtypes = [tf.uint16 if s.dtype == "bfloat16" else tf.as_dtype(s.dtype) for s in self._sections]
        arrays = tf.numpy_function(lambda row: self._decode(self._split(row)), [row], dtypes)
        arrays = arrays if isinstance(arrays, (list, tuple)) else [arrays]
        sections = list(zip(arrays, self._sections, strict=True))
        for array, section in sections:
            array.set_shape([1, section.count])
        return tuple(tf.bitcast(x[0], tf.bfloat16) if s.dtype == "bfloat16" else x[0] for x, s in sections)

    def _split(self, rows: np.ndarray) -> Sequence[np.ndarray]:
        return wire.split_messages(rows) if self._variable else rows  # type: ignore[return-value]

    def _decode(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self._variable:
            arrays = wire.decode_bodies([row[wire.HEADER_BYTES :] for row in rows], self._sections)
        else:
            arrays = wire.decode_body(np.asarray(rows), self._sections)
        return [x.astype(x.dtype.newbyteorder("="), copy=False) for x in arrays]

    def unpack(self, rows: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return an array of shape ``(ranks, count)`` a section, and the ranks whose tensor was not finite."""
        dtypes = [tf.uint16 if s.dtype == "bfloat16" else tf.as_dtype(s.dtype) for s in self._sections]
        *arrays, bad = tf.numpy_function(self._unpack, [rows], [*dtypes, tf.int32])
        shaped = []
        for array, section in zip(arrays, self._sections, strict=True):
            array.set_shape([self._ranks, section.count])
            shaped.append(tf.bitcast(array, tf.bfloat16) if section.dtype == "bfloat16" else array)
        return shaped, tf.ensure_shape(bad, [None])

    def reported(self, arrays: list[tf.Tensor], bad: tf.Tensor) -> list[tf.Tensor]:
        """Return the arrays, once it has been said which ranks' tensors were not finite."""
        if self._compressor.on_nonfinite != "raise":
            return arrays
        with after(tf.numpy_function(self._report, [bad], tf.bool)):
            return [tf.identity(array) for array in arrays]

    def _pack(self, finite: np.ndarray, *arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        step, self._known.messages = self._known.messages, self._known.messages + 1
        body = wire.encode_body(self._sections, arrays) if self._variable else None
        body_bytes = self._layout.body_bytes if body is None else body.nbytes
        header = wire.Header(wire.Kind.DATA, self._layout.digest, step, body_bytes, -1 if finite else 0)
        if body is None:
            message = wire.encode_message(header, self._sections, arrays, self._length)[None]
        else:
            message = wire.frame(header, body)
        if self._state is not None:
            self._state.steps += 1
        _WATCH.begin(self, self._shown, self._channel.process_set)
        telemetry = self._compressor.runtime.telemetry
        token = np.ones(1, np.float64 if self.spec.dtype == "float64" else np.float32)
        sent, dense = body_bytes + token.nbytes, self.spec.numel * ITEMSIZE[self.spec.dtype]
        telemetry.count(self._shown, sent, dense)
        telemetry.exchanges += 1
        telemetry.exchange_bytes += message.nbytes
        telemetry.overhead_bytes += wire.HEADER_BYTES
        return message, token

    def _gather(self, row: np.ndarray) -> np.ndarray:
        transport: Any = self._channel.transport
        what = f"the exchange of {self._name!r}"
        if self._variable:
            return np.frombuffer(b"".join(transport.allgather_any(row.tobytes(), what)), np.uint8)
        rows: np.ndarray = transport.allgather(row[0], what)
        return rows

    def _unpack(self, gathered: np.ndarray) -> tuple[np.ndarray, ...]:
        _WATCH.end(self)
        rows = self._split(gathered)
        headers = [wire.decode_header(row) for row in rows]
        for rank, header in enumerate(headers):
            if header.layout != self._layout.digest:
                raise WireFormatError(
                    f"expected layout {self._layout.digest.hex()} for {self._name!r}, got {header.layout.hex()} from "
                    f"rank {rank}"
                )
        steps = [header.step for header in headers]
        # Workers that have joined an elastic job count from 0.
        if len(set(steps)) > 1 and not is_elastic():
            raise HandshakeError(f"ranks are at different steps of {self._name!r}: by rank, {steps}")
        bad = [rank for rank, header in enumerate(headers) if header.first_nonfinite >= 0]
        if self._compressor.on_nonfinite != "raise":
            self._report(np.array(bad))
        return *self._decode(rows), np.array(bad, np.int32)

    def _report(self, bad: np.ndarray) -> np.ndarray:
        if bad.size:
            report_nonfinite(self._compressor, [(int(rank), self._name) for rank in bad])
        return np.array(True)
