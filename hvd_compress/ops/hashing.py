"""A counter-based random generator that every framework can compute.

Element ``i`` of a stream is a hash of ``i`` and of two keys: a multiplication, and then the
xor-shift-multiply rounds of a 32-bit finaliser, with the second key put in between them, so
that streams of different keys do not overlap.  Keys must be well mixed themselves, as those of
:meth:`hvd_compress.step.Step.keys` are: of two that differ in a bit or two streams are alike.
It is no cryptography, and need not be: the numbers round gradients and choose positions.
"""

from __future__ import annotations

import numpy as np

#: Odd constants: of the counter, and of the two multiplications.
COUNTER, FIRST, SECOND = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
#: The right shifts before, between and after the multiplications.
SHIFTS = (16, 15, 16)


def hash32(counters: np.ndarray, keys: tuple[int, int]) -> np.ndarray:
    """Return the hash of uint32 ``counters``, as uint32."""
    x = counters * np.uint32(COUNTER) + np.uint32(keys[0])
    x ^= x >> np.uint32(SHIFTS[0])
    x *= np.uint32(FIRST)
    x ^= np.uint32(keys[1])
    x ^= x >> np.uint32(SHIFTS[1])
    x *= np.uint32(SECOND)
    x ^= x >> np.uint32(SHIFTS[2])
    return x


def permuted(count: int, n: int, keys: tuple[int, int]) -> np.ndarray:
    """Return the first ``count`` places of a pseudo-random permutation of ``range(n)``, as int64.

    A Feistel network over the smallest square of a power of two that holds ``n``, with what
    falls beyond ``n`` sent through it again (*cycle walking*).  It depends on no library's
    random generator, whose streams may change between versions and so between ranks.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    places = _feistel(np.arange(count, dtype=np.int64), half, mask, keys)
    while True:
        beyond = np.flatnonzero(places >= n)
        if not beyond.size:
            return places
        places[beyond] = _feistel(places[beyond], half, mask, keys)


def _feistel(places: np.ndarray, half: int, mask: int, keys: tuple[int, int]) -> np.ndarray:
    left, right = places >> half, places & mask
    for turn in range(4):
        mixed = hash32(right.astype(np.uint32), (keys[0] ^ (turn * COUNTER & 0xFFFFFFFF), keys[1])).astype(np.int64)
        left, right = right, left ^ (mixed & mask)
    mixed_places: np.ndarray = (left << half) | right
    return mixed_places
