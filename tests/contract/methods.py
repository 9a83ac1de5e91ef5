"""All compressors, each with several settings, for the tests that every one of them has to pass."""

import numpy as np

import hvd_compress as h
from hvd_compress import EF21, ErrorFeedback, MomentumCorrection

_BOOK = np.random.default_rng(5).standard_normal((32, 8))
CODEBOOK = (_BOOK / np.linalg.norm(_BOOK, axis=1, keepdims=True)).astype(np.float32)

#: No sums are involved, so that all frameworks must agree in every bit.
EXACT = [
    h.NoCompression(),
    h.FP16(),
    h.FP16(feedback=ErrorFeedback()),
    h.BF16(),
    h.BF16(feedback=ErrorFeedback()),
    h.TopK(0.01),
    h.TopK(0.3),
    h.TopK(1.0),
    h.TopK(0.01, feedback=None),
    h.TopK(0.05, feedback=ErrorFeedback(0.9)),
    h.TopK(0.05, feedback=ErrorFeedback(0.5, "float16")),
    h.TopK(0.05, feedback=ErrorFeedback(dtype="bfloat16")),
    h.TopK(0.05, feedback=ErrorFeedback(dtype="int8")),
    h.TopK(0.05, feedback=EF21()),
    h.TopK(0.05, feedback=MomentumCorrection()),
    h.TopK(0.01, values=h.Int8()),
    h.TopK(0.1, values=h.QSGD(bits=2)),
    h.TopK(0.1, values=h.Natural()),
    h.TopK(0.1, values=h.BF16()),
    h.TopK(0.3, values=h.TopK(0.5)),
    h.TopK(h.warm_up(0.01, 4, 2)),
    h.TopK(h.Steps({0: 0.5, 2: 0.02})),
    h.Threshold(1.5),
    h.Threshold(0.5, max_ratio=0.02),
    h.Threshold(1.5, feedback=None),
    h.RandomK(0.01),
    h.RandomK(0.05, block=8, feedback=ErrorFeedback()),
    h.RandomK(0.05, block=7),
    h.RandomK(0.05, order="rolling"),
    h.RandomK(0.05, order="rolling", feedback=ErrorFeedback()),
    h.DGC(0.01),
    h.DGC(0.01, nesterov=True),
    h.DGC(0.01, masking=False, momentum=0.5),
    h.DGC(0.01, warmup_steps=4),
    h.DGC(0.01, values=h.Int8()),
    h.Int8(),
    h.Int8(64, feedback=ErrorFeedback()),
    *(h.QSGD(bits) for bits in range(2, 9)),
    h.QSGD(4, bucket=100, seed=3),
    h.QSGD(2, feedback=EF21()),
    h.TernGrad(None),
    h.Natural(),
    h.Natural(feedback=ErrorFeedback()),
    h.SignSGD(),
    h.Signum(0.5),
    h.QSGD(3, bucket=1),
]
#: Sums may be rounded in another order.
CLOSE = [
    h.TopK(0.1, values=h.EFSign()),
    h.TopK(0.1, values=h.OneBit(16)),
    h.TopK(0.1, values=h.QSGD(4, norm="l2")),
    h.DGC(0.01, clip_norm=1.0),
    h.DGC(0.01, nesterov=True, clip_norm=0.1, values=h.QSGD(bits=2)),
    h.QSGD(3, norm="l2"),
    h.QSGD(8, norm="l2", bucket=64),
    h.TernGrad(),
    h.TernGrad(1.0, feedback=ErrorFeedback()),
    h.EFSign(),
    h.EFSign(64),
    h.EFSign(feedback=MomentumCorrection(0.5)),
    h.EFSign(feedback=EF21()),
    h.OneBit(),
    h.OneBit(64),
    h.VectorQuantizer(),
    h.VectorQuantizer(8, 32, codebook=CODEBOOK),
    h.VectorQuantizer(3, 5, values=h.NoCompression()),
    h.VectorQuantizer(4, 16, unbiased=True),
    h.VectorQuantizer(8, 32, codebook=CODEBOOK, unbiased=True, values=h.NoCompression()),
    *(h.AdaptiveThreshold(0.05, fit=fit) for fit in ("exponential", "gamma", "pareto", "sample")),
    h.CoordinatedTopK(0.1, chunk=16),
    h.CoordinatedTopK(0.05, by="leader"),
    h.SVD(2),
    h.SVD(2, sampling="atomo"),
    h.PowerSGD(1),
    h.PowerSGD(3),
    h.PowerSGD(2, factors=h.FP16()),
    h.PowerSGD(16),
    h.PowerSGD(3, alternating=False),
    h.PowerSGD(2, alternating=False, factors=h.FP16()),
    h.Switch({0: h.NoCompression(), 2: h.TopK(0.01), 4: h.PowerSGD(2)}),
    h.Switch({0: h.PowerSGD(3), 3: h.PowerSGD(1), 5: h.EFSign()}),
]
ALL = [*EXACT, *CLOSE]


def name(compressor):
    """Return a short id for pytest."""
    return repr(compressor)[:60]
