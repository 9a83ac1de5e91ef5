"""``check_compressor`` passes what is right, however little of it is written, and finds what is wrong."""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest

from hvd_compress import Collective, Compressor, ErrorFeedback, Payload, UnsupportedError
from hvd_compress.errors import ContractError
from hvd_compress.step import FIRST, Slot
from hvd_compress.testing import check_compressor
from hvd_compress.wire import ArraySection


class Mean(Compressor):
    """Nothing but the two methods that must be there."""

    def encode(self, x, spec, ops, step=FIRST):
        mean = ops.sum(x) * (1 / spec.numel)
        return Payload((mean,), ops.all_finite(mean))

    def decode(self, arrays, spec, ops):
        return ops.zeros(spec.numel, spec.accumulator, arrays[0]) + arrays[0]


def test_a_compressor_of_two_methods_passes():
    check_compressor(Mean())
    check_compressor(Mean(feedback=ErrorFeedback()), frameworks=("torch",))


def test_it_passes_under_tensorflow():
    pytest.importorskip("tensorflow")
    check_compressor(Mean(feedback=ErrorFeedback()), frameworks=("numpy", "tensorflow"))


def test_an_unknown_framework():
    with pytest.raises(UnsupportedError, match=r"expected frameworks among numpy, torch, tensorflow, got \['jax'\]"):
        check_compressor(Mean(), ["jax"])


# --- What it must find --------------------------------------------------------------------


class MutatesInput(Mean):
    def encode(self, x, spec, ops, step=FIRST):
        x *= 2
        return super().encode(x, spec, ops, step)


class SendsAView(Mean):
    def encode(self, x, spec, ops, step=FIRST):
        return Payload((x,), ops.all_finite(x))

    def decode(self, arrays, spec, ops):
        return arrays[0] * 1.0


class WrongSections(Mean):
    def sections(self, spec):
        return (ArraySection(spec.accumulator, 2),)


class WrongDtypeOfSections(Mean):
    def sections(self, spec):
        return (ArraySection("float16", 1),)


class OneSectionTooMany(Mean):
    def sections(self, spec):
        return (ArraySection(spec.accumulator, 1),) * 2


class LosesShape(Mean):
    def decode(self, arrays, spec, ops):
        return super().decode(arrays, spec, ops)[:-1]


class LosesDtype(Mean):
    def decode(self, arrays, spec, ops):
        return ops.astype(super().decode(arrays, spec, ops), "float16")


class MovesZeros(Mean):
    def decode(self, arrays, spec, ops):
        return super().decode(arrays, spec, ops) + 1.0


class DividesByZero(Mean):
    def decode(self, arrays, spec, ops):
        return super().decode(arrays, spec, ops) * (arrays[0] / arrays[0])


class Overflows(Mean):
    def encode(self, x, spec, ops, step=FIRST):
        mean = ops.sqrt(ops.sum(x * x) * (1 / spec.numel))
        return Payload((mean,), ops.all_finite(x))


class HidesNaN(Mean):
    def encode(self, x, spec, ops, step=FIRST):
        return dataclasses.replace(super().encode(x, spec, ops, step), finite=ops.all_finite(0 * x[:1]))


class SendsNoNaN(Mean):
    def encode(self, x, spec, ops, step=FIRST):
        payload = super().encode(x, spec, ops, step)
        return Payload((ops.select(ops.abs(payload.arrays[0]) >= 0, payload.arrays[0], 0.0),), payload.finite)


class WrongResidual(Mean):
    def add_(self, x, payload, spec, ops, sign):
        return super().add_(x, payload, spec, ops, 1)


class CannotUndo(Mean):
    def add_(self, x, payload, spec, ops, sign):
        return super().add_(x, payload, spec, ops, -1)


class WrongSum(Mean):
    def combine(self, arrays, spec, ops):
        return super().combine(arrays, spec, ops) * 0.5


class Forgetful(Mean):
    calls: ClassVar = []

    def encode(self, x, spec, ops, step=FIRST):
        self.calls.append(1)
        return Payload((super().encode(x, spec, ops, step).arrays[0] * float(len(self.calls)),), ops.all_finite(x))


class SameNoise(Mean):
    unbiased = True

    def encode(self, x, spec, ops, step=FIRST):
        noise = ops.uniform(spec.numel, step.keys(self.seed, "noise", shared=True), x)
        return Payload((x + ops.astype(noise, spec.accumulator) * ops.abs(x),), ops.all_finite(x))

    def decode(self, arrays, spec, ops):
        return arrays[0] * 1.0


class NotUnbiased(Mean):
    unbiased = True


class NoContraction(Mean):
    def delta(self, spec):
        return 0.5


class NoDelta(Mean):
    def delta(self, spec):
        return 2.0


class DifferentPlaces(Mean):
    collective = Collective.ALLREDUCE

    def encode(self, x, spec, ops, step=FIRST):
        place = ops.uniform(1, step.keys(self.seed, "place"), x)
        return Payload(super().encode(x, spec, ops, step).arrays, ops.all_finite(x), (place,))

    def decode(self, arrays, spec, ops):
        return super().decode(arrays[:1], spec, ops)


