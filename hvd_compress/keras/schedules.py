"""Horovod's callbacks that set the learning rate, for Keras 3."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvd_compress.errors import ConfigError, UnsupportedError


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Set the learning rate to ``initial_lr * multiplier`` between two epochs, and log it as ``lr``.

    Args:
        initial_lr: learning rate at the start of training.
        multiplier: function of the epoch; or a number ``m``, for ``m ** (epoch - start_epoch)``.
        start_epoch: the first epoch to act in.
        end_epoch: the first one to act in no longer; None for never.
        staircase: act at the first batch of an epoch, with a whole number; otherwise at every
            batch, with ``epoch + batch / steps_per_epoch``.
        momentum_correction: where SGD and RMSprop keep momentum, which has the learning rate in
            it, scale it as the learning rate changes (Goyal et al. 2017,
            https://arxiv.org/abs/1706.02677, section 2.2).
        steps_per_epoch: batches in an epoch, where Keras cannot know.

    Raises:
        ConfigError: ``initial_lr`` is None.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ConfigError("initial_lr must be a number, got None")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out what to act on.

        Raises:
            ConfigError: the number of steps in an epoch is not known.
            UnsupportedError: the optimizer has no one learning rate that can be set.
        """
        optimizer = self.model.optimizer
        if hasattr(optimizer, "_optimizer_map"):
            raise UnsupportedError(f"{type(self).__name__} expected an optimizer with one learning rate, got several")
        schedule = getattr(_innermost(optimizer), "_learning_rate", None)
        if not isinstance(schedule, keras.Variable):
            raise UnsupportedError(
                f"{type(self).__name__} expected an optimizer made with a number as its learning rate, got "
                f"{type(schedule).__name__}, which sets it itself"
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(f"{type(self).__name__} expected steps_per_epoch, as Keras does not know it here")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate, where it is this callback's turn."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(self.initial_lr * self.multiplier(epoch + batch / float(self.steps_per_epoch or 1)))
        elif batch == 0:
            self._set(self.initial_lr * self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def _learning_rate(self) -> float:
        return float(self.model.optimizer.learning_rate.numpy())

    def _set(self, new: float) -> None:
        old = self._learning_rate()
        self.model.optimizer.learning_rate = new
        new = self._learning_rate()  # as it was rounded
        if self.momentum_correction and old not in (0.0, new):
            # Momentum is a constant of the traced step, so what it multiplies is scaled instead.
            for variable in _momentums(_innermost(self.model.optimizer)):
                variable.assign(variable * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / hvd.size()`` to ``initial_lr``, batch by batch.

    At ``epoch``, with a fraction, it is ``initial_lr / size * ((size - 1) * epoch / warmup_epochs + 1)``
    (Goyal et al. 2017, https://arxiv.org/abs/1706.02677).

    Args:
        initial_lr: the learning rate to reach.
        warmup_epochs: how many epochs it takes.
        momentum_correction: see :class:`LearningRateScheduleCallback`.
        steps_per_epoch: batches in an epoch, where Keras cannot know.
        verbose: 1 to say on rank 0 when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One batch ahead, so that an epoch ends at a round number.
            epoch += 1.0 / float(self.steps_per_epoch or 1)
            return 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / warmup_epochs + 1)  # type: ignore[no-any-return]

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate, and say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0 and hvd.rank() == 0:
            sys.stdout.write(f"\nEpoch {epoch + 1}: warm-up is over, the learning rate is {self._learning_rate():g}.\n")


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer inside a ``LossScaleOptimizer``."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _momentums(optimizer: Any) -> list[Any]:
    """Return the variables in which SGD and RMSprop keep sums of learning rates times gradients."""
    if isinstance(optimizer, keras.optimizers.SGD):
        found = getattr(optimizer, "momentums", None)
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        found = getattr(optimizer, "_momentums", None)
    else:
        found = None
    return [variable for variable in found or () if variable is not None]
