"""Residuals that are TensorFlow variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.ops.base import LARGEST
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.tensorflow import TensorFlowOps
from hvd_compress.packing import PACKED, Packed
from hvd_compress.state import ParameterState
from hvd_compress.step import RESIDUAL, Slot
from hvd_compress.transport.horovod import in_fresh_thread

_OPS = TensorFlowOps()
# Of the noise with which the host packs what is loaded.
_KEYS = (0, 0)
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


class PackedVariable:
    """An array in 8 bits, as two variables."""

    def __init__(self, start: np.ndarray, name: str, device: str) -> None:
        packed = Packed.of(start, _KEYS, NumpyOps())
        self._codes = make_variable(packed.codes, name, device)
        self._scales = make_variable(packed.scales, f"{name}_scales", device)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        return tuple(self._codes.shape)

    def read_value(self) -> tf.Tensor:
        """Return the numbers."""
        return Packed(self._codes.read_value(), self._scales.read_value(), _KEYS, _OPS).unpack()

    def numpy(self) -> np.ndarray:
        """Return the numbers on the host."""
        numbers: np.ndarray = Packed(self._codes.numpy(), self._scales.numpy(), _KEYS, NumpyOps()).unpack()
        return numbers

    def assign(self, value: Packed, read_value: bool = True) -> Any:
        """Replace them; returns an operation."""
        scales = tf.cast(value.scales, self._scales.dtype)
        pairs = ((self._codes, value.codes), (self._scales, scales))
        return tf.group(*(variable.assign(x, read_value=read_value) for variable, x in pairs))


def _on_host(variable: tf.Variable | PackedVariable) -> np.ndarray:
    x: np.ndarray = variable.numpy()
    # NumPy has no bfloat16 of its own.
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def _dtype_of(variable: tf.Variable | PackedVariable) -> str:
    return PACKED if isinstance(variable, PackedVariable) else str(variable.dtype.name)


class VariableState(ParameterState):
    """What is remembered of a parameter, in a ``tf.Variable`` each, made when a graph first needs them.

    As a :class:`ParameterState` it gives and takes their values on the host.
    """

    def __init__(self, name: str) -> None:
        self._variables: dict[str, tf.Variable | PackedVariable] = {}
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
        kept = {name: _on_host(variable) for name, variable in self._variables.items()}
        return {**self._loaded, **kept}

    def _set(self, name: str, value: Any) -> None:
        value = None if value is None else np.asarray(value)
        variable = self._variables.get(name)
        if isinstance(variable, PackedVariable):
            variable.assign(Packed.of(np.zeros(variable.shape) if value is None else value, _KEYS, NumpyOps()))
        elif variable is not None:
            limit = LARGEST[variable.dtype.name]
            given = np.zeros(variable.shape) if value is None else value.clip(-limit, limit)
            variable.assign(tf.cast(given, variable.dtype))
        elif value is None:
            self._loaded.pop(name, None)
        else:
            self._loaded[name] = value

    def variable(self, name: str) -> tf.Variable | PackedVariable:
        """Return a variable for which :meth:`materialise` was called."""
        return self._variables[name]

    def materialise(self, slots: Sequence[Slot], device: str) -> None:
        """Make the variables of these slots on ``device``, those that are not there yet.

        Raises:
            StateError: what was loaded has another size.
            UnsupportedError: they are there with another size or dtype.
        """
        for slot in slots:
            have = self._variables.get(slot.name)
            if have is not None:
                if (tuple(have.shape), _dtype_of(have)) != ((slot.count,), slot.dtype):
                    raise UnsupportedError(
                        f"expected all compressors of a Switch to remember as much under TensorFlow, where a graph is "
                        f"made once for all steps, got {slot.count} {slot.dtype} numbers as the {slot.name} of "
                        f"{self.name!r} after {have.shape[0]} {_dtype_of(have)} numbers"
                    )
                continue
            start = self._loaded.get(slot.name)
            if start is None:
                start = np.zeros(slot.count, np.float32)
            if start.shape != (slot.count,):
                raise StateError(
                    f"expected {slot.count} elements in the {slot.name} of {self.name!r}, got {start.shape[0]}: "
                    "the loaded state is of another model"
                )
            if slot.dtype == PACKED:
                self._variables[slot.name] = PackedVariable(start, slot.name, device)
            else:
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
