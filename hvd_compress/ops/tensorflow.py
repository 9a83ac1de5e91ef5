"""Operations on TensorFlow tensors, eager or in a graph, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.ops.hashing import COUNTER, FIRST, SECOND, SHIFTS

_ITEMS_WORTH_BLOCKS = 4096
# What the names of devices contain on which integers are as fast as floats.
_HOST = "CPU"


class TensorFlowOps:
    """The :class:`~hvd_compress.ops.base.Ops` of TensorFlow.

    Tensors cannot be changed, so the methods that work in place elsewhere return new ones.
    On a GPU TensorFlow runs most int32 arithmetic (reshaping, slicing, adding, comparing) on
    the host; positions are therefore computed as float64, which is exact up to 2**53.
    """

    name = "tensorflow"

    def dtype(self, x: tf.Tensor) -> str:
        """Return the dtype's name."""
        return str(x.dtype.name)

    def shape(self, x: tf.Tensor) -> tuple[int, ...]:
        """Return the static shape."""
        return tuple(x.shape.as_list())

    def flatten(self, x: tf.Tensor) -> tf.Tensor:
        """Return all elements in row-major order."""
        return tf.reshape(x, [-1])

    def reshape(self, x: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
        """Return ``x`` in another shape."""
        return tf.reshape(x, shape)

    def astype(self, x: tf.Tensor, dtype: str) -> tf.Tensor:
        """Convert where necessary."""
        return tf.cast(x, dtype)

    def astype_finite(self, x: tf.Tensor, dtype: str) -> tf.Tensor:
        """Convert; finite values beyond the range become its ends."""
        if x.dtype == dtype:
            return x
        largest = tf.as_dtype(dtype).max
        limit = float(largest)
        # bfloat16 rounds: the largest float32 would become infinity.
        clipped = tf.clip_by_value(x, -limit, limit)
        return tf.cast(tf.where(tf.math.is_finite(x), clipped, x), dtype)

    def add(self, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        """Return ``a + b``."""
        return a + b

    def scale_(self, x: tf.Tensor, factor: Any) -> tf.Tensor:
        """Return ``x`` times a number or one-element tensor."""
        return x * tf.cast(factor, x.dtype)

    def zeros(self, n: int, dtype: str, like: tf.Tensor) -> tf.Tensor:
        """Return ``n`` zeros."""
        return tf.zeros([n], dtype)

    def where(self, condition: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        """Choose one of two tensors by a 0-d boolean."""
        return tf.where(condition, a, b)

    def all_finite(self, x: tf.Tensor) -> tf.Tensor:
        """Tell whether all elements are finite, as a 0-d tensor."""
        return tf.reduce_all(tf.math.is_finite(x))

    def top_k(self, x: tf.Tensor, k: int) -> tf.Tensor:
        """Select exactly, with positions ascending and the lower position winning ties.

        The k largest elements lie in the k blocks with the largest maxima, so
        ``tf.math.top_k``, which is slow on many elements, sees two short lists: those maxima,
        and the elements of the blocks chosen.  With blocks of ``sqrt(n / k)`` both have
        about ``sqrt(n * k)`` elements.
        """
        n, order = int(x.shape[0]), _ordered(x)
        width = _block_width(n, k)
        if n < _ITEMS_WORTH_BLOCKS or width < 2:
            return _ascending(tf.cast(tf.math.top_k(order, k, sorted=False).indices, tf.float64))
        count = -(-n // width)
        if count * width > n:
            order = tf.pad(order, [[0, count * width - n]])
        blocks = tf.reshape(order, [count, width])
        if k < count:
            best = tf.math.top_k(tf.reduce_max(blocks, axis=1), k, sorted=False).indices
            chosen = _ascending(tf.cast(best, tf.float64))
            blocks = tf.gather(blocks, chosen)
        else:
            chosen = tf.range(count)
        within = tf.cast(tf.math.top_k(tf.reshape(blocks, [-1]), k, sorted=False).indices, tf.float64)
        # The width is a power of two, so the division is exact.
        block = tf.floor(within / width)
        start = tf.gather(tf.cast(chosen, tf.float64), tf.cast(block, tf.int32)) * width
        return _ascending(start + (within - block * width))

    def above(self, x: tf.Tensor, threshold: tf.Tensor, capacity: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Select by a threshold."""
        indices = self.top_k(x, capacity)
        taken = tf.gather(x, indices)
        sizes = tf.abs(taken)
        largest = tf.equal(tf.range(capacity, dtype=tf.int64), tf.argmax(sizes))
        valid = tf.logical_or(tf.logical_not(sizes <= threshold), largest)
        order = tf.argsort(tf.cast(tf.logical_not(valid), tf.int32), stable=True)
        valid = tf.gather(valid, order)
        indices = tf.where(valid, tf.gather(indices, order), 0)
        taken = tf.where(valid, tf.gather(taken, order), tf.zeros([], x.dtype))
        return tf.reshape(tf.reduce_sum(tf.cast(valid, tf.int32)), [1]), indices, taken

    def take(self, x: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
        """Return ``x[indices]``."""
        return tf.gather(x, indices)

    def scatter_add_(self, x: tf.Tensor, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Return ``x`` with ``values`` added at distinct positions."""
        return tf.tensor_scatter_nd_add(x, _column(indices), values)

    def fold(self, function: Callable[..., tf.Tensor], initial: tf.Tensor, arrays: Sequence[tf.Tensor]) -> tf.Tensor:
        """Fold over the leading axis, in a loop of the graph where its length is not known."""
        ranks = arrays[0].shape[0]
        if ranks is None:
            _, result = tf.while_loop(
                lambda rank, _: rank < tf.shape(arrays[0])[0],
                lambda rank, total: (rank + 1, function(total, *(tf.gather(x, rank) for x in arrays))),
                (tf.constant(0), initial),
                parallel_iterations=1,
            )
            return result
        rows = [tf.unstack(x, ranks) for x in arrays]
        for row in zip(*rows, strict=True):
            initial = function(initial, *row)
        return initial

    def to_host(self, arrays: list[tf.Tensor]) -> list[np.ndarray]:
        """Copy eager tensors to the host."""
        return [_bits_if_bfloat16(x.numpy()) for x in arrays]

    def from_host(self, arrays: list[np.ndarray], dtypes: list[str], like: tf.Tensor) -> list[tf.Tensor]:
        """Copy from the host."""
        return [
            tf.bitcast(tf.constant(x), tf.bfloat16) if name == "bfloat16" else tf.constant(x, name)
            for x, name in zip(arrays, dtypes, strict=True)
        ]

    def shared(self, x: tf.Tensor) -> np.ndarray | None:
        """Return None: TensorFlow's memory is not written to."""
        return None

    def move_like(self, x: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        """Return ``x``; TensorFlow moves it where it is used."""
        return x

    def copy(self, x: tf.Tensor) -> tf.Tensor:
        """Return ``x``; tensors cannot be changed."""
        return x

    def abs(self, x: tf.Tensor) -> tf.Tensor:
        """Return the magnitudes."""
        return tf.abs(x)

    def floor(self, x: tf.Tensor) -> tf.Tensor:
        """Round down."""
        return tf.floor(x)

    def sqrt(self, x: tf.Tensor) -> tf.Tensor:
        """Return the square roots."""
        return tf.sqrt(x)

    def log(self, x: tf.Tensor) -> tf.Tensor:
        """Return the natural logarithms."""
        return tf.math.log(x)

    def exp(self, x: tf.Tensor) -> tf.Tensor:
        """Return the exponentials."""
        return tf.exp(x)

    def clip(self, x: tf.Tensor, low: Any, high: Any) -> tf.Tensor:
        """Limit to a range."""
        return tf.maximum(tf.minimum(x, tf.cast(high, x.dtype)), tf.cast(low, x.dtype))

    def select(self, condition: tf.Tensor, a: tf.Tensor, b: Any) -> tf.Tensor:
        """Choose element by element."""
        return tf.where(condition, a, tf.cast(b, a.dtype))

    def sum(self, x: tf.Tensor) -> tf.Tensor:
        """Sum over the last axis."""
        return tf.reduce_sum(x, axis=-1, keepdims=True)

    def max(self, x: tf.Tensor) -> tf.Tensor:
        """Maximum over the last axis."""
        return tf.reduce_max(x, axis=-1, keepdims=True)

    def rows(self, x: tf.Tensor, width: int) -> tf.Tensor:
        """Return rows of ``width`` elements."""
        missing = -int(x.shape[0]) % width
        return tf.reshape(tf.pad(x, [[0, missing]]) if missing else x, [-1, width])

    def first(self, x: tf.Tensor, count: int) -> tf.Tensor:
        """Return the first elements."""
        return x[:count]

    def concat(self, arrays: Sequence[tf.Tensor], axis: int = 0) -> tf.Tensor:
        """Join arrays."""
        return tf.concat(list(arrays), axis)

    def cumsum(self, x: tf.Tensor) -> tf.Tensor:
        """Sum up."""
        return tf.cumsum(x, axis=-1)

    def argmax(self, x: tf.Tensor) -> tf.Tensor:
        """Return positions of maxima."""
        return tf.argmax(x, axis=-1, output_type=tf.int32)

    def pick(self, x: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Return one element of each row."""
        return tf.gather(x, tf.cast(positions, tf.int64), axis=1, batch_dims=1)

    def take_rows(self, x: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Return rows."""
        return tf.gather(x, tf.cast(positions, tf.int64))

    def clear_rows(self, x: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Return ``x`` with zeros in some rows."""
        zeros = tf.zeros([int(positions.shape[0]), int(x.shape[1])], x.dtype)
        return tf.tensor_scatter_nd_update(x, _column(positions), zeros)

    def add_rows(self, x: tf.Tensor, positions: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Add to some rows."""
        return tf.tensor_scatter_nd_add(x, _column(positions), rows)

    def svd(self, a: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the singular value decomposition."""
        s, u, v = tf.linalg.svd(a)
        return u, s, tf.transpose(v)

    def matmul(self, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        """Multiply matrices."""
        return tf.matmul(a, b)

    def transpose(self, a: tf.Tensor) -> tf.Tensor:
        """Return the transpose."""
        return tf.linalg.matrix_transpose(a)

    def pack(self, codes: tf.Tensor, width: int) -> tf.Tensor:
        """Pack codes into bytes."""
        if width == 8:
            return codes
        if 8 % width:
            bits = [tf.bitwise.bitwise_and(_right(codes, bit), tf.constant(1, tf.uint8)) for bit in range(width)]
            codes, width = tf.reshape(tf.stack(bits, axis=1), [-1]), 1
        columns = tf.unstack(self.rows(codes, 8 // width), axis=1)
        packed = columns[0]
        for i, column in enumerate(columns[1:], 1):
            packed = tf.bitwise.bitwise_or(packed, _left(column, i * width))
        return packed

    def unpack(self, packed: tf.Tensor, count: int, width: int) -> tf.Tensor:
        """Return codes."""
        if width == 8:
            return packed
        if 8 % width:
            bits = tf.unstack(tf.reshape(self.unpack(packed, count * width, 1), [count, width]), axis=1)
            codes = bits[0]
            for i, bit in enumerate(bits[1:], 1):
                codes = tf.bitwise.bitwise_or(codes, _left(bit, i))
            return codes
        mask = tf.constant((1 << width) - 1, tf.uint8)
        codes = [tf.bitwise.bitwise_and(_right(packed, i * width), mask) for i in range(8 // width)]
        return tf.reshape(tf.stack(codes, axis=1), [-1])[:count]

    def uniform(self, n: int, keys: Any, like: tf.Tensor) -> tf.Tensor:
        """Return random numbers in [0, 1)."""
        # As int64, which a GPU computes itself; only the low 32 bits of a product count.
        keys = tf.cast(keys, tf.int64)
        x = _low(tf.range(n, dtype=tf.int64) * COUNTER + keys[0])
        x = _low(tf.bitwise.bitwise_xor(x, _right(x, SHIFTS[0])) * FIRST)
        x = tf.bitwise.bitwise_xor(x, keys[1])
        x = _low(tf.bitwise.bitwise_xor(x, _right(x, SHIFTS[1])) * SECOND)
        x = tf.bitwise.bitwise_xor(x, _right(x, SHIFTS[2]))
        return tf.cast(_right(x, 8), tf.float32) * 2**-24

    def float_bits(self, x: tf.Tensor) -> tf.Tensor:
        """Return the bits as int64."""
        return _low(tf.cast(tf.bitcast(x, tf.int32), tf.int64))

    def from_float_bits(self, bits: tf.Tensor) -> tf.Tensor:
        """Return the numbers that have these bits."""
        return tf.bitcast(tf.cast(bits, tf.int32), tf.float32)


def _low(x: tf.Tensor) -> tf.Tensor:
    """Return the low 32 bits."""
    return tf.bitwise.bitwise_and(x, tf.constant(0xFFFFFFFF, tf.int64))


def _right(x: tf.Tensor, by: int) -> tf.Tensor:
    return tf.bitwise.right_shift(x, tf.constant(by, x.dtype))


def _left(x: tf.Tensor, by: int) -> tf.Tensor:
    return tf.bitwise.left_shift(x, tf.constant(by, x.dtype))


def _ordered(x: tf.Tensor) -> tf.Tensor:
    """Return numbers, 0 or more, that are ordered as the magnitudes, with NaN at the top."""
    if _HOST in x.device:
        # As integers, which have NaN above infinity.
        return tf.bitcast(tf.abs(x), tf.int64 if x.dtype == tf.float64 else tf.int32)
    # On a GPU integers would be compared on the host.  NaN is unordered; here it ties with infinity.
    return tf.where(tf.math.is_finite(x), tf.abs(x), tf.constant(np.inf, x.dtype))


def _block_width(n: int, k: int) -> int:
    """Return a power of two near ``sqrt(n / k)``, one that divides ``n`` if it is not much smaller."""
    width: int = 1 << round(float(np.log2(max(n / k, 1))) / 2)
    dividing = min(width, n & -n)
    return dividing if 4 * dividing >= width else width


def _ascending(positions: tf.Tensor) -> tf.Tensor:
    """Sort positions given as float64 and return them as int32."""
    return tf.cast(-tf.math.top_k(-positions, int(positions.shape[0])).values, tf.int32)


def _column(indices: tf.Tensor) -> tf.Tensor:
    # Reshaping int32 is done on the host, int64 on the device.
    return tf.reshape(tf.cast(indices, tf.int64), [-1, 1])


def _bits_if_bfloat16(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x
