"""Sections whose number of elements is in the message."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.errors import WireFormatError
from hvd_compress.wire import (
    HEADER_BYTES,
    ArraySection,
    CountedSection,
    CountSection,
    Header,
    IndexSection,
    Kind,
    decode_bodies,
    decode_header,
    encode_body,
    frame,
    is_variable,
    split_messages,
)

N, CAPACITY = 1000, 20
SECTIONS = [CountSection(CAPACITY), CountedSection("indices", CAPACITY, N), CountedSection("float32", CAPACITY)]


def arrays(positions):
    count = len(positions)
    indices, values = np.zeros(CAPACITY, np.int32), np.zeros(CAPACITY, np.float32)
    indices[:count] = sorted(positions)
    values[:count] = np.arange(1, count + 1)
    return [np.array([count], np.int32), indices, values]


def test_a_body_derived_by_hand():
    body = encode_body(SECTIONS, arrays([5]))
    # One of a thousand positions: 9 low bits, then 2 bits of which the first is set.
    assert body.tobytes() == bytes([1, 0, 0, 0, 5, 0, 1, 0, 0, 0x80, 0x3F])
    assert encode_body(SECTIONS, arrays([])).tobytes() == bytes(4)


@settings(deadline=None)
@given(st.lists(st.sets(st.integers(0, N - 1), max_size=CAPACITY), min_size=1, max_size=4))
def test_round_trip_of_ranks_that_send_different_numbers(ranks):
    sent = [arrays(positions) for positions in ranks]
    bodies = [encode_body(SECTIONS, one) for one in sent]
    for got, parts in zip(decode_bodies(bodies, SECTIONS), zip(*sent, strict=True), strict=True):
        assert got.tobytes() == np.stack(parts).tobytes()
    for body, positions in zip(bodies, ranks, strict=True):
        exact = IndexSection(N, len(positions)).nbytes if positions else 0
        assert body.nbytes == 4 + exact + 4 * len(positions)
        assert body.nbytes <= sum(section.nbytes for section in SECTIONS)


def test_counted_and_plain_sections_follow_each_other():
    sections = [ArraySection("uint8", 3), *SECTIONS, ArraySection("float32", 1), *SECTIONS]
    plain = [np.array([7, 8, 9], np.uint8), *arrays([1, 999]), np.array([2.5], np.float32), *arrays([])]
    assert is_variable(sections) and not is_variable(sections[:1])
    for got, sent in zip(decode_bodies([encode_body(sections, plain)], sections), plain, strict=True):
        assert got[0].tobytes() == sent.tobytes()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: b[:-1], "expected at least"),
        (lambda b: np.append(b, np.uint8(0)), "bytes in the body of rank 0, got"),
        (lambda b: np.concatenate([np.array([21, 0, 0, 0], np.uint8), b[4:]]), "a number from 0 to 20, got"),
        (lambda b: np.concatenate([np.array([255, 255, 255, 255], np.uint8), b[4:]]), "a number from 0 to 20, got"),
        (lambda b: np.concatenate([np.array([3, 0, 0, 0], np.uint8), b[4:]]), "expected"),
        (lambda b: b[:2], "expected at least"),
    ],
)
def test_damaged_bodies_are_refused(change, text):
    body = encode_body(SECTIONS, arrays([3, 500]))
    with pytest.raises(WireFormatError, match=text):
        decode_bodies([change(body)], SECTIONS)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_within_range(raw):
    try:
        count, indices, _ = decode_bodies([np.frombuffer(raw, np.uint8)], SECTIONS)
    except WireFormatError:
        return
    assert 0 <= count[0, 0] <= CAPACITY and (indices < N).all() and (indices >= 0).all()


def test_a_writer_refuses_what_does_not_fit():
    for count in (-1, CAPACITY + 1):
        with pytest.raises(WireFormatError, match="one number from 0 to 20"):
            CountSection(CAPACITY).encode(np.array([count], np.int32))
    for section in SECTIONS[1:]:
        with pytest.raises(WireFormatError, match="together with its count"):
            section.encode(np.zeros(CAPACITY, np.int32))
        with pytest.raises(WireFormatError, match="together with its count"):
            section.decode(np.zeros((1, CAPACITY), np.uint8))


def test_messages_are_split_by_their_headers():
    bodies = [encode_body(SECTIONS, arrays(p)) for p in ([1], [], [2, 3, 4])]
    messages = [frame(Header(Kind.DATA, bytes(8), 0, body.nbytes), body) for body in bodies]
    found = split_messages(np.concatenate(messages))
    assert [m.tobytes() for m in found] == [m.tobytes() for m in messages]
    assert [decode_header(m).body_bytes for m in found] == [body.nbytes for body in bodies]
    for cut in (1, HEADER_BYTES + 2):
        with pytest.raises(WireFormatError, match="expected a"):
            split_messages(np.concatenate(messages)[:-cut])
