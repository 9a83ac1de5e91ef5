"""The ways in which a tensor travels: gathered, reduced by Horovod in one round or two, or dense."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.adapters.common import note_average, shown_name
from hvd_compress.adapters.tensorflow.encoding import OPS, Encoder
from hvd_compress.adapters.tensorflow.message import Message
from hvd_compress.adapters.tensorflow.state import StepCounter, after
from hvd_compress.adapters.tensorflow.target import Target
from hvd_compress.base import Collective, Compressor
from hvd_compress.ops.base import ITEMSIZE
from hvd_compress.step import Payload


@dataclass(frozen=True)
class Dense:
    """Context of a tensor that Horovod reduces itself."""

    dtype: tf.DType
    watched: str
    momentum: Encoder | None = None


@dataclass(frozen=True)
class Queued:
    """Context of a tensor whose payloads are gathered."""

    messages: list[Message]
    row: tf.Tensor
    finite: tf.Tensor
    encoder: Encoder
    device: str


@dataclass(frozen=True)
class Reduced:
    """Context of a payload that Horovod reduces itself."""

    sent: tf.Tensor
    finite: tf.Tensor
    common: list[tf.Tensor]
    encoder: Encoder
    device: str


@dataclass(frozen=True)
class Prepared:
    """Context of a tensor that is encoded with what Horovod has reduced first."""

    compressor: Compressor
    gradient: tf.Tensor
    target: Target
    encoder: Encoder
    device: str


Context = Dense | Prepared | Queued | Reduced


def send(
    compressor: Compressor, tensor: tf.Tensor, target: Target, encoder: Encoder, device: str, averaged: bool
) -> tuple[tf.Tensor, Context]:
    """Compress a tensor as its encoder does; return what Horovod is to allreduce, and the context."""
    if not encoder.first.compresses(encoder.spec):
        return _compress_dense(compressor, tensor, target, encoder, device)
    with tf.device(device):
        encoder.start(tensor, device)
        if encoder.first.two_rounds:
            return _compress_prepared(compressor, tensor, target, encoder, device)
        if encoder.first.collective is Collective.ALLREDUCE:
            note_average(encoder.state, encoder.first, averaged)
            return _compress_reduced(compressor, tensor, target, encoder, device)
        return _compress_gathered(compressor, tensor, target, encoder, device)


def receive(tensor: tf.Tensor, ctx: Context) -> tf.Tensor:
    """Return the gradient that follows from what Horovod has reduced."""
    if isinstance(ctx, Dense):
        return _decompress_dense(tensor, ctx)
    with tf.device(ctx.device):
        if isinstance(ctx, Queued):
            total = _gathered(tensor, ctx)
        else:
            total = _agreed(tensor, ctx) if isinstance(ctx, Prepared) else _reduced(tensor, ctx)
        spec = ctx.encoder.spec
        return OPS.reshape(OPS.astype(total, spec.dtype), spec.shape)


def _compress_gathered(
    compressor: Compressor, tensor: tf.Tensor, target: Target, encoder: Encoder, device: str
) -> tuple[tf.Tensor, Queued]:
    spec, state, memory = encoder.spec, encoder.state, encoder.memory()
    messages = [Message(compressor, stage, target, spec, state) for stage in encoder.stages]

    def one(number: int, algorithm: Compressor) -> list[tf.Tensor]:
        payload, new = encoder.encode(algorithm, tensor, memory)
        return [*messages[number].pack(payload), payload.finite, *new]

    row, token, finite, *new = encoder.staged(one)
    # What is sent must not overtake the update.
    with after(encoder.remember(new)):
        row, token, finite = tf.identity(row), tf.identity(token), tf.identity(finite)
    return tf.ensure_shape(token, [1]), Queued(messages, row, finite, encoder, device)


def _gathered(token: tf.Tensor, ctx: Queued) -> tf.Tensor:
    encoder, spec = ctx.encoder, ctx.encoder.spec
    # The exchange itself takes place on the host.
    with tf.device(None):
        rows = ctx.messages[0].gather(ctx.row)

    def unpacked(number: int, algorithm: Compressor) -> list[tf.Tensor]:
        message = ctx.messages[number]
        arrays, bad = message.unpack(rows)
        spoiled = tf.size(bad) > 0
        restored = encoder.give_back_if(
            tf.logical_and(spoiled, ctx.finite), lambda: Payload(message.own(ctx.row), ctx.finite)
        )
        with after(restored):
            # Only now, so that an error that is raised finds what is remembered restored.
            arrays = message.reported(arrays, bad)
        ranks = tf.constant(arrays[0].shape[0]) if arrays[0].shape[0] else tf.shape(arrays[0])[0]
        return [algorithm.combine(arrays, spec, OPS), spoiled, ranks]

    total, spoiled, ranks = encoder.staged(unpacked)
    total = encoder.release(tf.ensure_shape(total, [spec.numel]), spoiled)
    # The token was 1.0 and has been scaled and reduced as the gradient would have been.
    factor = tf.reshape(tf.cast(token, spec.accumulator), []) / tf.cast(ranks, spec.accumulator)
    return OPS.scale_(total, factor)


def _compress_reduced(
    compressor: Compressor, tensor: tf.Tensor, target: Target, encoder: Encoder, device: str
) -> tuple[tf.Tensor, Reduced]:
    spec, memory = encoder.spec, encoder.memory()

    def one(number: int, algorithm: Compressor) -> list[tf.Tensor]:
        payload, new = encoder.encode(algorithm, tensor, memory)
        (array,) = payload.arrays
        common = [x if tf.is_tensor(x) else tf.constant(x, spec.accumulator) for x in payload.common]
        # Other ranks must hear of NaN even if it was not among what is sent.
        sent = tf.where(payload.finite, array, tf.constant(float("nan"), array.dtype))
        return [sent, payload.finite, *new, *common]

    sent, finite, *rest = encoder.staged(one)
    new, common = rest[: encoder.remembered], rest[encoder.remembered :]
    section = encoder.first.sections(spec)[0]
    sent = tf.ensure_shape(sent, [section.nbytes // ITEMSIZE[section.dtype]])
    counted = _count_step(compressor, target, encoder, sent, sent.shape[0] * sent.dtype.size)
    with after(tf.group(encoder.remember(new), counted)):
        sent, finite = tf.identity(sent), tf.identity(finite)
        common = [tf.identity(x) for x in common]
    return sent, Reduced(sent, finite, common, encoder, device)


def _count_step(compressor: Compressor, target: Target, encoder: Encoder, sent: tf.Tensor, sent_bytes: int) -> Any:
    """Count a step of a tensor that Horovod reduces, and its bytes; returns an operation."""
    shown, telemetry = shown_name(target.scope, target.known.kept), compressor.runtime.telemetry
    dense_bytes = encoder.spec.numel * ITEMSIZE[encoder.spec.dtype]

    def run(_: Any) -> Any:
        if encoder.state is not None:
            encoder.state.steps += 1
        telemetry.count(shown, sent_bytes, dense_bytes)
        return np.array(True)

    return tf.numpy_function(run, [sent[:1]], tf.bool)


def _reduced(tensor: tf.Tensor, ctx: Reduced) -> tf.Tensor:
    encoder, spec = ctx.encoder, ctx.encoder.spec
    spoiled = tf.logical_not(OPS.all_finite(tensor))
    with after(encoder.take_back_step_if(spoiled)):
        spoiled = tf.identity(spoiled)
    restored = encoder.give_back_if(
        tf.logical_and(spoiled, ctx.finite), lambda: Payload((ctx.sent,), ctx.finite, tuple(ctx.common))
    )

    def decoded(number: int, algorithm: Compressor) -> list[tf.Tensor]:
        with after(encoder.learn(algorithm, tensor)):
            return [algorithm.decode((tensor, *ctx.common), spec, OPS)]

    with after(restored):
        (total,) = encoder.staged(decoded)
    return encoder.release(tf.ensure_shape(total, [spec.numel]), spoiled)


def _compress_prepared(
    compressor: Compressor, tensor: tf.Tensor, target: Target, encoder: Encoder, device: str
) -> tuple[tf.Tensor, Prepared]:
    prepared = tf.cast(encoder.prepare(encoder.first, tensor, encoder.memory()), encoder.spec.accumulator)
    # Behind it a token, which is scaled and reduced as the gradient would have been.
    sent = tf.concat([prepared, tf.ones([1], prepared.dtype)], 0)
    return sent, Prepared(compressor, tensor, target, encoder, device)


def _agreed(tensor: tf.Tensor, ctx: Prepared) -> tf.Tensor:
    encoder, spec, target, algorithm = ctx.encoder, ctx.encoder.spec, ctx.target, ctx.encoder.first
    agreed, token = tensor[:-1], tensor[-1]
    payload, new = encoder.encode(algorithm, ctx.gradient, encoder.memory(), agreed)
    (own,) = payload.arrays
    # Other ranks must hear of NaN even if it was not among what is sent.
    own = tf.where(payload.finite, own, tf.constant(float("nan"), own.dtype))
    total, ranks = _second_sum(own, target)
    spoiled = tf.logical_not(OPS.all_finite(total))
    sent_bytes = tensor.shape[0] * tensor.dtype.size + (own.shape[0] + 1) * own.dtype.size
    counted = _count_step(ctx.compressor, target, encoder, own, sent_bytes)
    with after(tf.group(encoder.remember(new), counted)):
        total, spoiled = tf.identity(total), tf.identity(spoiled)
    with after(encoder.take_back_step_if(spoiled)):
        restored = encoder.give_back_if(tf.logical_and(spoiled, payload.finite), lambda: payload)
    with after(restored), after(encoder.learn(algorithm, total)):
        decoded = algorithm.decode((total, *payload.common), spec, OPS)
    released = encoder.release(tf.ensure_shape(decoded, [spec.numel]), spoiled)
    return OPS.scale_(released, token / tf.cast(ranks, token.dtype))


def _second_sum(own: tf.Tensor, target: Target) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the sum over the ranks, and their number, which may change in elastic jobs."""
    calls = importlib.import_module("horovod.tensorflow.mpi_ops")
    operation = target.known.operation
    named = {} if operation is None else {"name": f"{operation}.second", "ignore_name_scope": True}
    counted = tf.concat([own, tf.ones([1], own.dtype)], 0)
    total = calls._allreduce(counted, op=calls.Sum, process_set=target.channel.process_set, **named)
    return total[:-1], total[-1]


def _compress_dense(
    compressor: Compressor, tensor: tf.Tensor, target: Target, encoder: Encoder, device: str
) -> tuple[tf.Tensor, Dense]:
    spec = encoder.spec
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
    momentum = None
    if encoder.state is not None and encoder.first.has_momentum:
        encoder.start(tensor, device)
        momentum = encoder
    return sent, Dense(tensor.dtype, watched, momentum)


def _decompress_dense(tensor: tf.Tensor, ctx: Dense) -> tf.Tensor:
    if ctx.watched:
        tensor = tf.debugging.check_numerics(tensor, ctx.watched)
    if ctx.momentum is not None:
        # Momentum of a dense tensor is accumulated after the average.
        encoder, feedback = ctx.momentum, ctx.momentum.first.feedback
        memory, spec = encoder.memory(), ctx.momentum.spec
        update, momentum = feedback.after_average(memory, tensor, spec, OPS)  # type: ignore[union-attr]
        kept = tf.where(OPS.all_finite(momentum), momentum, memory["momentum"])
        with after(encoder.store({"momentum": kept})):
            tensor = OPS.reshape(tf.identity(update), spec.shape)
    return tf.cast(tensor, ctx.dtype)
