"""What can go wrong in an exchange: nothing is lost, every rank learns of it, the next step works.

After a step that failed a residual holds what was in it and this step's gradient, bit for bit,
as if nothing of the step had been sent.
"""

import numpy as np
import pytest
from simulation import NUMPY, SHAPES, TORCH, Rank, attempt, gradients_of

from hvd_compress import HandshakeError, NonFiniteGradientError, TransportError, WireFormatError
from hvd_compress.exchange import Item
from hvd_compress.transport.threads import run_ranks
from hvd_compress.wire import HEADER_BYTES

pytestmark = pytest.mark.timeout(60)
BOTH = pytest.mark.parametrize("ops", [NUMPY, TORCH], ids=["numpy", "torch"])

# The first exchange is calls 0 (handshake) and 1; the second is call 2.
SECOND = 2


def put(offset, value):
    """Return a fault that overwrites a byte of the message of the second exchange."""

    def spoil(message, call):
        if call == SECOND:
            message[offset] = value
        return message

    return spoil


def fill_indices(message, call):
    if call == SECOND:
        message[HEADER_BYTES : HEADER_BYTES + 20] = 0xFF
    return message


FAULTS = {
    "magic": (put(0, 0), "expected a message that starts with"),
    "version": (put(4, 9), "expected format version 1, got 9"),
    "kind": (put(5, 7), "expected a message of kind 0 or 1"),
    "length": (put(27, 1), "it is cut"),
    "indices": (fill_indices, "index set"),
}


def owed_after(rank, gradients):
    """Return by name what the residual must hold after a step that failed."""
    return {name: rank.residuals()[name] + gradient.ravel() for name, gradient in gradients.items()}


def run_with_a_failing_second_step(size, make_rank, gradients=gradients_of):
    """Do three steps; return each rank's error in the second, and check that nothing gets lost."""

    def work(transport):
        rank = make_rank(transport)
        applied = [rank.step(gradients_of(transport.rank, 0))]
        owed = owed_after(rank, gradients_of(transport.rank, 1))
        error = attempt(lambda: rank.step(gradients(transport.rank, 1)))
        for name, residual in rank.residuals().items():
            assert residual.tobytes() == owed[name].tobytes(), name
        assert not rank.exchange.busy
        applied.append(rank.step(gradients_of(transport.rank, 2)))
        return error, applied, rank.residuals()

    results = run_ranks(size, work)
    for name in SHAPES:
        due = sum(gradients_of(rank, step)[name].ravel() for rank in range(size) for step in range(3))
        kept = sum(residuals[name] for _, _, residuals in results)
        for _, applied, _ in results:
            np.testing.assert_array_equal(sum(sums[name] for sums in applied) + kept, due)
    return [error for error, _, _ in results]


@BOTH
@pytest.mark.parametrize("fault", FAULTS)
def test_a_message_spoilt_by_one_rank(fault, ops):
    spoil, text = FAULTS[fault]
    errors = run_with_a_failing_second_step(
        3, lambda t: Rank(t, ops=ops, spoil=spoil if t.rank == 1 else None), gradients_of
    )
    assert [type(error) for error in errors] == [WireFormatError] * 3
    assert all(text in str(error) for error in errors)
    assert len({str(error) for error in errors}) == 1


def test_a_nonfinite_position_that_no_tensor_has():
    errors = run_with_a_failing_second_step(2, lambda t: Rank(t, spoil=put(17, 1) if t.rank == 1 else None))
    assert {type(error) for error in errors} == {WireFormatError}


def test_a_message_of_another_layout():
    def spoil(message, call):
        if call == SECOND:
            message[8] ^= 1
        return message

    errors = run_with_a_failing_second_step(2, lambda t: Rank(t, spoil=spoil if t.rank == 1 else None))
    assert all(isinstance(error, (WireFormatError, HandshakeError)) for error in errors)


def test_a_message_that_is_cut_on_its_way():
    def corrupt(rows, call):
        return rows[:, :-1] if call == SECOND else rows

    errors = run_with_a_failing_second_step(2, lambda t: Rank(t, corrupt=corrupt))
    assert [type(error) for error in errors] == [WireFormatError] * 2
    assert all("it is cut" in str(error) for error in errors)


