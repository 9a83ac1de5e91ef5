"""``TopK``: how much it keeps, that it contracts, that it needs feedback, and its settings."""

import copy
import dataclasses
import math
import pickle
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_compress import Compressor, ConfigError, ErrorFeedback, Step, TensorSpec, TopK
from hvd_compress.adapters.torch.encoding import encode as _encode
from hvd_compress.codec import encode_step
from hvd_compress.compressors import ALL
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.torch import TorchOps
from hvd_compress.state import ParameterState

NUMPY, TORCH = NumpyOps(), TorchOps()


def spec_of(n, dtype="float32"):
    return TensorSpec((1, n), dtype)


# --- How much is kept ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "n", "k"),
    [
        (0.1, 30, 3),  # 0.1 * 30 is 3.0000000000000004
        (0.1, 31, 4),
        (0.07, 100, 7),  # 7.000000000000001
        (0.29, 100, 29),  # 28.999999999999996
        (1 / 3, 3, 1),
        (1 / 3, 4, 2),
        (0.5, 7, 4),
        (0.001, 1000, 1),
        (0.001, 1001, 2),
        (0.001, 25_000_000, 25_000),
        (1, 7, 7),
        (1.0, 1, 1),
        (1, 10**6, 10**6),
        (1e-9, 1000, 1),
        (5e-324, 10**6, 1),
        (Fraction(1, 10), 30, 3),
        (np.float32(0.5), 10, 5),
        (np.float32(0.1), 30, 3),
    ],
)
def test_kept_is_the_ratio_rounded_up(ratio, n, k):
    assert TopK(ratio).kept(spec_of(n)) == k


@pytest.mark.parametrize(("ratio", "n", "k"), [(1.0, 2**31 - 1, 2**31 - 1), (0.5, 2**31 - 2, 2**30 - 1)])
def test_kept_of_the_largest_tensors(ratio, n, k):
    assert TopK(ratio).kept(spec_of(n)) == k


@settings(deadline=None)
@given(n=st.integers(1, 10**6), hundredths=st.integers(1, 100))
def test_kept_of_whole_percentages_is_exact(n, hundredths):
    assert TopK(hundredths / 100).kept(spec_of(n)) == max(1, -(-hundredths * n // 100))


@settings(deadline=None)
@given(n=st.integers(1, 10**6), ratio=st.floats(0, 1, exclude_min=True))
def test_kept_is_in_range_and_at_least_the_ratio(n, ratio):
    k = TopK(ratio).kept(spec_of(n))
    assert 1 <= k <= n
    assert ratio * n - 1e-8 * n <= k <= max(1, ratio * n + 1)


@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_sections_depend_on_the_spec_alone(dtype, size):
    spec = TensorSpec((100, 300), dtype)
    indices, values = TopK(0.01).sections(spec)
    assert (indices.n, indices.k, indices.dtype) == (30_000, 300, "int32")
    assert (values.count, values.dtype, values.nbytes) == (300, dtype, 300 * size)
    assert list(TopK(0.01).sections(TensorSpec((30_000, 1), dtype))) == [indices, values]


# --- What is sent -------------------------------------------------------------------


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), ratio=st.floats(0.001, 1))
def test_it_is_a_contraction(ops, data, ratio):
    elements = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
    a = data.draw(arrays(np.float32, st.integers(1, 80), elements=elements))
    spec, compressor = spec_of(len(a)), TopK(ratio)
    x = a.copy() if ops is NUMPY else torch.from_numpy(a.copy())
    payload = compressor.encode(x, spec, ops)
    assert x.tolist() == a.tolist()
    rest = np.asarray(compressor.add_(x, payload, spec, ops, -1), np.float64)
    # Values travel as they are, so what was sent leaves exactly zeros.
    assert (rest[np.asarray(payload.arrays[0])] == 0).all()
    whole = np.float64(a)
    bound = (1 - compressor.kept(spec) / len(a)) * (whole**2).sum()
    # Both sides are sums of at most 80 squares in float64.
    assert (rest**2).sum() <= bound * (1 + 80 * 2**-52) + 1e-300


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_add_undoes_subtract_and_combine_adds_up(ops, dtype):
    spec, compressor = spec_of(6, dtype), TopK(0.5)
    wide = getattr(np, spec.accumulator)
    xs = [np.array(v, wide) for v in ([5, 0, -4, 0, 3, 1], [0, 7, -4, 6, 0, 2])]
    xs = xs if ops is NUMPY else [torch.from_numpy(x) for x in xs]
    payloads = [compressor.encode(x, spec, ops) for x in xs]
    assert [p.arrays[0].tolist() for p in payloads] == [[0, 2, 4], [1, 2, 3]]
    assert all(ops.dtype(p.arrays[1]) == dtype for p in payloads)
    for x, payload in zip(xs, payloads, strict=True):
        before = x.tolist()
        rest = compressor.add_(x, payload, spec, ops, -1)
        assert rest is x
        assert [rest[int(i)] for i in payload.arrays[0]] == [0, 0, 0]
        assert compressor.add_(rest, payload, spec, ops, 1).tolist() == before
    stack = np.stack if ops is NUMPY else torch.stack
    gathered = [stack([p.arrays[i] for p in payloads]) for i in (0, 1)]
    total = compressor.combine(gathered, spec, ops)
    assert ops.dtype(total) == spec.accumulator
    expected = np.zeros(6, wide)
    for payload in payloads:
        expected[np.asarray(payload.arrays[0])] += np.asarray(payload.arrays[1]).astype(wide)
    assert total.tolist() == expected.tolist()


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_combine_adds_in_rank_order(ops):
    indices, values = np.array([[2]] * 3, np.int32), np.array([[1], [1e8], [-1e8]], np.float32)
    arrays = [indices, values] if ops is NUMPY else [torch.from_numpy(indices), torch.from_numpy(values)]
    # 1 + 1e8 is 1e8 in float32; in any other order the 1 would survive.
    assert TopK(0.25).combine(arrays, spec_of(4), ops).tolist() == [0, 0, 0, 0]


