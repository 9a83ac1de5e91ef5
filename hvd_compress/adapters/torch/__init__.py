"""PyTorch tensors under stock ``horovod.torch``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hvd_compress.adapters.callsite import is_scaled_step
from hvd_compress.adapters.torch.encoding import OPS, encode, release
from hvd_compress.adapters.torch.model import Selected, collect_selected, submit_for_selection
from hvd_compress.adapters.torch.reduced import (
    Dense,
    Reduced,
    compress_dense,
    compress_reduced,
    decompress_reduced,
    with_momentum,
)
from hvd_compress.adapters.torch.rounds import Agreed, collect_agreed, submit_for_rounds
from hvd_compress.adapters.torch.target import Target, find_target
from hvd_compress.base import Collective, Compressor
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Exchange
from hvd_compress.wire import is_variable


@dataclass(frozen=True)
class Frozen:
    """Context of a parameter that is no longer trained: it gets a zero gradient."""

    exchange: Exchange
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Queued:
    """Context of a tensor that is in the exchange."""

    target: Target
    algorithm: Compressor


Context = Agreed | Dense | Frozen | Queued | Reduced | Selected


def compress(compressor: Compressor, tensor: torch.Tensor) -> tuple[torch.Tensor, Context]:
    """Implement ``Compressor.compress`` for PyTorch."""
    target, chosen = find_target(compressor, tensor)
    algorithm = chosen.at(0 if target.state is None else target.state.steps)
    if not algorithm.compresses(target.spec):
        return compress_dense(target, algorithm, tensor)
    if algorithm.collective is Collective.ALLREDUCE and not algorithm.two_rounds:
        return compress_reduced(target, algorithm, tensor)
    token = target.token(tensor)
    if target.frozen:
        # Sending the residual would move frozen weights.
        target.exchange.begin()
        return token, Frozen(target.exchange, tensor.shape, tensor.dtype, tensor.device)
    if algorithm.selects_over_model and target.owned:
        return token, submit_for_selection(target, algorithm, tensor, token.nbytes)
    if algorithm.two_rounds:
        return token, submit_for_rounds(target, algorithm, tensor, token.nbytes)
    item = encode(algorithm, tensor, target.spec, target.name, target.state, target.place, target.number)
    if is_variable(item.sections):
        item.counted = lambda nbytes: target.count(nbytes + token.nbytes)
    else:
        target.count(sum(section.nbytes for section in item.sections) + token.nbytes)
    target.exchange.submit(item)
    return token, Queued(target, algorithm)


def decompress(compressor: Compressor, tensor: torch.Tensor, ctx: Context) -> torch.Tensor:
    """Implement ``Compressor.decompress`` for PyTorch; ``tensor`` is what Horovod has reduced."""
    if isinstance(ctx, Dense):
        if ctx.exchange is not None:
            ctx.exchange.settle()
        return with_momentum(tensor, ctx).to(ctx.dtype)
    if isinstance(ctx, Frozen):
        ctx.exchange.settle()
        return torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
    if isinstance(ctx, Reduced):
        return decompress_reduced(tensor, ctx)
    target = ctx.target
    if not target.exchange.settled and is_scaled_step():
        raise UnsupportedError(
            "scaler.step(opt) expected gradients that are reduced already, since it unscales them; call "
            "opt.synchronize() after backward(), and scaler.step(opt) inside 'with opt.skip_synchronize():'"
        )
    if isinstance(ctx, Selected):
        total, ranks = collect_selected(ctx)
    elif isinstance(ctx, Agreed):
        total, ranks = collect_agreed(ctx)
    else:
        gathered = target.exchange.collect(target.name, target.slot)
        total, ranks = ctx.algorithm.combine(gathered.arrays, target.spec, OPS), gathered.ranks
    void = target.exchange.void or (isinstance(ctx, Agreed) and not ctx.finite)
    total = release(ctx.algorithm, total, target.state, target.spec, void)
    # The token was 1.0 and has been scaled and reduced as the gradient would have been: it is
    # 1 after Average and the number of ranks after Sum.
    if tensor.device == total.device and tensor.device.type != "cpu":
        factor: Any = tensor.to(total.dtype) / ranks
    else:
        factor = tensor.item() / ranks
    OPS.scale_(total, factor)
    return OPS.reshape(OPS.astype(total, target.spec.dtype), target.spec.shape)
