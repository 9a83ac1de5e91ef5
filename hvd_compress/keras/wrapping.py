"""How an optimizer of Keras 3 is made to reduce its gradients.

The class of the user's own object is exchanged for a subclass of it, so that everything it
holds (slots, iterations, a learning-rate schedule) stays, and so does its identity.  The
subclass reduces gradients where Keras is about to clip them: once for each real update, after
unscaling and accumulation, before clipping, weight decay and the update itself.

To Keras's serialization the object shows its plain class; a saved model needs no Horovod.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_compress.base import Collective, Compressor
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.keras.reduction import Reduction, neutral_names, unconverted

_LOSS_SCALING = "keras.src.optimizers.loss_scale_optimizer"
# What has been put in front of which class.
_CLASSES: dict[tuple[type, type], type] = {}


class Update:
    """What a distributed optimizer keeps: one plain object, which Keras does not track.

    Attributes:
        variables: those of the update that is being made.
        reached: whether the present ``apply`` has come to the reduction.
        reduced: whether the gradients of the update that is being made have been reduced.
        used: whether any ``apply`` ever came to the reduction.
        iterations: how many updates the optimizer had made before it was distributed.
    """

    def __init__(self, reduction: Reduction, iterations: int = 0) -> None:
        self.reduction = reduction
        self.variables: Sequence[Any] | None = None
        self.reached = False
        self.reduced = False
        self.used = False
        self.iterations = iterations


class _Front:
    """What all of them have in common."""

    _hvd_update: Update

    def register_local_var(self, var: Any) -> None:
        """Never reduce the gradient of a variable; divide it by the number of ranks unless told not to.

        Args:
            var: of Keras or TensorFlow.
        """
        self._hvd_update.reduction.register_local_var(var)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a distributed copy with the same settings and variables of its own.

        It shares the compressor, but not its residuals.
        """
        # Keras's own way fails for an optimizer that is built.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            copied = memo[id(self)] = type(self).from_config(self.get_config())  # type: ignore[attr-defined]
        if self.built:  # type: ignore[attr-defined]
            copied.build(list(self._trainable_variables))  # type: ignore[attr-defined]
            for mine, theirs in zip(copied.variables, self.variables, strict=True):  # type: ignore[attr-defined]
                mine.assign(theirs)
        distribute(copied, self._hvd_update.reduction.copy())
        return copied

    def __copy__(self) -> Any:
        """Return the same as a deep copy, as Keras does."""
        return self.__deepcopy__({})

    def finalize_variable_values(self, var_list: Any) -> None:
        """Finish training, at the end of ``fit``.

        Raises:
            UnsupportedError: there were updates, but none was reduced.
        """
        base: Any = super()
        _refuse_unreached(self)
        base.finalize_variable_values(var_list)


