"""What a compressor is.

A compressor is an immutable set of hyper-parameters with two methods, :meth:`Compressor.encode`,
which says what of a tensor is sent, and :meth:`Compressor.decode`, which says what the receivers
make of it.  Everything else, from finding out which parameter a gradient belongs to, to feedback
and exchange, is done for it.  Other methods may be overridden to do the same in less time.

``compress`` and ``decompress`` are Horovod's ``Compressor`` interface and are implemented
here once.  What a compressor remembers between steps is kept by parameter in its
:class:`~hvd_compress.state.Runtime`.
"""

from __future__ import annotations

import abc
import dataclasses
import difflib
import enum
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_compress.description import describe
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.feedback import Feedback, MomentumCorrection
from hvd_compress.ops.base import ITEMSIZE, Array, Ops
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.policy import Route, SizePolicy
from hvd_compress.settings import ShortRepr, is_number, is_whole
from hvd_compress.state import Runtime, world
from hvd_compress.step import FIRST, Payload, Slot, Step, TensorSpec
from hvd_compress.wire import ArraySection, Section, is_variable

if TYPE_CHECKING:
    from hvd_compress.kernels.work import Work

# Adapters are found by the framework that a tensor comes from, and loaded only then.
_ADAPTERS = {"torch": "hvd_compress.adapters.torch", "tensorflow": "hvd_compress.adapters.tensorflow"}

TRANSPORTS = ("auto", "mpi", "horovod")
ON_NONFINITE = ("propagate", "raise")


class Collective(enum.Enum):
    """How the payloads of different ranks are brought together."""

    #: They can be added up: Horovod's own allreduce does it.
    ALLREDUCE = "allreduce"
    #: Every rank needs all of them: the exchange of this package gathers them.
    ALLGATHER = "allgather"

    @property
    def sums(self) -> bool:
        """Whether payloads are added up."""
        return self is Collective.ALLREDUCE


def _framework(tensor: Any) -> str | None:
    """Return the framework that a tensor or parameter comes from, None if it is none of ours."""
    names = (base.__module__.partition(".")[0] for base in type(tensor).__mro__)
    return next((name for name in names if name in _ADAPTERS), None)


