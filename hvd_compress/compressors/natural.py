"""Natural compression: rounding to powers of two.

S. Horvath, C.-Y. Ho, L. Horvath, A. N. Sahu, M. Canini, P. Richtarik, "Natural compression for
distributed deep learning", MSML 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_compress.base import Compressor
from hvd_compress.ops.base import Array, Ops
from hvd_compress.step import FIRST, Payload, Step, TensorSpec
from hvd_compress.wire import ArraySection, Section

_MANTISSA = 1 << 23
_INFINITE = 255 * _MANTISSA
# Biased exponents that are sent: 127 of them, and zero.
_LOWEST, _HIGHEST = 19, 145
# The code of minus zero; zero is sent without a sign, so that receivers see what is no number.
_NOT_FINITE = 128


@dataclass(frozen=True, eq=False)
class Natural(Compressor):
    """Send sign and exponent of each element, in 8 bits, rounded stochastically to a power of two.

    Unbiased, with variance at most ``||x||^2 / 8``, for magnitudes from ``2**-108`` to
    ``2**18``; larger ones are limited, smaller ones become zero.

    Args:
        feedback: None by default.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.
    """

    @property
    def unbiased(self) -> bool:
        """As the paper proves, within the range."""
        return True

    def delta(self, spec: TensorSpec) -> float:
        """As the paper proves, within the range: the variance is at most an eighth."""
        return 7 / 8

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """A byte an element: the sign's bit is the highest; 128 stands for NaN and infinity."""
        return (ArraySection("uint8", spec.numel),)

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Round up with the probability that the mantissa gives."""
        bits = ops.float_bits(ops.astype_finite(x, "float32"))
        negative = bits >= (1 << 31)
        magnitude = ops.select(negative, bits - (1 << 31), bits)
        noise = ops.uniform(spec.numel, step.keys(self.seed, "rounding"), x)
        # A carry out of the mantissa is the next exponent.
        exponent = (magnitude + ops.astype(noise * float(_MANTISSA), "int64")) // _MANTISSA
        code = ops.clip(exponent, 0, _HIGHEST) - (_LOWEST - 1)
        code = ops.clip(code, 0, _HIGHEST - _LOWEST + 1)
        code = ops.select(code > 0, ops.select(negative, code + 128, code), 0)
        code = ops.select(magnitude < _INFINITE, code, _NOT_FINITE)
        return Payload((ops.astype(code, "uint8"),), ops.all_finite(x))

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return the powers of two."""
        sent = ops.astype(arrays[0], "int64")
        negative = sent >= 128
        code = ops.select(negative, sent - 128, sent)
        value = ops.select(code > 0, ops.from_float_bits((code + (_LOWEST - 1)) * _MANTISSA), 0.0)
        value = ops.select(negative, -value, value)
        return ops.astype(ops.select(sent != _NOT_FINITE, value, math.nan), spec.accumulator)
