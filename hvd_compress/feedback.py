"""Feedback: what a compressor drops in one step is added to the next.

Compressors that are biased, such as top-k, do not converge without it (S. P. Karimireddy et
al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019;
S. U. Stich et al., "Sparsified SGD with memory", NeurIPS 2018).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvd_compress.errors import ConfigError
from hvd_compress.kernels import Mode, Plan
from hvd_compress.ops.base import Array, Ops
from hvd_compress.packing import PACKED
from hvd_compress.settings import ShortRepr, is_number
from hvd_compress.step import RESIDUAL, Payload, Slot, Step, TensorSpec

Memory = Mapping[str, Array]


class Algorithm(Protocol):
    """What feedback needs of a compressor; see :class:`~hvd_compress.base.Compressor`."""

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return what receivers make of a payload."""

    def add_(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops, sign: int) -> Array:
        """Add or subtract the decoded payload."""

    def clear(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops) -> Array:
        """Return ``x`` with zeros where elements were sent."""


@dataclass(frozen=True)
class Feedback(ShortRepr, abc.ABC):
    """Base of all kinds of feedback.

    What is remembered is one array for each of :meth:`slots`.  ``memory`` maps their names
    to them and lacks those that do not exist yet, which count as zeros.
    """

    def slots(self, spec: TensorSpec) -> Sequence[Slot]:
        """Return what is remembered of a parameter; all have as many elements as the parameter."""
        return (Slot(RESIDUAL, spec.numel, spec.accumulator),)

    @abc.abstractmethod
    def compensate(self, gradient: Array, spec: TensorSpec, ops: Ops, step: Step) -> tuple[Array, Memory]:
        """Return what is to be compressed, as a new flat accumulator array, and slots that have changed."""

    def plan(self, memory: Memory) -> Plan | None:
        """Return how compiled loops do what :meth:`compensate` does; None if they cannot."""
        return None

    @abc.abstractmethod
    def keep(
        self, memory: Memory, x: Array, payload: Payload, algorithm: Algorithm, spec: TensorSpec, ops: Ops
    ) -> dict[str, Array]:
        """Return the slots after ``x`` was sent as ``payload``; ``x`` may be overwritten."""

    def after_loops(
        self, memory: Memory, payload: Payload, algorithm: Algorithm, spec: TensorSpec, ops: Ops
    ) -> dict[str, Array]:
        """Return the slots after compiled loops have sent ``payload``, and have kept what is not sent."""
        return dict(memory)

    @abc.abstractmethod
    def give_back(
        self, memory: Memory, payload: Payload, algorithm: Algorithm, spec: TensorSpec, ops: Ops
    ) -> dict[str, Array]:
        """Return the slots as if ``payload`` had been compressed but never sent; may change them."""

    def release(self, memory: Memory, total: Array, spec: TensorSpec, ops: Ops) -> tuple[Array, dict[str, Array]]:
        """Return what the optimizer gets for the ranks' decoded sum, and slots that have changed."""
        return total, {}


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """Keep the difference between what was to be sent and what the receivers decode.

    With the gradient ``g`` and the residual ``e`` of the step before, ``a = decay * e + g`` is
    compressed to ``c``, and ``e = a - decode(c)`` is kept.  So with ``decay=1`` over any number
    of steps the sum of what was applied plus the mean residual equals the sum of the mean
    gradients.  The residual is float32, or float64 for float64 gradients.

    Args:
        decay: at most 1: less forgets old errors, which can help when they have become stale
            (large learning-rate drops, very small ratios).
        dtype: ``"bfloat16"`` or ``"float16"`` halves the memory that residuals take; gradients
            that are some hundred times smaller than the residual are then lost in it.  ``"int8"``
            quarters it: 256 elements share a scale, and rounding is stochastic, so that nothing is
            lost on average.

    Raises:
        ConfigError: ``decay`` is not above 0 and at most 1, or ``dtype`` another one.
    """

    decay: float = 1.0
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float16", "bfloat16", PACKED):
            raise ConfigError(f"ErrorFeedback.dtype must be 'bfloat16', 'float16', 'int8' or None, got {self.dtype!r}")
        _require_number(self, "decay", lambda value: 0 < value <= 1, "in (0, 1]")

    def slots(self, spec: TensorSpec) -> Sequence[Slot]:
        """The residual."""
        return (Slot(RESIDUAL, spec.numel, self.dtype or spec.accumulator),)

    def plan(self, memory: Memory) -> Plan | None:
        """Add."""
        if RESIDUAL not in memory:
            return Plan(Mode.SET)
        return Plan(Mode.ADD) if self.decay == 1 else Plan(Mode.DECAY, self.decay)

    def compensate(self, gradient: Array, spec: TensorSpec, ops: Ops, step: Step) -> tuple[Array, Memory]:
        """Return ``decay * residual + gradient``."""
        residual = step.memory.get(RESIDUAL)
        exact = ops.astype(ops.flatten(gradient), spec.accumulator)
        if residual is not None:
            return ops.add(residual if self.decay == 1 else residual * self.decay, exact), {}
        # What is returned is overwritten later, the user's gradient must not be.
        return ops.copy(exact) if spec.dtype == spec.accumulator else exact, {}

    def keep(
        self, memory: Memory, x: Array, payload: Payload, algorithm: Algorithm, spec: TensorSpec, ops: Ops
    ) -> dict[str, Array]:
        """Keep what receivers do not decode."""
        return {RESIDUAL: algorithm.add_(x, payload, spec, ops, -1)}

    def give_back(
        self, memory: Memory, payload: Payload, algorithm: Algorithm, spec: TensorSpec, ops: Ops
    ) -> dict[str, Array]:
        """Add what was sent."""
        return {RESIDUAL: algorithm.add_(memory[RESIDUAL], payload, spec, ops, 1)}


@dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """Accumulate momentum before compression, as Deep Gradient Compression does.

    With ``u = momentum * u + g`` and ``v = v + u``, ``v`` is compressed.  Sparsifiers set both
    to zero where elements were sent (*momentum factor masking*), so that stale momentum does
    not carry weights on.  The optimizer must have no momentum of its own.

    Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression", ICLR 2018.

    Args:
        momentum: in [0, 1).
        nesterov: ``u = momentum * (u + g)``, ``v = v + u + g`` instead.
        masking: whether momentum is cleared where elements were sent.
        clip_norm: the L2 norm that each tensor's gradient is clipped to on its rank, before it
            is accumulated, times ``N ** -0.5`` on ``N`` ranks, so that the sum of independent
            gradients has about the norm ``clip_norm``.

    Raises:
        ConfigError: ``momentum`` is not in [0, 1), ``clip_norm`` not positive.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        _require_number(self, "momentum", lambda value: 0 <= value < 1, "in [0, 1)")
        if self.clip_norm is not None:
            _require_number(self, "clip_norm", lambda value: 0 < value < math.inf, "above 0, or None")

    def slots(self, spec: TensorSpec) -> Sequence[Slot]:
        """The residual ``v`` and the momentum ``u``."""
        return (*super().slots(spec), Slot("momentum", spec.numel, spec.accumulator))

    def plan(self, memory: Memory) -> Plan | None:
        """Accumulate momentum, unless gradients are clipped first."""
        if self.clip_norm is not None:
            return None
        return Plan(Mode.NESTEROV if self.nesterov else Mode.MOMENTUM, self.momentum)

    def compensate(self, gradient: Array, spec: TensorSpec, ops: Ops, step: Step) -> tuple[Array, Memory]:
        """Return the accumulated momentum ``v``."""
        g = ops.astype(ops.flatten(gradient), spec.accumulator)
        if self.clip_norm is not None:
            g = _clipped(g, self.clip_norm * step.size**-0.5, ops)
        u = self._moved(step.memory.get("momentum"), g)
        v = u + g if self.nesterov else u
        residual = step.memory.get(RESIDUAL)
        return ops.copy(v) if residual is None else ops.add(residual, v), {"momentum": u}

    def keep(
        self, memory: Memory, x: Array, payload: Payload, algorithm: Algorithm, spec: TensorSpec, ops: Ops
    ) -> dict[str, Array]:
        """Keep what receivers do not decode, and the momentum of what was not sent."""
        u = memory["momentum"]
        return {
            "momentum": algorithm.clear(u, payload, spec, ops) if self.masking else u,
            RESIDUAL: algorithm.add_(x, payload, spec, ops, -1),
        }

    def after_loops(
        self, memory: Memory, payload: Payload, algorithm: Algorithm, spec: TensorSpec, ops: Ops
    ) -> dict[str, Array]:
        """Keep the momentum of what was not sent."""
        u = memory["momentum"]
        return {**memory, "momentum": algorithm.clear(u, payload, spec, ops) if self.masking else u}

    def give_back(
        self, memory: Memory, payload: Payload, algorithm: Algorithm, spec: TensorSpec, ops: Ops
    ) -> dict[str, Array]:
        """Add what was sent; the momentum there, which was cleared, starts anew."""
        return {RESIDUAL: algorithm.add_(memory[RESIDUAL], payload, spec, ops, 1)}

    def after_average(self, memory: Memory, average: Array, spec: TensorSpec, ops: Ops) -> tuple[Array, Array]:
        """Return update and new momentum of a tensor that travels dense."""
        g = ops.astype(ops.flatten(average), spec.accumulator)
        u = self._moved(memory.get("momentum"), g)
        return (u + g if self.nesterov else u), u

    def _moved(self, u: Array | None, g: Array) -> Array:
        # A zero gets the sign that it has in a sum with zeros.
        if self.nesterov:
            return (g + 0.0 if u is None else u + g) * self.momentum
        return g + 0.0 if u is None else u * self.momentum + g


@dataclass(frozen=True)
class EF21(Feedback):
    """Send how the gradient differs from what receivers believe it to be.

    Every rank keeps an estimate ``h`` of its own gradient that all others know; it sends
    ``c = C(g - h)`` and adds the decoded ``c`` to ``h``.  What the optimizer gets is the mean
    of all ``h``, kept as their sum ``H``.  Unlike a residual, ``g - h`` does not grow, and old
    gradients are never replayed.

    P. Richtarik, I. Sokolov, I. Fatkhullin, "EF21: a new, simpler, theoretically better, and
    practically faster error feedback", NeurIPS 2021.
    """

    def slots(self, spec: TensorSpec) -> Sequence[Slot]:
        """This rank's estimate and the sum of all ranks'."""
        return (
            Slot("estimate", spec.numel, spec.accumulator),
            Slot("estimates", spec.numel, spec.accumulator, common=True),
        )

    def compensate(self, gradient: Array, spec: TensorSpec, ops: Ops, step: Step) -> tuple[Array, Memory]:
        """Return ``gradient - estimate``."""
        g = ops.astype(ops.flatten(gradient), spec.accumulator)
        h = step.memory.get("estimate")
        return ops.copy(g) if h is None else g - h, {}

    def keep(
        self, memory: Memory, x: Array, payload: Payload, algorithm: Algorithm, spec: TensorSpec, ops: Ops
    ) -> dict[str, Array]:
        """Add to the estimate what all ranks now know."""
        h = memory.get("estimate")
        h = ops.zeros(spec.numel, spec.accumulator, x) if h is None else ops.copy(h)
        return {"estimate": algorithm.add_(h, payload, spec, ops, 1)}

    def give_back(
        self, memory: Memory, payload: Payload, algorithm: Algorithm, spec: TensorSpec, ops: Ops
    ) -> dict[str, Array]:
        """Take what was sent out of the estimate."""
        return {"estimate": algorithm.add_(memory["estimate"], payload, spec, ops, -1)}

    def release(self, memory: Memory, total: Array, spec: TensorSpec, ops: Ops) -> tuple[Array, dict[str, Array]]:
        """Return the sum of all estimates."""
        known = memory.get("estimates")
        total = total if known is None else known + total
        return ops.copy(total), {"estimates": total}


def _clipped(g: Array, norm: float, ops: Ops) -> Array:
    """Scale ``g`` down to an L2 norm."""
    largest = ops.max(ops.abs(g))
    # Squares of large elements would overflow.
    scale = ops.select(largest > 0, largest, 1.0)
    length = ops.sqrt(ops.sum((g / scale) * (g / scale))) * scale
    return ops.select(length > norm, g * (norm / ops.select(length > norm, length, 1.0)), g)


def _require_number(owner: Any, name: str, valid: Callable[[float], bool], expected: str) -> None:
    value = getattr(owner, name)
    if not is_number(value) or not valid(float(value)):
        raise ConfigError(f"{type(owner).__name__}.{name} must be a number {expected}, got {value!r}")
