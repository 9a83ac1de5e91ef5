"""Compressors whose ranks add something up before they encode.

Horovod waits for one tensor after the other, in another order on every rank, so a second allreduce
cannot be made of the result of the first tensor alone.  Both are therefore made when the exchange
starts, for all tensors together: two allreduces a step, however many tensors there are.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hvd_compress.adapters.torch.encoding import OPS
from hvd_compress.adapters.torch.target import Target
from hvd_compress.adapters.torch.waiting import Waiting, by_compressor, wait
from hvd_compress.base import Compressor
from hvd_compress.codec import learn
from hvd_compress.errors import TransportError
from hvd_compress.exchange import Item
from hvd_compress.step import Payload, Step, TensorSpec


@dataclass
class Agreed(Waiting):
    """Context of a tensor that is encoded with what the ranks have agreed on.

    Attributes:
        arrays: the sum of what all ranks have sent, and what receivers know.
        finite: whether all ranks' gradients were.
    """

    arrays: tuple[torch.Tensor, ...] = ()
    finite: bool = True


def submit_for_rounds(target: Target, algorithm: Compressor, tensor: torch.Tensor, token_bytes: int) -> Agreed:
    """Queue a tensor."""
    return wait(Agreed, _join, _nothing_sent, target, algorithm, tensor, token_bytes)


@torch.no_grad()
def collect_agreed(ctx: Agreed) -> tuple[torch.Tensor, int]:
    """Return the decoded sum, and the number of ranks."""
    exchange = ctx.target.exchange
    exchange.settle(ctx.target.slot)
    if not ctx.joined:
        raise TransportError(f"nothing was exchanged for {ctx.target.name!r}: its step was given up")
    if not ctx.finite:
        # Other tensors of a step that does not count have been sent as well.
        exchange.undo()
    exchange.taken(_name([ctx]))
    return ctx.algorithm.decode(ctx.arrays, ctx.target.spec, OPS), ctx.target.place[1]


def _nothing_sent(algorithm: Compressor, x: torch.Tensor, spec: TensorSpec, step: Step) -> tuple[torch.Tensor, ...]:
    """Return a payload of zeros, and what decoding it takes."""
    payload = algorithm.encode(torch.zeros_like(x), spec, OPS, step)
    return (*payload.arrays, *payload.common)


@torch.no_grad()
def _join(waiting: list[Agreed]) -> list[Item]:
    """Make both rounds, in the order of the names."""
    alike = by_compressor(waiting, lambda ctx: ctx.target.spec)
    members = [ctx for group in alike.values() for ctx in group]
    prepared: list[torch.Tensor] = []
    for group in alike.values():
        first = group[0]
        prepared += first.algorithm.prepare([c.x for c in group], first.target.spec, OPS, [c.step for c in group])
    sums = _summed(prepared, members, "first")
    for ctx, agreed in zip(members, sums, strict=True):
        ctx.step = dataclasses.replace(ctx.step, agreed=agreed)
    payloads: list[Payload] = []
    for group in alike.values():
        first = group[0]
        payloads += first.algorithm.encode_all([c.x for c in group], first.target.spec, OPS, [c.step for c in group])
    sums = _summed([payload.arrays[0] for payload in payloads], members, "second")
    # The same on all ranks, since all have the same sums.
    finite = bool(torch.stack([OPS.all_finite(x) for x in sums]).all())
    give_backs = [_keep(ctx, payload, x, finite) for ctx, payload, x in zip(members, payloads, sums, strict=True)]
    for ctx, first_sent, payload in zip(members, prepared, payloads, strict=True):
        ctx.target.count(first_sent.nbytes + payload.arrays[0].nbytes + ctx.token_bytes)

    def give_back() -> None:
        for one in give_backs:
            one()

    return [Item(_name(members), (), "float32", (), (), torch.ones((), dtype=torch.bool), give_back)]


def _keep(ctx: Agreed, payload: Payload, total: torch.Tensor, finite: bool) -> Callable[[], None]:
    """Remember what the payload leaves, or all of it in a step that does not count; return what gives it back."""
    spec, state = ctx.target.spec, ctx.target.state
    ctx.joined, ctx.finite = True, finite
    ctx.arrays = (total, *payload.common)
    give_back = ctx.remember(payload)
    if not finite:
        give_back()
        if state is not None:
            # What takes turns must take this one again.
            state.steps -= 1
    elif state is not None:
        state.store(learn(ctx.algorithm, total, state.memory(), spec, OPS))
    return give_back


def _name(members: Sequence[Agreed]) -> str:
    """Return what the sums of a step are called in the exchange: one for an optimizer, one for each direct call."""
    return "(sums)" if members[0].target.owned else f"(sums of {members[0].target.slot})"


def _summed(arrays: Sequence[torch.Tensor], members: Sequence[Agreed], which: str) -> list[torch.Tensor]:
    """Return the sums over the ranks, made by one allreduce for each dtype."""
    hvd = importlib.import_module("horovod.torch")
    target = members[0].target
    handles = {}
    for dtype in sorted({x.dtype for x in arrays}, key=str):
        flat = torch.cat([x for x in arrays if x.dtype == dtype])
        name = f"hvd_compress.sums.{which}.{dtype}.{target.name}"
        handles[dtype] = hvd.allreduce_async(flat, name=name, op=hvd.Sum, process_set=target.call.process_set)
    flats = {dtype: hvd.synchronize(handle) for dtype, handle in handles.items()}
    starts, sums = dict.fromkeys(flats, 0), []
    for x in arrays:
        start = starts[x.dtype]
        starts[x.dtype] = start + x.numel()
        sums.append(flats[x.dtype][start : start + x.numel()])
    return sums
