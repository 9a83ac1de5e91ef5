"""Horovod's callbacks for Keras 3, and one that logs what compression does."""

from __future__ import annotations

import math
import zlib
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError, HandshakeError
from hvd_compress.keras.schedules import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvd_compress.keras.variables import broadcast_variables, check_same_everywhere, native, natives
from hvd_compress.keras.wrapping import Distributed, DistributedLossScale, DistributedMulti, is_distributed

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CompressionStats",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Give all ranks the weights and the optimizer state of one, before the first step.

    The optimizer is built for it if need be.  A model that has no weights before it sees data,
    because its input shape was not given, gets them after the first batch instead, as in stock
    Horovod.  Metrics and the state of random generators stay each rank's own.

    It also switches XLA off, which cannot compile Horovod's operations.

    Args:
        root_rank: the rank to copy from.
        device: where to broadcast, by TensorFlow's name; empty for its choice.
        local_variables: a variable or several, of Keras or TensorFlow, that stay as they are.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local = {v._unique_id for v in natives(local_variables)} if local_variables is not None else set()

    def register_local_var(self, var: Any) -> None:
        """Never broadcast a variable, of Keras or TensorFlow."""
        self._local.update(v._unique_id for v in natives(var))

    def set_model(self, model: Any) -> None:
        """Prepare a model before Keras traces its training step."""
        super().set_model(model)
        if model.jit_compile:
            model.jit_compile = False
        optimizer = getattr(model, "optimizer", None)
        if is_distributed(optimizer) and not _used(optimizer):
            model.train_function = None  # one traced before the optimizer was distributed would not reduce

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if the model has weights already."""
        self.broadcast_done = False
        if self.model.built and self.model.weights:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first batch what could not be before."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizers = _optimizers(self.model)
        main = getattr(self.model, "optimizer", None)
        if main is not None and not main.built and self.model.trainable_variables:
            main.build(self.model.trainable_variables)
        weights = {v._unique_id: v for v in map(native, self.model.weights) if v._unique_id not in self._local}
        states = {v._unique_id: v for optimizer in optimizers for v in map(native, optimizer.variables)}
        variables = list({**weights, **states}.values())
        check_same_everywhere(variables, type(self).__name__)
        with tf.device(self.device):
            broadcast_variables(variables, self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Average all metrics in ``logs`` over the ranks, at the end of each epoch.

    Put it before callbacks that act on metrics, such as ``ReduceLROnPlateau``, or write them,
    such as ``TensorBoard``.  What is no number stays as it is.

    Args:
        device: where to average, by TensorFlow's name; empty for its choice.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the numbers in ``logs`` by their averages.

        Raises:
            HandshakeError: on every rank, if the ranks have metrics of different names.
        """
        logs = {} if logs is None else logs
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0 and not isinstance(value, str))
        row = [float(zlib.crc32("\n".join(names).encode())), *(float(logs[name]) for name in names)]
        # Padded, so that ranks with other numbers of metrics are told so, instead of mixed up.
        length = np.max(self._gather([float(len(row))]))
        rows = self._gather(row + [0.0] * (int(length) - len(row)))
        if (rows[:, 0] != rows[0, 0]).any():
            raise HandshakeError(
                f"expected metrics of the same names on all ranks, got {', '.join(names)} on rank {hvd.rank()} and "
                "others elsewhere; do all ranks evaluate?"
            )
        for name, value in zip(names, rows[:, 1:].mean(axis=0), strict=True):
            logs[name] = float(value)

    def _gather(self, row: list[float]) -> Any:
        with tf.device(self.device):
            return hvd.allgather(tf.constant([row], tf.float64)).numpy()


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Save the model whenever it is the best so far; use it on one rank.

    Args:
        monitor: name of the metric.
        verbose: 1 to show when the model is saved.
        save_weights_only: save weights instead of the model.
        mode: ``"min"``, ``"max"`` or ``"auto"``.
        save_freq: ``"epoch"``, or a number of batches.
        filepath: where to save; as in Horovod, it may also be set later, as ``.filepath``.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        super().__init__(
            # Keras checks how the name ends.
            filepath=filepath or f"unset{'.weights.h5' if save_weights_only else '.keras'}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that there is a path.

        Raises:
            ConfigError: ``filepath`` has not been set.
        """
        if self.filepath is None:
            raise ConfigError("BestModelCheckpoint expected its filepath to be set before training, got None")
        super().on_train_begin(logs)


class CompressionStats(keras.callbacks.Callback):  # type: ignore[misc]
    """Put what compression does into ``logs``, so that ``History`` and ``TensorBoard`` show it.

    At the end of each epoch: ``compression_ratio`` (bytes that dense gradients would have taken
    over bytes sent) and ``bytes_sent`` of this epoch, and ``residual_norm``, the Euclidean norm
    of all that is still to be sent.  All are of this rank; a ``MetricAverageCallback`` behind it
    averages them.

    Args:
        compression: the compressor that the optimizer was given.

    Raises:
        ConfigError: it is not a compressor of this package.
    """

    def __init__(self, compression: Compressor) -> None:
        super().__init__()
        if not isinstance(compression, Compressor):
            raise ConfigError(f"CompressionStats expected a compressor such as TopK(0.001), got {compression!r}")
        self.compression = compression
        self._before = (0, 0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember what had been sent before this epoch."""
        stats = self.compression.stats()
        self._before = stats["bytes_sent"], stats["dense_bytes"]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add to ``logs``."""
        if logs is None:
            return
        stats = self.compression.stats()
        sent, dense = stats["bytes_sent"] - self._before[0], stats["dense_bytes"] - self._before[1]
        logs["compression_ratio"] = dense / sent if sent else 1.0
        logs["bytes_sent"] = float(sent)
        logs["residual_norm"] = residual_norm(self.compression)


def residual_norm(compression: Compressor) -> float:
    """Return the Euclidean norm of all of this rank's residuals together."""
    residuals = [entry["residual"] for entry in compression.state_dict()["parameters"].values()]
    squares = [np.square(np.asarray(r, np.float64)).sum() for r in residuals if r is not None]
    return math.sqrt(float(sum(squares)))


def _optimizers(model: Any) -> list[Any]:
    """Return the optimizers of a model, those of a custom ``train_step`` too, in the same order on all ranks."""
    named = {name: value for name, value in vars(model).items() if isinstance(value, keras.optimizers.Optimizer)}
    return [named[name] for name in sorted(named)]


def _used(optimizer: Any) -> bool:
    """Return whether a training step with this optimizer has been traced since it was distributed."""
    if isinstance(optimizer, DistributedLossScale):
        return _used(optimizer.inner_optimizer)  # type: ignore[attr-defined]
    if isinstance(optimizer, DistributedMulti):
        return all(_used(inner) for inner in optimizer.optimizers)  # type: ignore[attr-defined]
    return isinstance(optimizer, Distributed) and optimizer._hvd_update.used
