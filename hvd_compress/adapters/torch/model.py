"""Selection of the largest elements over all tensors of a model together.

Which elements of a tensor are among them is known only when all tensors are there, which are then
sent as one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hvd_compress.adapters.torch.encoding import OPS
from hvd_compress.adapters.torch.target import Target
from hvd_compress.adapters.torch.waiting import Waiting, by_compressor, wait
from hvd_compress.base import Compressor
from hvd_compress.errors import TransportError
from hvd_compress.exchange import Item
from hvd_compress.step import Payload, Step, TensorSpec


@dataclass
class Selected(Waiting):
    """Context of a tensor whose elements are selected together with those of the others."""

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


def submit_for_selection(target: Target, algorithm: Compressor, tensor: torch.Tensor, token_bytes: int) -> Selected:
    """Queue a tensor; what is sent of it is found out when the exchange starts."""
    return wait(Selected, _join, _no_elements, target, algorithm, tensor, token_bytes)


def _no_elements(
    algorithm: Compressor, x: torch.Tensor, spec: TensorSpec, step: Step
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(0, dtype=torch.int32, device=x.device), x[:0]


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
    alike = by_compressor(waiting, lambda ctx: ctx.target.spec.dtype)
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
        give_backs.append(ctx.remember(own))
        ctx.target.count((last - first) * values.element_size() + ctx.token_bytes)
        start += ctx.target.spec.numel
    sections = algorithm.sections(spec)

    def give_back() -> None:
        for one in give_backs:
            one()

    positions = sum(section.nbytes for section in sections) - values.nbytes
    members[0].target.compressor.runtime.telemetry.overhead_bytes += positions
    return Item(joined.name, spec.shape, spec.dtype, sections, payload.arrays, payload.finite, give_back)