# --- Why feedback is the default --------------------------------------------------------


def descend(ops, feedback, ratio=0.05, n=20, ranks=2, steps=1500):
    """Minimise the mean over ranks of ``|x - target|^2 / 2 + pull_rank * x[0]``; the pulls cancel.

    The pull is each rank's largest component at every step, so ``k = 1`` sends nothing else.
    Returns how far each coordinate is from the minimum.
    """
    compressor, spec = TopK(ratio, feedback=feedback), spec_of(n, "float64")
    target = np.where(np.arange(n) % 2, 0.5, -0.5)
    states = [ParameterState("x") for _ in range(ranks)]
    x = np.zeros(n)
    for step in range(steps):
        sent = []
        for rank in range(ranks):
            gradient = x - target
            gradient[0] += (-1) ** rank
            sent.append(encode(compressor, gradient, spec, states[rank], ops))
        gathered = [np.stack(a) for a in zip(*sent, strict=True)]
        if ops is TORCH:
            gathered = [torch.from_numpy(a) for a in gathered]
        x = x - 0.1 / (1 + step / 100) * np.asarray(compressor.combine(gathered, spec, ops)) / ranks
    return np.abs(x - target)


def encode(compressor, gradient, spec, state, ops):
    if ops is TORCH:
        arrays = _encode(compressor, torch.from_numpy(gradient)[None], spec, "x", state).arrays
        return [a.numpy() for a in arrays]
    if compressor.feedback is None:
        return compressor.encode(gradient, spec, ops).arrays
    payload, new = encode_step(compressor, gradient[None], spec, ops, Step(memory=state.memory()))
    state.store(new)
    return payload.arrays


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_top_k_converges_only_with_feedback(ops):
    dense = descend(ops, None, ratio=1.0)
    without = descend(ops, None)
    with_feedback = descend(ops, ErrorFeedback())
    assert dense.max() < 1e-6
    assert (without[1:] == 0.5).all(), "all but the first coordinate have not moved at all"
    # A coordinate waits until its residual outgrows the pull of 1, so it is off by about the last step size, 0.006.
    assert with_feedback.max() < 0.02


# --- Settings ---------------------------------------------------------------------------

