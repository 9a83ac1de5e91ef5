"""PyTorch tensors under stock ``horovod.torch``."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvd_compress.adapters.callsite import Call, closure_of_step, find_torch_call, is_scaled_step
from hvd_compress.adapters.common import checked_spec, count, logger, report_nonfinite, settings_of, warn_unnamed
from hvd_compress.base import Compressor, Payload, TensorSpec
from hvd_compress.errors import StateError, UnboundTensorError, UnsupportedError
from hvd_compress.exchange import Exchange, Item
from hvd_compress.layout import Declaration, describe
from hvd_compress.ops.torch import TorchOps
from hvd_compress.policy import Route
from hvd_compress.state import ParameterState, Scope, process_set_key
from hvd_compress.transport.base import Transport
from hvd_compress.transport.choose import open_transport
from hvd_compress.transport.horovod import HorovodTransport

_OPS = TorchOps()


@dataclass(frozen=True)
class Dense:
    """Context of a tensor that Horovod reduces itself."""

    dtype: torch.dtype
    exchange: Exchange | None


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

    exchange: Exchange
    name: str
    slot: str
    spec: TensorSpec


def compress(compressor: Compressor, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Implement ``Compressor.compress`` for PyTorch."""
    call = find_torch_call(tensor) or _bound_call(compressor, tensor)
    spec = _checked_spec(compressor, tensor, call)
    scope = _scope(compressor, call)
    exchange = _exchange(compressor, scope, call)
    if call.owner is not None and not exchange.busy:
        _check_step(compressor, call.owner)
    while len(call.positions) > 1 and exchange.has(_name(call)):
        call = replace(call, positions=call.positions[1:])
    if compressor.policy.route(spec.shape) is Route.DENSE:
        return _compress_dense(compressor, tensor, spec, call, scope, exchange)
    token = _token(tensor, spec, call)
    state = _state(compressor, call, scope)
    if call.parameter is not None and not call.parameter.requires_grad:
        # Horovod still submits a zero gradient; sending the residual would move frozen weights.
        exchange.begin()
        return token, Frozen(exchange, tensor.shape, tensor.dtype, tensor.device)
    item = _encode(compressor, tensor, spec, _name(call), state)
    exchange.submit(item)
    payload_bytes = sum(section.nbytes for section in item.sections)
    count(compressor, scope, item.name, payload_bytes + token.nbytes, spec)
    return token, Queued(exchange, item.name, _slot(call), spec)


def decompress(compressor: Compressor, tensor: torch.Tensor, ctx: Dense | Frozen | Queued) -> torch.Tensor:
    """Implement ``Compressor.decompress`` for PyTorch; ``tensor`` is what Horovod has reduced."""
    if isinstance(ctx, Dense):
        if ctx.exchange is not None:
            ctx.exchange.settle()
        return tensor.to(ctx.dtype)
    if isinstance(ctx, Frozen):
        ctx.exchange.settle()
        return torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
    if not ctx.exchange.settled and is_scaled_step():
        raise UnsupportedError(
            "scaler.step(opt) expected gradients that are reduced already, since it unscales them; call "
            "opt.synchronize() after backward(), and scaler.step(opt) inside 'with opt.skip_synchronize():'"
        )
    gathered = ctx.exchange.collect(ctx.name, ctx.slot)
    total = compressor.combine(gathered.arrays, ctx.spec, _OPS)
    # The token was 1.0 and has been scaled and reduced as the gradient would have been: it is
    # 1 after Average and the number of ranks after Sum.
    if tensor.device == total.device and tensor.device.type != "cpu":
        factor: Any = tensor.to(total.dtype) / gathered.ranks
    else:
        factor = tensor.item() / gathered.ranks
    _OPS.scale_(total, factor)
    return _OPS.reshape(_OPS.astype(total, ctx.spec.dtype), ctx.spec.shape)


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


def _checked_spec(compressor: Compressor, tensor: torch.Tensor, call: Call) -> TensorSpec:
    kind, where = type(compressor).__name__, f" for {call.name!r}" if call.name else ""
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{kind} expected a dense tensor{where}, got {tensor.layout}")
    hvd = importlib.import_module("horovod.torch")
    spec = checked_spec(compressor, hvd, call.op, call.name, tuple(tensor.shape), _OPS.dtype(tensor))
    if (
        call.owner is None
        and tensor.requires_grad
        and torch.is_grad_enabled()
        and compressor.policy.route(spec.shape) is Route.EXCHANGE
    ):
        raise UnsupportedError(f"{kind} cannot be differentiated through{where}; pass tensor.detach()")
    return spec


def _name(call: Call) -> str:
    name = call.name or "(unnamed)"
    return f"{name}.{call.positions[0]}" if call.owner is None and call.grouped else name