class TwoToAdd(Mean):
    collective = Collective.ALLREDUCE

    def encode(self, x, spec, ops, step=FIRST):
        payload = super().encode(x, spec, ops, step)
        return Payload(payload.arrays * 2, payload.finite)


class UndeclaredSlot(Mean):
    def encode(self, x, spec, ops, step=FIRST):
        return dataclasses.replace(super().encode(x, spec, ops, step), memory={"secret": x})


class ShortSlot(UndeclaredSlot):
    def slots(self, spec):
        return (Slot("secret", 1, spec.accumulator),)


class RemembersNaN(Mean):
    """Says that all is finite of what is remembered, too."""

    def slots(self, spec):
        return (Slot("sum", 1, spec.accumulator),)

    def encode(self, x, spec, ops, step=FIRST):
        payload = super().encode(x, spec, ops, step)
        return dataclasses.replace(payload, memory={"sum": ops.sum(x) / (ops.max(ops.abs(x)) * 0.0)})


class TorchAlone(Mean):
    def decode(self, arrays, spec, ops):
        return super().decode(arrays, spec, ops) * (2.0 if ops.name == "torch" else 1.0)


class Unpicklable(Mean):
    def __getstate__(self):
        return {**super().__getstate__(), "seed": 5}


class Int64(Mean):
    def encode(self, x, spec, ops, step=FIRST):
        return Payload((ops.astype(x, "int64"),), ops.all_finite(x))


class TwoDimensional(Mean):
    def sections(self, spec):
        return (ArraySection(spec.accumulator, 1),)

    def encode(self, x, spec, ops, step=FIRST):
        return Payload((ops.reshape(super().encode(x, spec, ops, step).arrays[0], (1, 1)),), ops.all_finite(x))


EF = {"feedback": ErrorFeedback()}
BROKEN = [
    (MutatesInput, {}, "the gradient is not changed"),
    (SendsAView, {}, "a payload is a copy"),
    (WrongSections, {}, r"a section has the number of elements of its array .*: expected \(2,\), got \(1,\)"),
    (WrongDtypeOfSections, {}, "a section has the dtype of its array .*: expected 'float16', got 'float32'"),
    (OneSectionTooMany, {}, "there is an array for every section .*: expected 2, got 1"),
    (LosesShape, {}, r"decode returns a flat array .*: expected \(3000,\), got \(2999,\)"),
    (LosesDtype, {}, "decode returns the accumulator's dtype .*: expected 'float32', got 'float16'"),
    (MovesZeros, {}, r"zeros stay zeros \(numpy, float32 of shape \(60, 50\), step 0, zeros\): expected 0, got 3000"),
    (DividesByZero, {}, "what is decoded is finite if the gradient is .*zeros"),
    (Overflows, {}, "what is decoded is finite if the gradient is .*huge numbers"),
    (HidesNaN, {}, "payload.finite tells NaN and infinity .*inf at position 2999.*: expected False, got True"),
    (SendsNoNaN, {}, "NaN or infinity, which receivers must see"),
    (WrongResidual, EF, "what was applied plus the residual is the sum of the gradients"),
    (CannotUndo, EF, "give_back restores slot residual"),
    (WrongSum, {}, "combine returns the sum of what is decoded"),
    (Forgetful, {}, "the same seed, step and data give the same bytes"),
    (SameNoise, {}, "the noise of rounding differs between ranks"),
    (NotUnbiased, {}, "unbiased: the mean is the tensor .*expected 'a bias below"),
    (NoContraction, {}, r"delta: .*ordinary numbers\): expected 'at most 0.5', got 0\.99"),
    (NoDelta, {}, r"delta is a part .*expected 'a number in \[0, 1\]', got 2.0"),
    (DifferentPlaces, {}, "what is not sent is the same on all ranks"),
    (TwoToAdd, {}, "a payload that is added up is one array"),
    (UndeclaredSlot, {}, r"what is remembered has a slot .*expected 'one of \[\]', got 'secret'"),
    (ShortSlot, {}, "slot secret is as long as it says"),
    (RemembersNaN, {}, "slot sum stays finite"),
    (TorchAlone, {}, "torch decodes what numpy does"),
    (Unpicklable, {}, "it can be copied"),
    (Int64, {}, "a section has a dtype that can be sent"),
    (TwoDimensional, {}, "payload arrays are flat"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), BROKEN, ids=[kind.__name__ for kind, *_ in BROKEN])
def test_what_is_wrong_is_named(kind, settings, message):
    with pytest.raises(ContractError, match=message) as caught:
        check_compressor(kind(**settings))
    assert isinstance(caught.value, AssertionError)
    assert str(caught.value).startswith(f"{kind.__name__}(")


def test_the_input_of_a_failure_can_be_read_in_the_message():
    with pytest.raises(ContractError) as caught:
        check_compressor(LosesDtype())
    assert str(caught.value) == (
        "LosesDtype(min_numel=0): contract broken: decode returns the accumulator's dtype (numpy, float32 of "
        "shape (60, 50), step 0, ordinary numbers): expected 'float32', got 'float16'"
    )


def test_numpy_warnings_are_left_as_they_were():
    before = np.geterr()
    check_compressor(Mean(), ["numpy"])
    assert np.geterr() == before
