"""Compile the loops now, so that no training step has to: ``python -m hvd_compress.kernels``.

The result is kept beside the package, or where ``NUMBA_CACHE_DIR`` says, for all later processes.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from hvd_compress import kernels


def compile_all() -> float:
    """Compile all loops for float32 and float64; return how many seconds it took."""
    start = time.perf_counter()
    for dtype in ("float32", "float64"):
        for mode in kernels.Mode:
            x, empty = np.ones(5000, dtype), np.empty(0, dtype)
            u = np.zeros_like(x) if mode in (kernels.Mode.MOMENTUM, kernels.Mode.NESTEROV) else empty
            work = kernels.start((x, x.copy(), u), kernels.Plan(mode), {})
            if work is not None:
                work.top_k(5)
                work.quantise(512, 4, 1e-30, (1, 2))
                work.signs(512, True)
    return time.perf_counter() - start


if __name__ == "__main__":
    if kernels.available():
        sys.stdout.write(f"compiled in {compile_all():.1f} s\n")
