"""The gradients of one update, reduced by Horovod."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.base import Compressor
from hvd_compress.errors import UnsupportedError
from hvd_compress.keras.variables import native, natives, path_of
from hvd_compress.naming import alike
from hvd_compress.transport.horovod import HorovodTransport

Function = TypeVar("Function", bound=Callable[..., Any])


def unconverted(function: Function) -> Function:
    """Keep AutoGraph from rewriting a function in a user's ``tf.function``."""
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


def neutral_names() -> Any:
    """Leave the name scopes of the caller.

    Ranks find each other's operations by name, and Keras numbers its names: those of layers and
    optimizers differ on a rank that has made one more, to evaluate with, say.
    """
    return tf.name_scope("")


@dataclass(frozen=True)
class Settings:
    """The arguments of ``DistributedOptimizer``, checked.

    Attributes:
        groups: a number of groups, lists of variables, or None.
        passes: backward passes that each update adds up (1 where it averages them).
        accumulate: backward passes between updates.
    """

    name: str
    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    gradient_predivide_factor: float
    op: Any
    groups: Any
    process_set: Any
    scale_local_gradients: bool
    passes: int = 1
    accumulate: int = 1


class Reduction:
    """Reduces gradients with stock Horovod's own function, in a graph or eagerly.

    Args:
        settings: how.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._local: set[str] = set()
        self._eager: dict[tuple[str, ...], Any] = {}
        self._functions: dict[int | None, Callable[[list[Any], list[Any]], list[Any]]] = {}
        self._lists = [natives(group) for group in settings.groups] if isinstance(settings.groups, list) else []

    def copy(self) -> Reduction:
        """Return one for another optimizer, with the same settings and local variables."""
        copied = Reduction(self.settings)
        copied._local.update(self._local)
        return copied

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of a variable to its own rank from now on."""
        self._local.update(v._unique_id for v in natives(variable))
        self._eager.clear()

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients.

        Args:
            gradients: tensors or ``tf.IndexedSlices``, none of them None.
            variables: theirs, of Keras or TensorFlow.

        Raises:
            UnsupportedError: inside XLA or a ``tf.distribute`` strategy.
        """
        _check_context()
        self._name(variables)
        passes = self.settings.passes
        given = [gradient * passes for gradient in gradients] if passes != 1 else list(gradients)
        found = [native(variable) for variable in variables]
        local = [variable._unique_id in self._local for variable in found]
        shared = [i for i, is_local in enumerate(local) if not is_local]
        reduced = iter(self._reduce([given[i] for i in shared], [found[i] for i in shared]))
        return [self._scaled_local(given[i]) if is_local else next(reduced) for i, is_local in enumerate(local)]

    def _reduce(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        if not gradients or self._alone():
            return gradients
        if not tf.executing_eagerly():
            return self._reduce_in_graph(gradients, variables)
        # A function for each set of variables: one alone would be shared by sets of equal
        # shapes, and what a compressor keeps for a variable is chosen while tracing.
        key = tuple(variable._unique_id for variable in variables)
        if key not in self._eager:
            self._eager[key] = tf.function(
                lambda grads: self._reduce_in_graph(grads, variables), autograph=False, reduce_retracing=True
            )
        return list(self._eager[key](gradients))

    def _alone(self) -> bool:
        """Return whether Horovod would do nothing: on a single rank, or one outside of the process set.

        Its way to do nothing is a branch of a ``tf.cond``, while the other one is traced all the same.
        """
        process_set = self.settings.process_set
        return not _elastic() and not (process_set.included() and process_set.size() > 1)

    def _reduce_in_graph(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        result: list[Any] = [None] * len(gradients)
        with neutral_names():
            with tf.name_scope(f"{self.settings.name}_Gradients"):
                sent = [self._prepared(gradient, f"gradient_{i}") for i, gradient in enumerate(gradients)]
            for members, groups in self._groups(variables):
                reduced = self._function(groups)([sent[i] for i in members], [variables[i] for i in members])
                for i, gradient in zip(members, reduced, strict=True):
                    result[i] = _finished(gradient, variables[i], gradients[i].dtype)
        return result

    def _groups(self, variables: list[Any]) -> list[tuple[list[int], int | None]]:
        """Return which gradients to pass to Horovod together, and into how many groups it is to put them.

        Horovod would find the members of lists by name; names in Keras 3 are not unique.
        """
        if not self._lists:
            groups = self.settings.groups
            return [(list(range(len(variables))), groups and min(groups, len(variables)))]
        position = {variable._unique_id: i for i, variable in enumerate(variables)}
        lists = [[position.pop(v._unique_id) for v in group if v._unique_id in position] for group in self._lists]
        return [(members, 1) for members in lists if members] + [([i], None) for i in position.values()]

    def _function(self, groups: int | None) -> Callable[[list[Any], list[Any]], list[Any]]:
        if groups not in self._functions:
            self._functions[groups] = _horovod_function(self.settings, groups)
        return self._functions[groups]

    def _prepared(self, gradient: Any, name: str) -> Any:
        """Name a gradient, as Horovod names its operations by tensors; give it a dtype that Horovod has."""
        brain = gradient.dtype == tf.bfloat16 and not isinstance(self.settings.compression, Compressor)
        if isinstance(gradient, tf.IndexedSlices):
            values = tf.cast(gradient.values, tf.float32) if brain else gradient.values
            indices = tf.identity(gradient.indices, name=f"{name}_indices")
            return tf.IndexedSlices(tf.identity(values, name=f"{name}_values"), indices, gradient.dense_shape)
        return tf.identity(tf.cast(gradient, tf.float32) if brain else gradient, name=name)

    def _scaled_local(self, gradient: Any) -> Any:
        """Divide what is not reduced by the number of ranks, as Horovod does unless told not to."""
        if not self.settings.scale_local_gradients:
            return gradient
        ranks = self.settings.process_set.size()
        if _elastic():
            ranks = hvd.size_op(process_set_id=self.settings.process_set.process_set_id)
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)

    def _name(self, variables: Sequence[Any]) -> None:
        """Tell a compressor of this package what the variables are called in its ``state_dict``."""
        compression = self.settings.compression
        if not isinstance(compression, Compressor):
            return
        paths = compression.runtime.paths
        new = [variable for variable in variables if native(variable) not in paths]
        own = [path_of(variable) for variable in new]
        for variable, name in zip(new, self._common_names(own), strict=True):
            paths[native(variable)] = name

    def _common_names(self, names: list[str]) -> list[str]:
        """Return the first rank's names where the ranks' differ in numbers alone, as Keras gives them.

        Other differences are left to the comparison that follows, which says what they are.
        """
        if not names or _elastic() or self._alone():
            return names
        transport = HorovodTransport(self.settings.process_set, "hvd_compress.names", "tensorflow")
        everyone = transport.allgather_any(json.dumps(names).encode(), "the names of what all ranks train")
        lists = [json.loads(row) for row in everyone]
        same = all(len(row) == len(names) and all(map(alike, row, lists[0])) for row in lists)
        return lists[0] if same else names

    def all_ranks(self, condition: Any) -> Any:
        """Return whether ``condition``, a 0-d boolean tensor, holds on all ranks; the same on all."""
        _check_context()
        with neutral_names(), tf.name_scope(f"{self.settings.name}_Finite"):
            failed = tf.identity(1.0 - tf.cast(condition, tf.float32), name="failed")
            # Summed, not Min: some of Horovod's backends have sums alone.
            total = hvd._allreduce_cond(failed, op=hvd.Sum, process_set=self.settings.process_set)
            return tf.equal(total, 0.0)


def _elastic() -> bool:
    """Return whether the number of ranks may change."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))


