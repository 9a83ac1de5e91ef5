"""What the papers say, in float64 NumPy and as plainly as possible; nothing here calls the package's algorithms.

``u`` are the uniform random numbers that an algorithm draws, one for each element.
"""

import numpy as np

# --- What is sent of an array: what receivers make of it --------------------------------


def top_k(a, k):
    """Stich et al. 2018: the k largest magnitudes; of equal ones the first."""
    chosen = np.zeros(a.size, bool)
    chosen[np.argsort(-np.abs(a), kind="stable")[:k]] = True
    return np.where(chosen, a, 0.0)


def quantised_top_k(a, k, quantise):
    """Top-k whose values are quantised in their turn, in order of position."""
    places = np.flatnonzero(top_k(np.abs(a) + 1e-300, k))
    out = np.zeros(a.size)
    out[places] = quantise(a[places])
    return out


def random_k(a, places, scaled):
    """Stich et al. 2018; ``n / k`` makes it unbiased."""
    out = np.zeros(a.size)
    for place in places:
        out[place] = a[place] * (a.size / len(places) if scaled else 1.0)
    return out


def qsgd(x, s, bucket, u, norm):
    """Alistarh et al. 2017, section 3.1: ``||x|| sgn(x_i) xi_i(x, s)`` in buckets."""
    out = np.zeros(x.size)
    for start in range(0, x.size, bucket):
        v = x[start : start + bucket]
        length = np.abs(v).max() if norm == "max" else np.sqrt((v**2).sum())
        for i, value in enumerate(v):
            if length == 0:
                continue
            ratio = s * abs(value) / length
            level = int(ratio)
            # Up with the probability of the remainder.
            if u[start + i] >= 1 - (ratio - level):
                level += 1
            out[start + i] = length * np.sign(value) * level / s
    return out


def terngrad(x, clip, u):
    """Wen et al. 2017: ``s * sign(g) * b`` with ``P(b = 1) = |g| / s``; clipped at ``clip`` sigma."""
    if clip is not None:
        sigma = np.sqrt(np.mean(x**2))
        x = np.where(np.abs(x) <= clip * sigma, x, np.sign(x) * clip * sigma)
    s = np.abs(x).max()
    if s == 0:
        return np.zeros(x.size)
    return s * np.sign(x) * (u >= 1 - np.abs(x) / s)


def natural(x, u):
    """Horvath et al. 2022, definition 1: to the power of two below or above, so that the mean is right."""
    out = np.zeros(x.size)
    for i, t in enumerate(x):
        if t != 0:
            below = 2.0 ** np.floor(np.log2(abs(t)))
            up = (abs(t) - below) / below
            out[i] = np.sign(t) * (2 * below if u[i] >= 1 - up else below)
    return out


def sign(x):
    """One bit has no zero: zero counts as positive."""
    return np.where(x >= 0, 1.0, -1.0)


def ef_sign(a, bucket):
    """Karimireddy et al. 2019, algorithm 1: ``||p||_1 / d * sign(p)``."""
    out = np.zeros(a.size)
    for start in range(0, a.size, bucket):
        v = a[start : start + bucket]
        out[start : start + bucket] = np.abs(v).sum() / v.size * sign(v)
    return out


def one_bit(a, bucket):
    """Seide et al. 2014: each side of zero is replaced by its mean."""
    out = np.zeros(a.size)
    for start in range(0, a.size, bucket):
        v = a[start : start + bucket]
        for side in (v >= 0, v < 0):
            if side.any():
                out[start : start + bucket][side] = v[side].mean()
    return out


def vector(x, book, quantise):
    """Dai et al. 2019, the biased kind: the codeword of largest projection, and the projection."""
    rows = np.append(x, np.zeros(-x.size % book.shape[1])).reshape(-1, book.shape[1])
    codes = [int(np.argmax([abs(c @ row) for c in book])) for row in rows]
    sizes = quantise(np.array([book[code] @ row for code, row in zip(codes, rows, strict=True)]))
    return np.concatenate([size * book[code] for size, code in zip(sizes, codes, strict=True)])[: x.size]


