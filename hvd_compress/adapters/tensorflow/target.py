"""Which variable a gradient belongs to, and what ranks agree on before it is exchanged."""

from __future__ import annotations

import gc
import os
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.adapters.callsite import TensorFlowCall
from hvd_compress.adapters.common import settings_of, shown_name, warn_of_two_momenta
from hvd_compress.adapters.tensorflow.guard import guard_variables
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
# How often the variables of any compressor have been compared, by process set; the same on all its members.
_COMPARED: Counter[str] = Counter()


@dataclass
class Known:
    """A tensor that the ranks have compared.

    What one rank's garbage collector does, or which models it keeps, must not show in what ranks
    have in common, so ``kept`` alone may depend on it.

    Attributes:
        name: what ranks compare, and errors say.
        operation: of Horovod, the same on all ranks; None for an unnamed direct call.
        kept: the name in checkpoints and ``stats()``; free for another variable once this one is gone.
        messages: how many this rank has written.
    """

    name: str
    operation: str | None
    kept: str
    messages: int = 0


@dataclass
class Channel:
    """How one scope exchanges over one process set.

    Attributes:
        process_set: Horovod's process set.
        transport: mpi4py's; None where ``hvd.allgather`` in the graph does it.
        order: touched by every exchange through mpi4py, so that TensorFlow runs them in the
            order of the program, which is the same on all ranks.
        turns: how often a gradient that Horovod reduces for several variables has come.
        variables: those that have been compared between ranks.
        direct: the direct calls that have been, by name.
    """

    process_set: Any
    transport: Transport | None = None
    order: Any = None
    variables: WeakIdDictionary[Known] = field(default_factory=WeakIdDictionary)
    direct: dict[str, Known] = field(default_factory=dict)
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
    """What a tensor is the gradient of; ``variable`` is None in direct calls."""

    scope: Scope
    channel: Channel
    variable: tf.Variable | None
    known: Known


def find_target(compressor: Compressor, call: TensorFlowCall, tensor: tf.Tensor) -> tuple[Target, tf.Tensor]:
    """Return what the tensor is the gradient of, and the tensor with its static shape.

    Raises:
        HandshakeError, StateError, TransportError: at the first sight of a variable.
    """
    runtime = compressor.runtime
    if call.variables is None:
        scope = runtime.scope("tensorflow", "allreduce", [], dict)
        channel = _channel(scope, call)
        name = call.name or "(unnamed)"
        if call.grouped:
            name = f"{name}.{_take_turn(channel, call.positions)}"
        members = process_set_key(call.process_set)
        if members != "0":
            name = f"{name}@{members}"  # another tensor in each process set
        if name not in channel.direct:
            if call.name is not None:
                _agree(compressor, channel, name, [(name, tuple(tensor.shape), tensor.dtype.name, ())])
            channel.direct[name] = Known(name, None if call.name is None else _operation(name), name)
        _connect(compressor, channel)
        return Target(scope, channel, None, channel.direct[name]), tensor
    if call.owner is None:
        scope = runtime.scope(_TAPES, "tape", [], WeakIdDictionary)
    else:
        scope = runtime.scope(call.owner, None, call.variables, WeakIdDictionary)
    guard_variables(call)
    channel = _channel(scope, call)
    variable = call.variables[_take_turn(channel, call.positions)]
    _register(compressor, scope, channel, call)
    # Densified IndexedSlices have lost their first dimension.
    tensor = tf.ensure_shape(tensor, variable.shape)
    return Target(scope, channel, variable, channel.variables[variable]), tensor


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


def _momentum_of(optimizer: Any) -> str | None:
    """Return how a Keras optimizer accumulates momentum, if it does."""
    momentum = getattr(optimizer, "momentum", None)
    if isinstance(momentum, (int, float)) and momentum:
        return f"momentum={momentum}"
    beta = getattr(optimizer, "beta_1", None)
    return None if beta is None else f"beta_1={beta}"


def _register(compressor: Compressor, scope: Scope, channel: Channel, call: TensorFlowCall) -> None:
    """Give all variables that are new a state, and compare them between ranks before anything waits for them.

    Raises:
        HandshakeError: ranks disagree.
        StateError: a loaded state is of another model.
    """
    pairs = zip(call.variables or [], call.gradients or [], strict=True)
    new = [v for v, g in pairs if g is not None and not isinstance(g, tf.IndexedSlices) and v not in channel.variables]
    if not new:
        return
    warn_of_two_momenta(compressor, _momentum_of(call.owner))
    runtime, key = compressor.runtime, process_set_key(channel.process_set)
    names = _distinct([_name(runtime, variable) for variable in new], set())
    entries = [(name, tuple(v.shape.as_list()), v.dtype.name, ()) for v, name in zip(new, names, strict=True)]
    _COMPARED[key] += 1
    number = f"{key}.{_COMPARED[key]}"
    try:
        _agree(compressor, channel, number, entries)
        kept_names = _kept_names(scope, channel, new, names)
        specs = [TensorSpec(tuple(v.shape.as_list()), v.dtype.name) for v in new]
        remembered = [compressor.choose(name, spec).remembers(spec) for name, spec in zip(names, specs, strict=True)]
        runtime.match_restored(scope, [kept for kept, own in zip(kept_names, remembered, strict=True) if own])
        for variable, name, kept, own in zip(new, names, kept_names, remembered, strict=True):
            # A new worker of an elastic job has not counted with the others.
            counted = "" if is_elastic() else number
            operation = _operation(name if counted else shown_name(scope, kept), counted)
            channel.variables[variable] = Known(name, operation, kept)
            if own:
                runtime.entry(scope, variable, kept, VariableState)
        runtime.check_all_restored_used(scope)
    except BaseException:
        for variable in new:
            channel.variables.pop(variable, None)
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
    channel.order = make_variable(np.zeros((), np.int32), "order", "CPU:0")


def is_elastic() -> bool:
    """Tell whether the number of ranks may change."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))


def _operation(name: str, number: str = "") -> str:
    """Return a name for Horovod's operation; no two tensors have the same name and number."""
    plain = re.sub(r"[^A-Za-z0-9.]", "_", name)
    # Few characters are allowed; what was replaced must not make two names equal.
    return ".".join(filter(None, ("hvd_compress", number, plain, f"{zlib.crc32(name.encode()):08x}")))


def _name(runtime: Runtime, variable: tf.Variable) -> str:
    bound = (name for (_, name), one in runtime.bound.items() if one is variable)
    return str(next(bound, None) or runtime.paths.get(variable) or variable.name)


def _kept_names(scope: Scope, channel: Channel, variables: list[Any], names: list[str]) -> list[str]:
    """Return the variables' names in checkpoints and ``stats()``.

    A model that is built like one that is gone gets its names, so that a state that is saved
    now fits a process that has built this model alone.
    """

    def used() -> set[str]:
        return {known.kept for known in channel.variables.values()} | {s.name for s in scope.entries.values()}

    fresh = [name for variable, name in zip(variables, names, strict=True) if variable not in scope.entries]
    if used().intersection(fresh):
        gc.collect()  # models are part of reference cycles, so the old one may only seem alive
    new_names = iter(_distinct(fresh, used()))
    return [scope.entries[v].name if v in scope.entries else next(new_names) for v in variables]


def _distinct(names: list[str], used: set[str]) -> list[str]:
    """Number those that are used already."""
    used, distinct = set(used), []
    for name in names:
        number, free = 1, name
        while free in used:
            number += 1
            free = f"{name}#{number}"
        used.add(free)
        distinct.append(free)
    return distinct
