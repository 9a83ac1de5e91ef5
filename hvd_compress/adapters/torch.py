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
from hvd_compress.adapters.common import (
    checked_spec,
    count,
    logger,
    report_nonfinite,
    settings_of,
    warn_unnamed,
    without_feedback,
)
from hvd_compress.base import Collective, Compressor
from hvd_compress.codec import encode_step, give_back, learn, slots_of
from hvd_compress.errors import StateError, UnboundTensorError, UnsupportedError
from hvd_compress.exchange import Exchange, Item
from hvd_compress.feedback import MomentumCorrection
from hvd_compress.layout import Declaration, describe
from hvd_compress.ops.torch import TorchOps
from hvd_compress.state import RESIDUAL, ParameterState, Scope, process_set_key
from hvd_compress.step import Payload, Step, TensorSpec
from hvd_compress.transport.base import Transport
from hvd_compress.transport.choose import open_transport
from hvd_compress.transport.horovod import HorovodTransport
from hvd_compress.wire import is_variable

_OPS = TorchOps()


@dataclass(frozen=True)
class Dense:
    """Context of a tensor that Horovod reduces itself."""

    dtype: torch.dtype
    exchange: Exchange | None
    spec: TensorSpec
    momentum: MomentumCorrection | None
    state: ParameterState | None


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
    algorithm: Compressor
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
    chosen = compressor.choose(call.name, spec)
    state = _state(compressor, call, scope) if chosen.remembers(spec) else None
    algorithm = chosen.at(0 if state is None else state.steps)
    if not algorithm.compresses(spec):
        return _compress_dense(compressor, algorithm, tensor, spec, call, scope, exchange, state)
    if algorithm.collective is Collective.ALLREDUCE:
        return _compress_reduced(compressor, algorithm, tensor, spec, call, scope, exchange, state)
    token = _token(tensor, spec, call)
    if call.parameter is not None and not call.parameter.requires_grad:
        # Horovod still submits a zero gradient; sending the residual would move frozen weights.
        exchange.begin()
        return token, Frozen(exchange, tensor.shape, tensor.dtype, tensor.device)
    item = _encode(algorithm, tensor, spec, _name(call), state, _place(call))
    exchange.submit(item)
    if is_variable(item.sections):
        item.counted = lambda nbytes: count(compressor, scope, item.name, nbytes + token.nbytes, spec)
    else:
        payload_bytes = sum(section.nbytes for section in item.sections)
        count(compressor, scope, item.name, payload_bytes + token.nbytes, spec)
    return token, Queued(exchange, item.name, _slot(call), spec, algorithm, state)


def decompress(compressor: Compressor, tensor: torch.Tensor, ctx: Dense | Frozen | Queued | Reduced) -> torch.Tensor:
    """Implement ``Compressor.decompress`` for PyTorch; ``tensor`` is what Horovod has reduced."""
    if isinstance(ctx, Dense):
        if ctx.exchange is not None:
            ctx.exchange.settle()
        return _with_momentum(tensor, ctx).to(ctx.dtype)
    if isinstance(ctx, Frozen):
        ctx.exchange.settle()
        return torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
    if isinstance(ctx, Reduced):
        return _decompress_reduced(tensor, ctx)
    if not ctx.exchange.settled and is_scaled_step():
        raise UnsupportedError(
            "scaler.step(opt) expected gradients that are reduced already, since it unscales them; call "
            "opt.synchronize() after backward(), and scaler.step(opt) inside 'with opt.skip_synchronize():'"
        )
    gathered = ctx.exchange.collect(ctx.name, ctx.slot)
    total = ctx.algorithm.combine(gathered.arrays, ctx.spec, _OPS)
    total = _release(ctx.algorithm, total, ctx.state, ctx.spec, gathered.void)
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
        and compressor.choose(call.name, spec).compresses(spec)
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

        def connect() -> Transport:
            runtime.check_all_restored_used(scope)
            # All members of a process set open their exchanges over it in the same order.
            label = f"hvd_compress.{runtime.next_exchange(key)}"
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
    _warn_of_two_momenta(compressor, owner)
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


