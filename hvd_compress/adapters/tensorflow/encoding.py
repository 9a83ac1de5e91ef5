"""Compressing one tensor in a graph: feedback, state, and compressors that change from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.adapters.tensorflow.state import PackedVariable, VariableState, after
from hvd_compress.base import Compressor
from hvd_compress.codec import encode_step, give_back, learn, prepare_step, slots_of
from hvd_compress.errors import UnsupportedError
from hvd_compress.ops.base import Array, Ops
from hvd_compress.ops.tensorflow import TensorFlowOps
from hvd_compress.packing import PACKED, Packed
from hvd_compress.step import Payload, Step, TensorSpec, derive_keys

OPS = TensorFlowOps()
# Keys of the noise with which residuals are packed that are given back.
_RESTORED = (0, 1)


@dataclass(frozen=True)
class GraphStep(Step):
    """A step whose number the host knows when it runs.

    Attributes:
        state: counts the steps; None for a tensor that nothing is remembered of.
        gradient: read by the host's functions, so that they run in this step and not before.
    """

    state: VariableState | None = None
    gradient: Any = None

    def keys(self, seed: int, purpose: str, shared: bool = False) -> Any:
        """Return the keys as a tensor."""
        rank = None if shared else self.rank

        def derived(number: int) -> np.ndarray:
            return np.array(derive_keys(seed, purpose, self.key, number, rank), np.int64)

        return self.on_host(derived, "int64", (2,), OPS, self.gradient)

    def on_host(
        self, function: Callable[[int], np.ndarray], dtype: str, shape: tuple[int, ...], ops: Ops, like: Array
    ) -> Array:
        """Return what the host computes for the number of the step."""
        return host_value(self.state, self.gradient, function, dtype, shape)


def host_value(
    state: VariableState | None, gradient: tf.Tensor, function: Callable[[int], Any], dtype: str, shape: tuple[int, ...]
) -> tf.Tensor:
    """Return ``function(number of steps)``, computed by the host once the gradient is there."""

    def run(_: np.ndarray) -> np.ndarray:
        return np.asarray(function(0 if state is None else state.steps), dtype)

    return tf.ensure_shape(tf.numpy_function(run, [tf.reshape(gradient, [-1])[:1]], dtype), shape)


class Encoder:
    """One tensor's compressor, with its stages, and what it remembers; ``first`` is the step it begins with.

    Raises:
        UnsupportedError: the stages are of different kinds.
    """

    def __init__(
        self,
        chosen: Compressor,
        spec: TensorSpec,
        state: VariableState | None,
        key: str,
        place: tuple[int, int],
        first: int = 0,
    ) -> None:
        self.spec = spec
        self.state = state
        self._chosen = chosen
        self._key = key
        self._place = place
        self._first = first
        self._started = False
        self.stages = list(chosen.stages)
        if len({type(stage) for stage in self.stages}) > 1:
            raise UnsupportedError(
                f"{chosen} expected stages of one kind under TensorFlow, where a graph is made once for all steps"
            )
        if self.stages[0].selects_over_model:
            raise UnsupportedError(
                f"{chosen} expected PyTorch: TensorFlow's graph reduces every tensor by itself; use scope='tensor'"
            )
        self._slots = () if state is None else slots_of(self.stages[0], spec)
        self._index: tf.Tensor | None = None

    @property
    def first(self) -> Compressor:
        """The compressor of the first stage."""
        return self.stages[0]

    @property
    def remembered(self) -> int:
        """How many tensors :meth:`remember` takes."""
        return sum(2 if slot.dtype == PACKED else 1 for slot in self._slots)

    def start(self, gradient: tf.Tensor, device: str) -> None:
        """Make the variables, and find out the stage of this step, once."""
        if self._started:
            return
        self._started = True
        if self.state is not None:
            self.state.materialise(self._slots, device)
        if len(self.stages) > 1:
            stage_of, first = self._chosen.stage, self._first
            self._index = host_value(self.state, gradient, lambda n: stage_of(max(n - first, 0)), "int32", ())

    def staged(self, function: Callable[[int, Compressor], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Return what ``function(number, compressor)`` returns for the stage of this step."""
        if self._index is None:
            return function(0, self.first)
        branches = [lambda i=i, stage=stage: function(i, stage) for i, stage in enumerate(self.stages)]
        return list(tf.switch_case(self._index, branches))

    def memory(self) -> dict[str, tf.Tensor]:
        """Return what is remembered, in the accumulation dtype."""
        return {} if self.state is None else {s.name: self._read(s.name) for s in self._slots}

    def _read(self, name: str) -> tf.Tensor:
        state: Any = self.state
        return tf.cast(state.variable(name).read_value(), self.spec.accumulator)

    def _step(
        self, algorithm: Compressor, gradient: tf.Tensor, memory: Mapping[str, tf.Tensor], agreed: tf.Tensor | None
    ) -> GraphStep:
        if self.state is None:
            memory = {s.name: tf.zeros([s.count], s.dtype) for s in algorithm.slots(self.spec)}
        return GraphStep(self._key, None, *self._place, memory, agreed, state=self.state, gradient=gradient)

    def prepare(self, algorithm: Compressor, gradient: tf.Tensor, memory: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Return what the ranks add up before they encode."""
        return prepare_step(algorithm, gradient, self.spec, OPS, self._step(algorithm, gradient, memory, None))

    def encode(
        self,
        algorithm: Compressor,
        gradient: tf.Tensor,
        memory: Mapping[str, tf.Tensor],
        agreed: tf.Tensor | None = None,
    ) -> tuple[Payload, list[tf.Tensor]]:
        """Return the payload, and the new values of the slots in their order."""
        step = self._step(algorithm, gradient, memory, agreed)
        payload, new = encode_step(algorithm, gradient, self.spec, OPS, step)
        values: list[tf.Tensor] = []
        for slot in self._slots:
            if slot.dtype == PACKED:
                values += [new[slot.name].codes, new[slot.name].scales]
            else:
                values.append(new.get(slot.name, tf.cast(memory[slot.name], slot.dtype)))
        return payload, values

    def remember(self, values: Sequence[tf.Tensor]) -> Any:
        """Assign what :meth:`encode` has returned; returns an operation."""
        if self.state is None or not self._slots:
            return tf.constant(False)
        rest, assigned = iter(values), []
        for slot in self._slots:
            value = Packed(next(rest), next(rest), None, OPS) if slot.dtype == PACKED else next(rest)
            assigned.append(self.state.variable(slot.name).assign(value, read_value=False))
        return tf.group(*assigned)

    def store(self, new: Mapping[str, tf.Tensor]) -> Any:
        """Assign some slots; returns an operation."""
        if self.state is None or not new:
            return tf.constant(False)
        assigned = []
        for name, value in new.items():
            variable: Any = self.state.variable(name)
            packed = isinstance(variable, PackedVariable)
            kept = Packed.of(value, _RESTORED, OPS) if packed else tf.cast(value, variable.dtype)
            assigned.append(variable.assign(kept, read_value=False))
        return tf.group(*assigned)

    def give_back_if(self, spoiled: tf.Tensor, payload_of: Callable[[], Payload]) -> tf.Tensor:
        """Take back what was sent, if ``spoiled``; ``payload_of`` returns it."""
        if self.state is None or self.first.feedback is None:
            return tf.constant(False)

        def restore() -> tf.Tensor:
            def one(number: int, algorithm: Compressor) -> list[tf.Tensor]:
                restored = give_back(algorithm, self.memory(), payload_of(), self.spec, OPS)
                with after(self.store(restored)):
                    return [tf.constant(True)]

            return self.staged(one)[0]

        return tf.cond(spoiled, restore, lambda: tf.constant(False))

    def counting(self, sent: tf.Tensor) -> tf.Tensor:
        """Return the tensor, and count a step when it is made."""
        state = self.state

        def run(_: np.ndarray) -> np.ndarray:
            if state is not None:
                state.steps += 1
            return np.array(True)

        with after(tf.numpy_function(run, [tf.reshape(sent, [-1])[:1]], tf.bool)):
            return tf.identity(sent)

    def take_back_step_if(self, spoiled: tf.Tensor) -> tf.Tensor:
        """Count the step not at all, if ``spoiled``: what takes turns must take this one again."""
        state = self.state

        def run(bad: np.ndarray) -> np.ndarray:
            if bad and state is not None:
                state.steps -= 1
            return bad

        return tf.numpy_function(run, [spoiled], tf.bool)

    def learn(self, algorithm: Compressor, reduced: tf.Tensor) -> Any:
        """Keep what follows from what Horovod has reduced; returns an operation."""
        return self.store(learn(algorithm, reduced, self.memory(), self.spec, OPS))

    def release(self, total: tf.Tensor, spoiled: tf.Tensor) -> tf.Tensor:
        """Return what the optimizer gets."""
        feedback = self.first.feedback
        if feedback is None or self.state is None:
            return total
        memory = self.memory()
        total, new = feedback.release(memory, total, self.spec, OPS)
        kept = {name: tf.where(spoiled, memory[name], value) for name, value in new.items()}
        with after(self.store(kept)):
            return tf.identity(total)
