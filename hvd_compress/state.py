"""What a compressor remembers between steps, by parameter."""

from __future__ import annotations

import gc
import sys
import weakref
import zlib
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from hvd_compress.checkpoint import FORMAT, VERSION, by_kind, check_size, checked, copied, redistribute, renamed
from hvd_compress.errors import StateError
from hvd_compress.identity import WeakIdDictionary
from hvd_compress.ops.base import LARGEST, Array
from hvd_compress.step import RESIDUAL
from hvd_compress.telemetry import Telemetry

# Slots that are in no unit of the gradient: positions.
_UNSCALED = ("leaders",)
# Labels of scopes whose parameters are not all known in the first step.
_GROWING = ("allreduce", "tape")


@dataclass
class ParameterState:
    """What is remembered of one parameter.

    Attributes:
        name: the same on all ranks.
        residual: flat, in the accumulation dtype; None before the first step.
        steps: how often the parameter was compressed.
        restored: the state was loaded and has not been used yet.
        slots: what else is remembered, by name.
        common: the names of those slots that are the same on all ranks.
        averages: the names of those that Horovod has averaged, and not added up.
        hints: what compiled loops found in earlier steps; no part of a checkpoint.
    """

    name: str
    residual: Array | None = None
    steps: int = 0
    restored: bool = False
    slots: dict[str, Array] = field(default_factory=dict)
    common: set[str] = field(default_factory=set)
    averages: set[str] = field(default_factory=set)
    hints: dict[str, float] = field(default_factory=dict)

    def memory(self) -> dict[str, Array]:
        """Return all that is remembered, by name."""
        return dict(self.slots) if self.residual is None else {**self.slots, RESIDUAL: self.residual}

    def store(self, new: dict[str, Array]) -> None:
        """Replace what has changed."""
        for name, value in new.items():
            if name == RESIDUAL:
                self.residual = value
            else:
                self.slots[name] = value

    def as_dict(self) -> dict[str, Any]:
        """Return copies of everything, as a ``state_dict`` holds it."""
        entry = {"residual": self.residual, "steps": self.steps, **by_kind(self.slots, self.common)}
        return copied({**entry, "averages": sorted(self.averages)} if self.averages else entry)

    def load(self, entry: dict[str, Any]) -> None:
        """Take over what :meth:`as_dict` returned."""
        self.residual, self.steps, self.restored = entry["residual"], entry["steps"], True
        self.slots = {**entry.get("memory", {}), **entry.get("common", {})}
        self.common = set(entry.get("common", {}))
        self.averages = set(entry.get("averages", ()))
        self.hints = {}


class Scope:
    """The parameters of one optimizer, or the names of direct calls, and their exchanges.

    Attributes:
        label: what it is called in a ``state_dict`` and in ``stats()``; it depends on which optimizers
            are still alive on this rank, so nothing that ranks compare may contain it.
        entries: states by parameter object, held weakly, or by name.
        exchanges: how they exchange, by process set, with ``busy``, ``undo()`` and ``abandon()``.
    """

    def __init__(self, label: str, owner: Any, entries: MutableMapping[Any, ParameterState]) -> None:
        self.label = label
        self.entries = entries
        self.exchanges: dict[str, Any] = {}
        self.checked_restored = False
        self._framework = owner if isinstance(owner, str) else None
        self._owner = None if isinstance(owner, str) else weakref.ref(owner)

    def belongs_to(self, owner: Any) -> bool:
        """Tell whether ``owner`` is this scope's optimizer (a string: the framework of the direct calls)."""
        if isinstance(owner, str):
            return self._framework == owner
        return self._owner is not None and self._owner() is owner

    @property
    def owned(self) -> bool:
        """Whether this is an optimizer's scope."""
        return self._owner is not None

    @property
    def orphaned(self) -> bool:
        """Whether the optimizer no longer exists."""
        return self._owner is not None and self._owner() is None


