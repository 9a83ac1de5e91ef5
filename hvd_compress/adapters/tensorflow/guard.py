"""Traces that are used for other variables than those they were made for.

Called eagerly, a tape of Horovod reduces in a ``tf.function``, and TensorFlow takes one trace of
it for all variables of equal shapes.  Which variable a residual belongs to is decided while
tracing, so a second model would share the first one's residuals, silently.  Usually the hash of
the compressor keeps them apart, see ``tensorflow_salt``; this notices where it has not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_compress.adapters.callsite import TensorFlowCall, variables_being_reduced
from hvd_compress.errors import UnsupportedError

#: Horovod's function that it keeps, by the name that TensorFlow gives its graph.
_KEPT = "allreduce_grads"


def guard_variables(call: TensorFlowCall) -> None:
    """Let every eager call of the function that is being traced compare its variables with those of the trace."""
    graph: Any = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    if tf.executing_eagerly() or not getattr(graph, "name", "").endswith(_KEPT):
        return
    with tf.init_scope(), tf.device("CPU:0"):
        nothing = tf.constant(0.0)
    # TensorFlow calls it, in Python, whenever the function is called, to learn the value of an input.
    check = _check([weakref.ref(variable) for variable in call.variables or []], nothing)
    graph.capture_call_time_value(
        check, tf.TensorSpec([], tf.float32), key="hvd_compress_variables", default_value=nothing
    )


def _check(traced: list[weakref.ref[Any]], nothing: tf.Tensor) -> Callable[[], tf.Tensor]:
    def check() -> tf.Tensor:
        given = variables_being_reduced()
        if given is not None:
            meant = [reference() for reference in traced]
            if len(given) != len(meant) or any(a is not b for a, b in zip(given, meant, strict=True)):
                raise UnsupportedError(
                    f"an eager tape or optimizer was first used for the variables {_names(meant)}, and now, at the "
                    f"same place of the program, for {_names(given)}, which would share their residuals; expected one "
                    "hvd.DistributedGradientTape(...) in the program for each set of variables, a step inside "
                    "tf.function, or a compressor for each model"
                )
        return nothing

    return check


def _names(variables: list[Any]) -> str:
    names = ["(deleted)" if variable is None else repr(variable.name) for variable in variables]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
