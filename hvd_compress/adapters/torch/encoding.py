"""Compressing one tensor, and what is remembered of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_compress.adapters.common import logger, without_feedback
from hvd_compress.base import Compressor
from hvd_compress.codec import encode_step, give_back, slots_of
from hvd_compress.errors import StateError
from hvd_compress.exchange import Item, nothing
from hvd_compress.ops.torch import TorchOps
from hvd_compress.packing import packed_like, unpacked
from hvd_compress.state import ParameterState
from hvd_compress.step import Payload, Step, TensorSpec

OPS = TorchOps()


@torch.no_grad()
def encode(
    algorithm: Compressor,
    tensor: torch.Tensor,
    spec: TensorSpec,
    name: str,
    state: ParameterState | None,
    place: tuple[int, int] = (0, 1),
    unnamed: int = 0,
) -> Item:
    """Compress one tensor and update what is remembered of it; ``unnamed`` numbers calls without a name."""
    payload, give_back = compressed(algorithm, tensor, spec, name, state, place, unnamed)
    return Item(name, spec.shape, spec.dtype, algorithm.sections(spec), payload.arrays, payload.finite, give_back)


def compressed(
    algorithm: Compressor,
    tensor: torch.Tensor,
    spec: TensorSpec,
    name: str,
    state: ParameterState | None,
    place: tuple[int, int],
    unnamed: int,
) -> tuple[Payload, Callable[[], None]]:
    """Return the payload, and what gives back what it has taken out of what is remembered."""
    if state is None:
        # A direct call without a name has no place to remember anything.
        algorithm, memory, number = without_feedback(algorithm), {}, unnamed
    else:
        memory, number = fitting(state, algorithm, tensor, spec), state.steps
    step = Step(name, number, *place, memory, hints={} if state is None else state.hints)
    payload, new = encode_step(algorithm, tensor, spec, OPS, step, in_place=True)
    if state is None:
        return payload, nothing
    state.store(new)
    state.common.update(slot.name for slot in slots_of(algorithm, spec) if slot.common)
    state.steps += 1
    if algorithm.feedback is None:
        return payload, nothing
    return payload, GiveBack(algorithm, weakref.ref(state), payload, spec)


def release(
    algorithm: Compressor, total: torch.Tensor, state: ParameterState | None, spec: TensorSpec, void: bool
) -> torch.Tensor:
    """Return what the optimizer gets for the decoded sum; ``void`` if the step does not count."""
    if algorithm.feedback is None or state is None:
        return total
    total, new = algorithm.feedback.release(state.memory(), total, spec, OPS)
    if not void:
        state.store(new)
    return total


def fitting(
    state: ParameterState, algorithm: Compressor, tensor: torch.Tensor, spec: TensorSpec
) -> dict[str, torch.Tensor]:
    """Return the memory as the tensor needs it, after a move, a change of dtype or of size."""
    restored, state.restored = state.restored, False
    memory: dict[str, Any] = state.memory()
    for name, kept in memory.items():
        # A checkpoint that TensorFlow has written has NumPy arrays.
        x = torch.from_numpy(kept) if isinstance(kept, np.ndarray) else unpacked(kept, spec.accumulator, OPS)
        memory[name] = OPS.astype(OPS.move_like(x, tensor), spec.accumulator)
    for slot in () if algorithm.feedback is None else algorithm.feedback.slots(spec):
        have = memory.get(slot.name)
        if have is None or have.shape == (slot.count,):
            continue
        expected = f"expected {slot.count} elements in the {slot.name} of {state.name!r}, got {have.numel()}"
        if restored:
            raise StateError(f"{expected}: the loaded state is of another model")
        logger.warning("%s: the parameter has changed its size, so its %s is dropped", expected, slot.name)
        state.slots.clear()
        return {}
    return memory


@dataclass
class GiveBack:
    """Put back, once, into what is remembered what was taken out to be sent."""

    algorithm: Compressor
    # Weakly: a model that is gone must not live on in what was sent last.
    state: weakref.ref[ParameterState]
    payload: Payload
    spec: TensorSpec
    done: bool = False

    def __call__(self) -> None:
        """Do it."""
        if self.done:
            return
        self.done = True
        # Where the gradient was not finite, nothing was taken out.
        state = self.state()
        memory = {} if state is None else state.memory()
        if state is None or not memory or not bool(self.payload.finite):
            return
        # The model may have been converted meanwhile.
        exact = {name: unpacked(x, self.spec.accumulator, OPS) for name, x in memory.items()}
        restored = give_back(self.algorithm, exact, self.payload, self.spec, OPS)
        state.store({name: packed_like(x, memory[name], OPS) for name, x in restored.items()})
