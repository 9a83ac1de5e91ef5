"""Whole messages: exact bytes, round trip, and hostile ones."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import WireFormatError
from hvd_compress.wire import (
    HEADER_BYTES,
    ArraySection,
    Header,
    IndexSection,
    Kind,
    decode_body,
    decode_header,
    encode_message,
)

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = bytes(range(1, 9))

# Written out from the specification in hvd_compress/wire/__init__.py.
TINY = (
    "48564443"  # HVDC
    "01"  # version
    "00"  # data
    "0000"  # reserved
    "0102030405060708"  # layout
    "ffffffff"  # all finite
    "07000000"  # step 7
    "0e00000000000000"  # 14 bytes follow
    "0549"  # positions 1, 4, 9 of 10: see test_indices.py
    "0000803f000000c00000c07f"  # 1.0, -2.0, NaN as float32
)
TINY_SECTIONS = (IndexSection(10, 3), ArraySection("float32", 3))
TINY_ARRAYS = (np.array([1, 4, 9], np.int32), np.array([1, -2, np.nan], np.float32))
# Layout changed, 46 bytes as the last agreed layout has it, the body ignored.
CHANGED = "48564443010100000102030405060708fffffffffeffffff" + 8 * "00" + 14 * "00"

# Two tensors: the second one's values are bfloat16 bits, and it holds the first NaN.
LARGE_SECTIONS = (
    IndexSection(100_000, 100),
    ArraySection("float64", 100),
    IndexSection(64, 64),
    ArraySection("bfloat16", 64),
    ArraySection("float16", 3),
    ArraySection("int32", 2),
)
LARGE_ARRAYS = (
    np.array([99_999 * i * (i + 1) // 10_100 for i in range(1, 101)], np.int32),
    np.arange(100) / 8 - 6,
    np.arange(64, dtype=np.int32),
    np.arange(0x3F80, 0x3F80 + 64, dtype=np.uint16),
    np.array([0.5, -0.0, np.inf], np.float16),
    np.array([-1, 2**31 - 1], np.int32),
)
LARGE_HEADER = {"layout": b"\xff" * 8, "step": 2**32 - 1, "first_nonfinite": 1}


def message(sections=TINY_SECTIONS, arrays=TINY_ARRAYS, **header):
    body = sum(section.nbytes for section in sections)
    header = Header(**{"kind": Kind.DATA, "layout": LAYOUT, "step": 7, "body_bytes": body, **header})
    return encode_message(header, sections, arrays, HEADER_BYTES + body)


def decode(raw, sections=TINY_SECTIONS):
    """Read one message as the exchange does."""
    row = np.frombuffer(raw, np.uint8)
    return decode_header(row), decode_body(row[None], sections)


# --- Bytes --------------------------------------------------------------------------------


def test_tiny_message_derived_by_hand():
    assert HEADER_BYTES == 32
    assert message().tobytes().hex() == TINY
    header, (indices, values) = decode(bytes.fromhex(TINY))
    assert header == Header(Kind.DATA, LAYOUT, 7, 14, -1)
    assert indices.tolist() == [[1, 4, 9]]
    np.testing.assert_array_equal(values, TINY_ARRAYS[1][None])


def test_changed_layout_derived_by_hand():
    header = Header(Kind.LAYOUT_CHANGED, LAYOUT, 2**32 - 2, 0)
    assert encode_message(header, (), (), 46).tobytes().hex() == CHANGED
    assert decode_header(np.frombuffer(bytes.fromhex(CHANGED), np.uint8)) == header


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("message_tiny.bin", message),
        ("message_large.bin", lambda: message(LARGE_SECTIONS, LARGE_ARRAYS, **LARGE_HEADER)),
    ],
)
def test_golden_messages(name, expected):
    assert (GOLDEN / name).read_bytes() == expected().tobytes()


def test_the_large_golden_message_is_read_back():
    header, arrays = decode((GOLDEN / "message_large.bin").read_bytes(), LARGE_SECTIONS)
    assert header == Header(Kind.DATA, b"\xff" * 8, 2**32 - 1, len(LARGE_ARRAYS[0]) * 8 + 150 + 16 + 128 + 6 + 8, 1)
    for section, got, sent in zip(LARGE_SECTIONS, arrays, LARGE_ARRAYS, strict=True):
        assert got.shape == (1, *sent.shape)
        assert got.dtype.name == sent.dtype.name
        assert got[0].tobytes() == sent.tobytes(), section


def test_all_golden_messages_are_read():
    assert {path.name for path in GOLDEN.glob("message*")} == {"message_tiny.bin", "message_large.bin"}


def test_steps_wrap_around():
    header = decode_header(message(step=2**32 + 5))
    assert header.step == 5


# --- Round trip ---------------------------------------------------------------------------

DTYPES = {"float16": "f2", "bfloat16": "u2", "float32": "f4", "float64": "f8", "int32": "i4", "uint8": "u1"}


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_round_trip_of_any_sections_and_ranks(data, ranks):
    sections, columns = [], []
    for _ in range(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()):
            n = data.draw(st.integers(1, 1000))
            k = data.draw(st.integers(1, min(n, 20)))
            sections.append(IndexSection(n, k))
            rng = np.random.default_rng(data.draw(st.integers(0, 99)))
            columns.append([np.sort(rng.choice(n, k, replace=False)).astype(np.int32) for _ in range(ranks)])
        else:
            dtype, count = data.draw(st.sampled_from(sorted(DTYPES))), data.draw(st.integers(1, 9))
            sections.append(ArraySection(dtype, count))
            size = np.dtype(DTYPES[dtype]).itemsize * count
            raw = [data.draw(st.binary(min_size=size, max_size=size)) for _ in range(ranks)]
            columns.append([np.frombuffer(r, DTYPES[dtype]) for r in raw])
    rows = np.stack([message(sections, [c[rank] for c in columns]) for rank in range(ranks)])
    decoded = decode_body(rows, sections)
    for column, got, section in zip(columns, decoded, sections, strict=True):
        assert got.dtype.name == ("uint16" if section.dtype == "bfloat16" else section.dtype)
        assert [row.tobytes() for row in got] == [sent.tobytes() for sent in column]


def test_big_endian_and_strided_arrays_are_sent_the_same():
    plain = np.arange(6, dtype=np.float32)
    section = ArraySection("float32", 3)
    expected = section.encode(plain[::2].copy()).tobytes()
    assert section.encode(plain[::2]).tobytes() == expected
    assert section.encode(plain[::2].astype(">f4")).tobytes() == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_decoded_arrays_are_aligned_and_writeable(ranks):
    """A section can start at any byte of a received message, but frameworks want memory of their own."""
    sections = (ArraySection("uint8", 1), ArraySection("float64", 2))
    rows = np.stack([message(sections, (np.zeros(1, np.uint8), np.ones(2)))] * ranks)
    rows.flags.writeable = False
    flags = decode_body(rows, sections)[1].flags
    assert flags.aligned
    assert flags.writeable, "PyTorch warns of tensors that share memory with a read-only array"


# --- Refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "new", "text"),
    [
        (0, b"X", r"expected a message that starts with b'HVDC', got b'XVDC'"),
        (4, b"\x02", r"expected format version 1, got 2; do all ranks have the same package\?"),
        (4, b"\x00", r"expected format version 1, got 0"),
        (5, b"\x02", r"expected a message of kind 0 or 1, got kind 2"),
        (6, b"\x01", r"reserved 1"),
        (7, b"\x80", r"reserved 32768"),
        (24, b"\x0f", r"expected a body of 15 bytes, got 14: it is cut"),
        (31, b"\xff", r"expected a body of \d+ bytes, got 14"),
    ],
)
def test_a_wrong_header_is_refused(offset, new, text):
    raw = bytearray.fromhex(TINY)
    raw[offset : offset + len(new)] = new
    with pytest.raises(WireFormatError, match=text):
        decode(bytes(raw))


@pytest.mark.parametrize("stated", [0, 1, 13])
def test_a_body_longer_than_stated_is_refused(stated):
    raw = bytearray.fromhex(TINY)
    raw[24] = stated
    with pytest.raises(WireFormatError):
        decode(bytes(raw))


def test_a_nonfinite_position_below_minus_one_is_refused():
    raw = bytearray.fromhex(TINY)
    raw[16:20] = (-2).to_bytes(4, "little", signed=True)
    with pytest.raises(WireFormatError):
        decode(bytes(raw))


@pytest.mark.parametrize("length", range(46))
def test_a_cut_message_is_refused(length):
    raw = bytes.fromhex(TINY)[:length]
    text = "expected a message of at least 32 bytes" if length < 32 else "it is cut"
    with pytest.raises(WireFormatError, match=text):
        decode(raw)
    if length >= 32:
        with pytest.raises(WireFormatError, match=f"expected messages of 46 bytes, got {length}"):
            decode_body(np.frombuffer(raw, np.uint8)[None], TINY_SECTIONS)


def test_an_extended_message_is_refused():
    with pytest.raises(WireFormatError, match=r"expected 15 body bytes, got a header of 14"):
        decode(bytes.fromhex(TINY) + b"\0")


def test_a_writer_refuses_what_does_not_fit():
    header = Header(Kind.DATA, LAYOUT, 0, 14)
    with pytest.raises(WireFormatError, match="expected a body of at most 13 bytes, got 14"):
        encode_message(header, TINY_SECTIONS, TINY_ARRAYS, 45)
    for wrong in (np.zeros(2, np.float32), np.zeros(3, np.float64), np.zeros((3, 1), np.float32)):
        with pytest.raises(WireFormatError, match="expected 3 elements of float32, got "):
            encode_message(header, TINY_SECTIONS, (TINY_ARRAYS[0], wrong), 46)


def check_hostile(raw):
    """Decode or fail with ``WireFormatError``; positions that are accepted are valid."""
    try:
        _, (indices, values) = decode(raw)
    except WireFormatError:
        return
    assert (np.diff(indices) > 0).all()
    assert indices.min() >= 0
    assert indices.max() < 10
    assert values.shape == (1, 3)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 8 * 46 - 1), min_size=1, max_size=4))
def test_flipped_bits(flips):
    raw = bytearray.fromhex(TINY)
    for bit in flips:
        raw[bit // 8] ^= 1 << (bit % 8)
    check_hostile(bytes(raw))


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.binary(min_size=46, max_size=46)))
def test_random_bytes(raw):
    check_hostile(raw)


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=14, max_size=14))
def test_random_bodies(body):
    check_hostile(bytes.fromhex(TINY)[:32] + body)
