"""What Horovod reduces itself: dense tensors, and payloads that can be added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hvd_compress.adapters.common import note_average
from hvd_compress.adapters.torch.encoding import OPS, compressed, fitting, release
from hvd_compress.adapters.torch.target import Target
from hvd_compress.base import Compressor
from hvd_compress.codec import learn
from hvd_compress.exchange import Exchange, Item, nothing
from hvd_compress.feedback import EF21, MomentumCorrection
from hvd_compress.state import ParameterState
from hvd_compress.step import TensorSpec


@dataclass(frozen=True)
class Dense:
    """Context of a tensor that Horovod reduces itself."""

    dtype: torch.dtype
    exchange: Exchange | None
    spec: TensorSpec
    algorithm: Compressor | None
    state: ParameterState | None


@dataclass(frozen=True)
class Reduced:
    """Context of a payload that Horovod reduces itself."""

    exchange: Exchange
    name: str
    spec: TensorSpec
    algorithm: Compressor
    state: ParameterState | None
    common: tuple[Any, ...]
    give_back: Callable[[], None]


def compress_dense(target: Target, algorithm: Compressor, tensor: torch.Tensor) -> tuple[torch.Tensor, Dense]:
    """Let a tensor travel as it is."""
    spec, watched = target.spec, None
    if target.owned:
        target.exchange.submit(Item(target.name, spec.shape, spec.dtype, (), (), OPS.all_finite(tensor), nothing))
        watched = target.exchange if target.compressor.on_nonfinite == "raise" else None
    # Horovod has no bfloat16, and refuses what is not contiguous (channels_last, transposed).
    sent = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    sent = sent.contiguous()
    target.count(sent.nbytes)
    if target.state is not None:
        target.state.steps += 1
    # Momentum would move frozen weights.
    accumulates = algorithm.has_momentum and not target.frozen
    return sent, Dense(tensor.dtype, watched, spec, algorithm if accumulates else None, target.state)


@torch.no_grad()
def with_momentum(tensor: torch.Tensor, ctx: Dense) -> torch.Tensor:
    """Return the update of a dense tensor whose momentum is accumulated here, after the average."""
    feedback = None if ctx.algorithm is None else ctx.algorithm.feedback
    if ctx.algorithm is None or ctx.state is None or not isinstance(feedback, MomentumCorrection):
        return tensor
    memory = fitting(ctx.state, ctx.algorithm, tensor, ctx.spec)
    update, momentum = feedback.after_average(memory, tensor, ctx.spec, OPS)
    if bool(OPS.all_finite(momentum)):
        ctx.state.store({"momentum": momentum})
        ctx.state.common.add("momentum")
    return OPS.reshape(update, ctx.spec.shape).clone()


def compress_reduced(target: Target, algorithm: Compressor, tensor: torch.Tensor) -> tuple[torch.Tensor, Reduced]:
    """Compress to a payload that Horovod adds up itself."""
    spec, name, state = target.spec, target.name, target.state
    note_average(state, algorithm, target.averaged)
    with torch.no_grad():
        if target.frozen:
            # All ranks must send as much as for any other.
            tensor, state = torch.zeros_like(tensor), None
        payload, give_back = compressed(algorithm, tensor, spec, name, state, target.place, target.number)
        (array,) = payload.arrays
        # Other ranks must hear of NaN even if it was not among what is sent.  Horovod reduces in place.
        sent = torch.where(payload.finite, array, torch.full_like(array, float("nan"))).contiguous()
    if target.owned:
        target.exchange.submit(Item(name, spec.shape, spec.dtype, (), (), payload.finite, give_back))
    else:
        target.exchange.begin()
    target.count(sent.nbytes)
    return sent, Reduced(target.exchange, name, spec, algorithm, state, payload.common, give_back)


@torch.no_grad()
def decompress_reduced(tensor: torch.Tensor, ctx: Reduced) -> torch.Tensor:
    """Return the gradient that follows from what Horovod has reduced."""
    ctx.exchange.settle()
    spec, state, void = ctx.spec, ctx.state, ctx.exchange.void
    if state is not None and (ctx.give_back is not nothing or ctx.algorithm.slots(spec)):
        # The same on all ranks, since all have the same sum.
        if not bool(OPS.all_finite(tensor)):
            if not isinstance(ctx.algorithm.feedback, EF21):
                # What others got of it is already among EF21's estimates, and stays right without them.
                ctx.exchange.undo()
            ctx.give_back()
            # What takes turns must take this one again.
            state.steps -= 1
            void = True
        else:
            ctx.exchange.taken(ctx.name)
            state.store(learn(ctx.algorithm, tensor, state.memory(), spec, OPS))
    total = ctx.algorithm.decode((tensor, *ctx.common), spec, OPS)
    total = release(ctx.algorithm, total, state, spec, void)
    return OPS.reshape(OPS.astype(total, spec.dtype), spec.shape).clone()
