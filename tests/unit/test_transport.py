"""How transports wait, and the contract of all transports, held by the one made of threads."""

import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_compress import ConfigError, ExchangeTimeoutError, TransportError
from hvd_compress.transport import base
from hvd_compress.transport.base import MAX_MESSAGE_BYTES, Transport
from hvd_compress.transport.choose import CHOICES
from hvd_compress.transport.threads import run_ranks, thread_group

pytestmark = pytest.mark.timeout(60)


class Lonely(Transport):
    """A rank whose other ranks never answer."""

    name, rank, size = "lonely", 1, 3

    def __init__(self, alive=lambda: None):
        self.aborted = []
        self.alive = alive

    def allgather(self, message, what):
        self.wait(lambda: False, what)

    def allgather_any(self, data, what):
        self.wait(lambda: False, what)

    def abort(self, message):
        self.aborted.append(message)

    def check_alive(self):
        self.alive()


@pytest.fixture(autouse=True)
def no_timeout(monkeypatch):
    monkeypatch.delenv("HVD_COMPRESS_TIMEOUT", raising=False)


@pytest.fixture
def clock(monkeypatch):
    """Replace time by one that passes only in ``sleep``, at least a millisecond each."""
    now = SimpleNamespace(t=0.0, sleeps=[])

    def sleep(seconds):
        now.sleeps.append(seconds)
        now.t += max(seconds, 1e-3)

    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: now.t, sleep=sleep))
    return now


def messages(caplog, level):
    return [r.getMessage() for r in caplog.records if r.levelno == level and r.name == "hvd_compress"]


# --- Waiting --------------------------------------------------------------------------------


def test_what_is_done_is_not_waited_for(clock):
    Lonely().wait(lambda: True, "nothing")
    assert clock.sleeps == []


def test_sleeps_are_short_at_first_and_never_long(clock):
    Lonely().wait(lambda: clock.t > 1, "something")
    assert clock.sleeps[0] == 0
    assert clock.sleeps == sorted(clock.sleeps)
    assert clock.sleeps[-1] == max(clock.sleeps) == 2e-3


def test_a_warning_after_a_while_says_what_is_waited_for(caplog, monkeypatch):
    monkeypatch.setattr(base, "WARN_AFTER_S", 0.05)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "hvd_compress"):
        Lonely().wait(lambda: bool(messages(caplog, logging.WARNING)), "exchange 7 of 3 tensors ('a', 'b', 'c')")
    assert time.monotonic() - start >= 0.05
    (warning,) = messages(caplog, logging.WARNING)
    assert warning.startswith(
        "rank 1 of 3 has waited 0 s for the other ranks in exchange 7 of 3 tensors ('a', 'b', 'c'); usual causes: "
    )
    assert "HVD_COMPRESS_TIMEOUT" in warning


def test_warnings_come_once_a_minute(caplog, clock):
    with caplog.at_level(logging.WARNING, "hvd_compress"):
        Lonely().wait(lambda: clock.t > 59.9, "x")
        assert messages(caplog, logging.WARNING) == []
        clock.t = 0.0
        Lonely().wait(lambda: clock.t > 185, "x")
    waited = [text.split(" s for")[0].rsplit(" ", 1)[1] for text in messages(caplog, logging.WARNING)]
    assert waited == ["60", "120", "180"]


def test_signs_of_life_are_asked_for_once_a_second(clock):
    asked = []
    Lonely(alive=lambda: asked.append(clock.t)).wait(lambda: clock.t > 5.5, "x")
    assert [round(t) for t in asked] == [1, 2, 3, 4, 5]


def test_no_sign_of_life_ends_the_waiting(clock):
    def dead():
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        Lonely(alive=dead).wait(lambda: False, "x")
    assert 1 <= clock.t < 1.1


@pytest.mark.parametrize("method", ["allgather", "allgather_any"])
def test_a_timeout_aborts_and_raises(monkeypatch, caplog, method):
    monkeypatch.setenv("HVD_COMPRESS_TIMEOUT", "0.05")
    transport, start = Lonely(), time.monotonic()
    with pytest.raises(ExchangeTimeoutError) as caught:
        getattr(transport, method)(b"", "the handshake before exchange 0")
    assert 0.05 <= time.monotonic() - start < 30
    text = "rank 1 of 3 gave up on the handshake before exchange 0 after 0 s (HVD_COMPRESS_TIMEOUT)"
    assert str(caught.value).startswith(text + "; usual causes: ")
    assert [m.startswith(text) for m in transport.aborted] == [True]
    assert [m.startswith(text) for m in messages(caplog, logging.ERROR)] == [True]


