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

_TORCH_OPTIMIZER = "horovod.torch.optimizer"
_TORCH_OPS = "horovod.torch.mpi_ops"


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
