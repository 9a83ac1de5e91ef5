"""Who called ``compress``, and for which parameter.

Horovod hands a compressor nothing but the tensor.  The rest (the parameter, its name, the
reduction op, the process set) is in the frames of the calling functions.  Horovod 0.28.1 is
its last release, so these are stable; this module alone reads them, and a test covers every
entry point.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.identity import Serials

_TORCH_OPTIMIZER = "horovod.torch.optimizer"
_TORCH_OPS = "horovod.torch.mpi_ops"
_TENSORFLOW = "horovod.tensorflow"
#: Modules in which ``self`` is the optimizer.
_KERAS = ("horovod._keras", "hvd_compress.keras.wrapping")
_AGGREGATION = "horovod.tensorflow.gradient_aggregation_eager"


@dataclass(frozen=True)
class Call:
    """One call of ``compress``.

    Attributes:
        owner: the DistributedOptimizer; None for ``hvd.allreduce`` and the like.
        parameter: the parameter; None for direct calls.
        name: Horovod's name of the operation, None for an unnamed direct call.
        op: Horovod's reduction op.
        process_set: Horovod's process set.
        grouped: Horovod reduces several tensors in one call.
        positions: of the tensor in a grouped direct call, several if it is passed several times.
    """

    owner: Any
    parameter: Any
    name: str | None
    op: Any
    process_set: Any
    grouped: bool = False
    positions: tuple[int, ...] = (0,)


def find_torch_call(tensor: Any) -> Call | None:
    """Return who compresses this PyTorch tensor, or None if it is not Horovod.

    Raises:
        UnsupportedError: an entry point that cannot be compressed.
    """
    for frame in _callers():
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == _TORCH_OPTIMIZER and function in ("_allreduce_grad_async", "_grouped_allreduce_grad_async"):
            return _optimizer_call(frame.f_locals, tensor, function.startswith("_grouped"))
        if module == _TORCH_OPS and function in ("allreduce", "grouped_allreduce"):
            return _direct_call(frame.f_locals, tensor, function == "grouped_allreduce")
        if module == _TORCH_OPS and function in ("reducescatter", "grouped_reducescatter"):
            raise UnsupportedError(f"hvd.{function} cannot be compressed; expected hvd.allreduce or an optimizer")
    return None


def closure_of_step(owner: Any) -> bool:
    """Tell whether gradients are being computed by the closure of ``owner.step(closure)``.

    Stock Horovod synchronises before it calls the closure, so they would never be reduced.
    Inside ``skip_synchronize()`` the closure may synchronise itself, which is right.  The
    hooks of GPU tensors run on autograd's threads, so all threads are looked at.
    """
    if not owner._should_synchronize:
        return False
    threads = sys._current_frames()
    # A frame that refers to itself would keep the optimizer alive.
    threads[threading.get_ident()] = sys._getframe(1)
    return any(_in_closure(top, owner) for top in threads.values())


def is_scaled_step() -> bool:
    """Tell whether this happens inside ``GradScaler.step(opt)``.

    It has then unscaled gradients that were not reduced yet, and that reduced ones, still
    scaled, are about to replace.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler" and frame.f_code.co_name == "step":
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


def _in_closure(top: FrameType, owner: Any) -> bool:
    frame: FrameType | None = top
    while frame is not None:
        if frame.f_globals.get("__name__") == _TORCH_OPTIMIZER and frame.f_code.co_name in ("synchronize", "step"):
            called = frame.f_locals
            if called.get("self") is owner:
                # synchronize submits what had no hook, before the closure runs.
                return frame.f_code.co_name == "step" and called.get("closure") is not None
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class TensorFlowCall:
    """One call of ``compress`` by ``horovod.tensorflow``.

    Attributes:
        owner: the Keras optimizer; None for a tape and for direct calls.
        variables: those that Horovod reduces gradients for; None for direct calls.
        gradients: theirs, in the same order; None where a variable has none.
        positions: of the tensor among the gradients, several if it is passed several times.
        name: the name of a direct call, None if it has none.
        op: Horovod's reduction op.
        process_set: Horovod's process set.
        grouped: Horovod reduces several tensors in one call.
    """

    owner: Any
    variables: list[Any] | None
    gradients: list[Any] | None
    positions: tuple[int, ...]
    name: str | None
    op: Any
    process_set: Any
    grouped: bool


def find_tensorflow_call(tensor: Any) -> TensorFlowCall | None:
    """Return who compresses this TensorFlow tensor, or None if it is not Horovod.

    Raises:
        UnsupportedError: an entry point that cannot be compressed.
    """
    reduce: dict[str, Any] | None = None
    owner = variables = gradients = position = None
    for function, module, frame_locals in _tensorflow_frames():
        if module == _TENSORFLOW and function in ("reducescatter", "grouped_reducescatter"):
            raise UnsupportedError(f"hvd.{function} cannot be compressed; expected hvd.allreduce or an optimizer")
        if reduce is None:
            if module == _TENSORFLOW and function in ("allreduce", "grouped_allreduce"):
                reduce = frame_locals
        elif gradients is None and module == _TENSORFLOW:
            if frame_locals.get("grad") is tensor and isinstance(frame_locals.get("i"), int):
                position = frame_locals["i"]
            if function == "allreduce_grads":
                gradients, variables = frame_locals["grads"], frame_locals["vars"]
        elif gradients is not None and module in _KERAS and owner is None:
            owner = _optimizer_in(frame_locals)
    if reduce is None:
        return None
    candidates = reduce.get("tensors") or [tensor] if gradients is None else gradients
    positions = tuple(i for i, other in enumerate(candidates) if other is tensor)
    if position in positions:
        positions = (position,)
    return TensorFlowCall(
        owner,
        None if gradients is None or variables is None else list(variables),
        None if gradients is None else list(gradients),
        positions,
        reduce.get("name"),
        reduce["op"],
        reduce["process_set"],
        "tensors" in reduce,
    )


