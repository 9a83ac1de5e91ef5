"""Operations on TensorFlow tensors, eager or in a graph, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

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

    def move_like(self, x: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        """Return ``x``; TensorFlow moves it where it is used."""
        return x

    def copy(self, x: tf.Tensor) -> tf.Tensor:
        """Return ``x``; tensors cannot be changed."""
        return x


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