def _slot(call: Call) -> str:
    return "" if call.owner is not None else call.name or "(unnamed)"


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
            runtime.check_all_restored_used(scope)
            label = f"hvd_compress.{runtime.next_exchange(f'{key}.{name}')}"
            return open_transport(compressor.transport, process_set, label)

        settings = settings_of(compressor)
        exchange = scope.exchanges[key] = Exchange(
            connect,
            _OPS,
            settings,
            runtime.telemetry,
            lambda bad: report_nonfinite(compressor, bad),
            watch_dense=compressor.on_nonfinite == "raise" and call.owner is not None,
            declaration=_declare(settings, call) if call.owner is not None else None,
        )
    return exchange


def _declare(settings: dict[str, Any], call: Call) -> Declaration:
    """Start comparing this optimizer's parameters between ranks, by a named operation that waits for nobody."""
    names = sorted((name, p) for p, name in call.owner._parameter_names.items())
    entries = [(name, tuple(p.shape), _OPS.dtype(p), ()) for name, p in names]
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


def _token(tensor: torch.Tensor, spec: TensorSpec, call: Call) -> torch.Tensor:
    # In a group Horovod wants all tensors on one device, and dense ones may be among them.
    device = tensor.device if call.grouped else torch.device("cpu")
    return torch.ones(1, dtype=torch.float64 if spec.dtype == "float64" else torch.float32, device=device)


def _compress_dense(
    compressor: Compressor, tensor: torch.Tensor, spec: TensorSpec, call: Call, scope: Scope, exchange: Exchange
) -> tuple[torch.Tensor, Dense]:
    name, watched = _name(call), None
    if call.owner is not None:
        exchange.submit(Item(name, spec.shape, spec.dtype, (), (), _OPS.all_finite(tensor), _nothing))
        watched = exchange if compressor.on_nonfinite == "raise" else None
    # Horovod has no bfloat16, and refuses what is not contiguous (channels_last, transposed).
    sent = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    sent = sent.contiguous()
    count(compressor, scope, name, sent.nbytes, spec)
    return sent, Dense(tensor.dtype, watched)


def _nothing() -> None:
    """Give back nothing: dense tensors have no residual."""


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


@torch.no_grad()
def _encode(
    compressor: Compressor, tensor: torch.Tensor, spec: TensorSpec, name: str, state: ParameterState | None
) -> Item:
    """Compress one tensor and update its residual."""
    give_back: Callable[[], None] = _nothing
    if compressor.feedback is None or state is None:
        payload = compressor.encode(_OPS.astype(_OPS.flatten(tensor), spec.accumulator), spec, _OPS)
    else:
        residual = _fitting(state, tensor, spec)
        x = compressor.feedback.compensate(residual, tensor, _OPS)
        payload = compressor.encode(x, spec, _OPS)
        x = compressor.add_(x, payload, spec, _OPS, -1)
        state.residual = compressor.feedback.keep(residual, x, payload.finite, _OPS)
        give_back = _GiveBack(compressor, weakref.ref(state), payload, spec)
    if state is not None:
        state.steps += 1
    return Item(name, spec.shape, spec.dtype, compressor.sections(spec), payload.arrays, payload.finite, give_back)


def _fitting(state: ParameterState, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor | None:
    """Return the residual as the tensor needs it, after a move, a change of dtype or of size."""
    residual: Any = state.residual
    if residual is not None and not isinstance(residual, torch.Tensor):
        residual = torch.from_numpy(residual)  # from a checkpoint that TensorFlow has written
    restored, state.restored = state.restored, False
    if residual is None:
        return None
    if residual.shape != (spec.numel,):
        expected = f"expected {spec.numel} elements in the residual of {state.name!r}, got {residual.numel()}"
        if restored:
            raise StateError(f"{expected}: the loaded state is of another model")
        logger.warning("%s: the parameter has changed its size, so its residual is dropped", expected)
        return None
    return _OPS.astype(_OPS.move_like(residual, tensor), spec.accumulator)


@dataclass(frozen=True)
class _GiveBack:
    """Put back into the residual what was taken out to be sent."""

    compressor: Compressor
    # Weakly: a model that is gone must not live on in what was sent last.
    state: weakref.ref[ParameterState]
    payload: Payload
    spec: TensorSpec

    def __call__(self) -> None:
        # Where the gradient was not finite, nothing was taken out.
        state = self.state()
        residual: Any = None if state is None else state.residual
        if state is None or residual is None or not bool(self.payload.finite):
            return
        if _OPS.dtype(residual) == self.spec.accumulator:
            self.compressor.add_(residual, self.payload, self.spec, _OPS, 1)
            return
        # The model was converted meanwhile.
        exact = _OPS.astype(residual, self.spec.accumulator)
        restored = self.compressor.add_(exact, self.payload, self.spec, _OPS, 1)
        state.residual = _OPS.astype(restored, _OPS.dtype(residual))
