"""Keras's variables as TensorFlow's, and their broadcast."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.errors import ConfigError, HandshakeError


def native(variable: Any) -> Any:
    """Return the ``tf.Variable`` of a Keras variable; others are returned as they are.

    ``keras.Variable.value`` would be cast in an autocast scope, which is a tensor then.
    """
    value = getattr(variable, "_value", None)
    return value if isinstance(value, tf.Variable) else variable


def path_of(variable: Any) -> str:
    """Return the name of a variable with those of its layers, such as ``dense/kernel``."""
    return str(getattr(variable, "path", None) or variable.name)


def natives(variables: Any) -> list[Any]:
    """Return one variable, or several, as a list of ``tf.Variable``.

    Raises:
        ConfigError: something in it is no variable.
    """
    several = variables if isinstance(variables, (list, tuple, set)) else [variables]
    found = [native(variable) for variable in several]
    for variable in found:
        if not isinstance(variable, tf.Variable):
            raise ConfigError(f"expected variables of Keras or TensorFlow, got {type(variable).__name__}")
    return found


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = hvd.global_process_set, inplace: bool = False
) -> Any:
    """Copy variables from one rank to all others, as Horovod's function of this name does.

    Args:
        variables: of Keras or TensorFlow; the same ones, in the same order, on every rank.
        root_rank: the rank to copy from.
        process_set: the ranks to copy to.
        inplace: let Horovod write into the variables' memory.
    """
    found = natives(list(variables))
    if inplace or not tf.executing_eagerly():
        return hvd.broadcast_variables(found, root_rank, process_set=process_set, inplace=inplace)
    # One by one: Horovod would trace a function for these variables, which takes longer and is never freed.
    for variable in found:
        # Horovod's operations have no bfloat16; float32 holds each of its values exactly.
        sent = tf.cast(variable, tf.float32 if variable.dtype == tf.bfloat16 else variable.dtype)
        received = hvd.broadcast(sent, root_rank, process_set=process_set)
        variable.assign(tf.cast(received, variable.dtype))
    return None


def check_same_everywhere(variables: Iterable[Any], what: str) -> None:
    """Compare number, shapes and dtypes of variables between the ranks.

    A broadcast of different variables would wait for ever, or mix them up.

    Raises:
        HandshakeError: on every rank, if they differ.
    """
    described = [f"{tuple(v.shape)} {v.dtype.name}" for v in natives(list(variables))]
    row = np.array([[len(described), zlib.crc32("\n".join(described).encode())]], np.int64)
    rows = hvd.allgather(tf.constant(row)).numpy()
    if (rows != rows[0]).any():
        rank = int(np.argmax((rows != rows[0]).any(axis=1)))
        raise HandshakeError(
            f"{what}: expected variables of the same shapes and dtypes on all ranks, got {rows[0, 0]} on rank 0 and "
            f"{rows[rank, 0]} that differ on rank {rank}; build and load models and optimizers alike on all ranks"
        )
