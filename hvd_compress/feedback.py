"""Error feedback: what a compressor drops in one step is added to the next.

Compressors that are biased, such as top-k, do not converge without it (S. P. Karimireddy et
al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019;
S. U. Stich et al., "Sparsified SGD with memory", NeurIPS 2018).
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.ops.base import ACCUMULATOR, Array, Ops


@dataclass(frozen=True)
class ErrorFeedback:
    """Keep the difference between what was to be sent and what the receivers decode.

    With the gradient ``g`` and the residual ``e`` of the step before, ``a = e + g`` is
    compressed to ``c``, and ``e = a - decode(c)`` is kept.  So over any number of steps the
    sum of what was applied plus the mean residual equals the sum of the mean gradients.
    The residual is float32, or float64 for float64 gradients.
    """

    def compensate(self, residual: Array | None, gradient: Array, ops: Ops) -> Array:
        """Return ``residual + gradient`` in the accumulation dtype, as a new flat array."""
        flat = ops.flatten(gradient)
        exact = ops.astype(flat, ACCUMULATOR[ops.dtype(flat)])
        if residual is not None:
            return ops.add(residual, exact)
        # What is returned is overwritten later, the user's gradient must not be.
        return ops.copy(exact) if ops.dtype(exact) == ops.dtype(flat) else exact

    def keep(self, residual: Array | None, remainder: Array, finite: Array, ops: Ops) -> Array:
        """Return the new residual: ``remainder``, or the old one if the gradient was not finite.

        One infinity that entered a residual would stay there for ever.
        """
        if residual is None:
            residual = ops.zeros(ops.shape(remainder)[0], ops.dtype(remainder), remainder)
        return ops.where(finite, remainder, residual)