RATIO = "TopK.ratio must be a number in (0, 1], got "
FEEDBACK = "TopK.feedback must be ErrorFeedback() or None, got "
TRANSPORT = "TopK.transport must be one of 'auto', 'mpi', 'horovod', got "
NONFINITE = "TopK.on_nonfinite must be one of 'propagate', 'raise', got "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 10}, RATIO + "10 (int)"),
        ({"ratio": 0}, RATIO + "0 (int)"),
        ({"ratio": -1}, RATIO + "-1 (int)"),
        ({"ratio": 1.0000001}, RATIO + "1.0000001 (float)"),
        ({"ratio": "1%"}, RATIO + "'1%' (str)"),
        ({"ratio": True}, RATIO + "True (bool)"),
        ({"ratio": math.nan}, RATIO + "nan (float)"),
        ({"ratio": math.inf}, RATIO + "inf (float)"),
        ({"ratio": None}, RATIO + "None (NoneType)"),
        ({"ratio": 1j}, RATIO + "1j (complex)"),
        ({"feedback": True}, FEEDBACK + "True (bool)"),
        ({"feedback": ErrorFeedback}, FEEDBACK + repr(ErrorFeedback) + " (ABCMeta)"),
        ({"min_numel": -1}, "TopK.min_numel must be a whole number, 0 or more, got -1 (int)"),
        ({"min_numel": 1.5}, "TopK.min_numel must be a whole number, 0 or more, got 1.5 (float)"),
        ({"min_numel": True}, "TopK.min_numel must be a whole number, 0 or more, got True (bool)"),
        ({"seed": -1}, "TopK.seed must be a whole number, 0 or more, got -1 (int)"),
        ({"seed": None}, "TopK.seed must be a whole number, 0 or more, got None (NoneType)"),
        ({"transport": "nccl"}, TRANSPORT + "'nccl' (str)"),
        ({"transport": None}, TRANSPORT + "None (NoneType)"),
        ({"on_nonfinite": "ignore"}, NONFINITE + "'ignore' (str)"),
        ({"on_nonfinite": ["raise"]}, NONFINITE + "['raise'] (list)"),
    ],
    ids=str,
)
def test_a_wrong_setting_says_what_was_expected_and_what_came(arguments, message):
    with pytest.raises(ConfigError) as caught:
        TopK(**{"ratio": 0.1, **arguments})
    assert str(caught.value) == message


def test_an_unknown_setting_is_named_with_those_there_are():
    message = r"^TopK expected settings among .*min_numel.*, got 'min_nummel'; did you mean min_numel\?$"
    with pytest.raises(ConfigError, match=message):
        TopK(0.1, min_nummel=3)
    with pytest.raises(ConfigError, match=r"got 'xyzzy'$"):
        TopK(0.1, xyzzy=3)


def test_the_class_in_place_of_an_instance():
    with pytest.raises(ConfigError, match=r"expected an instance, as in compression=TopK\(0.01\), got the class"):
        TopK.compress(torch.ones(3))


@pytest.mark.parametrize(("ratio", "said"), [(1, True), (1.0, False), (0.01, False)])
def test_one_as_if_it_were_one_percent(ratio, said, caplog):
    TopK(ratio)
    assert ("for 1 % write TopK(0.01)" in caplog.text) == said


def test_positional_and_missing_settings_are_type_errors():
    with pytest.raises(TypeError, match="positional"):
        TopK(0.1, None)
    with pytest.raises(TypeError, match="ratio"):
        TopK()


def test_defaults_and_all_settings_are_compared_between_ranks():
    compressor = TopK(0.5)
    assert compressor.feedback == ErrorFeedback()
    assert compressor.settings() == {
        "TopK.ratio": "0.5",
        "TopK.feedback": "ErrorFeedback()",
        "TopK.min_numel": "1024",
        "TopK.seed": "0",
        "TopK.transport": "'auto'",
        "TopK.on_nonfinite": "'propagate'",
        "TopK.values": "None",
        "TopK.scope": "'tensor'",
    }


class Unpicklable:
    """Like an open connection, this can be neither copied nor pickled."""

    busy = False

    def __init__(self):
        self.lock = threading.Lock()


def required(kind):
    """Return values for the settings that have no default."""
    return {f.name: 0.25 for f in dataclasses.fields(kind) if f.name in ("ratio", "tau")}


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
@pytest.mark.parametrize("name", ALL)
def test_copies_carry_the_settings_and_no_state(name, duplicate):
    kind = ALL[name]
    first = required(kind)
    original = kind(**first, min_numel=3, seed=7, transport="horovod", on_nonfinite="raise")
    scope = original.runtime.scope("torch", "allreduce", [], dict)
    original.runtime.entry(scope, "w", "w").residual = np.ones(3)
    scope.exchanges["0"] = Unpicklable()
    twin = duplicate(original)
    assert type(twin) is kind
    assert twin.settings() == original.settings()
    assert twin.runtime is not original.runtime
    assert twin.state_dict()["parameters"] == {}
    assert list(original.state_dict()["parameters"]) == ["allreduce/w"]
    assert duplicate(twin).settings() == original.settings()


@pytest.mark.parametrize("name", ALL)
def test_compressors_are_frozen_hashable_and_themselves(name):
    kind = ALL[name]
    first = required(kind)
    compressor = kind(**first)
    for setting in ("ratio", "feedback", "seed", "anything"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(compressor, setting, 1)
    # Two with equal settings have states of their own, so they are not equal.
    assert len({compressor, compressor, kind(**first)}) == 2
    assert isinstance(compressor, Compressor)
    if compressor.feedback is not None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            compressor.feedback.x = 1
    assert dataclasses.replace(compressor, seed=2).runtime is not compressor.runtime
