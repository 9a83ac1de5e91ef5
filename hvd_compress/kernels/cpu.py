"""Loops that do in one pass over memory what the operations of ``ops`` need several for.

Compiled by Numba, on the CPU, for float32 and float64.  Each does exactly the arithmetic of its
generic twin, in the same order and the same precision: no fast-math, and no fused multiply-add.

Numbers are compared as the integers that their bits are, without the sign: that vectorises, and
infinity and NaN are larger than every number.  Numba computes with integers of 64 bits unless
they are cast, which halves the speed of loops over 32-bit ones; hence the casts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from hvd_compress.kernels.plan import Mode
from hvd_compress.ops.hashing import COUNTER, FIRST, SECOND, SHIFTS

NOTHING, SET, ADD, DECAY, MOMENTUM, NESTEROV = (int(mode) for mode in Mode)

# Elements that are looked at one by one only if the largest of them is large enough.
_BLOCK = 64
# Elements that stay in the first-level cache between the loops that go over them.
_CHUNK = 2048
# Sums that are made side by side.
_LANES = 16
# Bits that a pass of the exact selection looks at.
_DIGIT = 11

_COUNTER, _FIRST, _SECOND = np.uint32(COUNTER), np.uint32(FIRST), np.uint32(SECOND)
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (np.uint32(shift) for shift in SHIFTS)
_UNIT = np.float32(2.0**-24)


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile when first called; keep the result in a file for later processes, where there is a place for it."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except (RuntimeError, OSError):  # neither the package's folder nor the user's can be written to
        return njit(nogil=True, error_model="numpy")(function)


# --- Accumulation ---------------------------------------------------------------------


@_compiled
def _accumulate(mode: int, factor: Any, x: Any, u: Any, g: Any) -> None:
    if mode == ADD:
        for i in range(x.size):
            x[i] += g[i]
    elif mode == SET:
        for i in range(x.size):
            x[i] = g[i]
    elif mode == DECAY:
        for i in range(x.size):
            x[i] = x[i] * factor + g[i]
    elif mode == MOMENTUM:
        for i in range(x.size):
            u[i] = u[i] * factor + g[i]
            x[i] += u[i]
    elif mode == NESTEROV:
        for i in range(x.size):
            u[i] = (u[i] + g[i]) * factor
            x[i] += u[i] + g[i]


@_compiled
def largest_magnitude(bits: Any, mask: Any) -> Any:
    """Return the bits of the largest magnitude, 0 if there are no elements."""
    top = bits.dtype.type(0)
    for i in range(bits.size):
        m = bits.dtype.type(bits[i] & mask)
        top = m if m > top else top
    return top


# --- Top-k ----------------------------------------------------------------------------


@_compiled
def accumulate_and_collect(
    mode: int, factor: Any, x: Any, bits: Any, u: Any, g: Any, mask: Any, threshold: Any, positions: Any, found: Any
) -> int:
    """Accumulate, and collect where the bits of magnitudes are ``threshold`` or more, and those bits.

    Returns their number; if there is not room for all, the first ones are there.
    """
    n, count = bits.size, 0
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        _accumulate(mode, factor, x[start:stop], u[start:stop], g[start:stop])
        for first in range(start, stop, _BLOCK):
            block = bits[first : min(first + _BLOCK, stop)]
            top = bits.dtype.type(0)
            for i in range(block.size):
                m = bits.dtype.type(block[i] & mask)
                top = m if m > top else top
            if top >= threshold:
                for i in range(block.size):
                    m = bits.dtype.type(block[i] & mask)
                    if m >= threshold:
                        if count < positions.size:
                            positions[count] = first + i
                            found[count] = m
                        count += 1
    return count


@_compiled
def kth_largest(bits: Any, mask: Any, width: int, k: int) -> tuple[Any, int]:
    """Return the ``k``-th largest of magnitudes' bits, and how many are larger.

    A radix selection, so that its time depends on nothing but the size.
    """
    counts = np.empty(1 << _DIGIT, np.int64)
    prefix, above, shift = np.int64(0), 0, width
    while shift > 0:
        digit = min(_DIGIT, shift)
        shift -= digit
        last = (1 << digit) - 1
        counts[: last + 1] = 0
        for i in range(bits.size):
            m = bits[i] & mask
            if (m >> (shift + digit)) == prefix:
                counts[(m >> shift) & last] += 1
        value = last
        while above + counts[value] < k:
            above += counts[value]
            value -= 1
        prefix = (prefix << digit) | value
    return bits.dtype.type(prefix), above


@_compiled
def select(bits: Any, mask: Any, threshold: Any, above: int, k: int, positions: Any, out: Any) -> None:
    """Write the ``k`` positions of what is above the threshold, and of the first ones that equal it.

    ``positions`` are those of ``bits``; empty: they are all there are.
    """
    ties, count = k - above, 0
    for i in range(bits.size):
        m = bits.dtype.type(bits[i] & mask)
        if m >= threshold:
            if m == threshold:
                if ties == 0:
                    continue
                ties -= 1
            out[count] = positions[i] if positions.size else i
            count += 1
            if count == k:
                return


@_compiled
def sample(mode: int, factor: Any, x: Any, u: Any, g: Any, stride: int, out: Any) -> None:
    """Write what every ``stride``-th element of ``x`` is going to be."""
    for j in range(out.size):
        i = j * stride
        if mode == NOTHING:
            out[j] = x[i]
        elif mode == SET:
            out[j] = g[i]
        elif mode == ADD:
            out[j] = x[i] + g[i]
        elif mode == DECAY:
            out[j] = x[i] * factor + g[i]
        elif mode == MOMENTUM:
            out[j] = x[i] + (u[i] * factor + g[i])
        else:
            out[j] = x[i] + ((u[i] + g[i]) * factor + g[i])


# --- Quantisers -----------------------------------------------------------------------


@_compiled
def _fill_noise(hashes: Any, out: Any, first: int, key0: Any, key1: Any) -> None:
    """Write what ``ops.uniform`` returns for elements from ``first`` on; ``hashes`` is for use here."""
    # Three loops, of which the second is all multiplications of one kind, take less than half the time of one.
    h = np.uint32(np.uint32(np.uint32(first) * _COUNTER) + key0)
    for i in range(hashes.size):
        hashes[i] = h
        h = np.uint32(h + _COUNTER)
    for i in range(hashes.size):
        h = hashes[i]
        h = np.uint32(h ^ (h >> _SHIFT_0))
        h = np.uint32(h * _FIRST)
        h = np.uint32(h ^ key1)
        h = np.uint32(h ^ (h >> _SHIFT_1))
        h = np.uint32(h * _SECOND)
        h = np.uint32(h ^ (h >> _SHIFT_2))
        hashes[i] = np.uint32(h >> np.uint32(8))
    for i in range(hashes.size):
        out[i] = np.float32(np.int32(hashes[i])) * _UNIT


@_compiled
def _append(codes: Any, width: int, packed: Any, at: int, held: int, filled: int) -> tuple[int, int, int]:
    """Pack codes behind ``filled`` bits that are held back; return where the next byte goes, and what is held."""
    done = 0
    if filled == 0 and width == 8:
        packed[at : at + codes.size] = codes
        return at + codes.size, 0, 0
    if filled == 0 and width == 4:
        done = codes.size // 2 * 2
        out = packed[at : at + done // 2]
        for i in range(out.size):
            out[i] = np.uint8(codes[2 * i] | (codes[2 * i + 1] << 4))
        at += out.size
    if filled == 0 and width == 2:
        done = codes.size // 4 * 4
        out = packed[at : at + done // 4]
        for i in range(out.size):
            out[i] = np.uint8(
                codes[4 * i] | (codes[4 * i + 1] << 2) | (codes[4 * i + 2] << 4) | (codes[4 * i + 3] << 6)
            )
        at += out.size
    if filled == 0 and width == 1:
        done = codes.size // 8 * 8
        out = packed[at : at + done // 8]
        for i in range(out.size):
            byte = codes[8 * i]
            for j in range(1, 8):
                byte |= codes[8 * i + j] << j
            out[i] = np.uint8(byte)
        at += out.size
    for i in range(done, codes.size):
        held |= codes[i] << filled
        filled += width
        while filled >= 8:
            packed[at] = held & 0xFF
            at += 1
            held >>= 8
            filled -= 8
    return at, held, filled


@_compiled
def _round(x: Any, noise: Any, scale: Any, levels: Any, step: Any, codes: Any, keep: bool) -> None:
    for i in range(x.size):
        value = x[i]
        m = np.floor(abs(value) * scale + x.dtype.type(noise[i]))
        m = m if m < levels else levels
        signed = -m if value < 0 else m
        codes[i] = np.uint8(np.int32(signed + levels))
        if keep:
            x[i] = value - signed * step


@_compiled
def quantise(
    mode: int,
    factor: Any,
    x: Any,
    bits: Any,
    u: Any,
    g: Any,
    mask: Any,
    keep: bool,
    bucket: int,
    width: int,
    smallest: Any,
    key0: Any,
    key1: Any,
    packed: Any,
    norms: Any,
) -> None:
    """Accumulate and round to levels, bucket by bucket; leave in ``x`` what is not sent, if ``keep``.

    ``norms`` are written as bits.
    """
    n, real, chunk = x.size, x.dtype.type, min(bucket, _CHUNK)
    levels = real((1 << (width - 1)) - 1)
    unit = real(1.0 / ((1 << (width - 1)) - 1))
    codes, noise, hashes = np.empty(chunk, np.uint8), np.empty(chunk, np.float32), np.empty(chunk, np.uint32)
    limit = np.empty(1, x.dtype)
    limit_bits = limit.view(bits.dtype)
    at, held, filled = 0, 0, 0
    for b in range(norms.size):
        start, stop = b * bucket, min((b + 1) * bucket, n)
        _accumulate(mode, factor, x[start:stop], u[start:stop], g[start:stop])
        limit_bits[0] = largest_magnitude(bits[start:stop], mask)
        if not limit[0] > smallest:
            limit[0] = 0
        norms[b] = limit[0]
        scale = real(1) / limit[0] * levels if limit[0] > 0 else real(0)
        step = limit[0] * unit
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            size = last - first
            _fill_noise(hashes[:size], noise[:size], first, key0, key1)
            _round(x[first:last], noise[:size], scale, levels, step, codes[:size], keep)
            at, held, filled = _append(codes[:size], width, packed, at, held, filled)
    if filled:
        packed[at] = held


# --- Signs ----------------------------------------------------------------------------


@_compiled
def _sums(x: Any, codes: Any, upper: Any, lower: Any) -> tuple[float, float, int]:
    """Return the sums of what is not negative and of what is, and how many are not; write 1 for these, 0 for others."""
    upper[:] = 0
    lower[:] = 0
    zero = x.dtype.type(0)
    whole = x.size // _LANES * _LANES
    # Sums side by side can be vectorised; a single one, whose order is fixed, cannot.
    for start in range(0, whole, _LANES):
        block = x[start : start + _LANES]
        for j in range(_LANES):
            upper[j] += block[j] if block[j] >= 0 else zero
            lower[j] += block[j] if block[j] < 0 else zero
    above, below, count = 0.0, 0.0, 0
    for j in range(_LANES):
        above += upper[j]
        below += lower[j]
    for i in range(whole, x.size):
        if x[i] >= 0:
            above += x[i]
        else:
            below += x[i]
    for i in range(x.size):
        codes[i] = np.uint8(x[i] >= 0)
    for i in range(x.size):
        count += codes[i]
    return above, below, count


@_compiled
def signs(
    mode: int,
    factor: Any,
    x: Any,
    u: Any,
    g: Any,
    keep: bool,
    both: bool,
    bucket: int,
    packed: Any,
    above: Any,
    below: Any,
) -> None:
    """Accumulate, pack signs, and average magnitudes by bucket; leave in ``x`` what is not sent, if ``keep``.

    If ``both``, what is not negative and what is are averaged for themselves; else ``below`` is ``-above``.
    """
    n, real = x.size, x.dtype.type
    codes, upper, lower = np.empty(_CHUNK, np.uint8), np.empty(_LANES, x.dtype), np.empty(_LANES, x.dtype)
    at, held, filled = 0, 0, 0
    for b in range(above.size):
        start, stop = b * bucket, min((b + 1) * bucket, n)
        total_above, total_below, total = 0.0, 0.0, 0
        for first in range(start, stop, _CHUNK):
            last = min(first + _CHUNK, stop)
            row, own = x[first:last], codes[: last - first]
            _accumulate(mode, factor, row, u[first:last], g[first:last])
            sum_above, sum_below, count = _sums(row, own, upper, lower)
            total_above += sum_above
            total_below += sum_below
            total += count
            at, held, filled = _append(own, 1, packed, at, held, filled)
        if both:
            above[b] = total_above / max(total, 1)
            below[b] = total_below / max(stop - start - total, 1)
        else:
            above[b] = (total_above - total_below) / (stop - start)
            below[b] = -above[b]
        if keep:
            high, low, row = real(above[b]), real(below[b]), x[start:stop]
            for i in range(row.size):
                row[i] -= high if row[i] >= 0 else low
    if filled:
        packed[at] = held