def test_a_message_of_another_length_is_a_transport_error():
    def spoil(message, call):
        return message[:-1] if call == SECOND else message

    errors = run_with_a_failing_second_step(2, lambda t: Rank(t, spoil=spoil if t.rank == 0 else None))
    assert [type(error) for error in errors] == [TransportError] * 2


def test_a_transport_that_fails_before_it_sends_leaves_the_ranks_at_different_steps():
    """One rank's exchange fails where the others' waits; it tries again, and both learn of it."""

    def work(transport):
        def spoil(message, call):
            if transport.rank == 1 and call == SECOND:
                raise ConnectionError("out of memory, say")
            return message

        rank = Rank(transport, spoil=spoil)
        rank.step(gradients_of(transport.rank, 0))
        owed = owed_after(rank, gradients_of(transport.rank, 1))
        if transport.rank == 1:
            error = attempt(lambda: rank.step(gradients_of(1, 1)))
            assert isinstance(error, ConnectionError)
            assert all((rank.residuals()[name] == owed[name]).all() for name in SHAPES)
        error = attempt(lambda: rank.step(gradients_of(transport.rank, 1 + transport.rank)))
        return type(error), str(error)

    message = "ranks are at different steps: exchanges done so far, by rank, are [1, 2, 1]"
    assert run_ranks(3, work) == [(HandshakeError, message)] * 3


# --- NaN and infinity -------------------------------------------------------------------------


def spoilt(rank, names, value):
    gradients = gradients_of(rank, 1)
    for name in names:
        gradients[name].flat[3] = value
    return gradients


@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_on_some_ranks_is_reported_to_all_and_nothing_is_lost(ops, value):
    bad = {0: [], 1: ["fc", "head"], 2: ["head"]}

    def work(transport):
        rank, number = Rank(transport, ops=ops), transport.rank
        rank.step(gradients_of(number, 0))
        before, owed = rank.residuals(), owed_after(rank, gradients_of(number, 1))
        sums = rank.step(spoilt(number, bad[number], value))
        for name, residual in rank.residuals().items():
            # Its own tensors that are not finite keep their residual; all others get back what was taken.
            expected = before[name] if name in bad[number] else owed[name]
            assert residual.tobytes() == expected.tobytes(), name
        rank.step(gradients_of(number, 2))
        return rank.reports, {name: bool(np.isfinite(x).all()) for name, x in sums.items()}

    results = run_ranks(3, work)
    # By rank, the first such tensor in the order of names.
    assert [reports for reports, _ in results] == [[[(1, "fc"), (2, "head")]]] * 3
    assert [finite for _, finite in results] == [{"conv": True, "fc": False, "head": False}] * 3


def test_nothing_is_reported_when_all_is_finite():
    def work(transport):
        rank = Rank(transport)
        for step in range(3):
            rank.step(gradients_of(transport.rank, step))
        return rank.reports

    assert run_ranks(2, work) == [[], []]


def test_what_was_exchanged_and_never_applied_is_given_back():
    """A step that an error of the user's ended between two ``decompress`` calls."""

    def work(transport):
        rank = Rank(transport)
        first, second = (gradients_of(transport.rank, step) for step in (0, 1))
        for name, gradient in first.items():
            rank.submit(name, gradient)
        applied = {"fc": rank.collect("fc", SHAPES["fc"])}  # and not the others
        for name, total in rank.step(second).items():
            applied[name] = applied.get(name, 0) + total
        return applied, rank.residuals(), {name: first[name] + second[name] for name in SHAPES}

    results = run_ranks(3, work)
    for name in SHAPES:
        owed = sum(residuals[name].reshape(-1) for _, residuals, _ in results)
        true = sum(gradients[name].reshape(-1) for _, _, gradients in results)
        np.testing.assert_allclose(np.asarray(results[0][0][name]).reshape(-1) + owed, true, atol=1e-5)