class Distributed(_Front):
    """What is put in front of an optimizer's class."""

    @unconverted
    def build(self, variables: Any) -> None:
        """Build the optimizer, and let a loss scaling around it agree with other ranks."""
        base: Any = super()
        _distribute_callers(self)
        base.build(variables)

    @unconverted
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply gradients, reduced over all ranks.

        Raises:
            UnsupportedError: the gradients would be applied without having been reduced.
        """
        base: Any = super()
        update = self._hvd_update
        _refuse_float8(self, trainable_variables)
        _refuse_undistributed_callers(self)
        due = _is_due(self) and len(grads) > 0
        update.reached = False
        base.apply(grads, trainable_variables)
        if due and not update.reached:
            raise UnsupportedError(
                f"{type(self).__name__} applied gradients that were not reduced: expected its apply() to call Keras's "
                "own, which calls _clip_gradients() before each update; hvd_compress reduces there"
            )

    @unconverted
    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        base: Any = super()
        update = self._hvd_update
        update.variables, update.reduced = trainable_variables, False
        try:
            with neutral_names():
                base._backend_apply_gradients(grads, trainable_variables)
        finally:
            update.variables, update.reduced = None, False

    @unconverted
    def _clip_gradients(self, grads: Any) -> Any:
        base: Any = super()
        update = self._hvd_update
        if update.variables is None or update.reduced or len(update.variables) != len(grads):
            raise UnsupportedError(
                f"{type(self).__name__} expected one call of _clip_gradients() in each update, with one gradient for "
                "each variable; hvd_compress reduces the gradients there"
            )
        reduced = update.reduction(grads, update.variables)
        update.reached = update.reduced = update.used = True
        return base._clip_gradients(reduced)

    @unconverted
    def update_step(self, *args: Any, **kwargs: Any) -> Any:
        """Update one variable, in the course of ``apply``.

        Raises:
            UnsupportedError: called otherwise, with a gradient that was not reduced.
        """
        if not self._hvd_update.reduced:
            raise UnsupportedError(
                f"{type(self).__name__}.update_step() was called with a gradient that was not reduced; expected a call "
                "of apply() or apply_gradients()"
            )
        base: Any = super()
        return base.update_step(*args, **kwargs)


class DistributedLossScale(_Front):
    """What is put in front of ``LossScaleOptimizer``: all ranks skip the same steps."""

    @unconverted
    def check_finite(self, grads: Any) -> Any:
        """Return whether the gradients of all ranks are finite."""
        base: Any = super()
        return self._hvd_update.reduction.all_ranks(base.check_finite(grads))


class DistributedMulti(_Front):
    """What is put in front of ``MultiOptimizer``, whose own optimizers do the work."""

    @unconverted
    def build(self, variables: Any) -> None:
        """Build the optimizer, and reduce in those that a callable has just made, too."""
        base: Any = super()
        _distribute_callers(self)
        base.build(variables)
        for inner in self.optimizers:  # type: ignore[attr-defined]
            if not is_distributed(inner):
                distribute(inner, self._hvd_update.reduction)


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer came from ``DistributedOptimizer``, or is inside one that did."""
    return isinstance(optimizer, _Front)


