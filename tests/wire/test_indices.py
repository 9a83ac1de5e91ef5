"""Elias-Fano coded index sets: exact bytes, size, round trip, and what no reader may accept."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hvd_compress import WireFormatError
from hvd_compress.wire import IndexSection, index_bytes
from hvd_compress.wire.indices import decode_indices, encode_indices

GOLDEN = Path(__file__).parent / "golden"
LARGEST = 2**31 - 1


def reference(positions, n):
    """Encode as ``hvd_compress.wire`` specifies it, with whole numbers of plain Python."""
    k = len(positions)
    width = 0
    while k << (width + 1) <= n:
        width += 1
    low = sum((p % 2**width) << (i * width) for i, p in enumerate(positions))
    high = sum(1 << ((p >> width) + i) for i, p in enumerate(positions))
    low_bits, high_bits = k * width, k + ((n - 1) >> width)
    return low.to_bytes(-(-low_bits // 8), "little") + high.to_bytes(-(-high_bits // 8), "little")


def quadratic(n, k):
    """Return ``k`` positions below ``n`` at growing distances, the same for ever."""
    return [(n - 1) * i * (i + 1) // (k * (k + 1)) for i in range(1, k + 1)]


FILES = {
    "indices_n10_k3.bin": (10, [1, 4, 9]),
    "indices_n1_k1.bin": (1, [0]),
    "indices_n64_k64.bin": (64, list(range(64))),
    "indices_n100000_k100.bin": (100_000, quadratic(100_000, 100)),
    "indices_n2147483647_k5.bin": (LARGEST, [0, 1, 2**30, LARGEST - 2, LARGEST - 1]),
}


@st.composite
def index_sets(draw, most=60):
    """Draw ``n`` and ascending distinct positions below it."""
    n = draw(st.one_of(st.integers(1, 200), st.integers(1, LARGEST)))
    k = draw(st.integers(1, min(n, most)))
    if k == n:
        return n, list(range(n))
    top, bottom = st.integers(max(0, n - 100), n - 1), st.integers(0, min(n, 100) - 1)
    position = st.one_of(st.integers(0, n - 1), top, bottom)
    positions = draw(st.lists(position, min_size=1, max_size=k, unique=True))
    return n, sorted(positions)


def encode(positions, n):
    return encode_indices(np.array(positions, np.int32), n)


# --- Bytes ------------------------------------------------------------------------------


def test_bytes_derived_by_hand():
    # n = 10, k = 3: l = floor(log2(10 / 3)) = 1.  Positions 1, 4, 9.
    # Low bits 1, 0, 1, the first one lowest: 0b101 = 05.
    # High parts 0, 2, 4 set bits 0+0, 2+1, 4+2 of 3 + (9 >> 1) = 7 bits: 0b1001001 = 49.
    assert encode([1, 4, 9], 10).tobytes().hex() == "0549"
    # n = 20, k = 2: l = 3.  Positions 7, 18 = 0b00111, 0b10010: low bits 111 and 010.
    # 0b010111 = 17.  High parts 0 and 2 set bits 0 and 3 of 2 + (19 >> 3) = 4 bits: 0b1001 = 09.
    assert encode([7, 18], 20).tobytes().hex() == "1709"
    # n = k = 3: no low bits; bits 0, 2, 4 of 3 + 2 = 5: 0b10101 = 15.
    assert encode([0, 1, 2], 3).tobytes().hex() == "15"


@pytest.mark.parametrize("name", FILES)
def test_golden_bytes(name):
    n, positions = FILES[name]
    expected = (GOLDEN / name).read_bytes()
    assert encode(positions, n).tobytes() == expected
    decoded = decode_indices(np.frombuffer(expected, np.uint8)[None], n, len(positions))
    assert decoded.tolist() == [positions]


def test_all_golden_index_files_are_read():
    assert {path.name for path in GOLDEN.glob("indices*")} == set(FILES)


@settings(max_examples=300, deadline=None)
@given(index_sets())
def test_matches_plain_python(case):
    n, positions = case
    encoded = encode(positions, n)
    assert encoded.dtype == np.uint8
    assert encoded.tobytes() == reference(positions, n)
    assert encoded.nbytes == index_bytes(n, len(positions)) == IndexSection(n, len(positions)).nbytes


# --- Size ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [10**5, 2_359_296, 25_000_000, LARGEST])
def test_twelve_bits_a_position_at_a_thousandth(n):
    k = math.ceil(n / 1000)
    assert 11.5 < 8 * index_bytes(n, k) / k < 12.1


@settings(deadline=None)
@given(st.integers(1, LARGEST), st.data())
def test_size_is_between_l_plus_1_and_l_plus_3_bits(n, data):
    k = data.draw(st.integers(1, n))
    width = math.floor(math.log2(n // k))
    # Each of the two fields is padded by less than a byte.
    assert k * (width + 1) <= 8 * index_bytes(n, k) < k * (width + 3) + 16


@settings(deadline=None)
@given(st.integers(1, 10**6), st.data())
def test_size_is_near_what_information_theory_demands(n, data):
    k = data.draw(st.integers(1, n))
    least = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    # Elias-Fano's guarantee is 2 bits a position above log2(n / k); the binomial has log2(e) more.
    assert least - 1e-6 * n <= 8 * index_bytes(n, k) <= least + 2 * k + math.log2(n + 1) + 16


# --- Round trip ------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(index_sets(), st.integers(1, 4))
def test_round_trip_of_all_ranks(case, ranks):
    n, positions = case
    mirrored = sorted(n - 1 - p for p in positions)
    rows = [mirrored if rank % 2 else positions for rank in range(ranks)]
    decoded = decode_indices(np.stack([encode(row, n) for row in rows]), n, len(positions))
    assert decoded.dtype == np.int32
    assert decoded.tolist() == rows


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (1000, 1), (1000, 1000), (1000, 999), (100_000, 50_000)])
def test_round_trip_of_first_last_and_spread_positions(n, k):
    for positions in (range(k), range(n - k, n), np.linspace(0, n - 1, k).astype(int)):
        assert decode_indices(encode(list(positions), n)[None], n, k).tolist() == [list(positions)]


# --- What no reader may accept -----------------------------------------------------------------


def check_hostile(rows, n, k):
    """Decode, or fail in the one way that is allowed; what is accepted is valid and canonical."""
    try:
        decoded = decode_indices(rows, n, k)
    except WireFormatError:
        return False
    assert (decoded.shape, decoded.dtype) == ((len(rows), k), np.int32)
    assert decoded.min() >= 0
    assert decoded.max() < n
    assert (np.diff(decoded, axis=1) > 0).all()
    for row, positions in zip(rows, decoded, strict=True):
        assert encode_indices(positions, n).tobytes() == row.tobytes()
    return True


@settings(max_examples=500, deadline=None)
@given(index_sets(most=12), st.data())
def test_flipped_bits(case, data):
    n, positions = case
    row = encode(positions, n)
    before = row.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * len(row) - 1))
        row[bit // 8] ^= 1 << (bit % 8)
    accepted = check_hostile(row[None], n, len(positions))
    if accepted and (row != before).any():
        assert decode_indices(row[None], n, len(positions)).tolist() != [positions]


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 300), st.data())
def test_random_bytes(n, data):
    k = data.draw(st.integers(1, min(n, 20)))
    size = index_bytes(n, k)
    raw = data.draw(st.binary(min_size=2 * size, max_size=2 * size))
    check_hostile(np.frombuffer(raw, np.uint8).reshape(2, size), n, k)


@settings(deadline=None)
@given(index_sets(most=12), st.data())
def test_one_position_too_many_or_too_few(case, data):
    n, positions = case
    k = len(positions)
    row = encode(positions, n)
    start = len(row) - (k + ((n - 1) >> math.floor(math.log2(n // k))) + 7) // 8
    bits = np.unpackbits(row[start:], bitorder="little")
    bit = data.draw(st.integers(0, k + ((n - 1) >> math.floor(math.log2(n // k))) - 1))
    bits[bit] ^= 1
    row[start:] = np.packbits(bits, bitorder="little")
    got = k + (1 if bits[bit] else -1)
    good = encode(positions, n)
    with pytest.raises(WireFormatError, match=rf"expected {k} positions in the index set of rank 1, got {got}"):
        decode_indices(np.stack([good, row]), n, k)


@settings(deadline=None)
@given(index_sets(), st.integers(1, 2**20))
def test_positions_out_of_range(case, more):
    """A writer that believes in a larger tensor of the same coded size must be found out."""
    n, positions = case
    k, larger = len(positions), n + more
    assume(larger <= LARGEST)
    assume(math.floor(math.log2(n // k)) == math.floor(math.log2(larger // k)))
    assume(index_bytes(n, k) == index_bytes(larger, k))
    bad = [*positions[:-1], larger - 1]
    with pytest.raises(WireFormatError, match=r"expected (positions below|zero padding|\d+ positions)"):
        decode_indices(encode(bad, larger)[None], n, k)


@pytest.mark.parametrize("bit", [2, 7, 8 + 5, 8 + 6, 8 + 7])
def test_every_padding_bit_of_both_fields(bit):
    n, row = 100, encode([7, 48], 100)  # l = 5: 10 low bits, 5 high bits
    assert len(row) == 3
    row[1 + bit // 8] |= 1 << (bit % 8)
    field = "low" if bit < 8 else "high"
    with pytest.raises(WireFormatError, match=f"expected zero padding after the {field} bits"):
        decode_indices(row[None], n, 2)


def test_the_message_of_a_position_out_of_range():
    row = np.frombuffer(bytes.fromhex("0749"), np.uint8)  # 1, 5, 9: valid below 10, not below 9
    assert decode_indices(row[None], 10, 3).tolist() == [[1, 5, 9]]
    row = np.frombuffer(bytes.fromhex("0649"), np.uint8)
    assert decode_indices(row[None], 10, 3).tolist() == [[0, 5, 9]]
    with pytest.raises(WireFormatError, match="expected positions below 9 in the index set of rank 0, got 9"):
        decode_indices(row[None], 9, 3)


def test_equal_and_descending_positions():
    # Both in the high part 0 of n = 20, k = 2: bits 0 and 1.  Low bits 5 and 5, then 5 and 4.
    for low in (0b101_101, 0b100_101):
        row = np.array([[low, 0b11]], np.uint8)
        with pytest.raises(WireFormatError, match="does not ascend"):
            decode_indices(row, 20, 2)
    assert decode_indices(np.array([[0b110_101, 0b11]], np.uint8), 20, 2).tolist() == [[5, 6]]


@pytest.mark.parametrize("array", [np.zeros(2, np.int32), np.zeros(4, np.int32), np.zeros((1, 3), np.int32)])
def test_a_section_refuses_another_number_of_positions(array):
    with pytest.raises(WireFormatError, match="expected 3 positions, got an array of shape"):
        IndexSection(10, 3).encode(array)
