"""Bit packing against whole-number arithmetic in plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import WireFormatError
from hvd_compress.wire.bits import bits_to_bytes, pack, unpack


def reference(values, width):
    """Write the values as one long little-endian number."""
    number = sum(int(v) << (i * width) for i, v in enumerate(values))
    return number.to_bytes(-(-len(values) * width // 8), "little")


@st.composite
def packable(draw):
    width = draw(st.integers(1, 31))
    return draw(st.lists(st.integers(0, 2**width - 1), min_size=1, max_size=50)), width


@pytest.mark.parametrize(("bits", "size"), [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (2**40, 2**37)])
def test_bits_to_bytes(bits, size):
    assert bits_to_bytes(bits) == size


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([1, 0, 1], 1, "05"),
        ([1, 2, 3], 2, "39"),  # 11 10 01, read from the right
        ([0x123, 0xABC], 12, "23c1ab"),
        ([2**31 - 1], 31, "ffffff7f"),
        ([5, 7], 0, ""),
    ],
)
def test_the_lowest_bit_comes_first(values, width, expected):
    assert pack(np.array(values, np.uint32), width).tobytes().hex() == expected


@settings(deadline=None)
@given(packable())
def test_pack_matches_plain_python(case):
    values, width = case
    packed = pack(np.array(values, np.uint32), width)
    assert packed.dtype == np.uint8
    assert packed.tobytes() == reference(values, width)


@settings(deadline=None)
@given(packable(), st.integers(1, 3))
def test_round_trip_of_several_rows(case, rows):
    values, width = case
    columns = np.array([np.roll(values, r) for r in range(rows)], np.uint32)
    packed = np.stack([pack(row, width) for row in columns])
    unpacked = unpack(packed, len(values), width)
    assert unpacked.dtype == np.uint32
    np.testing.assert_array_equal(unpacked, columns)


def test_width_zero_reads_nothing_and_gives_zeros():
    unpacked = unpack(np.empty((2, 0), np.uint8), 3, 0)
    assert (unpacked.shape, unpacked.dtype) == ((2, 3), np.uint32)
    assert not unpacked.any()


@settings(deadline=None)
@given(packable(), st.data())
def test_every_padding_bit_is_checked(case, data):
    values, width = case
    used = len(values) * width
    padding = -used % 8
    if padding == 0:
        return
    packed = pack(np.array(values, np.uint32), width)
    packed[-1] |= 1 << (8 - 1 - data.draw(st.integers(0, padding - 1)))
    with pytest.raises(WireFormatError, match="expected zero padding"):
        unpack(packed[None], len(values), width)
