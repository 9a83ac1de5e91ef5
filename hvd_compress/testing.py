"""What every compressor keeps to, checked in one call, for compressors of your own too.

In a test::

    from hvd_compress.testing import check_compressor


    def test_mine():
        check_compressor(Mine())

Neither Horovod nor MPI is needed: ranks are simulated, and payloads go through the wire format.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from hvd_compress import wire
from hvd_compress.base import Collective, Compressor
from hvd_compress.codec import encode_step, give_back, learn, prepare_step, slots_of
from hvd_compress.errors import ContractError, UnsupportedError
from hvd_compress.feedback import ErrorFeedback
from hvd_compress.ops.base import ITEMSIZE, Array, Ops
from hvd_compress.packing import PACKED, Packed, unpacked
from hvd_compress.step import RESIDUAL, Payload, Step, TensorSpec

__all__ = ["ContractError", "check_compressor"]

_OPS = {"numpy": "NumpyOps", "torch": "TorchOps", "tensorflow": "TensorFlowOps"}
_MAIN = TensorSpec((60, 50), "float32")
_SPECS = [
    _MAIN,
    *(TensorSpec((60, 50), dtype) for dtype in ("float64", "float16", "bfloat16")),
    *(TensorSpec(shape, "float32") for shape in ((1,), (1, 1), (1, 1025), (33, 1), (3, 5, 7, 11))),
]
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, PACKED: 2.0**-6, "float32": 2.0**-23, "float64": 2.0**-52}
# Sums and products of a few thousand numbers are off by less than so many roundings.
_ROUNDINGS = 64
_RANKS = 3
_STEPS = 6
# Draws for what holds in expectation, and the standard errors that are allowed: by chance once in 10 million.
_DRAWS, _ERRORS = 600, 5.3


def check_compressor(compressor: Compressor, frameworks: Sequence[str] = ("numpy", "torch")) -> None:
    """Check everything that feedback, exchange and adapters expect of a compressor, and what it claims.

    Every stage is driven with tensors of several shapes and dtypes, of ordinary, tiny, huge,
    sparse and constant numbers, zeros, NaN and infinity, over several steps and simulated ranks.
    The claims are :attr:`~hvd_compress.base.Compressor.unbiased` and
    :meth:`~hvd_compress.base.Compressor.delta`.  Takes about a second.

    Args:
        compressor: an instance; its settings are used, but for ``min_numel``.
        frameworks: of ``"numpy"``, ``"torch"`` and ``"tensorflow"``; they must agree.

    Raises:
        ContractError: an ``AssertionError`` that says which contract is broken, for which
            input, what was expected and what came.
    """
    unknown = [name for name in frameworks if name not in _OPS]
    if unknown or not frameworks:
        raise UnsupportedError(f"check_compressor expected frameworks among {', '.join(_OPS)}, got {frameworks!r}")
    _check_copies(compressor)
    whole = _unlimited(compressor)
    with np.errstate(all="ignore"):
        for stage in map(_unlimited, _stages(whole)):
            for framework in frameworks:
                _check_stage(_Alone(stage), _ops_of(framework))
            _check_claims(_Alone(stage), frameworks)
        for framework in frameworks:
            _check_steps(whole, _ops_of(framework))
        _check_frameworks(whole, frameworks)


# --- Driving a compressor ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Alone:
    """A stage that compresses all steps, though otherwise stages take turns."""

    stage: Compressor

    def at(self, number: int) -> Compressor:
        return self.stage


class _Rank:
    """One rank that sends gradients of one tensor, checking what is true of every payload."""

    def __init__(self, compressor: Any, spec: TensorSpec, ops: Ops, rank: int = 0, size: int = 1) -> None:
        self.compressor, self.spec, self.ops = compressor, spec, ops
        self.rank, self.size, self.number = rank, size, 0
        self.memory: dict[str, Array] = {}
        # What the ranks have added up before they encode.
        self.agreed: Array | None = None
        # Of messages.
        self.seen, self.last = "", 0

    @property
    def algorithm(self) -> Compressor:
        """What compresses the next step."""
        algorithm: Compressor = self.compressor.at(self.number)
        return algorithm

    def step(self) -> Step:
        """Return the next step, with the memory as adapters pass it."""
        memory = {name: unpacked(x, self.spec.accumulator, self.ops) for name, x in self.memory.items()}
        return Step("weight", self.number, self.rank, self.size, memory, self.agreed)

    def encode(self, values: np.ndarray, seen: str) -> tuple[Payload, dict[str, Array]]:
        """Compress without remembering anything; ``seen`` is how messages call the values."""
        self.seen, self.last = seen, self.number
        gradient = _tensor(values, self.spec.dtype, self.ops)
        before = _bytes(gradient, self.ops)
        payload, new = encode_step(self.algorithm, gradient, self.spec, self.ops, self.step())
        if _bytes(gradient, self.ops) != before:
            self.fail("the gradient is not changed", "the same bytes", "others")
        sent = [_bytes(array, self.ops) for array in payload.arrays]
        if hasattr(gradient, "__setitem__"):
            # As the next backward pass does.
            gradient[...] = 7
            if [_bytes(array, self.ops) for array in payload.arrays] != sent:
                self.fail("a payload is a copy", "arrays of its own", "arrays that change with the gradient")
        return payload, new

    def send(self, values: np.ndarray, seen: str) -> tuple[np.ndarray, Payload]:
        """Compress a step; return what is decoded, as float64, and the payload."""
        payload, new = self.encode(values, seen)
        self.check_payload(payload)
        decoded = self.decode(payload)
        finite = bool(np.isfinite(values).all())
        self.expect("payload.finite tells NaN and infinity", finite, bool(_host(payload.finite, self.ops)))
        if finite != bool(np.isfinite(decoded).all()) and (finite or self.gathered):
            wanted = "finite numbers" if finite else "NaN or infinity, which receivers must see"
            self.fail("what is decoded is finite if the gradient is", wanted, decoded)
        self.check_memory(new)
        self.memory.update(new)
        if not self.gathered and finite and self.size == 1:
            self.learn(payload.arrays[0])
        self.number += 1
        return decoded, payload

    def learn(self, reduced: Array) -> None:
        """Take over what has been reduced."""
        self.memory.update(learn(self.algorithm, reduced, self.memory, self.spec, self.ops))

    @property
    def gathered(self) -> bool:
        """Whether payloads are gathered, and not added up by Horovod."""
        return self.algorithm.collective is Collective.ALLGATHER

    def decode(self, payload: Payload) -> np.ndarray:
        """Return what receivers make of a payload."""
        x = self.algorithm.decode((*payload.arrays, *payload.common), self.spec, self.ops)
        self.expect("decode returns the accumulator's dtype", self.spec.accumulator, self.ops.dtype(x))
        self.expect("decode returns a flat array", (self.spec.numel,), tuple(self.ops.shape(x)))
        return _numbers(x, self.ops)

    def check_payload(self, payload: Payload) -> None:
        """Compare arrays with sections, and send them through the wire format."""
        sections = list(self.algorithm.sections(self.spec))
        self.expect("there is an array for every section", len(sections), len(payload.arrays))
        host = self.ops.to_host(list(payload.arrays))
        for section, array, sent in zip(sections, payload.arrays, host, strict=True):
            self.expect("a section has the dtype of its array", section.dtype, self.ops.dtype(array))
            if section.dtype not in ITEMSIZE:
                self.fail("a section has a dtype that can be sent", f"one of {', '.join(ITEMSIZE)}", section.dtype)
            self.expect("payload arrays are flat", 1, sent.ndim)
            if isinstance(section, wire.CountedSection):
                continue  # its bytes depend on how many elements count
            encoded = section.encode(sent) if self.fits(section, sent) else sent
            self.expect("a section has as many bytes as it says", section.nbytes, encoded.nbytes)
        if not self.gathered:
            self.expect("a payload that is added up is one array", 1, len(sections))
            return
        for sent, received in zip(host, _through_the_wire(sections, [host]), strict=True):
            self.expect("what is received is what was sent", sent.tobytes(), received.tobytes())

    def fits(self, section: Any, array: np.ndarray) -> bool:
        """Tell whether a section says how many elements there are, raising if it is wrong."""
        count = getattr(section, "count", getattr(section, "k", None))
        if count is not None:
            self.expect("a section has the number of elements of its array", (count,), array.shape)
        return True

    def check_memory(self, new: Mapping[str, Array]) -> None:
        """Compare what is remembered with the slots."""
        slots = {slot.name: slot for slot in slots_of(self.algorithm, self.spec)}
        for name, x in new.items():
            if name not in slots:
                self.fail("what is remembered has a slot", f"one of {sorted(slots)}", name)
            dtype = PACKED if isinstance(x, Packed) else self.ops.dtype(x)
            self.expect(f"slot {name} has its dtype", slots[name].dtype, dtype)
            self.expect(f"slot {name} is as long as it says", (slots[name].count,), tuple(x.shape))
            if not np.isfinite(_numbers(x, self.ops)).all():
                self.fail(f"slot {name} stays finite", "finite numbers", x)

    def expect(self, contract: str, expected: Any, got: Any) -> None:
        """Raise ContractError unless both are equal."""
        if expected != got:
            self.fail(contract, expected, got)

    def close(self, contract: str, expected: np.ndarray, got: np.ndarray, tolerance: float) -> None:
        """Raise ContractError if arrays differ by more than ``tolerance``."""
        worst = int(np.argmax(np.abs(expected - got))) if expected.size else 0
        if expected.size and not np.abs(expected - got).max() <= tolerance:
            where = f"{got.flat[worst]!r} at position {worst}"
            self.fail(contract, f"{expected.flat[worst]!r}, give or take {tolerance:.3g}", where)

    def fail(self, contract: str, expected: Any, got: Any) -> NoReturn:
        """Raise ContractError."""
        where = f"{self.ops.name}, {self.spec.dtype} of shape {self.spec.shape}, step {self.last}, {self.seen}"
        raise _broken(self.compressor.at(self.last), contract, where, expected, got)


def _broken(compressor: Compressor, contract: str, where: str, expected: Any, got: Any) -> ContractError:
    said = f"contract broken: {contract} ({where}): expected {expected!r:.200}, got {got!r:.200}"
    return ContractError(f"{compressor!r:.200}: {said}")


def _ops_of(framework: str) -> Ops:
    module = importlib.import_module(f"hvd_compress.ops.{framework}")
    ops: Ops = getattr(module, _OPS[framework])()
    return ops


def _tensor(values: np.ndarray, dtype: str, ops: Ops) -> Array:
    """Return a tensor of the framework; where it can be, not contiguous, as transposed weights are."""
    if ops.name == "numpy":
        return np.array(values, dtype, order="F")
    framework = importlib.import_module(ops.name)
    if ops.name == "tensorflow":
        return framework.cast(framework.constant(values), dtype)
    turned = np.array(values.T, np.float64, order="C")
    return framework.from_numpy(turned).to(getattr(framework, dtype)).permute(*range(values.ndim - 1, -1, -1))


def _host(x: Array, ops: Ops) -> np.ndarray:
    x = x.unpack() if isinstance(x, Packed) else x
    return np.asarray(ops.to_host([x])[0])


def _numbers(x: Array, ops: Ops) -> np.ndarray:
    """Return float64 numbers."""
    host = _host(x, ops)
    if host.dtype == np.uint16:  # bfloat16
        host = (host.astype(np.uint32) << 16).view(np.float32)
    return host.astype(np.float64)


def _bytes(x: Array, ops: Ops) -> bytes:
    return _host(x, ops).tobytes()


def _through_the_wire(sections: Sequence[wire.Section], ranks: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Encode each rank's arrays to a message, and decode all: an array of shape ``(ranks, count)`` a section."""
    body = sum(section.nbytes for section in sections)
    header = wire.Header(wire.Kind.DATA, bytes(8), 0, body)
    if wire.is_variable(sections):
        return wire.decode_bodies([wire.encode_body(sections, arrays) for arrays in ranks], sections)
    messages = [wire.encode_message(header, sections, arrays, wire.HEADER_BYTES + body) for arrays in ranks]
    return wire.decode_body(np.stack(messages), sections)