def _warn_of_two_momenta(compressor: Compressor, owner: Any) -> None:
    if "momentum" in compressor.runtime.warned or not compressor.has_momentum:
        return
    for group in owner.param_groups:
        if group.get("momentum") or "betas" in group:
            compressor.runtime.warned.add("momentum")
            logger.warning(
                "%s accumulates momentum itself, and so does the optimizer it is used with (%s); expected an optimizer "
                "without, such as torch.optim.SGD(..., momentum=0)",
                type(compressor).__name__,
                f"momentum={group['momentum']}" if group.get("momentum") else f"betas={group['betas']}",
            )
            return


def _token(tensor: torch.Tensor, spec: TensorSpec, call: Call) -> torch.Tensor:
    # In a group Horovod wants all tensors on one device, and dense ones may be among them.
    device = tensor.device if call.grouped else torch.device("cpu")
    return torch.ones(1, dtype=torch.float64 if spec.dtype == "float64" else torch.float32, device=device)


def _compress_dense(
    compressor: Compressor,
    algorithm: Compressor,
    tensor: torch.Tensor,
    spec: TensorSpec,
    call: Call,
    scope: Scope,
    exchange: Exchange,
    state: ParameterState | None,
) -> tuple[torch.Tensor, Dense]:
    name, watched = _name(call), None
    if call.owner is not None:
        exchange.submit(Item(name, spec.shape, spec.dtype, (), (), _OPS.all_finite(tensor), _nothing))
        watched = exchange if compressor.on_nonfinite == "raise" else None
    # Horovod has no bfloat16, and refuses what is not contiguous (channels_last, transposed).
    sent = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    sent = sent.contiguous()
    count(compressor, scope, name, sent.nbytes, spec)
    momentum = algorithm.feedback if isinstance(algorithm.feedback, MomentumCorrection) else None
    if state is not None:
        state.steps += 1
    return sent, Dense(tensor.dtype, watched, spec, momentum, state)


@torch.no_grad()
def _with_momentum(tensor: torch.Tensor, ctx: Dense) -> torch.Tensor:
    """Return the update of a dense tensor whose momentum is accumulated here, after the average."""
    if ctx.momentum is None or ctx.state is None:
        return tensor
    memory = _fitting(ctx.state, tensor, ctx.spec)
    update, momentum = ctx.momentum.after_average(memory, tensor, ctx.spec, _OPS)
    if bool(_OPS.all_finite(momentum)):
        ctx.state.store({"momentum": momentum})
    return _OPS.reshape(update, ctx.spec.shape).clone()


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
    algorithm: Compressor,
    tensor: torch.Tensor,
    spec: TensorSpec,
    name: str,
    state: ParameterState | None,
    place: tuple[int, int] = (0, 1),
) -> Item:
    """Compress one tensor and update what is remembered of it."""
    payload, give_back = _compressed(algorithm, tensor, spec, name, state, place)
    return Item(name, spec.shape, spec.dtype, algorithm.sections(spec), payload.arrays, payload.finite, give_back)


def _compressed(
    algorithm: Compressor,
    tensor: torch.Tensor,
    spec: TensorSpec,
    name: str,
    state: ParameterState | None,
    place: tuple[int, int],
) -> tuple[Payload, Callable[[], None]]:
    if state is None:
        # A direct call without a name has no place to remember anything.
        algorithm, memory, number = without_feedback(algorithm), _started(algorithm, {}, tensor, spec), 0
    else:
        memory, number = _started(algorithm, _fitting(state, tensor, spec), tensor, spec), state.steps
    step = Step(name, number, *place, memory)
    payload, new = encode_step(algorithm, tensor, spec, _OPS, step)
    if state is None:
        return payload, _nothing
    state.store(new)
    state.common.update(slot.name for slot in slots_of(algorithm, spec) if slot.common)
    state.steps += 1
    if algorithm.feedback is None:
        return payload, _nothing
    return payload, _GiveBack(algorithm, weakref.ref(state), payload, spec)


def _started(
    algorithm: Compressor, memory: dict[str, torch.Tensor], tensor: torch.Tensor, spec: TensorSpec
) -> dict[str, torch.Tensor]:
    """Return the memory with the compressor's own slots, zeros in the first step."""
    for slot in algorithm.slots(spec):
        if slot.name not in memory:
            memory[slot.name] = _OPS.zeros(slot.count, slot.dtype, tensor)
    return memory


def _place(call: Call) -> tuple[int, int]:
    """Return rank and size in the process set."""
    return call.process_set.rank(), call.process_set.size()


