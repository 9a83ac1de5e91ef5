"""Vector quantisation.

X. Dai et al., "Hyper-Sphere Quantization: communication-efficient SGD for federated learning",
arXiv 1911.04655, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_compress.base import Compressor, is_quantiser
from hvd_compress.compressors.levels import Int8
from hvd_compress.errors import ConfigError
from hvd_compress.feedback import ErrorFeedback, Feedback
from hvd_compress.ops.base import Array, Ops
from hvd_compress.ops.hashing import hash32
from hvd_compress.settings import is_whole
from hvd_compress.step import FIRST, Payload, Step, TensorSpec
from hvd_compress.wire import ArraySection, Section

# Rows whose products with all codewords are held at a time.
_CHUNK = 16384


@dataclass(frozen=True, eq=False)
class VectorQuantizer(Compressor):
    """Send, for every ``dim`` elements, the number of a codeword and a magnitude.

    The codebook has ``codewords`` unit vectors, drawn from the seed or given; all ranks have
    the same.  With ``unbiased=False`` the codeword is the one of largest projection, and the
    magnitude that projection: the error is never larger than the vector, so it needs feedback
    and has it by default.  With ``unbiased=True`` the vector is written as a combination of
    codewords and one of them is drawn with the probability of its weight; the expectation is
    the vector itself, the variance large.

    Args:
        dim: elements of a sub-vector.
        codewords: 2 to 256; a code takes 8 bits, or fewer if fewer are enough.
        unbiased: see above.
        codebook: rows of a trained codebook, as :func:`train_codebook` returns; None draws one.
        values: how the magnitudes travel; they must be quantised without bias for ``unbiased``.
        feedback: ``ErrorFeedback()`` by default, None with ``unbiased``.
        min_numel, seed, transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`.

    Raises:
        ConfigError: a setting is out of range.
    """

    dim: int = 16
    codewords: int = 256
    unbiased: bool = field(default=False, kw_only=True)
    codebook: Any = field(default=None, kw_only=True)
    values: Compressor = field(default_factory=Int8, kw_only=True)
    feedback: Feedback | None = field(default=ErrorFeedback(), kw_only=True)

    def __post_init__(self) -> None:
        for name, low, high in (("dim", 1, 4096), ("codewords", 2, 256)):
            value = getattr(self, name)
            whole = is_whole(value, low, high)
            self._require(whole, name, f"a whole number from {low} to {high}")
        self._require(is_quantiser(self.values), "values", "a quantiser such as Int8()")
        if self.codebook is not None:
            book = np.asarray(self.codebook, np.float32)
            valid = book.shape == (self.codewords, self.dim) and np.allclose((book**2).sum(axis=-1), 1, atol=1e-4)
            self._require(valid, "codebook", f"{self.codewords} rows of {self.dim} numbers, each of unit length")
            object.__setattr__(self, "codebook", tuple(map(tuple, book.tolist())))
        super().__post_init__()
        if self.unbiased:
            object.__setattr__(self, "feedback", None)
            self._require(self.values.unbiased, "values", "an unbiased quantiser such as Int8(), with unbiased=True")
            # What codewords do not span could never be drawn.
            spans = int(np.linalg.matrix_rank(self.book())) == self.dim
            self._require(spans, "codewords", f"enough to span {self.dim} dimensions, with unbiased=True")

    def delta(self, spec: TensorSpec) -> float:
        """What the best codeword carries at least of any vector, times what is left of the magnitudes."""
        if self.unbiased:
            return 0.0
        carried: float = self.derived("carried", self._carried)
        return carried * self.values.delta(self._magnitudes(spec))

    def _carried(self) -> float:
        if self.codewords < self.dim:
            return 0.0
        # The squares of all projections sum up to that of the smallest singular value, or more.
        singular = np.linalg.svd(self.book().astype(np.float64), compute_uv=False)
        return float(singular[-1]) ** 2 / self.codewords

    def _bits(self) -> int:
        return (self.codewords - 1).bit_length()

    def _vectors(self, spec: TensorSpec) -> int:
        return -(-spec.numel // self.dim)

    def _magnitudes(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec((self._vectors(spec),), spec.accumulator)

    def sections(self, spec: TensorSpec) -> Sequence[Section]:
        """Packed codes, then what the magnitudes take."""
        packed = (self._vectors(spec) * self._bits() + 7) // 8
        return ArraySection("uint8", packed), *self.values.sections(self._magnitudes(spec))

    def book(self) -> np.ndarray:
        """Return the codebook, float32 of shape ``(codewords, dim)``."""
        book: np.ndarray = self.derived("book", self._made_book)
        return book

    def _made_book(self) -> np.ndarray:
        if self.codebook is not None:
            return np.asarray(self.codebook, np.float32)
        count = self.codewords * self.dim
        keys = Step().keys(self.seed, "codebook", shared=True)
        # Sums of uniform numbers, since transcendental functions differ between machines.
        drawn = hash32(np.arange(12 * count, dtype=np.uint32), keys).reshape(12, count).astype(np.float64)
        book = (drawn.sum(axis=0) / 2**32 - 6.0).reshape(self.codewords, self.dim)
        return np.asarray((book / np.sqrt((book**2).sum(axis=1, keepdims=True))).astype(np.float32))

    def _on_device(self, matrix: np.ndarray, spec: TensorSpec, ops: Ops, like: Array) -> Array:
        (moved,) = ops.from_host([np.ascontiguousarray(matrix.astype(spec.accumulator))], [spec.accumulator], like)
        return moved

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Find, or draw, a codeword for every sub-vector."""
        vectors, book = ops.rows(x, self.dim), self.book()
        coefficients = book.T
        if self.unbiased:
            coefficients = self.derived("inverse", lambda: np.linalg.pinv(book.astype(np.float64)))
        weights_of = self._on_device(coefficients, spec, ops, x)
        noise = None
        if self.unbiased:
            noise = ops.uniform(self._vectors(spec), step.keys(self.seed, "codewords"), x)
            noise = ops.reshape(ops.astype(noise, spec.accumulator), (-1, 1))
        codes, magnitudes = [], []
        for start in range(0, self._vectors(spec), _CHUNK):
            weights = ops.matmul(vectors[start : start + _CHUNK], weights_of)
            sizes = ops.abs(weights)
            if noise is None:
                code = ops.argmax(sizes)
                magnitude = ops.pick(weights, code)
            else:
                sums = ops.cumsum(sizes)
                total = sums[:, -1:]
                below = ops.astype(sums <= noise[start : start + _CHUNK] * total, spec.accumulator)
                code = ops.astype(ops.clip(ops.sum(below), 0.0, self.codewords - 1.0), "int32")
                code = ops.flatten(code)
                sign = ops.select(ops.pick(weights, code) < 0, -1.0 + 0.0 * noise[start : start + _CHUNK, 0], 1.0)
                magnitude = sign * ops.flatten(total)
            codes.append(ops.astype(code, "uint8"))
            magnitudes.append(magnitude)
        sent = self.values.encode(ops.concat(magnitudes), self._magnitudes(spec), ops, step)
        # The magnitude of finite elements may overflow.
        finite = ops.all_finite(x) & sent.finite
        return Payload((ops.pack(ops.concat(codes), self._bits()), *sent.arrays), finite)

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Return codewords times magnitudes."""
        packed, *sent = arrays
        book = self._on_device(self.book(), spec, ops, packed)
        codes = ops.astype(ops.unpack(packed, self._vectors(spec), self._bits()), "int32")
        # Only a damaged message has codes beyond the last codeword.
        codes = ops.clip(codes, 0, self.codewords - 1)
        magnitudes = self.values.decode(sent, self._magnitudes(spec), ops)
        rows = ops.take_rows(book, codes) * ops.reshape(magnitudes, (-1, 1))
        return ops.first(ops.flatten(rows), spec.numel)


def train_codebook(
    gradients: Any, dim: int = 16, codewords: int = 256, iterations: int = 10, seed: int = 0
) -> np.ndarray:
    """Return a codebook for gradients like these, by spherical k-means; pass it to all ranks.

    Args:
        gradients: an array; its elements are cut into sub-vectors of ``dim``.
        dim: of a codeword.
        codewords: how many.
        iterations: of k-means.
        seed: of the start.

    Returns:
        float32 of shape ``(codewords, dim)``, rows of unit length.

    Raises:
        ConfigError: there are fewer sub-vectors than codewords.
    """
    flat = np.asarray(gradients, np.float64).reshape(-1)
    vectors = flat[: len(flat) // dim * dim].reshape(-1, dim)
    lengths = np.linalg.norm(vectors, axis=1)
    vectors = vectors[lengths > 0]
    if len(vectors) < codewords:
        raise ConfigError(f"expected at least {codewords} sub-vectors that are not zero, got {len(vectors)}")
    chosen = np.random.default_rng(seed).choice(len(vectors), codewords, replace=False)
    book = vectors[chosen] / np.linalg.norm(vectors[chosen], axis=1, keepdims=True)
    for _ in range(iterations):
        products = vectors @ book.T
        nearest = np.abs(products).argmax(axis=1)
        # Codewords stand for both directions, so what is opposite counts negatively.
        signs = np.sign(products[np.arange(len(vectors)), nearest])
        sums = np.zeros_like(book)
        np.add.at(sums, nearest, vectors * signs[:, None])
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        book = np.where(norms > 0, sums / np.maximum(norms, 1e-300), book)
    return np.asarray(book.astype(np.float32))
