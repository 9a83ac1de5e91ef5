"""Which variable a gradient belongs to, and what ranks agree on before it is exchanged."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.adapters.callsite import TensorFlowCall
from hvd_compress.adapters.common import settings_of
from hvd_compress.adapters.tensorflow.state import Anchor, VariableState, make_variable
from hvd_compress.base import Compressor
from hvd_compress.errors import UnsupportedError
from hvd_compress.identity import WeakIdDictionary
from hvd_compress.layout import compare, describe
from hvd_compress.state import Runtime, Scope, process_set_key
from hvd_compress.step import TensorSpec
from hvd_compress.transport.base import Transport
from hvd_compress.transport.choose import open_transport
from hvd_compress.transport.horovod import HorovodTransport

# All tapes together: a tape lives for a step, the state of its variables for longer.
_TAPES = Anchor()


@dataclass
class Channel:
    """How one scope exchanges over one process set.

    Attributes:
        process_set: Horovod's process set.
        transport: mpi4py's; None where ``hvd.allgather`` in the graph does it.
        order: touched by every exchange through mpi4py, so that TensorFlow runs them in the
            order of the program, which is the same on all ranks.
        turns: how often a gradient that Horovod reduces for several variables has come.
        names: of the variables, by which they are known in checkpoints and messages.
        agreed: names of direct calls that have been compared between ranks.
    """

    process_set: Any
    transport: Transport | None = None
    order: Any = None
    names: WeakIdDictionary[str] = field(default_factory=WeakIdDictionary)
    agreed: set[str] = field(default_factory=set)
    turns: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Nothing is ever queued: the graph exchanges each tensor by itself."""
        return False

    def abandon(self) -> None:
        """Nothing to do: nothing is queued."""

    def undo(self) -> None:
        """Refuse: a graph keeps no record of what it has sent.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "undo_step() expected PyTorch; under TensorFlow skip the step before the gradients are exchanged, "
            "as hvd_compress.keras does with a LossScaleOptimizer"
        )


@dataclass(frozen=True)
class Target:
    """What a tensor is the gradient of."""

    scope: Scope
    channel: Channel
    variable: tf.Variable | None
    name: str
    named: bool


def find_target(compressor: Compressor, call: TensorFlowCall, tensor: tf.Tensor) -> tuple[Target, tf.Tensor]:
    """Return what the tensor is the gradient of, and the tensor with its static shape.

    Raises:
        HandshakeError, StateError, TransportError: at the first sight of a variable.
    """
    runtime = compressor.runtime
    if call.variables is None:
        scope = runtime.scope(None, "allreduce", [], dict)
        channel = _channel(scope, call)
        name = call.name or "(unnamed)"
        if call.grouped:
            name = f"{name}.{_take_turn(channel, call.positions)}"
        members = process_set_key(call.process_set)
        if members != "0":
            name = f"{name}@{members}"  # another tensor in each process set
        if call.name is not None and name not in channel.agreed:
            _agree(compressor, channel, name, [(name, tuple(tensor.shape), tensor.dtype.name, ())])
            channel.agreed.add(name)
        elif channel.transport is None:
            _connect(compressor, channel)
        return Target(scope, channel, None, name, call.name is not None), tensor
    if call.owner is None:
        scope = runtime.scope(_TAPES, "tape", [], WeakIdDictionary)
    else:
        scope = runtime.scope(call.owner, None, call.variables, WeakIdDictionary)
    channel = _channel(scope, call)
    variable = call.variables[_take_turn(channel, call.positions)]
    _register(compressor, scope, channel, call)
    # Densified IndexedSlices have lost their first dimension.
    tensor = tf.ensure_shape(tensor, variable.shape)
    return Target(scope, channel, variable, channel.names[variable], True), tensor


def _take_turn(channel: Channel, positions: tuple[int, ...]) -> int:
    """Return the position: gradients that are one tensor come in turn."""
    if len(positions) == 1:
        return positions[0]
    turn = channel.turns.get(positions, 0)
    channel.turns[positions] = turn + 1
    return positions[turn % len(positions)]


def _channel(scope: Scope, call: TensorFlowCall) -> Channel:
    key = process_set_key(call.process_set)
    channel: Channel | None = scope.exchanges.get(key)
    if channel is None:
        channel = scope.exchanges[key] = Channel(call.process_set)
    return channel


def _register(compressor: Compressor, scope: Scope, channel: Channel, call: TensorFlowCall) -> None:
    """Give all variables that are new a state, and compare them between ranks before anything waits for them.

    Raises:
        HandshakeError: ranks disagree.
        StateError: a loaded state is of another model.
    """
    pairs = zip(call.variables or [], call.gradients or [], strict=True)
    new = [v for v, g in pairs if g is not None and not isinstance(g, tf.IndexedSlices) and v not in channel.names]
    if not new:
        return
    runtime = compressor.runtime
    for variable in new:
        channel.names[variable] = _free_name(runtime, scope, channel, variable)
    entries = [(channel.names[v], tuple(v.shape.as_list()), v.dtype.name, ()) for v in new]
    try:
        _agree(compressor, channel, runtime.next_exchange(process_set_key(channel.process_set)), entries)
        for variable in new:
            name, spec = channel.names[variable], TensorSpec(tuple(variable.shape.as_list()), variable.dtype.name)
            chosen = compressor.choose(name, spec)
            if chosen.compresses(spec) or chosen.has_momentum:
                runtime.entry(scope, variable, channel.names[variable], VariableState)
        runtime.check_all_restored_used(scope)
    except BaseException:
        for variable in new:
            channel.names.pop(variable, None)
            scope.entries.pop(variable, None)
        raise


def _agree(compressor: Compressor, channel: Channel, label: str, entries: list[Any]) -> None:
    """Compare tensors and settings between ranks, while the graph is being made.

    A rank that traces again, alone, brings nothing new and compares nothing.  Workers that
    join an elastic job would be alone with this, so there only the messages are checked.
    """
    if not is_elastic():
        transport = HorovodTransport(channel.process_set, f"hvd_compress.handshake.{label}", "tensorflow")
        text = describe(settings_of(compressor), sorted(entries))
        compare(transport.allgather_any(text, "the comparison of what all ranks train"))
    _connect(compressor, channel)


def _connect(compressor: Compressor, channel: Channel) -> None:
    if compressor.transport != "mpi" or channel.transport is not None:
        return
    number = compressor.runtime.next_exchange(process_set_key(channel.process_set))
    channel.transport = open_transport("mpi", channel.process_set, f"hvd_compress.{number}", "tensorflow")
    channel.order = make_variable(np.zeros((), np.int32), "hvd_compress_order", "CPU:0")


def is_elastic() -> bool:
    """Tell whether the number of ranks may change."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))


def _free_name(runtime: Runtime, scope: Scope, channel: Channel, variable: tf.Variable) -> str:
    if variable in scope.entries:
        return scope.entries[variable].name
    name = next((name for name, bound in runtime.bound.items() if bound is variable), variable.name)
    used = {*channel.names.values(), *(state.name for state in scope.entries.values())}
    number, free = 1, name
    while free in used:
        number += 1
        free = f"{name}#{number}"
    return str(free)