def _unlimited(compressor: Compressor) -> Compressor:
    """Return a copy that compresses small tensors too."""
    twin = copy.copy(compressor)
    object.__setattr__(twin, "min_numel", 0)
    return twin


def _stages(compressor: Compressor) -> Sequence[Compressor]:
    try:
        return compressor.stages
    except UnsupportedError:  # a schedule that is a function
        return [compressor.at(0)]


def _specs(stage: Compressor, ops: Ops) -> list[TensorSpec]:
    """Return what to check: what is compressed, or everything where nothing is; NumPy has no bfloat16."""
    able = [spec for spec in _SPECS if ops.name != "numpy" or "bfloat16" not in _dtypes(stage, spec)]
    return [spec for spec in able if stage.compresses(spec)] or able


def _dtypes(stage: Compressor, spec: TensorSpec) -> set[str]:
    slots = {slot.dtype for slot in slots_of(stage, spec)}
    # Sections that are found out by encoding need NumPy, which cannot do it for bfloat16.
    own = type(stage).sections is not Compressor.sections
    return {spec.dtype, *slots, *(section.dtype for section in (stage.sections(spec) if own else ()))}


def _inputs(spec: TensorSpec) -> dict[str, np.ndarray]:
    """Return finite data of many kinds, all of which the dtype can hold."""
    rng = np.random.default_rng(0)
    ordinary = rng.standard_normal(spec.shape)
    sparse = np.where(rng.random(spec.shape) < 0.01, ordinary, 0.0)
    sparse.flat[spec.numel // 2] = 1.0
    tails = ordinary * np.exp(2 * np.abs(rng.standard_normal(spec.shape)))
    largest, smallest = (1e4, 1e-6) if spec.dtype == "float16" else (1e30, 1e-30)
    return {
        "ordinary numbers": ordinary,
        "sparse numbers": sparse,
        "heavy tails": np.clip(tails, -largest, largest),
        "one constant": np.full(spec.shape, -0.1),
        "huge numbers": ordinary * largest / 10,
        "tiny numbers": ordinary * smallest,
    }


def _gradients(spec: TensorSpec, ranks: int, steps: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((steps, ranks, *spec.shape))


# --- Contracts --------------------------------------------------------------------------


def _check_copies(compressor: Compressor) -> None:
    twins = {"copied": copy.deepcopy(compressor)}
    # Python itself cannot pickle classes of a function or an interactive session, nor lambdas as settings.
    with contextlib.suppress(pickle.PicklingError, AttributeError):
        twins["pickled"] = pickle.loads(pickle.dumps(compressor))
    for way, twin in twins.items():
        if (type(twin), twin.settings()) != (type(compressor), compressor.settings()):
            raise _broken(compressor, f"it can be {way}", way, compressor.settings(), twin.settings())


def _check_stage(alone: _Alone, ops: Ops) -> None:
    """Check one stage alone, from its first step on."""
    specs = _specs(alone.stage, ops)
    for spec in specs:
        for seen, values in _inputs(spec).items():
            rank = _Rank(alone, spec, ops)
            for _ in range(2):
                rank.send(values, seen)
            if seen == "ordinary numbers":
                rank.send(values[::-1], seen)
        _check_zeros(_Rank(alone, spec, ops))
        _check_identity(_Rank(alone, spec, ops))
    for spec in specs[:1]:
        _check_nonfinite(alone, spec, ops)
        _check_give_back(_Rank(alone, spec, ops))
        _check_randomness(alone, spec, ops)
        _check_ranks([_Rank(alone, spec, ops, rank, _RANKS) for rank in range(_RANKS)])


def _check_steps(whole: Compressor, ops: Ops) -> None:
    """Check what is remembered over steps and over changes from one stage to the next."""
    numbers = sorted({*range(_STEPS), *_changes(whole)})
    if any("bfloat16" in _dtypes(whole.at(n), _MAIN) for n in numbers) and ops.name == "numpy":
        return
    ranks = [_Rank(whole, _MAIN, ops, rank, _RANKS) for rank in range(_RANKS)]
    for number, gradients in zip(numbers, _gradients(_MAIN, _RANKS, len(numbers)), strict=True):
        for rank in ranks:
            rank.number = number
        _exchanged(ranks, gradients)
    _check_identity(_Rank(whole, _MAIN, ops))


def _changes(whole: Compressor) -> Iterator[int]:
    """Yield the steps around those in which another stage begins."""
    known = {whole.stage(0)}
    for number in range(1, 4096):
        if whole.stage(number) not in known:
            known.add(whole.stage(number))
            yield from (number - 1, number, number + 1)


def _check_zeros(rank: _Rank) -> None:
    for _ in range(2):
        decoded, _ = rank.send(np.zeros(rank.spec.shape), "zeros")
        rank.expect("zeros stay zeros", 0, int(np.count_nonzero(decoded)))
        for name, x in rank.memory.items():
            rank.expect(f"slot {name} of zeros stays zero", 0, int(np.count_nonzero(_numbers(x, rank.ops))))


def _check_identity(rank: _Rank) -> None:
    """Error feedback: what was applied and what is kept is all there was."""
    applied, due, largest = np.zeros(rank.spec.numel), np.zeros(rank.spec.numel), 0.0
    for values in _gradients(rank.spec, 1, _STEPS)[:, 0]:
        if rank.algorithm.feedback != ErrorFeedback():
            return
        decoded, _ = rank.send(values, "ordinary numbers")
        applied += decoded
        due += _numbers(_tensor(values.reshape(-1), rank.spec.dtype, rank.ops), rank.ops)
        kept = _numbers(rank.memory[RESIDUAL], rank.ops)
        largest = max(largest, np.abs(decoded).max(), np.abs(kept).max(), np.abs(due).max())
    tolerance = _ROUNDINGS * _EPSILON[rank.spec.accumulator] * largest
    rank.close("what was applied plus the residual is the sum of the gradients", due, applied + kept, tolerance)


def _check_nonfinite(alone: _Alone, spec: TensorSpec, ops: Ops) -> None:
    for bad, place in ((np.nan, 0), (np.inf, -1), (-np.inf, 17), (-np.nan, 1234)):
        rank = _Rank(alone, spec, ops)
        good = _gradients(rank.spec, 1, 3)[:, 0]
        for values in good[:2]:
            rank.send(values, "ordinary numbers")
        before = {name: _bytes(x, rank.ops) for name, x in rank.memory.items()}
        poisoned = good[2].copy()
        poisoned.flat[place % poisoned.size] = bad
        rank.send(poisoned, f"{bad} at position {place % poisoned.size}")
        for name, x in rank.memory.items():
            if name in before:
                rank.expect(f"NaN and infinity leave slot {name} as it was", before[name], _bytes(x, rank.ops))
        rank.send(good[2], f"the step after {bad}")


def _check_give_back(rank: _Rank) -> None:
    """What was taken out to be sent can be put back."""
    values, feedback = _gradients(rank.spec, 1, 3)[:, 0], rank.algorithm.feedback
    if feedback is None:
        return
    for gradient in values[:2]:
        rank.send(gradient, "ordinary numbers")
    before, step, algorithm = dict(rank.memory), rank.step(), rank.algorithm
    x, _ = feedback.compensate(_tensor(values[2], rank.spec.dtype, rank.ops), rank.spec, rank.ops, step)
    expected = {name: _numbers(old, rank.ops) for name, old in {**before, RESIDUAL: x}.items()}
    _, payload = rank.send(values[2], "ordinary numbers")
    memory = {name: rank.ops.copy(unpacked(x, rank.spec.accumulator, rank.ops)) for name, x in rank.memory.items()}
    for name, restored in give_back(algorithm, memory, payload, rank.spec, rank.ops).items():
        largest = max(np.abs(expected[name]).max(), np.abs(_numbers(restored, rank.ops)).max())
        slots = {slot.name: slot.dtype for slot in slots_of(algorithm, rank.spec)}
        tolerance = _ROUNDINGS * _EPSILON[slots[name]] * largest
        rank.close(f"give_back restores slot {name}", expected[name], _numbers(restored, rank.ops), tolerance)


def _check_randomness(alone: _Alone, spec: TensorSpec, ops: Ops) -> None:
    values = _inputs(spec)["ordinary numbers"]

    def sent(number: int = 0, rank: int = 0, compressor: _Alone = alone) -> list[bytes]:
        one = _Rank(compressor, spec, ops, rank, _RANKS)
        one.number = number
        payload, _ = one.encode(values, "ordinary numbers")
        return [_bytes(array, ops) for array in payload.arrays]

    here = _Rank(alone, spec, ops)
    here.seen = "ordinary numbers"
    first = sent()
    for twin in (alone, copy.deepcopy(alone)):
        here.expect("the same seed, step and data give the same bytes", first, sent(compressor=twin))
    if here.gathered and alone.stage.unbiased and sent(number=1) != first and sent(rank=1) == first:
        here.fail("the noise of rounding differs between ranks, so that it averages out", "other bytes", "the same")
    if not here.gathered:
        ranks = [_Rank(alone, spec, ops, rank, _RANKS) for rank in range(_RANKS)]
        _agree(ranks, [values] * _RANKS)
        payloads = [rank.encode(values, "ordinary numbers")[0] for rank in ranks]
        common = [[_known(x, ops) for x in payload.common] for payload in payloads]
        here.expect("what is not sent is the same on all ranks", [common[0]] * _RANKS, common)


def _known(x: Any, ops: Ops) -> Any:
    return x if isinstance(x, float) else _bytes(x, ops)


def _check_ranks(ranks: Sequence[_Rank]) -> None:
    for gradients in _gradients(ranks[0].spec, len(ranks), 2):
        _exchanged(ranks, gradients)


def _agree(ranks: Sequence[_Rank], gradients: Sequence[np.ndarray]) -> None:
    """Make the first round of compressors that have two."""
    first = ranks[0]
    spec, ops, algorithm = first.spec, first.ops, first.algorithm
    sums: Any = None
    for rank, values in zip(ranks, gradients, strict=True):
        rank.agreed = None
        one = prepare_step(algorithm, _tensor(values, spec.dtype, ops), spec, ops, rank.step())
        if one is not None:
            size = sum(section.nbytes for section in algorithm.prepared(spec))
            first.expect("prepare returns what prepared says", size, len(_bytes(one, ops)))
            sums = one if sums is None else sums + one
    for rank in ranks:
        rank.agreed = sums


def _exchanged(ranks: Sequence[_Rank], gradients: np.ndarray) -> None:
    """Send one step of all ranks, and compare what the receivers combine with the sum of what they decode."""
    first = ranks[0]
    _agree(ranks, list(gradients))
    algorithm, spec, ops, gathered = first.algorithm, first.spec, first.ops, first.gathered
    sent = [rank.send(values, "ordinary numbers") for rank, values in zip(ranks, gradients, strict=True)]
    expected = np.sum([decoded for decoded, _ in sent], axis=0)
    payloads = [payload for _, payload in sent]
    eps = _EPSILON[spec.accumulator]
    if gathered:
        sections = algorithm.sections(spec)
        arrays = _through_the_wire(sections, [ops.to_host(list(payload.arrays)) for payload in payloads])
        moved = ops.from_host(arrays, [section.dtype for section in sections], payloads[0].arrays[0])
        total = algorithm.combine(moved, spec, ops)
    else:
        reduced = payloads[0].arrays[0]
        eps = max(eps, _EPSILON[ops.dtype(reduced)])
        for payload in payloads[1:]:
            reduced = reduced + payload.arrays[0]
        total = algorithm.decode((reduced, *payloads[0].common), spec, ops)
        for rank in ranks:
            rank.memory.update(learn(algorithm, ops.copy(reduced), rank.memory, spec, ops))
    first.expect("combine returns the accumulator's dtype", spec.accumulator, ops.dtype(total))
    first.expect("combine returns a flat array", (spec.numel,), tuple(ops.shape(total)))
    if algorithm.additive:
        largest = max(np.abs(decoded).max() for decoded, _ in sent)
        tolerance = _ROUNDINGS * len(ranks) * eps * largest
        first.close("combine returns the sum of what is decoded", expected, _numbers(total, ops), tolerance)


def _check_frameworks(whole: Compressor, frameworks: Sequence[str]) -> None:
    """All frameworks decode the same, up to the order of sums."""
    results: dict[str, list[np.ndarray]] = {}
    for framework in frameworks:
        rank = _Rank(whole, _MAIN, _ops_of(framework))
        if framework == "numpy" and any("bfloat16" in _dtypes(whole.at(n), _MAIN) for n in range(_STEPS)):
            continue
        gradients = _gradients(_MAIN, 1, _STEPS)[:, 0]
        results[framework] = [rank.send(values, "ordinary numbers")[0] for values in gradients]
    for framework, decoded in list(results.items())[1:]:
        base, other = next(iter(results.items()))
        for number, (a, b) in enumerate(zip(other, decoded, strict=True)):
            rank = _Rank(whole, _MAIN, _ops_of(framework))
            rank.last, rank.seen = number, "ordinary numbers"
            off = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(a)), 1e-300)
            if off > 1e-3:
                rank.fail(f"{framework} decodes what {base} does", "a relative difference below 0.001", off)


