"""The exchange of ranks that are threads, against a simulation in float64.

Gradients are whole numbers, so that every sum is exact and all comparisons are for equality.
"""

import math
import random
import threading

import numpy as np
import pytest
from simulation import NUMPY, SHAPES, TORCH, Rank, Simulation, attempt, gradients_of

from hvd_compress import HandshakeError, TopK, TransportError
from hvd_compress.layout import Declaration, describe
from hvd_compress.transport.threads import run_ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("size", "ops"), [(1, NUMPY), (2, NUMPY), (3, NUMPY), (4, NUMPY), (1, TORCH), (3, TORCH)])
def test_matches_the_simulation_whatever_the_order(size, ops, dtype):
    steps = 5

    def work(transport):
        rank, rng = Rank(transport, ops=ops, dtype=dtype), random.Random(transport.rank)
        orders = [rng.sample(sorted(SHAPES), len(SHAPES)) for _ in range(steps)]
        sums = [rank.step(gradients_of(transport.rank, step), orders[step]) for step in range(steps)]
        assert not rank.exchange.busy
        return sums, rank.residuals()

    results = run_ranks(size, work)
    simulation = Simulation(size)
    for step in range(steps):
        expected = simulation.step([gradients_of(rank, step) for rank in range(size)])
        for sums, _ in results:
            for name, values in expected.items():
                assert sums[step][name].dtype == dtype
                np.testing.assert_array_equal(sums[step][name], values)
    for rank, (_, residuals) in enumerate(results):
        for name, residual in residuals.items():
            np.testing.assert_array_equal(residual, simulation.residuals[rank, name])


@pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_all_ranks_get_the_same_bits(ops):
    """Real numbers, whose sum depends on the order of additions."""

    def work(transport):
        rng = np.random.default_rng(transport.rank)
        rank = Rank(transport, TopK(1.0), ops=ops)
        return rank.step({"w": rng.standard_normal((20, 20)) * 10.0 ** rng.integers(-8, 8, (20, 20))})["w"].tobytes()

    assert len(set(run_ranks(4, work))) == 1


def test_half_precision_travels_in_half_precision():
    def work(transport):
        rank = Rank(transport, dtype="float16")
        sums = rank.step(gradients_of(transport.rank, 0))
        assert {x.dtype.name for x in sums.values()} == {"float32"}
        return sums, rank.telemetry.as_dict()

    results = run_ranks(2, work)
    expected = Simulation(2).step([gradients_of(rank, 0) for rank in range(2)])
    for sums, stats in results:
        assert stats["dense_bytes"] == 2 * (96 + 35 + 100)
        for name, values in expected.items():
            np.testing.assert_array_equal(sums[name], values)


def test_one_exchange_a_step_and_a_handshake_once():
    def work(transport):
        rank, calls = Rank(transport), []
        for step in range(4):
            rank.step(gradients_of(transport.rank, step))
            calls.append(rank.spy.calls)
        return calls

    assert run_ranks(2, work) == [[2, 3, 4, 5]] * 2


def test_counted_bytes_are_the_bytes_the_transport_saw():
    def work(transport):
        rank, names = Rank(transport), list(SHAPES)
        for step, gone in enumerate([0, 0, 1, 1, 1, 0]):
            rank.step(gradients_of(transport.rank, step, names[gone:]))
        return rank.telemetry.as_dict(), rank.spy.bytes

    for stats, seen in run_ranks(2, work):
        assert stats["exchange_bytes"] + stats["handshake_bytes"] == seen
        assert stats["handshake_bytes"] == 3 * 8
        assert stats["exchanges"] == 6 + 2, "a step with another layout is sent twice"
        assert stats["steps"] == 6
        assert stats["parameters"]["conv"]["steps"] == 3
        assert stats["bytes_sent"] == stats["exchange_bytes"], "what was sent in vain counts too"
        assert stats["dense_bytes"] == 4 * (3 * 96 + 6 * 35 + 6 * 100)
        assert stats["ratio"] == stats["dense_bytes"] / stats["bytes_sent"]


def test_without_a_change_of_layout_payloads_and_headers_are_all_that_is_sent():
    def work(transport):
        rank = Rank(transport)
        for step in range(3):
            rank.step(gradients_of(transport.rank, step))
        return rank.telemetry.as_dict()

    for stats in run_ranks(2, work):
        assert stats["bytes_sent"] == stats["exchange_bytes"]