class Runtime:
    """All state of one compressor; see ``Compressor.state_dict``."""

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        self.scopes: list[Scope] = []
        self._opened: dict[str, int] = {}
        # What bind() was told, by framework and name.
        self.bound: weakref.WeakValueDictionary[tuple[str, str], Any] = weakref.WeakValueDictionary()
        # What Keras calls its variables; two models' may have equal names.
        self.paths: WeakIdDictionary[str] = WeakIdDictionary()
        self.warned: set[str] = set()
        self._restored: dict[str, dict[str, Any]] = {}

    # --- Scopes and parameters ----------------------------------------------------

    def scope(
        self,
        owner: Any,
        label: str | None,
        parameters: list[Any],
        new_entries: Callable[[], MutableMapping[Any, ParameterState]],
    ) -> Scope:
        """Return the scope of ``owner``, making it on first sight.

        Args:
            owner: an optimizer, or the name of a framework for its direct calls.
            label: None for an optimizer, which gets one that is free, or takes over label
                and residuals of one that is gone and had the same parameters.  The direct calls
                of a second framework get its name behind the label.
            parameters: those of the optimizer.
            new_entries: makes a mapping that holds its keys weakly.
        """
        for scope in self.scopes:
            if scope.belongs_to(owner):
                return scope
        entries = new_entries()
        if label is None:
            if any(s.owned for s in self.scopes):
                # An optimizer is part of a reference cycle, so an old one may only seem alive, and on some ranks only.
                gc.collect()
            label = self._inherit(parameters, entries)
            self.scopes = [s for s in self.scopes if s.entries or not s.orphaned]
            if label is None or any(s.label == label and not s.orphaned for s in self.scopes):
                label = self._free_label()
        elif any(s.label == label for s in self.scopes):
            label = f"{label}.{owner}"
        scope = Scope(label, owner, entries)
        self.scopes.append(scope)
        return scope

    def next_exchange(self, process_set: str) -> str:
        """Name an exchange that is about to be opened, the same on all members of its process set."""
        number = self._opened[process_set] = self._opened.get(process_set, -1) + 1
        return f"{process_set}.{number}"

    def _inherit(self, parameters: list[Any], entries: MutableMapping[Any, ParameterState]) -> str | None:
        label = None
        for scope in self.scopes:
            inherited = [p for p in parameters if p in scope.entries] if scope.orphaned else []
            for parameter in inherited:
                entries[parameter] = scope.entries.pop(parameter)
            if inherited and label is None:
                label = scope.label
        return label

    def _free_label(self) -> str:
        used, number = {scope.label for scope in self.scopes}, 0
        while f"optimizer{number}" in used:
            number += 1
        return f"optimizer{number}"

    def entry(
        self, scope: Scope, key: Any, name: str, make: Callable[[str], ParameterState] = ParameterState
    ) -> ParameterState:
        """Return a parameter's state, new (from ``make``) or as restored."""
        state = scope.entries.get(key)
        if state is None:
            state = scope.entries[key] = make(name)
            restored = self._restored.pop(f"{scope.label}/{name}", None)
            if restored is not None:
                state.load(restored)
        return state

    def match_restored(self, scope: Scope, names: list[str]) -> None:
        """Give what was loaded for this scope the names that its parameters have now.

        Args:
            scope: before its first step.
            names: of all its parameters of which something is remembered, in the order of the model.
        """
        if not (scope.checked_restored or _grows(scope.label)):
            self._restored = renamed(self._restored, scope.label, names)

    def check_all_restored_used(self, scope: Scope) -> None:
        """Raise if a loaded state has parameters that this scope's first step did not show.

        Raises:
            StateError: the state belongs to another model.
        """
        if scope.checked_restored:
            return
        scope.checked_restored = True
        unknown = [key for key in self._restored if key.startswith(f"{scope.label}/")]
        if unknown and not _grows(scope.label):
            known = sorted(state.name for state in scope.entries.values())
            raise StateError(
                f"the loaded state has parameters that this optimizer has not: expected some of {known}, got {unknown}"
            )

    # --- Saving and loading -------------------------------------------------------

    def states(self) -> dict[str, ParameterState]:
        """Return every parameter's state under its name in a ``state_dict``."""
        return _states(self.scopes)

    def _exchanges(self) -> list[Any]:
        return [exchange for scope in self.scopes for exchange in scope.exchanges.values()]

    def state_dict(self, compressor: str, rank: int, size: int) -> dict[str, Any]:
        """Return the state of this rank as plain types and tensors.

        Raises:
            StateError: gradients are queued, so that the residuals lack what is about to be sent.
        """
        if any(exchange.busy for exchange in self._exchanges()):
            raise StateError(
                "expected to be called between steps, got a call while gradients are queued; "
                "call opt.step() or opt.synchronize() before compression.state_dict()"
            )
        parameters = {key: s.as_dict() for key, s in self.states().items()}
        for key, restored in self._restored.items():
            parameters.setdefault(key, copied(restored))
        return {
            "format": FORMAT,
            "version": VERSION,
            "compressor": compressor,
            "rank": rank,
            "size": size,
            "parameters": parameters,
        }

    def load_state_dict(self, state: Any, compressor: str, rank: int, size: int) -> None:
        """Replace the state of this rank; see ``Compressor.load_state_dict``."""
        gc.collect()  # a model or optimizer that is gone may only seem alive, and must not get what is loaded
        scopes = [s for s in self.scopes if not s.orphaned]
        if isinstance(state, (list, tuple)):
            parameters = redistribute([checked(s, compressor) for s in state], rank, size)
        else:
            own = checked(state, compressor)
            if (own["rank"], own["size"]) != (rank, size):
                remedy = "every rank must load the state that it has saved itself"
                if own["size"] != size:
                    remedy = "to go on with another number of ranks pass the list of all ranks' states"
                raise StateError(
                    f"expected the state of rank {rank} of {size}, got that of rank {own['rank']} of "
                    f"{own['size']}; {remedy}"
                )
            parameters = {key: copied(value) for key, value in own["parameters"].items()}
        live = _states(scopes)
        labels = {label for label in (key.split("/", 1)[0] for key in live) if not _grows(label)}
        for label in labels:
            names = [key.split("/", 1)[1] for key in live if key.split("/", 1)[0] == label]
            parameters = renamed(parameters, label, names)
        unknown = [key for key in parameters if key not in live and key.split("/", 1)[0] in labels]
        if unknown:
            raise StateError(f"the state has parameters that this model lacks: expected {sorted(live)}, got {unknown}")
        for key, entry in live.items():
            if key in parameters:
                check_size(key, entry.residual, parameters[key]["residual"])
        self.scopes = scopes
        for exchange in self._exchanges():
            exchange.abandon()
        for key, entry in live.items():
            entry.load(parameters.pop(key, {"residual": None, "steps": 0}))
        self._restored = parameters
        for scope in self.scopes:
            scope.checked_restored = False

    def rescale(self, factor: float) -> None:
        """Multiply all that is remembered by ``factor``, as it is in units of the gradient."""
        for state in self.states().values():
            state.store({name: _scaled(x, factor) for name, x in state.memory().items() if name not in _UNSCALED})
        for restored in self._restored.values():
            if restored["residual"] is not None:
                restored["residual"] = _scaled(restored["residual"], factor)
            for kind in ("memory", "common"):
                arrays = restored.get(kind, {})
                arrays.update({name: _scaled(x, factor) for name, x in arrays.items() if name not in _UNSCALED})

    def undo(self) -> None:
        """Put what the last step has sent back into the residuals."""
        for exchange in self._exchanges():
            exchange.undo()

    def forget_exchanges(self) -> None:
        """Drop all connections, so that the next step opens new ones; residuals stay."""
        self._opened.clear()
        for scope in self.scopes:
            scope.exchanges.clear()


def _scaled(x: Array, factor: float) -> Array:
    """Multiply; what is beyond the largest number becomes that, since infinity would stay for ever."""
    scaled = x * factor
    largest = LARGEST[str(x.dtype).removeprefix("torch.")]
    return scaled.clip(-largest, largest)


def _grows(label: str) -> bool:
    """Tell whether new parameters may come at any time in a scope of this label."""
    return label.partition(".")[0] in _GROWING


def _states(scopes: list[Scope]) -> dict[str, ParameterState]:
    return {f"{scope.label}/{state.name}": state for scope in scopes for state in scope.entries.values()}


def world() -> tuple[int, int]:
    """Return Horovod's rank and size, or 0 and 1 where Horovod is not in use."""
    for name in ("horovod.torch", "horovod.tensorflow"):
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            return horovod.rank(), horovod.size()
    return 0, 1


def process_set_key(process_set: Any) -> str:
    """Return a name that differs between process sets; Horovod uses the number of one that was removed again."""
    number = process_set.process_set_id
    if number == 0:
        return "0"
    return f"{number}-{zlib.crc32(repr(list(process_set.ranks)).encode()):08x}"