# --- Claims -----------------------------------------------------------------------------


def _check_claims(alone: _Alone, frameworks: Sequence[str]) -> None:
    """Check them on one framework: all compute the same."""
    for ops in map(_ops_of, frameworks):
        for spec in _specs(alone.stage, ops)[:1]:
            _check_unbiased(alone, spec, ops)
            _check_delta(alone, spec, ops)
            return


def _draws(alone: _Alone, spec: TensorSpec, ops: Ops, values: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` independent compressions of ``values``."""
    x = ops.reshape(_tensor(values.reshape(-1), spec.accumulator, ops), (spec.numel,))
    made = []
    for i in range(count):
        memory = {s.name: ops.zeros(s.count, s.dtype, x) for s in alone.stage.slots(spec)}
        step = Step(f"weight{i}", i, i % _RANKS, _RANKS, memory)
        payload = alone.stage.encode(x, spec, ops, step)
        made.append(_numbers(alone.stage.decode((*payload.arrays, *payload.common), spec, ops), ops))
    return np.array(made)


def _check_unbiased(alone: _Alone, spec: TensorSpec, ops: Ops) -> None:
    """Test that the mean of many draws is the tensor, along directions that a bias would show in."""
    if not alone.stage.unbiased:
        return
    spec = TensorSpec((9, 29), spec.dtype)
    rng = np.random.default_rng(2)
    values = rng.standard_normal(spec.shape) * np.exp(rng.standard_normal(spec.shape))
    values[rng.random(spec.shape) < 0.1] = 0
    x = values.astype(spec.accumulator).astype(np.float64).reshape(-1)
    edges = np.zeros((3, spec.numel))
    edges[0, :16] = edges[1, -16:] = edges[2, ::2] = 1
    directions = np.array([x, np.sign(x), np.ones_like(x), *edges, *rng.choice([-1.0, 1.0], (4, spec.numel))])
    along = (_draws(alone, spec, ops, values, _DRAWS) - x) @ directions.T
    errors = along.std(axis=0) / np.sqrt(_DRAWS) + 1e-6 * np.abs(directions) @ np.abs(x)
    scores = np.abs(along.mean(axis=0)) / errors
    if not scores.max() < _ERRORS:
        one = _Rank(alone, spec, ops)
        one.seen = f"{_DRAWS} draws"
        one.fail("unbiased: the mean is the tensor", f"a bias below {_ERRORS} standard errors", float(scores.max()))


def _check_delta(alone: _Alone, spec: TensorSpec, ops: Ops) -> None:
    """Test the contraction that is claimed."""
    delta = alone.stage.delta(spec)
    one = _Rank(alone, spec, ops)
    one.seen = "delta"
    if not 0 <= delta <= 1:
        one.fail("delta is a part", "a number in [0, 1]", delta)
    if not delta:
        return
    for seen in ("ordinary numbers", "sparse numbers", "heavy tails", "one constant"):
        values = _inputs(spec)[seen]
        x = values.astype(spec.accumulator).astype(np.float64).reshape(-1)
        ratios = ((_draws(alone, spec, ops, values, 48) - x) ** 2).sum(axis=1) / (x**2).sum()
        allowed = 1 - delta + _ERRORS * ratios.std() / np.sqrt(len(ratios)) + 1e-6
        if not ratios.mean() <= allowed:
            one.seen = seen
            one.fail("delta: ||x - C(x)||^2 / ||x||^2", f"at most {1 - delta:.6g}", float(ratios.mean()))
