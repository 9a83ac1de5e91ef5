"""What one rank does locally in a step: feedback, compression, and feedback again.

The adapters of all frameworks call this, and so do tests, which need neither Horovod nor MPI.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hvd_compress import kernels
from hvd_compress.base import Compressor
from hvd_compress.errors import UnsupportedError
from hvd_compress.ops.base import Array, Ops
from hvd_compress.packing import PACKED, kept_as
from hvd_compress.step import RESIDUAL, Payload, Slot, Step, TensorSpec


def slots_of(compressor: Compressor, spec: TensorSpec) -> Sequence[Slot]:
    """Return all that is remembered of such a parameter."""
    feedback = compressor.feedback
    return (*(() if feedback is None else feedback.slots(spec)), *compressor.slots(spec))


def known_slots(compressor: Compressor, spec: TensorSpec) -> set[str]:
    """Return the names of all that a compressor remembers of such a parameter in any step."""
    try:
        stages: Sequence[Compressor] = compressor.stages
    except UnsupportedError:
        stages = [compressor.at(0)]  # one function of the step: what is remembered does not depend on it
    return {slot.name for stage in stages for slot in slots_of(stage, spec)}


def encode_step(
    compressor: Compressor, gradient: Array, spec: TensorSpec, ops: Ops, step: Step, in_place: bool = False
) -> tuple[Payload, dict[str, Array]]:
    """Compress a gradient.

    Args:
        compressor: what to do.
        gradient: of any shape; it is not changed.
        spec: its shape and dtype.
        ops: its framework's operations.
        step: with what is remembered in ``memory``, in the accumulation dtype; what does not
            exist yet may be missing.
        in_place: what is remembered may be changed, instead of a copy.

    Returns:
        The payload, and the new values of all slots.  If the gradient holds NaN or infinity
        they are the old ones: one infinity that entered a residual would stay there for ever.
    """
    fused = _encode_fused(compressor, gradient, spec, ops, step, in_place)
    if fused is not None:
        return fused
    x, changed = compensated(compressor, gradient, spec, ops, step)
    step, started = opened(compressor, gradient, spec, ops, step)
    payload = compressor.encode(x, spec, ops, step)
    new = kept(compressor, x, changed, payload, spec, ops, step)
    return dataclasses.replace(payload, memory={}), {**started, **new}


def _encode_fused(
    compressor: Compressor, gradient: Array, spec: TensorSpec, ops: Ops, step: Step, in_place: bool
) -> tuple[Payload, dict[str, Array]] | None:
    """Do the same in compiled loops; None if that cannot be done, and nothing has been changed then."""
    feedback = compressor.feedback
    plan = kernels.Plan(kernels.Mode.NOTHING) if feedback is None else feedback.plan(step.memory)
    if plan is None or not (compressor.fuses and spec.numel and kernels.available()):
        return None
    g = ops.astype(ops.flatten(gradient), spec.accumulator)
    slots = () if feedback is None else feedback.slots(spec)
    kept = {}
    for slot in slots:
        old = step.memory.get(slot.name)
        if old is None:
            old = ops.zeros(spec.numel, spec.accumulator, g)
        elif not in_place:
            old = ops.copy(old)
        kept[slot.name] = old
    arrays = [ops.shared(x) for x in (g, kept.get(RESIDUAL, g), kept.get("momentum", ops.first(g, 0)))]
    work = None if any(x is None for x in arrays) else kernels.start(arrays, plan, step.hints)
    if work is None:
        return None
    payload = compressor.encode_fused(work, spec, ops, dataclasses.replace(step, memory={RESIDUAL: g, **kept}))
    new = {} if feedback is None else feedback.after_loops(kept, payload, compressor, spec, ops)
    for slot in slots:
        if slot.dtype != spec.accumulator:
            keys = step.keys(compressor.seed, slot.name) if slot.dtype == PACKED else None
            new[slot.name] = kept_as(new[slot.name], slot.dtype, keys, ops)
    return payload, new


def prepare_step(compressor: Compressor, gradient: Array, spec: TensorSpec, ops: Ops, step: Step) -> Array | None:
    """Return what the ranks add up first, if anything; :func:`encode_step` gets the sum as ``step.agreed``."""
    if not compressor.two_rounds:
        return None
    x, _ = compensated(compressor, gradient, spec, ops, step)
    step, _ = opened(compressor, gradient, spec, ops, step)
    return compressor.prepare([x], spec, ops, [step])[0]


def opened(
    compressor: Compressor, like: Array, spec: TensorSpec, ops: Ops, step: Step
) -> tuple[Step, dict[str, Array]]:
    """Return the step with all slots of the compressor in its memory, and those of them that are new."""
    # Another compressor, of an earlier step, may have had a slot of the same name and another size.
    started = {
        slot.name: ops.zeros(slot.count, slot.dtype, like)
        for slot in compressor.slots(spec)
        if slot.name not in step.memory or ops.shape(step.memory[slot.name]) != (slot.count,)
    }
    return dataclasses.replace(step, memory={**step.memory, **started}), started


def compensated(
    compressor: Compressor, gradient: Array, spec: TensorSpec, ops: Ops, step: Step
) -> tuple[Array, Mapping[str, Array]]:
    """Return what is to be compressed, and slots of feedback that have changed."""
    if compressor.feedback is None:
        return ops.astype(ops.flatten(gradient), spec.accumulator), {}
    return compressor.feedback.compensate(gradient, spec, ops, step)


def kept(
    compressor: Compressor,
    x: Array,
    changed: Mapping[str, Array],
    payload: Payload,
    spec: TensorSpec,
    ops: Ops,
    step: Step,
) -> dict[str, Array]:
    """Return the new values of all slots after ``x`` was sent as ``payload``; ``x`` may be overwritten."""
    memory, new = step.memory, dict(payload.memory)
    if compressor.feedback is not None:
        new.update(compressor.feedback.keep({**memory, **changed}, x, payload, compressor, spec, ops))
    for name, value in new.items():
        old = memory.get(name)
        if old is None:
            old = ops.zeros(ops.shape(value)[0], ops.dtype(value), value)
        new[name] = ops.where(payload.finite, value, ops.astype(old, ops.dtype(value)))
    for slot in slots_of(compressor, spec):
        if slot.name in new:
            keys = step.keys(compressor.seed, slot.name) if slot.dtype == PACKED else None
            new[slot.name] = kept_as(new[slot.name], slot.dtype, keys, ops)
    return new


def give_back(
    compressor: Compressor, memory: Mapping[str, Array], payload: Payload, spec: TensorSpec, ops: Ops
) -> dict[str, Array]:
    """Return the slots that change when a finite payload is not applied after all."""
    if compressor.feedback is None:
        return {}
    return compressor.feedback.give_back(memory, payload, compressor, spec, ops)


def learn(
    compressor: Compressor, reduced: Array, memory: Mapping[str, Array], spec: TensorSpec, ops: Ops
) -> dict[str, Array]:
    """Return the slots that change with what Horovod has reduced; none do if it is not finite."""
    new = compressor.learn(reduced, memory, spec, ops)
    if new:
        finite = ops.all_finite(reduced)
        new = {name: ops.where(finite, value, memory.get(name, value)) for name, value in new.items()}
    return new