# --- Layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_that_vanishes_and_returns_on_all_ranks(size):
    def work(transport):
        rank = Rank(transport)
        names = [list(SHAPES), ["conv", "head"], ["conv", "head"], list(SHAPES)]
        return [rank.step(gradients_of(transport.rank, step, n)) for step, n in enumerate(names)]

    results = run_ranks(size, work)
    simulation = Simulation(size)
    for step, names in enumerate([list(SHAPES), ["conv", "head"], ["conv", "head"], list(SHAPES)]):
        expected = simulation.step([gradients_of(rank, step, names) for rank in range(size)])
        for sums in results:
            assert sorted(sums[step]) == sorted(names)
            for name, values in expected.items():
                np.testing.assert_array_equal(sums[step][name], values)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_tensor_that_vanishes_on_one_rank_only(odd):
    """All ranks learn of it, lose nothing, and can go on when they agree again."""

    def work(transport):
        rank = Rank(transport)
        rank.step(gradients_of(transport.rank, 0))
        names = ["conv", "head"] if transport.rank == odd else list(SHAPES)
        gradients = gradients_of(transport.rank, 1, names)
        before = rank.residuals()
        error = attempt(lambda: rank.step(gradients))
        owed = {name: rank.residuals()[name] - before[name] - gradients[name].ravel() for name in names}
        assert all(not x.any() for x in owed.values())
        again = rank.step(gradients_of(transport.rank, 2))
        return type(error), str(error), {name: x.tobytes() for name, x in again.items()}

    results = run_ranks(3, work)
    first, other = ("absent", "present") if odd == 0 else ("present", "absent")
    rank = 1 if odd == 0 else odd
    message = f"rank {rank} does not agree with rank 0: parameter 'fc' is {first} on rank 0 and {other} on rank {rank}"
    assert {(kind, text) for kind, text, _ in results} == {(HandshakeError, message)}
    assert results[0][2] == results[1][2] == results[2][2]