def distribute(optimizer: Any, reduction: Reduction) -> None:
    """Exchange the class of an optimizer, and of those inside it."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if not is_distributed(optimizer.inner_optimizer):
            distribute(optimizer.inner_optimizer, reduction)
        front: type = DistributedLossScale
    elif hasattr(optimizer, "optimizers") and hasattr(optimizer, "_optimizer_map"):
        for inner in optimizer.optimizers:
            distribute(inner, reduction)
        front = DistributedMulti
    else:
        _accumulate(optimizer, reduction.settings.accumulate)
        _warn_of_zeros(optimizer, reduction.settings.compression)
        front = Distributed
    # Past Keras's __setattr__, which would track them.
    _drop_traced_steps(optimizer)
    object.__setattr__(optimizer, "_hvd_update", Update(reduction, _iterations(optimizer)))
    object.__setattr__(optimizer, "__class__", _distributed_class(front, type(optimizer)))


def _distributed_class(front: type, plain: type) -> type:
    """Return a subclass of ``plain`` that shows Keras ``plain`` as its class."""
    if (front, plain) in _CLASSES:
        return _CLASSES[front, plain]
    from_config: Any = plain.from_config  # type: ignore[attr-defined]
    namespace = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "__class__": property(lambda self: plain),
        "__new__": lambda cls, *args, **kwargs: _plain(plain, lambda: plain(*args, **kwargs)),
        "from_config": classmethod(lambda cls, config, **kwargs: _plain(plain, lambda: from_config(config, **kwargs))),
    }
    return _CLASSES.setdefault((front, plain), type(plain.__name__, (front, plain), namespace))


def _plain(plain: type, make: Any) -> Any:
    """Return a new optimizer of the plain class, since there are no settings to distribute it by."""
    warnings.warn(
        f"a new {plain.__name__} is not distributed, though it was made by way of one that is: "
        "wrap it in DistributedOptimizer",
        stacklevel=3,
    )
    return make()


def _iterations(optimizer: Any) -> int:
    iterations = getattr(optimizer, "_iterations", None)
    return 0 if iterations is None or not tf.executing_eagerly() else int(iterations.numpy())


def _drop_traced_steps(optimizer: Any) -> None:
    """Let models trace their training steps anew that have traced them with this optimizer, unreduced."""
    if not optimizer.built:
        return
    for thing in gc.get_objects():
        # Not isinstance(), which runs code of objects that pretend to be others.
        if issubclass(type(thing), keras.Model) and getattr(thing, "train_function", None) is not None:
            values = list(vars(thing).values())
            values += [v for several in values if isinstance(several, (list, tuple)) for v in several]
            if any(v is optimizer or getattr(v, "inner_optimizer", None) is optimizer for v in values):
                thing.train_function = None


def _refuse_unreached(optimizer: Any) -> None:
    update = optimizer._hvd_update
    if isinstance(optimizer, Distributed) and not update.used and _iterations(optimizer) > update.iterations:
        raise UnsupportedError(
            f"{type(optimizer).__name__} has made {_iterations(optimizer) - update.iterations} updates with gradients "
            "that were not reduced: the training step was traced before the optimizer was distributed; call "
            "DistributedOptimizer before the first step, or trace the step again, as model.compile(...) does"
        )


def _accumulate(optimizer: Any, passes: int) -> None:
    """Let Keras accumulate the gradients of so many steps."""
    if passes in (1, optimizer.gradient_accumulation_steps):
        return
    if optimizer.gradient_accumulation_steps:
        raise ConfigError(
            f"backward_passes_per_step={passes} does not go with an optimizer that has gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}; expected the same number, or one of the two alone"
        )
    if optimizer.built:
        raise ConfigError(
            f"backward_passes_per_step={passes} expected an optimizer that is not built yet, or has been made with "
            f"gradient_accumulation_steps={passes}: its variables are saved in the order in which they are made"
        )
    optimizer.gradient_accumulation_steps = passes


def _warn_of_zeros(optimizer: Any, compression: Any) -> None:
    sparsifies = isinstance(compression, Compressor) and compression.collective is Collective.ALLGATHER
    if sparsifies and isinstance(optimizer, keras.optimizers.Adafactor):
        warnings.warn(
            "Keras's Adafactor divides by zero where all of a row or column of a gradient is zero, which is likely "
            f"with {type(compression).__name__}: weights may become NaN; use another optimizer, or no compression",
            stacklevel=4,
        )


def _is_due(optimizer: Any) -> bool:
    """Return whether the next ``apply`` makes an update; while tracing the branch that does is always seen."""
    steps = optimizer.gradient_accumulation_steps
    if not steps or not tf.executing_eagerly():
        return True
    return (int(optimizer._iterations.numpy()) + 1) % int(steps) == 0


def _refuse_float8(optimizer: Any, variables: Any) -> None:
    for variable in variables or optimizer._trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise UnsupportedError(
                f"{variable.path} is overwritten by its gradient (float8 training), which would differ between ranks; "
                "expected a model without float8"
            )


def _loss_scaling_callers(optimizer: Any) -> list[Any]:
    """Return the ``LossScaleOptimizer`` around an optimizer that is calling it, if it is not distributed.

    Nothing else leads from an optimizer to the one that ``compile()`` puts around it.
    """
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _LOSS_SCALING:  # never look into a user's frames
            caller = frame.f_locals.get("self")
            if getattr(caller, "inner_optimizer", None) is optimizer and not is_distributed(caller):
                found.append(caller)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _distribute_callers(optimizer: Any) -> None:
    for caller in _loss_scaling_callers(optimizer):
        if not is_distributed(caller):
            distribute(caller, optimizer._hvd_update.reduction)


def _refuse_undistributed_callers(optimizer: Any) -> None:
    if _loss_scaling_callers(optimizer):
        raise UnsupportedError(
            "a LossScaleOptimizer was built before the optimizer inside it was distributed, so its ranks would skip "
            "different steps; expected DistributedOptimizer(LossScaleOptimizer(...))"
        )