def tensorflow_salt() -> tuple[Any, ...] | None:
    """Return something that differs between the users of one compressor, None outside of Horovod.

    Horovod keeps one function for all tapes and optimizers with equal arguments, and
    TensorFlow one trace of it for all variables of equal shapes, so two models would share
    residuals.  Both find them by hash, so the hash has to tell who asks.  A tape is new in every
    step; it is known by the variables it has watched, and, since the tapes of a GAN watch those of
    both models, by the place in the program where it is wrapped.

    Raises:
        UnsupportedError: a stock Horovod optimizer around a Keras 3 optimizer, which never reduces.
    """
    asked = False
    for function, module, frame_locals in _tensorflow_frames():
        asked = asked or (module == _TENSORFLOW and function == "_make_allreduce_grads_fn")
        if not asked or "self" not in frame_locals or module not in (_TENSORFLOW, *_KERAS):
            continue
        user = frame_locals["self"]
        if module == "horovod._keras" and hasattr(user, "_backend_apply_gradients"):
            raise UnsupportedError(
                "stock Horovod never reduces the gradients of a Keras 3 optimizer; instead of "
                "'import horovod.tensorflow.keras as hvd' write 'import hvd_compress.keras as hvd', "
                "or use Keras 2 (tf_keras with TF_USE_LEGACY_KERAS=1)"
            )
        if hasattr(frame_locals.get("tape"), "watched_variables"):
            watched = sorted(_SERIALS.of(v) for v in frame_locals["tape"].watched_variables())
            return ("tape", *watched, *_place())
        return ("optimizer", _SERIALS.of(user))
    return ("function",) if asked else None


def variables_being_reduced() -> list[Any] | None:
    """Return the variables that Horovod's innermost tape or Keras optimizer is reducing, eagerly, gradients of."""
    for function, _, frame_locals in _tensorflow_frames():
        # Inside a class Python puts its name before two underscores.
        name = "rs" if function == "gradient" else "rv" if function.endswith("__filtered_reduce_grads") else None
        if name in frame_locals:
            return list(frame_locals[name])
    return None


def _place() -> tuple[tuple[str, str, int, int], ...]:
    """Say where in the program a tape is being wrapped; what is in the frames is not looked at."""
    place, outside = [], False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if outside:
            place.append((code.co_filename, code.co_name, code.co_firstlineno, frame.f_lasti))
        # Horovod asks for the hash at several places of its own, which must get the same.
        is_horovod = frame.f_globals.get("__name__") == _TENSORFLOW
        outside = outside or (is_horovod and code.co_name.endswith("DistributedGradientTape"))
        frame = frame.f_back
    return tuple(place)


_SERIALS = Serials()


def _tensorflow_frames() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield function, module and variables of all Horovod's frames, from the innermost on."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module in (_TENSORFLOW, _AGGREGATION, *_KERAS):
            # AutoGraph calls its versions tf__name.
            yield frame.f_code.co_name.removeprefix("tf__"), module, frame.f_locals
        frame = frame.f_back


def _optimizer_in(frame_locals: dict[str, Any]) -> Any:
    candidate = frame_locals.get("self")
    return candidate if hasattr(candidate, "apply_gradients") else None


def _callers() -> Iterator[FrameType]:
    # compress() is called by Horovod directly, or from a comprehension; the rest is ours.
    frame: FrameType | None = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _optimizer_call(frame_locals: dict[str, Any], tensor: Any, grouped: bool) -> Call:
    owner = frame_locals["self"]
    if not hasattr(owner, "op"):
        raise UnsupportedError("op=Adasum cannot be compressed; expected op=hvd.Average or op=hvd.Sum")
    if grouped:
        parameter = next(parameter for parameter in frame_locals["ps"] if parameter.grad is tensor)
    else:
        parameter = frame_locals["p"]
    name = owner._parameter_names.get(parameter)
    return Call(owner, parameter, name, owner.op, owner.process_set, grouped)


def _direct_call(frame_locals: dict[str, Any], tensor: Any, grouped: bool) -> Call:
    op = frame_locals["op"]
    if op is None:
        average = frame_locals.get("average")
        ops = sys.modules[_TORCH_OPS]
        op = ops.Sum if average is False else ops.Average
    positions: tuple[int, ...] = (0,)
    if grouped:
        positions = tuple(i for i, t in enumerate(frame_locals["tensors"]) if t is tensor)
    return Call(None, None, frame_locals["name"], op, frame_locals["process_set"], grouped, positions)