@dataclass(frozen=True, eq=False)
class Compressor(ShortRepr, abc.ABC):
    """Base of all compressors; pass an instance as Horovod's ``compression`` argument.

    Args:
        feedback: what happens to what is dropped: :class:`ErrorFeedback`, or None.
        min_numel: tensors with fewer elements, and those with fewer than two dimensions,
            travel dense.
        seed: for compressors that draw random numbers.
        transport: ``"auto"`` (mpi4py where all ranks can use it), ``"mpi"``, or ``"horovod"``.
        on_nonfinite: ``"propagate"`` shows NaN and infinity in every rank's gradient, as
            dense Horovod does; ``"raise"`` raises ``NonFiniteGradientError`` on every rank.

    Raises:
        ConfigError: a setting is out of range.
    """

    feedback: Feedback | None = field(default=None, kw_only=True)
    min_numel: int = field(default=1024, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    transport: str = field(default="auto", kw_only=True)
    on_nonfinite: str = field(default="propagate", kw_only=True)

    collective = Collective.ALLGATHER
    shows_first = True
    #: Whether :meth:`combine` returns the sum of what is decoded; a vote does not.
    additive = True

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Refuse settings that the compressor has not.

        Raises:
            ConfigError: naming the settings that there are.
        """
        names = [f.name for f in fields(cls)]
        for unknown in [name for name in settings if name not in names]:
            near = difflib.get_close_matches(unknown, names, 1, 0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{cls.__name__} expected settings among {', '.join(names)}, got {unknown!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._require(
            self.feedback is None or isinstance(self.feedback, Feedback), "feedback", "ErrorFeedback() or None"
        )
        for name in ("min_numel", "seed"):
            value = getattr(self, name)
            whole = is_whole(value)
            self._require(whole, name, "a whole number, 0 or more")
        self._require(self.transport in TRANSPORTS, "transport", f"one of {', '.join(map(repr, TRANSPORTS))}")
        self._require(self.on_nonfinite in ON_NONFINITE, "on_nonfinite", f"one of {', '.join(map(repr, ON_NONFINITE))}")
        self._start()

    def _start(self) -> None:
        object.__setattr__(self, "_runtime", Runtime())
        # What follows from the settings; kept here, since a cache elsewhere would keep compressors alive.
        object.__setattr__(self, "_derived", {})

    def derived(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make()`` returned the first time for this ``key``."""
        cache = self._derived  # type: ignore[attr-defined]
        if key not in cache:
            cache[key] = make()
        return cache[key]

    def _leave_to_members(self) -> None:
        """Refuse settings that the compressors this one consists of have themselves."""
        for setting in fields(self):
            if setting.name in ("feedback", "min_numel", "seed") and getattr(self, setting.name) != setting.default:
                raise ConfigError(
                    f"{type(self).__name__}.{setting.name} would have no effect; give it to the compressors in it"
                )

    def _require(self, valid: bool, setting: str, expected: str) -> None:
        if not valid:
            value = getattr(self, setting)
            raise ConfigError(
                f"{type(self).__name__}.{setting} must be {expected}, got {value!r} ({type(value).__name__})"
            )

    # --- What an algorithm defines --------------------------------------------------

    @abc.abstractmethod
    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Compress the flat accumulator array ``x``, which must not be changed.

        The sizes of what is returned must depend on ``spec`` alone.
        """

    @abc.abstractmethod
    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return, as a flat accumulator array, what receivers make of one rank's payload.

        Args:
            arrays: the payload's, followed by what it has in ``common``.
            spec: of the gradient.
            ops: the operations of the framework that the arrays belong to.
        """

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Return what a payload consists of; must depend on ``spec`` alone."""
        return self.derived(spec, lambda: _found_sections(self, spec))  # type: ignore[no-any-return]

    def slots(self, spec: TensorSpec) -> Sequence[Slot]:
        """Return what is remembered of a parameter between steps, besides what feedback remembers."""
        return ()

    def combine(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return the sum of all ranks' decoded payloads, a new flat accumulator array.

        ``arrays`` have a leading axis of ranks.  The order of additions must be that of the
        ranks, so that all get the same bits; ``ops.fold`` does it.
        """

        def add(total: Array, *row: Array) -> Array:
            return total + self.decode(row, spec, ops)

        return ops.fold(add, ops.zeros(spec.numel, spec.accumulator, arrays[0]), arrays)

    def add_(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops, sign: int) -> Array:
        """Return ``x`` plus (``sign=1``) or minus (``-1``) the decoded payload of this rank; may change ``x``."""
        decoded = self.decode((*payload.arrays, *payload.common), spec, ops)
        return x + decoded if sign > 0 else x - decoded

    def clear(self, x: Array, payload: Payload, spec: TensorSpec, ops: Ops) -> Array:
        """Return ``x`` with zeros where elements were sent; may change ``x``.  One that sends all returns ``x``."""
        return x

    def encode_fused(self, work: Work, spec: TensorSpec, ops: Ops, step: Step) -> Payload:
        """Accumulate and encode in compiled loops, with the result of accumulating and :meth:`encode`.

        Called instead of both if :attr:`fuses`, for finite tensors on the CPU.  The accumulator then
        holds what is not sent.
        """
        raise UnsupportedError(f"{type(self).__name__} has no compiled loops")

    @property
    def fuses(self) -> bool:
        """Whether there is :meth:`encode_fused`."""
        return False

    @property
    def two_rounds(self) -> bool:
        """Whether the ranks add something up before they encode (``Collective.ALLREDUCE`` only)."""
        return False

    def prepared(self, spec: TensorSpec) -> Sequence[Section]:
        """Return what :meth:`prepare` returns of one tensor, as sections."""
        return ()

    def prepare(self, xs: Sequence[Array], spec: TensorSpec, ops: Ops, steps: Sequence[Step]) -> list[Array]:
        """Return what the ranks are to add up before they encode these tensors of one spec; see :attr:`two_rounds`."""
        raise UnsupportedError(f"{type(self).__name__} has one round")

    def encode_all(self, xs: Sequence[Array], spec: TensorSpec, ops: Ops, steps: Sequence[Step]) -> list[Payload]:
        """Encode tensors of one spec; may do it in less time than one by one."""
        return [self.encode(x, spec, ops, step) for x, step in zip(xs, steps, strict=True)]

    def learn(self, reduced: Array, memory: Mapping[str, Array], spec: TensorSpec, ops: Ops) -> dict[str, Array]:
        """Return the slots that change with what Horovod has reduced (``Collective.ALLREDUCE`` only)."""
        return {}

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of what is decoded is the tensor itself.

        It is a claim; :func:`hvd_compress.testing.check_compressor` tests it.
        """
        return False

    def delta(self, spec: TensorSpec) -> float:
        """Return a proven contraction: ``||x - C(x)||^2 <= (1 - delta) ||x||^2``, in expectation if it draws.

        Above 0, error feedback converges.  It is a claim as well, up to rounding.
        """
        return 0.0

    def compresses(self, spec: TensorSpec) -> bool:
        """Tell whether such a tensor is compressed; otherwise it travels dense."""
        return self.policy.route(spec.shape) is Route.EXCHANGE

    @property
    def selects_over_model(self) -> bool:
        """Whether it depends on all other tensors what is sent of one."""
        return False

    def remembers(self, spec: TensorSpec) -> bool:
        """Tell whether anything is remembered of such a tensor, dense ones' momentum included."""
        return self.compresses(spec) or self.has_momentum

    def stage(self, number: int) -> int:
        """Return which of :attr:`stages` step ``number`` of a parameter belongs to."""
        return 0

    @property
    def stages(self) -> Sequence[Compressor]:
        """The compressors that this one is made of, one after the other; usually itself alone."""
        return (self,)

    # --- Horovod's interface --------------------------------------------------------

    def compress(self, tensor: Any = None) -> tuple[Any, Any]:
        """Queue a gradient for the exchange; return what Horovod is to allreduce, and a context.

        Called by Horovod.  For a compressed tensor Horovod gets a *token*: one element, 1.0,
        that it scales as it would have scaled the gradient.

        Raises:
            UnsupportedError: integer tensors, or ops other than Average and Sum.
            UnboundTensorError: called from elsewhere for a tensor that is not bound.
        """
        if not isinstance(self, Compressor):
            # Called on the class, which then takes the tensor for self.
            raise ConfigError("expected an instance, as in compression=TopK(0.01), got the class itself")
        return self._adapter(tensor).compress(self, tensor)  # type: ignore[no-any-return]

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the reduced gradient: fresh, with the shape, dtype and device it had.

        The first call of a step exchanges what all ``compress`` calls have queued.  With
        ``ctx=None`` (Horovod's sparse gradients) the tensor is returned as it is.

        Raises:
            HandshakeError, WireFormatError, TransportError, NonFiniteGradientError.
            UnsupportedError: the optimizer is used on after a step that ended with an error.
        """
        if ctx is None:
            return tensor
        if tensor is None:
            raise UnsupportedError(
                f"{type(self).__name__} expected a reduced tensor, got None: an earlier step ended with an error, and "
                "Horovod has kept what was left of it; build hvd.DistributedOptimizer again"
            )
        return self._adapter(tensor).decompress(self, tensor, ctx)

    # AutoGraph would rewrite them and everything they call; it leaves alone what carries this attribute.
    vars(compress)["autograph_info__"] = vars(decompress)["autograph_info__"] = True

    def _adapter(self, tensor: Any) -> Any:
        framework = _framework(tensor)
        if framework is not None:
            return importlib.import_module(_ADAPTERS[framework])
        raise UnsupportedError(
            f"{type(self).__name__} expected a tensor of one of {', '.join(_ADAPTERS)}, got {type(tensor).__name__}"
        )

    def __hash__(self) -> int:
        # horovod.tensorflow caches traced functions by this hash; see tensorflow_salt.
        if "horovod.tensorflow" in sys.modules:
            salt = importlib.import_module("hvd_compress.adapters.callsite").tensorflow_salt()
            return hash((id(self), salt))
        return hash((id(self), None))

    # --- Use ------------------------------------------------------------------------

    @property
    def runtime(self) -> Runtime:
        """The state of this instance, for adapters."""
        return self._runtime  # type: ignore[attr-defined,no-any-return]

    @property
    def policy(self) -> SizePolicy:
        """Which tensors are compressed."""
        return SizePolicy(self.min_numel)

    def settings(self) -> dict[str, str]:
        """Return all settings by qualified name, as ranks compare them."""
        # A function is shown with its address, which differs between ranks.
        values = {f.name: re.sub(r" at 0x[0-9a-f]+", "", repr(getattr(self, f.name))) for f in fields(self)}
        return {f"{type(self).__name__}.{name}": value for name, value in values.items()}

    @property
    def has_momentum(self) -> bool:
        """Whether momentum is accumulated here, so that the optimizer must not do it again."""
        return isinstance(self.feedback, MomentumCorrection)

    def choose(self, name: str | None, spec: TensorSpec) -> Compressor:
        """Return the compressor of a parameter: this one, unless it is a ``Policy``."""
        return self

    def at(self, number: int) -> Compressor:
        """Return what compresses step ``number`` of a parameter."""
        return self.stages[self.stage(number)]

    def bind(self, named_parameters: Iterable[tuple[str, Any]]) -> None:
        """Name the parameters whose gradients are passed to ``compress`` by other code than Horovod's.

        Args:
            named_parameters: usually ``model.named_parameters()``.
        """
        self.runtime.bound.update({(_framework(p) or "", name): p for name, p in named_parameters})

    def describe(self, model: Any) -> str:
        """Return a table of what each parameter will do, and of the bytes it sends in a step.

        Args:
            model: a ``torch.nn.Module``, a Keras model, or ``(name, tensor)`` pairs.
        """
        return describe(self, model)

    def stats(self) -> dict[str, Any]:
        """Return what this rank has sent so far.

        ``bytes_sent`` counts payloads, dense tensors, tokens and headers; ``dense_bytes`` is
        what the same gradients would have taken uncompressed, ``ratio`` the quotient,
        ``steps`` the largest number of steps of any parameter, ``parameters`` the same for
        each.  ``exchange_bytes`` is what went through this package's own ``exchanges``, and
        ``handshake_bytes`` what agreeing on the layout took, once.
        """
        return self.runtime.telemetry.as_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and step counts, for ``torch.save``.

        Every rank has its own.  The residuals are copies.  Call it between steps.

        Raises:
            StateError: gradients are queued that have not been exchanged yet.
        """
        rank, size = world()
        return self.runtime.state_dict(type(self).__name__, rank, size)

    def load_state_dict(self, state: Any) -> None:
        """Load what :meth:`state_dict` returned.

        Args:
            state: this rank's state; or, to go on with another number of ranks, a list of
                the states of all ranks of the earlier run.  What is still owed, the sum of
                the residuals over the number of ranks, then stays the same.

        Raises:
            StateError: the state is of another rank, world size, compressor or model, or is no
                state; nothing is changed then.
        """
        rank, size = world()
        self.runtime.load_state_dict(state, type(self).__name__, rank, size)

    def rescale_residuals(self, factor: float) -> None:
        """Multiply all residuals, as after a loss scale changed from ``s`` to ``factor * s``.

        Raises:
            ConfigError: the factor is not a positive finite number.
        """
        number = is_number(factor)
        if not (number and math.isfinite(factor) and factor > 0):
            raise ConfigError(f"the factor must be a positive finite number, got {factor!r}")
        self.runtime.rescale(float(factor))

    def undo_step(self) -> None:
        """Put what the last step has sent back into the residuals, because the step is not applied.

        Call it on every rank after a step was skipped for another reason than NaN or infinity in
        a compressed gradient (that is noticed): a sum that overflowed, a loss that was rejected.
        Twice does no harm.

        Raises:
            UnsupportedError: under TensorFlow, or with ``EF21``.
        """
        if any("estimates" in state.slots for state in self.runtime.states().values()):
            raise UnsupportedError("undo_step() expected ErrorFeedback or MomentumCorrection, got EF21")
        self.runtime.undo()

    def __getstate__(self) -> dict[str, Any]:
        # Pickles and copies carry the settings alone; state is per process: use state_dict().
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self._start()


def is_quantiser(values: Any) -> bool:
    """Tell whether this can compress what another compressor has selected.

    It must have no state and one stage, and add up.
    """
    if not isinstance(values, Compressor) or values.collective is not Collective.ALLGATHER:
        return False
    many = TensorSpec((4096,), "float32")
    try:
        alone = len(values.stages) == 1 and values.stages[0] is values
        sections = values.sections(many) if alone and values.additive else []
    except UnsupportedError:
        return False
    # The layout of the whole must follow from the settings, and it is to take no more than the values themselves.
    fits = 0 < sum(section.nbytes for section in sections) <= many.numel * ITEMSIZE[many.dtype]
    return fits and not is_variable(sections) and not values.slots(many)


def _found_sections(compressor: Compressor, spec: TensorSpec) -> Sequence[Section]:
    """Find out what a payload consists of by encoding zeros."""
    ops = NumpyOps()
    zeros = np.zeros(spec.numel, spec.accumulator)
    memory = {slot.name: np.zeros(slot.count, slot.dtype) for slot in compressor.slots(spec)}
    payload = compressor.encode(zeros, spec, ops, dataclasses.replace(FIRST, memory=memory))
    return tuple(ArraySection(ops.dtype(array), array.size) for array in payload.arrays)
