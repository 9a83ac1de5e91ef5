"""Residuals that are TensorFlow variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.errors import StateError
from hvd_compress.state import ParameterState
from hvd_compress.step import RESIDUAL, Slot
from hvd_compress.transport.horovod import in_fresh_thread

# Seen in TensorFlow's error when a module is exported together with its training step, to which they belong.
_HINT = "export_without_the_training_function"


class Anchor:
    """Something that can be referred to weakly."""


class StepCounter:
    """Counts, in the graph, how often something has run."""

    def __init__(self) -> None:
        self.variable = make_variable(np.zeros((), np.int64), "steps", "CPU:0")

    def __call__(self) -> int:
        """Return the count."""
        return int(self.variable.numpy())


class VariableState(ParameterState):
    """What is remembered of a parameter, in a ``tf.Variable`` each, made when a graph first needs them.

    As a :class:`ParameterState` it gives and takes their values on the host.
    """

    def __init__(self, name: str) -> None:
        self._variables: dict[str, tf.Variable] = {}
        self._loaded: dict[str, np.ndarray] = {}
        super().__init__(name)

    @property
    def residual(self) -> np.ndarray | None:  # type: ignore[override]
        """The residual; None before the first step."""
        return self._values().get(RESIDUAL)

    @residual.setter
    def residual(self, value: Any) -> None:
        self._set(RESIDUAL, value)

    @property
    def slots(self) -> dict[str, np.ndarray]:  # type: ignore[override]
        """What else is remembered."""
        return {name: value for name, value in self._values().items() if name != RESIDUAL}

    @slots.setter
    def slots(self, values: dict[str, Any]) -> None:
        for name in {*self._variables, *self._loaded, *values} - {RESIDUAL}:
            self._set(name, values.get(name))

    def store(self, new: dict[str, Any]) -> None:
        """Replace what has changed."""
        for name, value in new.items():
            self._set(name, value)

    def _values(self) -> dict[str, np.ndarray]:
        kept = {name: variable.numpy() for name, variable in self._variables.items()}
        # NumPy has no bfloat16 of its own.
        kept = {name: x.astype(np.float32) if x.dtype.itemsize == 2 else x for name, x in kept.items()}
        return {**self._loaded, **kept}

    def _set(self, name: str, value: Any) -> None:
        value = None if value is None else np.asarray(value)
        variable = self._variables.get(name)
        if variable is not None:
            variable.assign(tf.cast(np.zeros(variable.shape) if value is None else value, variable.dtype))
        elif value is None:
            self._loaded.pop(name, None)
        else:
            self._loaded[name] = value

    def variable(self, name: str) -> tf.Variable:
        """Return a variable for which :meth:`materialise` was called."""
        return self._variables[name]

    def materialise(self, slots: Sequence[Slot], device: str) -> None:
        """Make the variables of these slots on ``device``, those that are not there yet.

        Raises:
            StateError: what was loaded has another size.
        """
        for slot in slots:
            if slot.name in self._variables:
                continue
            start = self._loaded.get(slot.name)
            if start is None:
                start = np.zeros(slot.count, np.float32)
            if start.shape != (slot.count,):
                raise StateError(
                    f"expected {slot.count} elements in the {slot.name} of {self.name!r}, got {start.shape[0]}: "
                    "the loaded state is of another model"
                )
            self._variables[slot.name] = make_variable(start, slot.name, device, slot.dtype)
            self._loaded.pop(slot.name, None)
            if slot.common:
                self.common.add(slot.name)


def make_variable(value: np.ndarray, name: str, device: str, dtype: str | None = None) -> tf.Variable:
    """Return a new variable, wherever this is called from.

    ``tf.function`` allows new variables in its first trace only, and ``tf.init_scope`` does
    not change that; a thread of its own does.
    """

    def make() -> tf.Variable:
        with tf.device(device):
            start = value if dtype is None else tf.cast(value, dtype)
            return tf.Variable(start, trainable=False, name=f"hvd_compress_{name}_{_HINT}")

    return in_fresh_thread(make).result()


def after(operation: Any) -> Any:
    """Return a context whose operations run after this one; in eager mode they do anyway."""
    return tf.control_dependencies([] if tf.executing_eagerly() else [operation])
