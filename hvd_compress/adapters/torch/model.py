"""Selection of the largest elements over all tensors of a model together.

Which elements of a tensor are among them is known only when all tensors are there.  So their
accumulators wait in the exchange until it starts, and are then sent as one tensor.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hvd_compress.adapters.torch.encoding import OPS, GiveBack, fitting
from hvd_compress.adapters.torch.target import Target
from hvd_compress.base import Compressor
from hvd_compress.codec import compensated, kept
from hvd_compress.errors import TransportError
from hvd_compress.exchange import Item, nothing
from hvd_compress.step import Payload, Step, TensorSpec


@dataclass
class Selected:
    """Context of a tensor whose elements are selected together with those of the others."""

    target: Target
    algorithm: Compressor
    x: torch.Tensor
    step: Step
    new: dict[str, torch.Tensor]
    token_bytes: int
    joined: _Joined | None = None
    start: int = 0


@dataclass
class _Joined:
    """All tensors of one dtype and compressor, one after the other."""

    name: str
    spec: TensorSpec
    algorithm: Compressor
    total: torch.Tensor | None = None
    ranks: int = 1
    waiting: set[str] = field(default_factory=set)


@torch.no_grad()
def submit_for_selection(target: Target, algorithm: Compressor, tensor: torch.Tensor, token_bytes: int) -> Selected:
    """Queue a tensor; what is sent of it is found out when the exchange starts."""
    spec, state = target.spec, target.state
    memory = {} if state is None else fitting(state, algorithm, tensor, spec)
    step = Step(target.name, 0 if state is None else state.steps, *target.place, memory)
    x, new = compensated(algorithm, tensor, spec, OPS, step)
    ctx = Selected(target, algorithm, x, step, dict(new), token_bytes)
    finite = OPS.all_finite(x)
    give_back = functools.partial(_take_back, ctx, finite)
    target.exchange.submit(Item(target.name, spec.shape, spec.dtype, (), (), finite, give_back, None, ctx, _join))
    return ctx


def collect_selected(ctx: Selected) -> tuple[torch.Tensor, int]:
    """Return the tensor's part of the decoded sum, and the number of ranks."""
    exchange = ctx.target.exchange
    exchange.settle(ctx.target.slot)
    joined = ctx.joined
    if joined is None:
        raise TransportError(f"nothing was exchanged for {ctx.target.name!r}: its step was given up")
    if joined.total is None:
        gathered = exchange.collect(joined.name, ctx.target.slot)
        joined.total = joined.algorithm.combine(gathered.arrays, joined.spec, OPS)
        joined.ranks = gathered.ranks
    part = joined.total[ctx.start : ctx.start + ctx.target.spec.numel].clone()
    joined.waiting.discard(ctx.target.name)
    if not joined.waiting:
        joined.total = None
    return part, joined.ranks


@torch.no_grad()
def _join(waiting: list[Selected]) -> list[Item]:
    """Select over the tensors of a step, in the order of their names; return what is sent."""
    alike: dict[tuple[str, str], list[Selected]] = {}
    for ctx in sorted(waiting, key=lambda ctx: ctx.target.name):
        alike.setdefault((ctx.target.spec.dtype, repr(ctx.algorithm)), []).append(ctx)
    return [_joined_item(dtype, how, members) for (dtype, how), members in alike.items()]


def _joined_item(dtype: str, how: str, members: list[Selected]) -> Item:
    algorithm = members[0].algorithm
    spec = TensorSpec((sum(ctx.target.spec.numel for ctx in members),), dtype)
    names = {ctx.target.name for ctx in members}
    joined = _Joined(f"(all {dtype} tensors of {how})", spec, algorithm, waiting=names)
    payload = algorithm.encode(torch.cat([ctx.x for ctx in members]), spec, OPS, members[0].step)
    indices, values = payload.arrays
    start, give_backs = 0, []
    ends = torch.tensor([ctx.target.spec.numel for ctx in members], device=indices.device).cumsum(0)
    bounds = [0, *torch.searchsorted(indices.to(torch.int64), ends).tolist()]
    for i, ctx in enumerate(members):
        first, last = bounds[i], bounds[i + 1]
        ctx.joined, ctx.start = joined, start
        own = Payload((indices[first:last] - start, values[first:last]), payload.finite)
        give_backs.append(_remember(ctx, own))
        ctx.target.count((last - first) * values.element_size() + ctx.token_bytes)
        start += ctx.target.spec.numel
    sections = algorithm.sections(spec)

    def give_back() -> None:
        for one in give_backs:
            one()

    positions = sum(section.nbytes for section in sections) - values.nbytes
    members[0].target.compressor.runtime.telemetry.overhead_bytes += positions
    return Item(joined.name, spec.shape, spec.dtype, sections, payload.arrays, payload.finite, give_back)


def _remember(ctx: Selected, payload: Payload) -> Callable[[], None]:
    state, spec = ctx.target.state, ctx.target.spec
    if state is None:
        return nothing
    state.store(kept(ctx.algorithm, ctx.x, ctx.new, payload, spec, OPS, ctx.step))
    state.steps += 1
    return GiveBack(ctx.algorithm, weakref.ref(state), payload, spec) if ctx.algorithm.feedback else nothing


def _take_back(ctx: Selected, finite: torch.Tensor) -> None:
    """Keep all of a tensor of a step that was given up before the selection."""
    if ctx.joined is None:
        none = torch.zeros(0, dtype=torch.int32, device=ctx.x.device)
        _remember(ctx, Payload((none, ctx.x[:0]), finite))