DISAGREEMENTS = {
    "ratio": (
        lambda t: Rank(t, TopK(0.2 if t.rank == 1 else 0.1)).step(gradients_of(0, 0)),
        "rank 1 does not agree with rank 0: TopK.ratio is 0.1 on rank 0 and 0.2 on rank 1",
    ),
    "a setting that one has only": (
        lambda t: Rank(t, settings={"a": "1"} if t.rank else {"a": "1", "b": "2"}).step(gradients_of(0, 0)),
        "rank 1 does not agree with rank 0: b is 2 on rank 0 and absent on rank 1",
    ),
    "the last rank": (
        lambda t: Rank(t, settings={"version": "2" if t.rank == 2 else "1"}).step(gradients_of(0, 0)),
        "rank 2 does not agree with rank 0: version is 1 on rank 0 and 2 on rank 2",
    ),
    "dtype": (
        lambda t: Rank(t, dtype="float64" if t.rank == 1 else "float32").step(gradients_of(0, 0)),
        "rank 1 does not agree with rank 0: the dtype of parameter 'conv' is float32 on rank 0 and float64 on rank 1",
    ),
    "shape": (
        lambda t: Rank(t).step({"w": np.ones((4, 6) if t.rank == 2 else (6, 4))}),
        "rank 2 does not agree with rank 0: the shape of parameter 'w' is [6, 4] on rank 0 and [4, 6] on rank 2",
    ),
    "number of tensors": (
        lambda t: Rank(t).step(gradients_of(0, 0, ["fc"] if t.rank == 1 else ["fc", "head"])),
        "rank 1 does not agree with rank 0: parameter 'head' is present on rank 0 and absent on rank 1",
    ),
    "payload": (
        lambda t: Rank(t, TopK(0.5 if t.rank == 1 else 0.25), settings={"s": "1"}).step({"w": np.ones((2, 4))}),
        "rank 1 does not agree with rank 0: the payload of parameter 'w' is ["
        "'IndexSection(n=8, k=2)', \"ArraySection(dtype='float32', count=2)\"] on rank 0 and ["
        "'IndexSection(n=8, k=4)', \"ArraySection(dtype='float32', count=4)\"] on rank 1",
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_named_on_every_rank(what):
    call, message = DISAGREEMENTS[what]
    errors = run_ranks(3, lambda transport: attempt(lambda: call(transport)))
    assert [(type(e), str(e)) for e in errors] == [(HandshakeError, message)] * 3


class Arriving:
    """Descriptions of all ranks that arrive at last."""

    def __init__(self, *names_of_rank):
        self.strings = [describe({}, [(name, (2,), "float32", ()) for name in names]) for names in names_of_rank]
        self.here, self.waited = False, []

    def ready(self):
        return self.here

    def result(self, what):
        self.waited.append(what)
        return self.strings


def test_a_declaration_is_compared_when_it_is_there_and_at_the_latest_before_the_first_exchange():
    def work(transport):
        early, late = Arriving("ab", "ab"), Arriving("ab", "ab")
        for arriving in (early, late):
            arriving.here = arriving is early
            rank = Rank(transport, declaration=Declaration(arriving))
            rank.submit("fc", gradients_of(0, 0)["fc"])
            before = len(arriving.waited)
            assert before == (1 if arriving is early else 0)
            rank.collect("fc", SHAPES["fc"])
            rank.step(gradients_of(0, 1))
            assert len(arriving.waited) == 1

    run_ranks(1, work)


@pytest.mark.parametrize("when", ["submit", "settle"])
def test_a_declaration_that_differs_is_raised_and_nothing_is_connected(when):
    def work(transport):
        arriving = Arriving("abc", "abc", "ac")
        rank = Rank(transport, declaration=Declaration(arriving))
        arriving.here = when == "submit"
        error = attempt(lambda: rank.submit("fc", gradients_of(0, 0)["fc"]))
        if when == "settle":
            assert error is None
            error = attempt(rank.exchange.settle)
            assert rank.residuals()["fc"].tolist() == gradients_of(0, 0)["fc"].ravel().tolist()
        assert rank.connections == 0
        again = attempt(lambda: rank.submit("fc", gradients_of(0, 0)["fc"]))
        assert type(again) is type(error) and str(again) == str(error)
        return type(error), str(error)

    message = "rank 2 does not agree with rank 0: parameter 'b' is present on rank 0 and absent on rank 2"
    assert run_ranks(1, work) == [(HandshakeError, message)]


def test_a_declaration_is_waited_for_but_not_for_ever():
    arriving = Arriving("ab", "ab")
    declaration = Declaration(arriving)
    declaration.meet(0.01)
    assert arriving.waited == []
    threading.Timer(0.05, lambda: setattr(arriving, "here", True)).start()
    declaration.meet(60.0)
    declaration.check(wait=False)
    assert len(arriving.waited) == 1
    declaration.meet(60.0)


def test_collecting_what_was_never_submitted():
    def work(transport):
        rank = Rank(transport)
        rank.step(gradients_of(0, 0))
        return attempt(lambda: rank.exchange.collect("fc"))

    (error,) = run_ranks(1, work)
    assert isinstance(error, TransportError)
    assert str(error) == "nothing was exchanged for 'fc': decompress was called without compress"


@pytest.mark.parametrize("layers", [("conv", "fc"), ()], ids=["some", "all frozen"])
def test_ranks_may_ask_in_any_order_within_a_step(layers):
    """Dense and frozen tensors only settle; where they come last, nothing may be exchanged again."""

    def work(transport):
        rank, calls = Rank(transport, watch_dense=True), []
        for step in range(4):
            names = SHAPES if step < 2 else layers
            for name in names:
                rank.submit(name, gradients_of(transport.rank, step)[name])
            rank.exchange.begin()
            if transport.rank == 0:
                rank.exchange.settle()
            for name in names:
                rank.collect(name, SHAPES[name])
            rank.exchange.settle()
            calls.append(rank.spy.calls)
        return calls

    one, two = run_ranks(2, work)
    # Step 2 has another layout, which takes a message that says so, a handshake and an exchange.
    assert one == two == [2, 3, 6, 7]


def test_undoing_a_step_restores_what_was_sent():
    def work(transport):
        rank = Rank(transport)
        rank.step(gradients_of(transport.rank, 0))
        before = rank.residuals()
        gradients = gradients_of(transport.rank, 1)
        rank.step(gradients)
        rank.exchange.undo()
        rank.exchange.undo()
        return [
            np.array_equal(after, before[name] + gradients[name].ravel().astype(np.float32))
            for name, after in rank.residuals().items()
        ]

    assert run_ranks(2, work) == [[True] * 3] * 2


def test_what_is_queued_is_forgotten_when_residuals_are_replaced():
    def work(transport):
        rank = Rank(transport)
        rank.submit("conv", gradients_of(transport.rank, 0)["conv"])
        assert rank.exchange.busy
        rank.exchange.abandon()
        rank.states["conv"].residual[:] = 7
        rank.step(gradients_of(transport.rank, 1))
        return rank.residuals()["conv"]

    residual = run_ranks(1, work)[0]
    expected = 7 + gradients_of(0, 1)["conv"].ravel()
    kept = np.argsort(-np.abs(expected), kind="stable")[: math.ceil(0.1 * expected.size)]
    expected[kept] = 0
    assert residual.tolist() == expected.tolist()
