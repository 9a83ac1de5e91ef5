"""Compressors that take each other's place during training.

A graph is made once for all steps, so it has a branch for each of them, and what Horovod reduces has
another length in each.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvd_compress.adapters.tensorflow.encoding import Encoder, host_value
from hvd_compress.adapters.tensorflow.kinds import Context, Dense, Prepared, Queued, Reduced, receive, send
from hvd_compress.adapters.tensorflow.target import Target
from hvd_compress.base import Compressor
from hvd_compress.compressors.switch import Switch

# Those parts of a context that are tensors of the graph.
_TENSORS: dict[type, tuple[str, ...]] = {
    Dense: (),
    Prepared: ("gradient",),
    Queued: ("row", "finite"),
    Reduced: ("sent", "finite"),
}


@dataclass(frozen=True)
class Switched:
    """Context of a tensor whose compressor depends on the step.

    Attributes:
        contexts: of all compressors, of which one is right.
        turn: which one, a tensor of the graph.
        encoder: of any of them.
    """

    contexts: list[Context]
    turn: tf.Tensor
    encoder: Encoder


def send_switched(
    compressor: Compressor,
    chosen: Switch,
    tensor: tf.Tensor,
    target: Target,
    encoders: list[Encoder],
    device: str,
    averaged: bool,
) -> tuple[tf.Tensor, Any]:
    """Compress a tensor as the compressor whose turn it is does."""
    firsts, state, dtype = sorted(chosen.compressors), encoders[0].state, encoders[0].spec.accumulator

    def turn_of(number: int) -> int:
        return bisect.bisect_right(firsts, number) - 1

    def sent_by(number: int) -> tuple[tf.Tensor, Context]:
        sent, ctx = send(compressor, tensor, target, encoders[number], device, averaged)
        # All others count their steps themselves.
        return (encoders[number].counting(sent) if isinstance(ctx, Dense) else sent), ctx

    if tf.executing_eagerly():
        return sent_by(turn_of(0 if state is None else state.steps))
    with tf.device(device):
        for encoder in encoders:
            # Not in a branch, since another one needs it when the tensor is received.
            if encoder.first.remembers(encoder.spec):
                encoder.start(tensor, device)
    specs = [_specs_of(functools.partial(sent_by, i)) for i in range(len(firsts))]
    contexts: list[Context] = [None] * len(firsts)  # type: ignore[list-item]

    def branch(number: int) -> list[tf.Tensor]:
        sent, contexts[number] = sent_by(number)
        results = [tf.reshape(tf.cast(sent, dtype), [-1])]
        for other, spec in enumerate(specs):
            # All branches must return as much; what belongs to another one is never looked at.
            results += _tensors(contexts[number]) if other == number else [_empty(*one) for one in spec]
        return results

    turn = host_value(state, tensor, turn_of, "int32", ())
    sent, *rest = tf.switch_case(turn, [functools.partial(branch, i) for i in range(len(firsts))])
    for i, spec in enumerate(specs):
        own, rest = rest[: len(spec)], rest[len(spec) :]
        own = [tf.ensure_shape(x, shape) for x, (shape, _) in zip(own, spec, strict=True)]
        contexts[i] = _with_tensors(contexts[i], own)
    return sent, Switched(contexts, turn, encoders[0])


def receive_switched(tensor: tf.Tensor, ctx: Switched) -> tf.Tensor:
    """Return the gradient."""
    spec = ctx.encoder.spec

    def branch(one: Context) -> tf.Tensor:
        return receive(tf.reshape(tensor, spec.shape) if isinstance(one, Dense) else tensor, one)

    return tf.switch_case(ctx.turn, [functools.partial(branch, one) for one in ctx.contexts])


def _specs_of(make: Callable[[], tuple[tf.Tensor, Context]]) -> list[tuple[tf.TensorShape, tf.DType]]:
    """Return shapes and dtypes of a context's tensors, from a graph that is thrown away."""
    found: list[tuple[tf.TensorShape, tf.DType]] = []

    def trace() -> tf.Tensor:
        sent, ctx = make()
        found.extend((x.shape, x.dtype) for x in _tensors(ctx))
        return sent

    tf.function(trace, autograph=False).get_concrete_function()
    return found


def _empty(shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    return tf.zeros([size or 0 for size in shape.as_list()], dtype)


def _tensors(ctx: Context) -> list[tf.Tensor]:
    common = list(ctx.common) if isinstance(ctx, Reduced) else []
    return [getattr(ctx, name) for name in _TENSORS[type(ctx)]] + common


def _with_tensors(ctx: Context, tensors: list[tf.Tensor]) -> Context:
    names = _TENSORS[type(ctx)]
    changes: dict[str, Any] = dict(zip(names, tensors, strict=False))
    if isinstance(ctx, Reduced):
        changes["common"] = tensors[len(names) :]
    return dataclasses.replace(ctx, **changes)