def vector_unbiased(x, book, u):
    """Dai et al. 2019, the unbiased kind: ``v = C^T p``; codeword j with probability ``|p_j| / ||p||_1``."""
    rows = np.append(x, np.zeros(-x.size % book.shape[1])).reshape(-1, book.shape[1])
    out = []
    for row, draw in zip(rows, u, strict=True):
        p = np.linalg.lstsq(book.T, row, rcond=None)[0]
        total, j = np.abs(p).sum(), 0
        while j < len(book) - 1 and np.abs(p[: j + 1]).sum() <= draw * total:
            j += 1
        out.append((1.0 if p[j] >= 0 else -1.0) * total * book[j])
    return np.concatenate(out)[: x.size]


def bfloat16(x):
    """Float32 numbers rounded to 8 significant bits, to even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


# --- What is remembered -----------------------------------------------------------------


class ErrorFeedback:
    """Karimireddy et al. 2019: what was not sent is added to the next gradient."""

    def __init__(self, n, compress, decay=1.0):
        self.error, self.compress, self.decay = np.zeros(n), compress, decay

    def step(self, g):
        a = g + self.decay * self.error
        sent = self.compress(a)
        self.error = a - sent
        return sent


class Dgc:
    """Lin et al. 2018, algorithm 4, with dense masks."""

    def __init__(self, n, k, momentum, nesterov=False, masking=True, clip=None, ranks=1):
        self.u, self.v = np.zeros(n), np.zeros(n)
        self.k, self.momentum, self.nesterov, self.masking = k, momentum, nesterov, masking
        self.threshold = None if clip is None else clip / np.sqrt(ranks)

    def step(self, g):
        length = np.sqrt((g**2).sum())
        if self.threshold is not None and length > self.threshold:
            g = g * self.threshold / length
        if self.nesterov:
            self.u = self.momentum * (self.u + g)
            self.v = self.v + self.u + g
        else:
            self.u = self.momentum * self.u + g
            self.v = self.v + self.u
        mask = top_k(self.v, self.k) != 0
        sent = np.where(mask, self.v, 0.0)
        self.v = np.where(mask, 0.0, self.v)
        if self.masking:
            self.u = np.where(mask, 0.0, self.u)
        return sent


class Signum:
    """Bernstein et al. 2018: the sign of a moving average."""

    def __init__(self, n, beta):
        self.m, self.beta = np.zeros(n), beta

    def step(self, g):
        self.m = self.beta * self.m + (1 - self.beta) * g
        return sign(self.m)


class Ef21:
    """Richtarik et al. 2021: workers and server keep the same ``h``; the server uses their mean."""

    def __init__(self, n, compress):
        self.h, self.compress = np.zeros(n), compress

    def step(self, g):
        self.h = self.h + self.compress(g - self.h)
        return self.h


class PaperPowerSgd:
    """Algorithms 1 and 2 of the PowerSGD paper: two rounds, and errors against what all have sent."""

    def __init__(self, start, ranks):
        self.right, self.errors = start, [0.0] * ranks

    def step(self, gradients):
        deltas = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        left, _ = np.linalg.qr(sum(delta @ self.right for delta in deltas) / len(deltas))
        self.right = sum(delta.T @ left for delta in deltas) / len(deltas)
        sent = left @ self.right.T
        self.errors = [delta - sent for delta in deltas]
        return sent


class PowerSgd:
    """Vogels et al. 2020, alternating: all ranks of a group, whose matrices are ``(rows, columns)``.

    ``start`` are random vectors for the right factor, ``(columns, rank)``.
    """

    def __init__(self, rows, columns, start, ranks):
        self.errors = [np.zeros((rows, columns)) for _ in range(ranks)]
        self.right, self.left, self.number = start, None, 0

    def step(self, gradients):
        matrices = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        if self.number % 2 == 0:
            known, _ = np.linalg.qr(self.right)
            own = [m @ known for m in matrices]
            self.left = np.mean(own, axis=0)
            made = [p @ known.T for p in own]
            out = self.left @ known.T
        else:
            known, _ = np.linalg.qr(self.left)
            own = [m.T @ known for m in matrices]
            self.right = np.mean(own, axis=0)
            made = [known @ q.T for q in own]
            out = known @ self.right.T
        self.errors = [m - x for m, x in zip(matrices, made, strict=True)]
        self.number += 1
        return out
