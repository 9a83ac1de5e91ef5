"""TensorFlow tensors under stock ``horovod.tensorflow``, in graphs and eager.

Horovod reduces every gradient in a ``tf.cond`` of its own, so nothing can be passed from one
gradient to another and there is no common exchange of a step: every tensor has a message,
which Horovod's own allgather fuses with the others.  Messages are written and read by the
host; only the payload leaves the device.
"""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvd_compress.adapters.callsite import find_tensorflow_call
from hvd_compress.adapters.common import check_fits, checked_spec, warn_unnamed, without_feedback
from hvd_compress.adapters.tensorflow.encoding import OPS, Encoder
from hvd_compress.adapters.tensorflow.kinds import Context, Dense, receive, send
from hvd_compress.adapters.tensorflow.state import VariableState
from hvd_compress.adapters.tensorflow.switched import Switched, receive_switched, send_switched
from hvd_compress.adapters.tensorflow.target import Target, find_target
from hvd_compress.base import Compressor
from hvd_compress.compressors.switch import Switch
from hvd_compress.errors import UnboundTensorError, UnsupportedError


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
    shape = OPS.shape(tensor) if tensor.shape.is_fully_defined() else None
    if shape is None:
        raise UnsupportedError(
            f"{type(compressor).__name__} expected a tensor of known shape for {name!r}, got {tensor.shape}"
        )
    spec = checked_spec(compressor, hvd, call.op, name, shape, OPS.dtype(tensor))
    chosen = compressor.choose(name, spec)
    state = _state(compressor, target) if chosen.remembers(spec) else None
    if state is not None:
        check_fits(chosen, state, spec)
        state.restored = False
    place = call.process_set.rank(), call.process_set.size()
    device = tensor.device if target.variable is None else target.variable.device
    averaged = call.op == hvd.Average

    def encoder_of(algorithm: Compressor, first: int = 0) -> Encoder:
        return Encoder(algorithm if state is not None else without_feedback(algorithm), spec, state, name, place, first)

    if isinstance(chosen, Switch):
        encoders = [encoder_of(c, first) for first, c in sorted(chosen.compressors.items())]
        return send_switched(compressor, chosen, tensor, target, encoders, device, averaged)
    return send(compressor, tensor, target, encoder_of(chosen), device, averaged)


def decompress(compressor: Compressor, tensor: tf.Tensor, ctx: Context | Switched) -> tf.Tensor:
    """Implement ``Compressor.decompress`` for TensorFlow; ``tensor`` is what Horovod has reduced."""
    return receive_switched(tensor, ctx) if isinstance(ctx, Switched) else receive(tensor, ctx)


def _refuse_xla(compressor: Compressor) -> None:
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UnsupportedError(
            f"{type(compressor).__name__} and Horovod cannot run inside XLA; expected jit_compile=False, as in "
            "model.compile(..., jit_compile=False), got a function that XLA compiles"
        )


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
