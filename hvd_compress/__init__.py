"""Gradient compression for stock Horovod and MPI.

Pass a compressor as Horovod's ``compression`` argument::

    import horovod.torch as hvd
    from hvd_compress import TopK

    opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(), compression=TopK(0.001))

Importing this package imports neither a deep learning framework nor MPI.
"""

from hvd_compress.base import Collective, Compressor
from hvd_compress.compressors import (
    BF16,
    DGC,
    FP16,
    QSGD,
    SVD,
    AdaptiveThreshold,
    CoordinatedTopK,
    EFSign,
    Int8,
    Natural,
    NoCompression,
    OneBit,
    Policy,
    PowerSGD,
    RandomK,
    Rule,
    SignSGD,
    Signum,
    Switch,
    TernGrad,
    Threshold,
    TopK,
    VectorQuantizer,
    train_codebook,
)
from hvd_compress.errors import (
    ConfigError,
    ExchangeTimeoutError,
    HandshakeError,
    HvdCompressError,
    NonFiniteGradientError,
    StateError,
    TransportError,
    UnboundTensorError,
    UnsupportedError,
    WireFormatError,
)
from hvd_compress.factory import from_grace, make
from hvd_compress.feedback import EF21, ErrorFeedback, Feedback, MomentumCorrection
from hvd_compress.schedule import Steps, warm_up
from hvd_compress.step import Payload, Slot, Step, TensorSpec
from hvd_compress.version import __version__

__all__ = [
    "BF16",
    "DGC",
    "EF21",
    "FP16",
    "QSGD",
    "SVD",
    "AdaptiveThreshold",
    "Collective",
    "Compressor",
    "ConfigError",
    "CoordinatedTopK",
    "EFSign",
    "ErrorFeedback",
    "ExchangeTimeoutError",
    "Feedback",
    "HandshakeError",
    "HvdCompressError",
    "Int8",
    "MomentumCorrection",
    "Natural",
    "NoCompression",
    "NonFiniteGradientError",
    "OneBit",
    "Payload",
    "Policy",
    "PowerSGD",
    "RandomK",
    "Rule",
    "SignSGD",
    "Signum",
    "Slot",
    "StateError",
    "Step",
    "Steps",
    "Switch",
    "TensorSpec",
    "TernGrad",
    "Threshold",
    "TopK",
    "TransportError",
    "UnboundTensorError",
    "UnsupportedError",
    "VectorQuantizer",
    "WireFormatError",
    "__version__",
    "from_grace",
    "make",
    "train_codebook",
    "warm_up",
]
