"""Horovod's operations on single values, and ``load_model``, under Horovod's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvd_compress.errors import UnsupportedError
from hvd_compress.keras.optimizer import DistributedOptimizer


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = None,
) -> Any:
    """Return the average, or another reduction, of a value over all ranks.

    Args:
        value: anything that is convertible to a tensor, of the same shape on all ranks.
        name: of the operation; compressors of this package need one, to keep residuals by.
        average: Horovod's deprecated way to say ``op``.
        prescale_factor: multiplied with before the reduction.
        postscale_factor: multiplied with after it.
        op: ``Average`` (the default), ``Sum`` or another of Horovod's.
        compression: a compressor of this package or of Horovod, or None.
    """
    return hvd.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=hvd.Compression.none if compression is None else compression,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the values of all ranks, one after the other along the first axis.

    Args:
        value: anything that is convertible to a tensor; only the first axis may differ.
        name: of the operation.
    """
    return hvd.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of one rank.

    Args:
        value: anything that is convertible to a tensor, of the same shape on all ranks.
        root_rank: the rank to copy from.
        name: of the operation.
    """
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: Any = hvd.Average) -> Any:
    """Reduce a value over all ranks, and return this rank's part of the first axis.

    Args:
        value: anything that is convertible to a tensor, of the same shape on all ranks.
        name: of the operation.
        op: ``Average`` or ``Sum``.
    """
    return hvd.reducescatter(tf.convert_to_tensor(value), name=name, op=op)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Refuse: there are no global variables in TensorFlow 2.

    Raises:
        UnsupportedError: always; it says what to write.
    """
    raise UnsupportedError(
        "TensorFlow 2 has no global variables; expected hvd.callbacks.BroadcastGlobalVariablesCallback"
        f"({root_rank}), or hvd.broadcast_variables(model.weights, root_rank={root_rank})"
    )


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Load a model, and distribute its optimizer, with all of its state.

    For other arguments of :func:`DistributedOptimizer` load with ``keras.models.load_model`` and
    write ``hvd.DistributedOptimizer(model.optimizer, ...)``, which changes it in place.

    Args:
        filepath: of a saved model.
        custom_optimizers: optimizer classes of the user.
        custom_objects: names with what they stand for, as in Keras.
        compression: see :func:`DistributedOptimizer`.
        legacy_opts: for Keras 2; must be False.

    Raises:
        UnsupportedError: ``legacy_opts=True``.
    """
    if legacy_opts:
        raise UnsupportedError("Keras 3 has no legacy optimizers: expected legacy_opts=False, got True")
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