def test_no_timeout_before_its_time(monkeypatch, clock):
    monkeypatch.setenv("HVD_COMPRESS_TIMEOUT", "100")
    Lonely().wait(lambda: clock.t > 99.9, "x")
    with pytest.raises(ExchangeTimeoutError):
        Lonely().wait(lambda: clock.t > 202, "x")


@pytest.mark.parametrize("text", ["abc", "0", "-1", "nan", "1 s", " ", "1,5"])
def test_a_bad_timeout_is_refused(monkeypatch, text):
    monkeypatch.setenv("HVD_COMPRESS_TIMEOUT", text)
    with pytest.raises(ConfigError) as caught:
        Lonely().wait(lambda: False, "x")
    assert str(caught.value) == f"HVD_COMPRESS_TIMEOUT must be a positive number of seconds, got {text!r}"


@pytest.mark.parametrize("text", ["", "1", "2.5", "1e3", "inf"])
def test_good_timeouts(monkeypatch, text):
    monkeypatch.setenv("HVD_COMPRESS_TIMEOUT", text)
    Lonely().wait(lambda: True, "x")


def test_messages_that_mpi_cannot_count_are_refused():
    Lonely()._check_length(MAX_MESSAGE_BYTES)
    with pytest.raises(TransportError, match="expected at most 2147483647 bytes a message, got 2147483648"):
        Lonely()._check_length(MAX_MESSAGE_BYTES + 1)


def test_the_choices_are_those_that_a_compressor_accepts():
    from hvd_compress.base import TRANSPORTS

    assert CHOICES == TRANSPORTS


# --- The contract ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_allgather_returns_all_messages_in_rank_order(size):
    def work(transport):
        rounds = []
        for i in range(50):
            message = np.full(i, 10 * transport.rank + i % 7, np.uint8)
            rows = transport.allgather(message, "test")
            assert (rows.dtype, rows.shape) == (np.uint8, (size, i))
            message[:] = 99  # a sender may write into its buffer again
            rounds.append(rows)
        return [rows.tolist() for rows in rounds], transport.rank, transport.size

    expected = [[[10 * rank + i % 7] * i for rank in range(size)] for i in range(50)]
    assert run_ranks(size, work) == [(expected, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_allgather_any_takes_strings_of_any_length(size):
    def work(transport):
        return [transport.allgather_any(bytes([transport.rank]) * (transport.rank * n), "test") for n in range(5)]

    expected = [[bytes([rank]) * (rank * n) for rank in range(size)] for n in range(5)]
    assert run_ranks(size, work) == [expected] * size


def test_different_lengths_are_an_error_on_every_rank():
    def work(transport):
        with pytest.raises(TransportError, match=r"messages differ in length in the test: \[1, 2, 3\] bytes"):
            transport.allgather(np.zeros(transport.rank + 1, np.uint8), "the test")
        return transport.allgather_any(b"still in step", "the test")

    assert run_ranks(3, work) == [[b"still in step"] * 3] * 3


def test_ranks_run_at_the_same_time_and_return_in_order():
    assert run_ranks(3, lambda t: (t.rank, t.allgather_any(b"", "x"))) == [(r, [b""] * 3) for r in range(3)]


def test_an_error_of_the_first_rank_is_raised_and_frees_the_others():
    freed = []

    def work(transport):
        if transport.rank == 0:
            raise KeyError("mine")
        try:
            transport.allgather_any(b"", "the test")
        except TransportError as error:
            freed.append(str(error))
            raise

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, work)
    assert freed == ["another rank has failed during the test"] * 2


def test_the_first_error_is_raised_not_what_followed_from_it():
    def work(transport):
        if transport.rank == 1:
            raise KeyError("mine")
        transport.allgather_any(b"", "the test")

    with pytest.raises(KeyError, match="mine"):
        run_ranks(2, work)


def test_groups_do_not_disturb_each_other():
    first, second = thread_group(1)[0], thread_group(1)[0]
    first.abort("over")
    with pytest.raises(TransportError):
        first.allgather_any(b"", "x")
    assert second.allgather_any(b"y", "x") == [b"y"]