def test_raising_on_nonfinite_raises_on_every_rank():
    def work(transport):
        def refuse(bad):
            raise NonFiniteGradientError(f"{bad}")

        rank = Rank(transport, on_nonfinite=refuse)
        rank.step(gradients_of(transport.rank, 0))
        before, owed = rank.residuals(), owed_after(rank, gradients_of(transport.rank, 1))
        names = ["conv"] if transport.rank == 0 else []
        error = attempt(lambda: rank.step(spoilt(transport.rank, names, np.nan)))
        for name, residual in rank.residuals().items():
            assert residual.tobytes() == (before if name in names else owed)[name].tobytes()
        for name in SHAPES:
            later = attempt(lambda name=name: rank.exchange.collect(name))
            assert isinstance(later, TransportError), (
                "nothing of the step that failed, or of older ones, may be applied"
            )
        rank.step(gradients_of(transport.rank, 2))
        return type(error), str(error)

    assert run_ranks(3, work) == [(NonFiniteGradientError, "[(0, 'conv')]")] * 3


def dense_item(finite, calls):
    return Item("bias", (7,), "float32", (), (), np.asarray(finite), lambda: calls.append("given back"))


@pytest.mark.parametrize("watch", [False, True])
def test_dense_tensors_alone_are_exchanged_only_if_watched(watch):
    def work(transport):
        rank, calls = Rank(transport, watch_dense=watch), []
        rank.exchange.submit(dense_item(transport.rank != 1, calls))
        rank.exchange.settle()
        return rank.reports, calls, rank.connections, rank.spy.bytes

    expected = [(1, "bias")]
    quiet = ([], [], 0, 0)
    sent = 8 + HEADER_BYTES
    loud = [([expected], ["given back"] if rank != 1 else [], 1, sent) for rank in range(2)]
    assert run_ranks(2, work) == (loud if watch else [quiet, quiet])


def test_a_dense_tensor_beside_compressed_ones_takes_no_room_and_is_watched():
    def work(transport):
        rank = Rank(transport)
        rank.exchange.submit(dense_item(transport.rank != 0, []))
        rank.step(gradients_of(transport.rank, 0))
        alone = Rank(transport)
        alone.step(gradients_of(transport.rank, 0))
        return rank.reports, rank.spy.bytes - alone.spy.bytes

    assert run_ranks(2, work) == [([[(0, "bias")]], 0)] * 2


# --- Steps that were abandoned ----------------------------------------------------------------


@BOTH
def test_a_step_that_was_never_exchanged_is_given_back(ops):
    """An error between ``compress`` and ``decompress``, and then the next step."""

    def work(transport):
        rank = Rank(transport, ops=ops)
        for step in range(3):
            for name, gradient in gradients_of(transport.rank, step).items():
                rank.submit(name, gradient)
        assert rank.exchange.busy
        return {name: rank.collect(name, shape) for name, shape in SHAPES.items()}, rank.residuals()

    results = run_ranks(2, work)
    for name in SHAPES:
        due = sum(gradients_of(rank, step)[name].ravel() for rank in range(2) for step in range(3))
        kept = sum(residuals[name] for _, residuals in results)
        np.testing.assert_array_equal(results[0][0][name] + kept, due)


@BOTH
def test_an_abandoned_step_that_was_not_finite_gives_nothing_back(ops):
    def work(transport):
        rank = Rank(transport, ops=ops)
        rank.step(gradients_of(transport.rank, 0))
        before = rank.residuals()
        for name, gradient in spoilt(transport.rank, list(SHAPES), np.nan).items():
            rank.submit(name, gradient)
        for name, gradient in gradients_of(transport.rank, 2).items():
            rank.submit(name, gradient)
        sums = {name: rank.collect(name, shape) for name, shape in SHAPES.items()}
        return before, sums, rank.residuals(), rank.reports

    results = run_ranks(2, work)
    for name in SHAPES:
        due = sum(before[name] + gradients_of(rank, 2)[name].ravel() for rank, (before, *_) in enumerate(results))
        kept = sum(residuals[name] for _, _, residuals, _ in results)
        np.testing.assert_array_equal(results[0][1][name] + kept, due)
    assert [reports for *_, reports in results] == [[], []]


def test_the_transport_is_opened_once_and_late():
    def work(transport):
        rank = Rank(transport)
        for name, gradient in gradients_of(transport.rank, 0).items():
            rank.submit(name, gradient)
        before = rank.connections
        rank.exchange.settle()
        rank.exchange.settle()
        rank.step(gradients_of(transport.rank, 1))
        return before, rank.connections

    assert run_ranks(2, work) == [(0, 1)] * 2
