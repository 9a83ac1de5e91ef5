"""Horovod's ``DistributedOptimizer`` for the optimizers of Keras 3."""

from __future__ import annotations

import warnings
from typing import Any

import horovod.tensorflow as hvd

from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError
from hvd_compress.keras.reduction import Reduction, Settings
from hvd_compress.keras.requirements import check_optimizer
from hvd_compress.keras.wrapping import distribute, is_distributed
from hvd_compress.settings import is_whole


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Let an optimizer of Keras 3 reduce its gradients over all ranks, as Horovod's function of this name did.

    The optimizer is changed in place and returned.  Call it before the first training step.

    Args:
        optimizer: any built-in optimizer or a subclass of ``keras.optimizers.Optimizer``, new,
            built or loaded; also ``LossScaleOptimizer`` and ``MultiOptimizer``.
        name: prefix of Horovod's operations; ``"Distributed"`` and the class by default.
        device_dense: where dense gradients are reduced.
        device_sparse: where ``tf.IndexedSlices`` are gathered.
        compression: a compressor of this package, such as ``TopK(0.001)``; one of Horovod's
            (``Compression.fp16``); or None.
        sparse_as_dense: reduce ``tf.IndexedSlices`` as dense tensors.  Only then they are
            compressed; otherwise Horovod gathers them.
        gradient_predivide_factor: with ``op=Average``, divide by it before the sum, and by
            the number of ranks over it after.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: add up the gradients of so many steps before they are reduced
            and applied, through Keras's ``gradient_accumulation_steps``.
        average_aggregated_gradients: average these instead, as Keras does by itself.
        num_groups: Horovod's deprecated name of ``groups``.
        groups: a number of groups to reduce together, or lists of variables.
        process_set: the ranks to reduce over.
        scale_local_gradients: divide the gradients of variables that ``register_local_var`` was
            called for by the number of ranks.

    Returns:
        ``optimizer``.

    Raises:
        ConfigError: an argument is out of range, or the optimizer is distributed already.
        UnsupportedError: the optimizer is none of Keras 3.
    """
    check_optimizer(optimizer)
    if num_groups != 0:
        warnings.warn("num_groups is called groups in today's Horovod", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check_arguments(optimizer, compression, gradient_predivide_factor, op, backward_passes_per_step, groups)
    sums = backward_passes_per_step > 1 and not average_aggregated_gradients
    settings = Settings(
        name=name or f"Distributed{type(optimizer).__name__}",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=hvd.Compression.none if compression is None else compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        passes=backward_passes_per_step if sums else 1,
        accumulate=backward_passes_per_step,
    )
    distribute(optimizer, Reduction(settings))
    return optimizer


def _check_arguments(optimizer: Any, compression: Any, predivide: float, op: Any, passes: int, groups: Any) -> None:
    inner = getattr(optimizer, "inner_optimizer", None)
    if any(is_distributed(o) for o in (optimizer, inner, *getattr(optimizer, "optimizers", ()))):
        raise ConfigError(f"expected an optimizer that is not distributed yet, got {type(optimizer).__name__} that is")
    if op not in (hvd.Average, hvd.Sum):
        raise ConfigError(f"op must be Average or Sum, as in Horovod's own optimizer for Keras, got {op!r}")
    if predivide != 1.0 and op != hvd.Average:
        raise ConfigError(f"gradient_predivide_factor is for op=Average alone, got {predivide!r} with another op")
    if predivide != 1.0 and hvd.rocm_built():
        raise ConfigError("gradient_predivide_factor is not supported by Horovod with ROCm")
    if not is_whole(passes, 1):
        raise ConfigError(f"backward_passes_per_step must be a whole number, 1 or more, got {passes!r}")
    numbered = is_whole(groups, 1)
    if not (groups is None or numbered or isinstance(groups, list)):
        raise ConfigError(f"groups must be a positive number, a list of lists of variables, or None, got {groups!r}")
    if isinstance(compression, type) and issubclass(compression, Compressor):
        raise ConfigError(f"compression must be an instance, such as {compression.__name__}(...), got the class")
    methods = all(callable(getattr(compression, name, None)) for name in ("compress", "decompress"))
    if compression is not None and not methods:
        raise ConfigError(f"compression must have the methods compress and decompress, got {compression!r}")
