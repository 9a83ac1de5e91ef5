"""What the adapters of all frameworks do alike."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from hvd_compress.base import Compressor
from hvd_compress.codec import known_slots
from hvd_compress.errors import NonFiniteGradientError, StateError, UnsupportedError
from hvd_compress.feedback import EF21
from hvd_compress.ops.base import ACCUMULATOR, ITEMSIZE
from hvd_compress.state import ParameterState, Scope
from hvd_compress.step import TensorSpec
from hvd_compress.version import __version__

logger = logging.getLogger("hvd_compress")

# Positions are int32.
_MAX_NUMEL = 2**31 - 1
# Labels that need not be shown, since there is usually only one of them.
_USUAL = ("optimizer0", "allreduce", "bound", "tape")


def settings_of(compressor: Compressor) -> dict[str, Any]:
    """Return what ranks must have in common besides their tensors."""
    return {"the version of hvd_compress": __version__, **compressor.settings()}


def checked_spec(
    compressor: Compressor, hvd: Any, op: Any, name: str | None, shape: tuple[int, ...], dtype: str
) -> TensorSpec:
    """Return the spec of a gradient that can be compressed.

    Args:
        compressor: whose name the message gives.
        hvd: Horovod's module for the framework.
        op: the reduction op.
        name: of the tensor, if it has one.
        shape: of the tensor.
        dtype: of the tensor, by name.

    Raises:
        UnsupportedError: another op than Average and Sum, a dtype that is no float, too many elements.
    """
    kind, where = type(compressor).__name__, f" for {name!r}" if name else ""
    if op not in (hvd.Average, hvd.Sum):
        names = {hvd.Adasum: "Adasum", hvd.Min: "Min", hvd.Max: "Max", hvd.Product: "Product"}
        raise UnsupportedError(f"{kind} expected op=hvd.Average or op=hvd.Sum{where}, got {names.get(op, op)}")
    if dtype not in ACCUMULATOR:
        raise UnsupportedError(f"{kind} expected a gradient of {', '.join(ACCUMULATOR)}{where}, got {dtype}")
    spec = TensorSpec(shape, dtype)
    if spec.numel > _MAX_NUMEL:
        raise UnsupportedError(f"{kind} expected at most {_MAX_NUMEL} elements{where}, got {spec.numel}")
    return spec


def count(compressor: Compressor, scope: Scope, name: str, sent: int, spec: TensorSpec) -> None:
    """Count a step of one tensor."""
    compressor.runtime.telemetry.count(shown_name(scope, name), sent, spec.numel * ITEMSIZE[spec.dtype])


def shown_name(scope: Scope, name: str) -> str:
    """Return the name that ``stats()`` gives a tensor."""
    return name if scope.label in _USUAL else f"{scope.label}/{name}"


def report_nonfinite(compressor: Compressor, bad: list[tuple[int, str]]) -> None:
    """Warn once, or raise, as the compressor is set.

    Raises:
        NonFiniteGradientError: with ``on_nonfinite="raise"``.
    """
    where = ", ".join(f"rank {rank} in {name!r}" for rank, name in bad)
    message = f"NaN or infinity in the gradient of {where}"
    if compressor.on_nonfinite == "raise":
        raise NonFiniteGradientError(f"{message}; residuals are as if this step had not been sent")
    if "nonfinite" not in compressor.runtime.warned:
        compressor.runtime.warned.add("nonfinite")
        logger.warning(
            "%s; it is passed on to all ranks, so that all can skip this step, and residuals stay finite. "
            "This is said only once.",
            message,
        )


def check_fits(chosen: Compressor, state: ParameterState, spec: TensorSpec) -> None:
    """Raise if a loaded state has what this compressor could not go on with.

    Raises:
        StateError: it was saved with another feedback.
    """
    if state.restored:
        expected = known_slots(chosen, spec)
        unknown = sorted(set(state.memory()) - expected)
        if unknown:
            raise StateError(
                f"the loaded state of {state.name!r} was saved with another feedback: expected "
                f"{' and '.join(sorted(expected)) or 'nothing to be remembered'}, got {' and '.join(unknown)}"
            )


def note_average(state: ParameterState | None, algorithm: Compressor, averaged: bool) -> None:
    """Note of what Horovod itself reduces whether EF21 is going to add up sums or averages."""
    if state is not None:
        state.averages = {"estimates"} if averaged and isinstance(algorithm.feedback, EF21) else set()


def warn_of_two_momenta(compressor: Compressor, found: str | None) -> None:
    """Say, once, that compressor and optimizer both accumulate momentum; ``found`` is the optimizer's."""
    if found is not None and compressor.has_momentum and "momentum" not in compressor.runtime.warned:
        compressor.runtime.warned.add("momentum")
        logger.warning(
            "%s accumulates momentum itself, and so does the optimizer it is used with (%s); expected an optimizer "
            "without, such as SGD with momentum=0",
            type(compressor).__name__,
            found,
        )


def without_feedback(algorithm: Compressor) -> Compressor:
    """Return the same compressor for a tensor that has no place to remember anything."""
    if algorithm.feedback is None:
        return algorithm
    bare: Compressor = algorithm.derived("without feedback", lambda: dataclasses.replace(algorithm, feedback=None))
    return bare


def warn_unnamed(compressor: Compressor) -> None:
    """Say, once, that a direct call without a name keeps no residual."""
    if compressor.feedback is not None and "unnamed" not in compressor.runtime.warned:
        compressor.runtime.warned.add("unnamed")
        logger.warning(
            "hvd.allreduce was called without name=: there is nothing to keep a residual by, "
            "so what %s drops in such calls is lost",
            type(compressor).__name__,
        )
