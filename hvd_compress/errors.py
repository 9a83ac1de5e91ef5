"""Everything this package raises on purpose.

::

    HvdCompressError
    ├── ConfigError (ValueError)         a compressor was built with a wrong setting
    ├── UnsupportedError (TypeError)     a tensor, op or call that cannot be compressed
    ├── UnboundTensorError (LookupError) a tensor that belongs to no known parameter
    ├── HandshakeError                   ranks disagree about what they exchange
    ├── WireFormatError (ValueError)     bytes that are no valid message
    ├── TransportError (RuntimeError)    the exchange could not be set up or failed
    │   └── ExchangeTimeoutError         an exchange took longer than HVD_COMPRESS_TIMEOUT
    ├── NonFiniteGradientError (ArithmeticError)  NaN or infinity, with on_nonfinite="raise"
    ├── StateError (ValueError)          a state_dict that does not fit
    └── ContractError (AssertionError)   a compressor that does not pass hvd_compress.testing

Each also derives from the built-in class in brackets, so that callers who do not know
this package can still catch it.
"""

from __future__ import annotations


class HvdCompressError(Exception):
    """Base of all errors of this package."""

    #: TensorFlow's AutoGraph would raise a ``StagingError`` instead; this attribute keeps the class.
    ag_pass_through = True


class ConfigError(HvdCompressError, ValueError):
    """A compressor was built with a setting outside its range."""


class UnsupportedError(HvdCompressError, TypeError):
    """The tensor, reduction op or Horovod call cannot be combined with this compressor."""


class UnboundTensorError(HvdCompressError, LookupError):
    """No parameter or name could be found for a tensor, so it has no place to keep state."""


class HandshakeError(HvdCompressError):
    """Ranks disagree about settings, versions or parameters."""


class WireFormatError(HvdCompressError, ValueError):
    """Bytes that are truncated, corrupt, of another version or out of range."""


class TransportError(HvdCompressError, RuntimeError):
    """The exchange between ranks could not be set up, or failed."""


class ExchangeTimeoutError(TransportError):
    """An exchange took longer than ``HVD_COMPRESS_TIMEOUT`` seconds."""


class NonFiniteGradientError(HvdCompressError, ArithmeticError):
    """A gradient held NaN or infinity and the compressor was told to raise."""


class StateError(HvdCompressError, ValueError):
    """A ``state_dict`` that does not belong to this compressor, model, rank or world size."""


class ContractError(HvdCompressError, AssertionError):
    """A compressor breaks a contract that :func:`hvd_compress.testing.check_compressor` checks."""
