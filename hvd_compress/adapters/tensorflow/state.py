"""Residuals that are TensorFlow variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.base import TensorSpec
from hvd_compress.errors import StateError
from hvd_compress.state import ParameterState
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
    """A residual in a ``tf.Variable``, made when a graph first needs it; ``residual`` is its value on the host."""

    def __init__(self, name: str) -> None:
        self._variable: tf.Variable | None = None
        self._loaded: np.ndarray | None = None
        super().__init__(name)

    @property
    def residual(self) -> np.ndarray | None:  # type: ignore[override]
        """The value, float32 or float64; None before the first step."""
        return self._loaded if self._variable is None else self._variable.numpy()

    @residual.setter
    def residual(self, value: Any) -> None:
        loaded = None if value is None else np.asarray(value)
        if self._variable is None:
            self._loaded = loaded
        else:
            self._variable.assign(np.zeros(self._variable.shape) if loaded is None else loaded)

    @property
    def variable(self) -> tf.Variable:
        """The variable; :meth:`materialise` has been called."""
        return self._variable

    def materialise(self, spec: TensorSpec, device: str) -> tf.Variable:
        """Return the variable, made on ``device`` at the first call.

        Raises:
            StateError: what was loaded has another size.
        """
        if self._variable is None:
            start = np.zeros(spec.numel, spec.accumulator) if self._loaded is None else self._loaded
            if start.shape != (spec.numel,):
                raise StateError(
                    f"expected {spec.numel} elements in the residual of {self.name!r}, got {start.shape[0]}: "
                    "the loaded state is of another model"
                )
            self._variable = make_variable(start.astype(spec.accumulator), "residual", device)
            self._loaded = None
        return self._variable


def make_variable(value: np.ndarray, name: str, device: str) -> tf.Variable:
    """Return a new variable, wherever this is called from.

    ``tf.function`` allows new variables in its first trace only, and ``tf.init_scope`` does
    not change that; a thread of its own does.
    """

    def make() -> tf.Variable:
        with tf.device(device):
            return tf.Variable(value, trainable=False, name=f"hvd_compress_{name}_{_HINT}")

    return in_fresh_thread(make).result()


def after(operation: Any) -> Any:
    """Return a context whose operations run after this one; in eager mode they do anyway."""
    return tf.control_dependencies([] if tf.executing_eagerly() else [operation])