def _compress_reduced(
    compressor: Compressor,
    algorithm: Compressor,
    tensor: torch.Tensor,
    spec: TensorSpec,
    call: Call,
    scope: Scope,
    exchange: Exchange,
    state: ParameterState | None,
) -> tuple[torch.Tensor, Any]:
    """Compress to a payload that Horovod adds up itself."""
    name = _name(call)
    with torch.no_grad():
        if call.parameter is not None and not call.parameter.requires_grad:
            # Horovod still submits a gradient for what has been frozen; all ranks must send as much.
            tensor, state = torch.zeros_like(tensor), None
        payload, give_back = _compressed(algorithm, tensor, spec, name, state, _place(call))
        (array,) = payload.arrays
        # Other ranks must hear of NaN even if it was not among what is sent.  Horovod reduces in place.
        sent = torch.where(payload.finite, array, torch.full_like(array, float("nan"))).contiguous()
    if call.owner is not None:
        exchange.submit(Item(name, spec.shape, spec.dtype, (), (), payload.finite, give_back))
    count(compressor, scope, name, sent.nbytes, spec)
    return sent, Reduced(exchange, name, spec, algorithm, state, payload.common, give_back)


@torch.no_grad()
def _decompress_reduced(tensor: torch.Tensor, ctx: Reduced) -> torch.Tensor:
    ctx.exchange.settle()
    spec, state, void = ctx.spec, ctx.state, False
    if state is not None and (ctx.give_back is not _nothing or ctx.algorithm.slots(spec)):
        # The same on all ranks, since all have the same sum.
        if not bool(_OPS.all_finite(tensor)):
            ctx.exchange.undo()
            ctx.give_back()
            # What takes turns must take this one again.
            state.steps -= 1
            void = True
        else:
            ctx.exchange.taken(ctx.name)
            state.store(learn(ctx.algorithm, tensor, state.memory(), spec, _OPS))
    total = ctx.algorithm.decode((tensor, *ctx.common), spec, _OPS)
    total = _release(ctx.algorithm, total, state, spec, void)
    return _OPS.reshape(_OPS.astype(total, spec.dtype), spec.shape).clone()


def _release(
    algorithm: Compressor, total: torch.Tensor, state: ParameterState | None, spec: TensorSpec, void: bool
) -> torch.Tensor:
    if algorithm.feedback is None or state is None:
        return total
    total, new = algorithm.feedback.release(state.memory(), total, spec, _OPS)
    if not void:
        state.store(new)
    return total


def _fitting(state: ParameterState, tensor: torch.Tensor, spec: TensorSpec) -> dict[str, torch.Tensor]:
    """Return the memory as the tensor needs it, after a move, a change of dtype or of size."""
    restored, state.restored = state.restored, False
    memory: dict[str, Any] = state.memory()
    for name, kept in memory.items():
        # A checkpoint that TensorFlow has written has NumPy arrays.
        x = kept if isinstance(kept, torch.Tensor) else torch.from_numpy(kept)
        memory[name] = _OPS.astype(_OPS.move_like(x, tensor), spec.accumulator)
    residual = memory.get(RESIDUAL)
    if residual is not None and residual.shape != (spec.numel,):
        expected = f"expected {spec.numel} elements in the residual of {state.name!r}, got {residual.numel()}"
        if restored:
            raise StateError(f"{expected}: the loaded state is of another model")
        logger.warning("%s: the parameter has changed its size, so its residual is dropped", expected)
        state.slots.clear()
        return {}
    return memory


@dataclass
class _GiveBack:
    """Put back, once, into what is remembered what was taken out to be sent."""

    algorithm: Compressor
    # Weakly: a model that is gone must not live on in what was sent last.
    state: weakref.ref[ParameterState]
    payload: Payload
    spec: TensorSpec
    done: bool = False

    def __call__(self) -> None:
        if self.done:
            return
        self.done = True
        # Where the gradient was not finite, nothing was taken out.
        state = self.state()
        memory = {} if state is None else state.memory()
        if state is None or not memory or not bool(self.payload.finite):
            return
        # The model may have been converted meanwhile.
        kept = {name: _OPS.dtype(x) for name, x in memory.items()}
        exact = {name: _OPS.astype(x, self.spec.accumulator) for name, x in memory.items()}
        restored = give_back(self.algorithm, exact, self.payload, self.spec, _OPS)
        state.store({name: _OPS.astype(x, kept[name]) for name, x in restored.items()})
