"""Sections: the typed pieces that a tensor's payload is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hvd_compress.errors import WireFormatError
from hvd_compress.ops.base import ITEMSIZE
from hvd_compress.wire.indices import decode_indices, encode_indices, index_bytes


class Section(Protocol):
    """A piece of a payload whose size in bytes is known before its data."""

    @property
    def dtype(self) -> str:
        """The dtype of the decoded array."""

    @property
    def count(self) -> int:
        """Elements of the decoded array."""

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""

    def encode(self, array: np.ndarray) -> np.ndarray:
        """Turn this rank's array into uint8 of length :attr:`nbytes`."""

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Turn uint8 of shape ``(ranks, nbytes)`` into an array of shape ``(ranks, count)``."""


@dataclass(frozen=True)
class ArraySection:
    """``count`` elements of ``dtype``, as they are."""

    dtype: str
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.count * ITEMSIZE[self.dtype]

    def encode(self, array: np.ndarray) -> np.ndarray:
        """Return the bytes of ``array``."""
        if array.shape != (self.count,) or array.dtype.itemsize != ITEMSIZE[self.dtype]:
            raise WireFormatError(
                f"expected {self.count} elements of {self.dtype}, got {array.dtype} of shape {array.shape}"
            )
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return np.ascontiguousarray(little).view(np.uint8)

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Return the elements of every row; bfloat16 as uint16 bits."""
        host = "uint16" if self.dtype == "bfloat16" else self.dtype
        # A copy even of one row, which counts as contiguous whatever its stride and alignment.
        return rows.copy().view(np.dtype(host).newbyteorder("<"))


@dataclass(frozen=True)
class IndexSection:
    """``k`` distinct ascending positions below ``n``, Elias-Fano coded."""

    n: int
    k: int

    @property
    def dtype(self) -> str:
        """Positions are int32."""
        return "int32"

    @property
    def count(self) -> int:
        """Positions."""
        return self.k

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return index_bytes(self.n, self.k)

    def encode(self, array: np.ndarray) -> np.ndarray:
        """Encode positions."""
        if array.shape != (self.k,):
            raise WireFormatError(f"expected {self.k} positions, got an array of shape {array.shape}")
        return encode_indices(array, self.n)

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Decode and check the positions of every row."""
        return decode_indices(rows, self.n, self.k)


@dataclass(frozen=True)
class CountSection:
    """How many elements the counted sections after it hold, at most ``capacity``."""

    capacity: int

    dtype = "int32"
    count = 1
    nbytes = 4

    def encode(self, array: np.ndarray) -> np.ndarray:
        """Encode the number."""
        if array.shape != (1,) or not 0 <= int(array[0]) <= self.capacity:
            raise WireFormatError(f"expected one number from 0 to {self.capacity}, got {array!r}")
        return array.astype("<i4").view(np.uint8)

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Decode and check the number of every row."""
        counts = rows.copy().view("<i4")
        if ((counts < 0) | (counts > self.capacity)).any():
            raise WireFormatError(f"expected a number from 0 to {self.capacity}, got {counts.reshape(-1).tolist()}")
        return counts


@dataclass(frozen=True)
class CountedSection:
    """The first elements of an array of ``capacity``, as many as the :class:`CountSection` before says.

    ``kind`` is a dtype, or ``"indices"`` for ascending positions below ``n``.  On the device the
    array always has ``capacity`` elements, zeros after those that count.
    """

    kind: str
    capacity: int
    n: int = 0

    @property
    def dtype(self) -> str:
        """The dtype of the array."""
        return "int32" if self.kind == "indices" else self.kind

    @property
    def count(self) -> int:
        """Elements of the array."""
        return self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes on the wire at most."""
        if self.kind == "indices":
            # The code of fewer positions can take a little more, but never than this.
            return 4 * self.capacity
        return self.capacity * ITEMSIZE[self.kind]

    def exact(self, count: int) -> IndexSection | ArraySection:
        """Return the section of so many elements, at least one."""
        return IndexSection(self.n, count) if self.kind == "indices" else ArraySection(self.kind, count)

    def encode(self, array: np.ndarray) -> np.ndarray:
        """Refuse: the number is needed."""
        raise WireFormatError("a counted section is encoded together with its count")

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Refuse: the number is needed."""
        raise WireFormatError("a counted section is decoded together with its count")
