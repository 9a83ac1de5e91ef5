"""Tensors of which it is found out only when the exchange starts what is sent.

Until then their accumulators wait in the exchange.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hvd_compress.adapters.torch.encoding import OPS, GiveBack, fitting
from hvd_compress.adapters.torch.target import Target
from hvd_compress.base import Compressor
from hvd_compress.codec import compensated, kept, opened
from hvd_compress.exchange import Item, nothing
from hvd_compress.step import Payload, Step, TensorSpec


@dataclass
class Waiting:
    """Context of such a tensor.

    Attributes:
        target, algorithm: what it belongs to, and what compresses it.
        x: what is to be compressed, flat.
        step: with all that is remembered.
        new: slots that have changed.
        token_bytes: of what Horovod got.
        joined: that the exchange has started.
    """

    target: Target
    algorithm: Compressor
    x: torch.Tensor
    step: Step
    new: dict[str, torch.Tensor]
    token_bytes: int
    joined: Any = None

    def remember(self, payload: Payload) -> Callable[[], None]:
        """Keep what is not sent, and count the step; return what gives back what is."""
        state, spec = self.target.state, self.target.spec
        if state is None:
            return nothing
        state.store(kept(self.algorithm, self.x, self.new, payload, spec, OPS, self.step))
        state.steps += 1
        return GiveBack(self.algorithm, weakref.ref(state), payload, spec) if self.algorithm.feedback else nothing


Kind = TypeVar("Kind", bound=Waiting)


@torch.no_grad()
def wait(
    kind: type[Kind],
    join: Callable[[list[Any]], list[Item]],
    nothing_sent: Callable[[Compressor, torch.Tensor, TensorSpec, Step], tuple[torch.Tensor, ...]],
    target: Target,
    algorithm: Compressor,
    tensor: torch.Tensor,
    token_bytes: int,
) -> Kind:
    """Queue a tensor.

    Args:
        kind: the context that is returned.
        join: called when the exchange starts, with all that wait.
        nothing_sent: returns the arrays of a payload that sends nothing, for a step that is given up.
        target: what the tensor is the gradient of.
        algorithm: what compresses it.
        tensor: the gradient.
        token_bytes: of what Horovod gets.
    """
    spec, state = target.spec, target.state
    memory = {} if state is None else fitting(state, algorithm, tensor, spec)
    step = Step(target.name, target.number if state is None else state.steps, *target.place, memory)
    x, changed = compensated(algorithm, tensor, spec, OPS, step)
    step, _ = opened(algorithm, tensor, spec, OPS, step)
    ctx = kind(target, algorithm, x, step, dict(changed), token_bytes)
    finite = OPS.all_finite(x)

    def give_back() -> None:
        """Keep all of it: the step was given up before the exchange started."""
        if ctx.joined is None:
            ctx.remember(Payload(nothing_sent(algorithm, ctx.x, spec, step), finite))

    item = Item(target.name, spec.shape, spec.dtype, (), (), finite, give_back, None, ctx, join)
    target.exchange.submit(item)
    return ctx


def by_compressor(waiting: Sequence[Kind], key: Callable[[Kind], Any]) -> dict[Any, list[Kind]]:
    """Return what has the same key and compressor, in the order of the names."""
    alike: dict[Any, list[Kind]] = {}
    for ctx in sorted(waiting, key=lambda ctx: ctx.target.name):
        alike.setdefault((key(ctx), repr(ctx.algorithm)), []).append(ctx)
    return alike
