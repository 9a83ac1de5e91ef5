"""TensorFlow tensors under stock ``horovod.tensorflow``, in graphs and eager.

Horovod reduces every gradient in a ``tf.cond`` of its own, so nothing can be passed from one
gradient to another and there is no common exchange of a step: every tensor has a message,
which Horovod's own allgather fuses with the others.  Messages are written and read by the
host; only the payload leaves the device.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvd_compress.adapters.callsite import find_tensorflow_call
from hvd_compress.adapters.common import checked_spec, shown_name, warn_unnamed
from hvd_compress.adapters.tensorflow.message import Message
from hvd_compress.adapters.tensorflow.state import StepCounter, VariableState, after
from hvd_compress.adapters.tensorflow.target import Target, find_target
from hvd_compress.base import Compressor, Payload, TensorSpec
from hvd_compress.errors import UnboundTensorError, UnsupportedError
from hvd_compress.ops.base import ITEMSIZE
from hvd_compress.ops.tensorflow import TensorFlowOps
from hvd_compress.policy import Route

_OPS = TensorFlowOps()


@dataclass(frozen=True)
class Dense:
    """Context of a tensor that Horovod reduces itself."""

    dtype: tf.DType
    watched: str


@dataclass(frozen=True)
class Queued:
    """Context of a compressed tensor."""

    message: Message
    row: tf.Tensor
    payload: Payload
    state: VariableState | None
    device: str


def compress(compressor: Compressor, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """Implement ``Compressor.compress`` for TensorFlow."""
    call = find_tensorflow_call(tensor)
    if call is None:
        raise UnboundTensorError(
            f"{type(compressor).__name__}.compress() was called by other code than Horovod's; expected a call through "
            "hvd.DistributedGradientTape, hvd.DistributedOptimizer or hvd.allreduce(t, name=..., compression=...)"
        )
    _refuse_xla(compressor)
    if not call.process_set.included():
        # Horovod traces a branch for this rank, too, and never runs it.
        return tensor, Dense(tensor.dtype, "")
    target, tensor = find_target(compressor, call, tensor)
    name = target.known.name
    hvd = importlib.import_module("horovod.tensorflow")
    shape = _OPS.shape(tensor) if tensor.shape.is_fully_defined() else None
    if shape is None:
        raise UnsupportedError(
            f"{type(compressor).__name__} expected a tensor of known shape for {name!r}, got {tensor.shape}"
        )
    spec = checked_spec(compressor, hvd, call.op, name, shape, _OPS.dtype(tensor))
    if compressor.policy.route(spec.shape) is Route.DENSE:
        return _compress_dense(compressor, tensor, spec, target)
    device = tensor.device if target.variable is None else target.variable.device
    with tf.device(device):
        payload, state = _encode(compressor, tensor, spec, target)
    message = Message(compressor, target, spec, state)
    row, token = message.pack(payload)
    return token, Queued(message, row, payload, state, device)


def decompress(compressor: Compressor, tensor: tf.Tensor, ctx: Dense | Queued) -> tf.Tensor:
    """Implement ``Compressor.decompress`` for TensorFlow; ``tensor`` is what Horovod has reduced."""
    if isinstance(ctx, Dense):
        if ctx.watched:
            tensor = tf.debugging.check_numerics(tensor, ctx.watched)
        return tf.cast(tensor, ctx.dtype)
    message, spec = ctx.message, ctx.message.spec
    rows = message.gather(ctx.row)
    arrays, bad = message.unpack(rows)
    with tf.device(ctx.device):
        restored = _give_back(compressor, ctx, tf.size(bad) > 0)
        with after(restored):
            # Only now, so that an error that is raised finds the residuals restored.
            arrays = message.reported(arrays, bad)
        total = compressor.combine(arrays, spec, _OPS)
        # The token was 1.0 and has been scaled and reduced as the gradient would have been.
        ranks = tf.cast(rows.shape[0] or tf.shape(rows)[0], spec.accumulator)
        factor = tf.reshape(tf.cast(tensor, spec.accumulator), []) / ranks
        return _OPS.reshape(_OPS.astype(_OPS.scale_(total, factor), spec.dtype), spec.shape)


def _refuse_xla(compressor: Compressor) -> None:
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UnsupportedError(
            f"{type(compressor).__name__} and Horovod cannot run inside XLA; expected jit_compile=False, as in "
            "model.compile(..., jit_compile=False), got a function that XLA compiles"
        )


def _compress_dense(
    compressor: Compressor, tensor: tf.Tensor, spec: TensorSpec, target: Target
) -> tuple[tf.Tensor, Dense]:
    # Horovod has no bfloat16.
    sent = tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
    shown, counted = shown_name(target.scope, target.known.kept), compressor.runtime.telemetry.counted
    if shown not in counted:
        counted[shown] = (StepCounter(), spec.numel * sent.dtype.size, spec.numel * ITEMSIZE[spec.dtype])
    steps: Any = counted[shown][0]
    steps.variable.assign_add(1)
    watched = ""
    if compressor.on_nonfinite == "raise":
        watched = f"NonFiniteGradientError: NaN or infinity in the gradient of {target.known.name!r} on some rank"
    return sent, Dense(tensor.dtype, watched)


def _encode(
    compressor: Compressor, tensor: tf.Tensor, spec: TensorSpec, target: Target
) -> tuple[Payload, VariableState | None]:
    """Compress one tensor and update its residual."""
    state = _state(compressor, target)
    if state is None or compressor.feedback is None:
        return compressor.encode(_OPS.astype(_OPS.flatten(tensor), spec.accumulator), spec, _OPS), state
    variable = state.materialise(spec, tensor.device if target.variable is None else target.variable.device)
    residual = variable.read_value()
    x = compressor.feedback.compensate(residual, tensor, _OPS)
    payload = compressor.encode(x, spec, _OPS)
    remainder = compressor.add_(x, payload, spec, _OPS, -1)
    kept = compressor.feedback.keep(residual, remainder, payload.finite, _OPS)
    # What is sent must not overtake the update.
    with after(variable.assign(kept, read_value=False)):
        arrays = tuple(tf.identity(array) for array in payload.arrays)
        return Payload(arrays, tf.identity(payload.finite)), state


def _state(compressor: Compressor, target: Target) -> VariableState | None:
    """Return where the residual is kept; None for an unnamed direct call, which has no place for one."""
    if target.variable is not None:
        state: VariableState = target.scope.entries[target.variable]  # type: ignore[assignment]
        return state
    if target.known.operation is not None:
        name = target.known.kept
        return compressor.runtime.entry(target.scope, name, name, VariableState)  # type: ignore[return-value]
    warn_unnamed(compressor)
    return None


def _give_back(compressor: Compressor, ctx: Queued, spoiled: tf.Tensor) -> tf.Tensor:
    """Put what was sent back into the residual if another rank's gradient was not finite."""
    if ctx.state is None or compressor.feedback is None:
        return tf.constant(False)
    variable, spec = ctx.state.variable, ctx.message.spec

    def restore() -> tf.Tensor:
        restored = compressor.add_(variable.read_value(), ctx.payload, spec, _OPS, 1)
        with after(variable.assign(restored, read_value=False)):
            return tf.constant(True)

    return tf.cond(tf.logical_and(spoiled, ctx.payload.finite), restore, lambda: tf.constant(False))
