"""The operations that compressors, feedback and exchange are written in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

#: An array or tensor of whichever framework the :class:`Ops` belongs to.
Array = Any

#: Gradient dtypes that can be compressed, by the dtype that their arithmetic is done in.
ACCUMULATOR = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}

#: The largest number of each dtype.
LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2.0 - 2.0**-7) * 2.0**127,
    "float32": (2.0 - 2.0**-23) * 2.0**127,
    "float64": sys.float_info.max,
}

#: Bytes an element.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "uint8": 1, "bool": 1}


class Ops(Protocol):
    """What an algorithm may ask of a framework.

    Arrays are one-dimensional unless said otherwise, dtypes are names such as ``"float32"``.
    Arrays of all frameworks also have Python's arithmetic and comparison operators, between
    arrays of one dtype and with plain numbers, and slices.  Methods whose names end in ``_``
    change their first argument where the framework can; the result is what they return.  No
    method may wait for the device or copy a whole gradient to the host; only :meth:`to_host`
    does, for the payload.
    """

    name: str

    def dtype(self, x: Array) -> str:
        """Return the dtype's name."""

    def shape(self, x: Array) -> tuple[int, ...]:
        """Return the static shape."""

    def flatten(self, x: Array) -> Array:
        """Return all elements in logical (row-major) order, as a view where possible."""

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return ``x`` in another shape."""

    def astype(self, x: Array, dtype: str) -> Array:
        """Convert; returns ``x`` itself if it has the dtype already."""

    def astype_finite(self, x: Array, dtype: str) -> Array:
        """Convert, but keep finite what is finite: values beyond the range become its ends."""

    def add(self, a: Array, b: Array) -> Array:
        """Return ``a + b`` as a new array."""

    def scale_(self, x: Array, factor: Any) -> Array:
        """Multiply ``x`` in place by a number or one-element array and return it."""

    def zeros(self, n: int, dtype: str, like: Array) -> Array:
        """Return ``n`` zeros where ``like`` lives."""

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        """Choose the whole of ``a`` or ``b`` by a 0-d boolean."""

    def all_finite(self, x: Array) -> Array:
        """Return a 0-d boolean: no NaN and no infinity in ``x``."""

    def top_k(self, x: Array, k: int) -> Array:
        """Return the int32 positions of the ``k`` largest magnitudes, ascending.

        Exact.  Of equal magnitudes the lower position wins.  NaN and infinity count as
        larger than every number, in an order among themselves that is left open.
        """

    def above(self, x: Array, threshold: Array, capacity: int) -> tuple[Array, Array, Array]:
        """Return the elements whose magnitudes are above a threshold, and at least the largest one.

        Args:
            x: numbers.
            threshold: one-element array.
            capacity: the largest ones are returned if there are more.

        Returns:
            Their number (int32, one element), ascending int32 positions and values, both of
            ``capacity`` elements with zeros after those that count.
        """

    def take(self, x: Array, indices: Array) -> Array:
        """Return ``x[indices]``."""

    def scatter_add_(self, x: Array, indices: Array, values: Array) -> Array:
        """Add ``values`` to ``x`` at ``indices``, which must be distinct, but where zeros are added."""

    def fold(self, function: Callable[..., Array], initial: Array, arrays: Sequence[Array]) -> Array:
        """Return ``function(...function(initial, *rows[0])..., *rows[-1])`` along the arrays' first axis, in order."""

    def to_host(self, arrays: list[Array]) -> list[np.ndarray]:
        """Copy small arrays to the host, all at once; bfloat16 arrives as uint16 bits."""

    def from_host(self, arrays: list[np.ndarray], dtypes: list[str], like: Array) -> list[Array]:
        """Copy host arrays to where ``like`` lives, all at once; the inverse of :meth:`to_host`."""

    def shared(self, x: Array) -> np.ndarray | None:
        """Return a NumPy array over the memory of flat numbers, None where there is none to be written to."""

    def move_like(self, x: Array, like: Array) -> Array:
        """Return ``x`` on the device of ``like``."""

    def copy(self, x: Array) -> Array:
        """Return an independent copy."""

    # --- Elementwise, and over the last axis ----------------------------------------

    def abs(self, x: Array) -> Array:
        """Return the magnitudes."""

    def floor(self, x: Array) -> Array:
        """Round down."""

    def sqrt(self, x: Array) -> Array:
        """Return the square roots."""

    def log(self, x: Array) -> Array:
        """Return the natural logarithms."""

    def exp(self, x: Array) -> Array:
        """Return the exponentials."""

    def clip(self, x: Array, low: Any, high: Any) -> Array:
        """Limit to a range; the limits are numbers or arrays that broadcast."""

    def select(self, condition: Array, a: Array, b: Any) -> Array:
        """Choose element by element; ``b`` may be a number."""

    def sum(self, x: Array) -> Array:
        """Sum over the last axis, which stays with length 1."""

    def max(self, x: Array) -> Array:
        """Maximum over the last axis, which stays with length 1."""

    def rows(self, x: Array, width: int) -> Array:
        """Return ``x`` as rows of ``width`` elements, the last one padded with zeros."""

    def first(self, x: Array, count: int) -> Array:
        """Return the first ``count`` elements."""

    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        """Join arrays along an axis."""

    def cumsum(self, x: Array) -> Array:
        """Sum up along the last axis."""

    def argmax(self, x: Array) -> Array:
        """Return the position of the maximum along the last axis, as int32; the first of several."""

    def pick(self, x: Array, positions: Array) -> Array:
        """Return one element of each row of ``x``."""

    def take_rows(self, x: Array, positions: Array) -> Array:
        """Return rows of ``x``."""

    def clear_rows(self, x: Array, positions: Array) -> Array:
        """Return a copy of ``x`` with zeros in some rows."""

    def add_rows(self, x: Array, positions: Array, rows: Array) -> Array:
        """Return ``x`` with ``rows`` added at distinct positions; may change ``x``."""

    def svd(self, a: Array) -> tuple[Array, Array, Array]:
        """Return ``u, s, vt`` with ``a = u @ diag(s) @ vt``, the singular values in descending order."""

    # --- Matrices -------------------------------------------------------------------

    def matmul(self, a: Array, b: Array) -> Array:
        """Multiply matrices, or rows of matrices pair by pair."""

    def transpose(self, a: Array) -> Array:
        """Swap the last two axes, as a view where possible."""

    # --- Bits and random numbers ----------------------------------------------------

    def pack(self, codes: Array, width: int) -> Array:
        """Pack uint8 ``codes`` below ``2**width`` into bytes, the lowest bits first."""

    def unpack(self, packed: Array, count: int, width: int) -> Array:
        """Return ``count`` uint8 codes; the inverse of :meth:`pack`."""

    def uniform(self, n: int, keys: Any, like: Array) -> Array:
        """Return ``n`` float32 numbers in [0, 1), multiples of 2**-24, the same in all frameworks.

        A counter-based generator: element ``i`` is a hash of ``i`` and of the two 32-bit
        ``keys``, see :mod:`hvd_compress.ops.hashing`.
        """

    def float_bits(self, x: Array) -> Array:
        """Return the bits of float32 numbers as int64."""

    def from_float_bits(self, bits: Array) -> Array:
        """Return the float32 numbers that have these bits."""
