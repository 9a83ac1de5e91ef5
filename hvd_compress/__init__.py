"""Gradient compression for stock Horovod and MPI.

Pass a compressor as Horovod's ``compression`` argument::

    import horovod.torch as hvd
    from hvd_compress import TopK

    opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(), compression=TopK(0.001))

Importing this package imports neither a deep learning framework nor MPI.
"""

from hvd_compress.base import Collective, Compressor, Payload, TensorSpec
from hvd_compress.compressors import TopK
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
from hvd_compress.feedback import ErrorFeedback
from hvd_compress.version import __version__

__all__ = [
    "Collective",
    "Compressor",
    "ConfigError",
    "ErrorFeedback",
    "ExchangeTimeoutError",
    "HandshakeError",
    "HvdCompressError",
    "NonFiniteGradientError",
    "Payload",
    "StateError",
    "TensorSpec",
    "TopK",
    "TransportError",
    "UnboundTensorError",
    "UnsupportedError",
    "WireFormatError",
    "__version__",
]