def _horovod_function(settings: Settings, groups: int | None) -> Callable[[list[Any], list[Any]], list[Any]]:
    """Return Horovod's Python function, which reads the variables from its argument ``vars``."""
    function = hvd._make_allreduce_grads_fn(
        settings.name,
        settings.device_dense,
        settings.device_sparse,
        settings.compression,
        settings.sparse_as_dense,
        settings.op,
        settings.gradient_predivide_factor,
        groups,
        process_set=settings.process_set,
    )
    return getattr(function, "python_function", function)  # type: ignore[no-any-return]


def _finished(gradient: Any, variable: Any, dtype: Any) -> Any:
    """Restore dtype, and the static shape that a densified gradient may have lost."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.ensure_shape(tf.cast(gradient, dtype), variable.shape)


def _check_context() -> None:
    if tf.distribute.has_strategy() and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise UnsupportedError("Horovod cannot be combined with tf.distribute: start one process for each device")
    if _in_xla():
        raise UnsupportedError(
            "Horovod's operations cannot be compiled by XLA: expected compile(..., jit_compile=False), got "
            "jit_compile=True (Keras's default, 'auto', chooses it on GPUs); "
            "BroadcastGlobalVariablesCallback switches it off by itself"
        )


def _in_xla() -> bool:
    if tf.executing_eagerly():
        return False
    from tensorflow.python.ops import control_flow_util  # there is no public way to ask

    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
