"""What a gradient belongs to, and how it is exchanged."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvd_compress.adapters.callsite import Call, closure_of_step, find_torch_call
from hvd_compress.adapters.common import (
    check_fits,
    checked_spec,
    count,
    logger,
    report_nonfinite,
    settings_of,
    warn_of_two_momenta,
    warn_unnamed,
)
from hvd_compress.adapters.torch.encoding import OPS
from hvd_compress.base import Compressor
from hvd_compress.errors import UnboundTensorError, UnsupportedError
from hvd_compress.exchange import Exchange
from hvd_compress.layout import Declaration, describe
from hvd_compress.state import ParameterState, Scope, process_set_key
from hvd_compress.step import TensorSpec
from hvd_compress.transport.base import Transport
from hvd_compress.transport.choose import open_transport
from hvd_compress.transport.horovod import HorovodTransport

#: Seconds to wait, in an optimizer's first step, for the ranks to say what they train.
MEETING_S = 10.0


@dataclass(frozen=True)
class Target:
    """What a tensor is the gradient of, and the exchange that it takes part in.

    Attributes:
        compressor: the one that the user has given to Horovod.
        call: who calls it.
        spec: of the tensor.
        scope: the optimizer's, or that of the direct calls.
        exchange: over the call's process set.
        state: what is remembered; None if nothing is.
    """

    compressor: Compressor
    call: Call
    spec: TensorSpec
    scope: Scope
    exchange: Exchange
    state: ParameterState | None

    @property
    def name(self) -> str:
        """The tensor's name, the same on all ranks."""
        return _name(self.call)

    @property
    def owned(self) -> bool:
        """Whether an optimizer reduces it."""
        return self.call.owner is not None

    @property
    def slot(self) -> str:
        """The sequence of exchanges it belongs to."""
        return "" if self.owned else self.call.name or "(unnamed)"

    @property
    def place(self) -> tuple[int, int]:
        """Rank and size in the process set."""
        return self.call.process_set.rank(), self.call.process_set.size()

    @property
    def number(self) -> int:
        """The number of a call without a name, so that each draws other random numbers."""
        named = self.call.parameter is not None or self.call.name is not None
        return 0 if named else self.exchange.next_unnamed()

    @property
    def averaged(self) -> bool:
        """Whether Horovod divides the sum by the number of ranks."""
        return bool(self.call.op == importlib.import_module("horovod.torch").Average)

    @property
    def frozen(self) -> bool:
        """Whether the parameter is no longer trained; Horovod still submits a zero gradient for it."""
        return self.call.parameter is not None and not self.call.parameter.requires_grad

    def token(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the token, 1.0."""
        # In a group Horovod wants all tensors on one device, and dense ones may be among them.
        device = tensor.device if self.call.grouped else torch.device("cpu")
        return torch.ones(1, dtype=torch.float64 if self.spec.dtype == "float64" else torch.float32, device=device)

    def count(self, nbytes: int) -> None:
        """Count a step that sends so many bytes."""
        count(self.compressor, self.scope, self.name, nbytes, self.spec)


def find_target(compressor: Compressor, tensor: torch.Tensor) -> tuple[Target, Compressor]:
    """Return what a tensor is the gradient of, and what compresses it.

    Raises:
        UnboundTensorError, UnsupportedError, StateError.
    """
    call = find_torch_call(tensor) or _bound_call(compressor, tensor)
    spec = _spec(compressor, tensor, call)
    scope = _scope(compressor, call)
    exchange = _exchange(compressor, scope, call)
    if call.owner is not None and not exchange.begun:
        _check_step(compressor, call.owner)
    while len(call.positions) > 1 and exchange.has(_name(call)):
        call = replace(call, positions=call.positions[1:])
    chosen = compressor.choose(call.name, spec)
    state = _state(compressor, call, scope) if chosen.remembers(spec) else None
    if state is not None:
        check_fits(chosen, state, spec)
    return Target(compressor, call, spec, scope, exchange, state), chosen


def _name(call: Call) -> str:
    name = call.name or "(unnamed)"
    return f"{name}.{call.positions[0]}" if call.owner is None and call.grouped else name


def _bound_call(compressor: Compressor, tensor: torch.Tensor) -> Call:
    hvd = importlib.import_module("horovod.torch")
    for (framework, name), parameter in compressor.runtime.bound.items():
        if framework != "torch":
            continue
        if parameter.grad is tensor or parameter is tensor:
            return Call(None, parameter, name, hvd.Average, hvd.global_process_set)
    raise UnboundTensorError(
        f"{type(compressor).__name__}.compress() was called by other code than Horovod's for a tensor of shape "
        f"{tuple(tensor.shape)} that is no parameter's gradient; call compression.bind(model.named_parameters()) first"
    )


def _spec(compressor: Compressor, tensor: torch.Tensor, call: Call) -> TensorSpec:
    kind, where = type(compressor).__name__, f" for {call.name!r}" if call.name else ""
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{kind} expected a dense tensor{where}, got {tensor.layout}")
    hvd = importlib.import_module("horovod.torch")
    spec = checked_spec(compressor, hvd, call.op, call.name, tuple(tensor.shape), OPS.dtype(tensor))
    if (
        call.owner is None
        and tensor.requires_grad
        and torch.is_grad_enabled()
        and compressor.choose(call.name, spec).compresses(spec)
    ):
        raise UnsupportedError(f"{kind} cannot be differentiated through{where}; pass tensor.detach()")
    return spec


def _scope(compressor: Compressor, call: Call) -> Scope:
    runtime = compressor.runtime
    if call.owner is not None:
        return runtime.scope(call.owner, None, list(call.owner._parameter_names), WeakIdKeyDictionary)
    if call.parameter is not None:
        return runtime.scope(runtime, "bound", [], WeakIdKeyDictionary)
    return runtime.scope("torch", "allreduce", [], dict)


def _exchange(compressor: Compressor, scope: Scope, call: Call) -> Exchange:
    """Return the exchange of this scope over the call's process set; nothing is connected yet."""
    runtime, process_set = compressor.runtime, call.process_set
    key = process_set_key(process_set)
    exchange = scope.exchanges.get(key)
    if exchange is None:
        # Loops in several threads connect in any order, so the name of a parameter, not a number alone, tells
        # their exchanges apart, as it does their gradients in Horovod.
        name = min(call.owner._parameter_names.values()) if call.owner is not None else _name(call)

        def connect() -> Transport:
            label = f"hvd_compress.{runtime.next_exchange(f'{key}.{name}')}"
            return open_transport(compressor.transport, process_set, label)

        settings = settings_of(compressor)
        declaration = _declare(settings, call) if call.owner is not None else None
        exchange = scope.exchanges[key] = Exchange(
            connect,
            OPS,
            settings,
            runtime.telemetry,
            lambda bad: report_nonfinite(compressor, bad),
            watch_dense=compressor.on_nonfinite == "raise" and call.owner is not None,
            declaration=declaration,
            on_start=functools.partial(runtime.check_all_restored_used, scope),
            direct=call.owner is None,
        )
        if declaration is not None:
            declaration.meet(MEETING_S)
    return exchange


def _declare(settings: dict[str, Any], call: Call) -> Declaration:
    """Start comparing this optimizer's parameters between ranks, by a named operation that waits for nobody."""
    names = sorted((name, p) for p, name in call.owner._parameter_names.items())
    entries = [(name, tuple(p.shape), OPS.dtype(p), ()) for name, p in names]
    # Two optimizers may meet their first gradients in another order on each rank, so none can be counted.
    transport = HorovodTransport(call.process_set, f"hvd_compress.declaration.{entries[0][0]}")
    return Declaration(transport.start_allgather_any(describe(settings, entries)))


def _check_step(compressor: Compressor, owner: Any) -> None:
    """Look, once a step, for gradients that stock Horovod would silently not reduce.

    Raises:
        UnsupportedError: gradients of a closure that was passed to ``step``.
    """
    if closure_of_step(owner):
        raise UnsupportedError(
            "opt.step(closure) computes gradients that stock Horovod never reduces, since it synchronises before the "
            "closure runs; instead call loss.backward(), opt.synchronize(), and opt.step() inside "
            "'with opt.skip_synchronize():'"
        )
    warn_of_two_momenta(compressor, _momentum_of(owner))
    if "unreduced" in compressor.runtime.warned:
        return
    parameters = [p for group in owner.param_groups for p in group["params"]]
    missed = sum(p.requires_grad and p not in owner._requires_update for p in parameters)
    if missed:
        compressor.runtime.warned.add("unreduced")
        logger.warning(
            "%d of %d parameters were unfrozen or added after hvd.DistributedOptimizer was built, and stock Horovod "
            "never reduces them; build it again after such a change",
            missed,
            len(parameters),
        )


def _momentum_of(owner: Any) -> str | None:
    """Return how the optimizer accumulates momentum, if it does."""
    for group in owner.param_groups:
        if group.get("momentum"):
            return f"momentum={group['momentum']}"
        if "betas" in group:
            return f"betas={group['betas']}"
    return None


def _state(compressor: Compressor, call: Call, scope: Scope) -> ParameterState | None:
    """Return where the residual is kept; None for an unnamed direct call, which has no place for one."""
    name = _name(call)
    if call.parameter is not None:
        return compressor.runtime.entry(scope, call.parameter, name)
    if call.name is not None:
        # One name may be used over several process sets, and is another tensor in each.
        members = process_set_key(call.process_set)
        kept = name if members == "0" else f"{name}@{members}"
        return compressor.runtime.entry(scope, kept, kept)
    warn_unnamed(compressor)
    return None
