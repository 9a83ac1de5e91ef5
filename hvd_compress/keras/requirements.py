"""What this package needs: Keras 3.5 or newer, on the TensorFlow backend."""

from __future__ import annotations

from typing import Any

import keras

from hvd_compress.errors import UnsupportedError

STOCK = "import horovod.tensorflow.keras as hvd"


def check_keras(version: str, backend: str) -> None:
    """Refuse what the optimizer of this package cannot work with.

    Args:
        version: of Keras.
        backend: name of its backend.

    Raises:
        ImportError: Keras 2, a Keras before 3.5, or another backend than TensorFlow.
    """
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < (3, 0):
        raise ImportError(f"hvd_compress.keras is for Keras 3, got Keras {version}; for Keras 2 write: {STOCK}")
    if release < (3, 5):
        raise ImportError(
            f"hvd_compress.keras expects Keras 3.5 or newer, got {version}: before, Keras clipped gradients that were "
            "yet to be accumulated; upgrade with: pip install -U keras"
        )
    if backend != "tensorflow":
        raise ImportError(
            f"hvd_compress.keras expects Keras's TensorFlow backend, got {backend!r}; set KERAS_BACKEND=tensorflow"
        )


def check_optimizer(optimizer: Any) -> None:
    """Refuse everything that is no optimizer of Keras 3.

    Raises:
        UnsupportedError: says what to write for optimizers of Keras 2 and of TensorFlow.
    """
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(optimizer).__mro__]
    expected = f"hvd_compress.keras expected an optimizer of Keras 3 (keras.optimizers), got {kinds[0]}"
    if any(kind.startswith("tf_keras.") or kind.startswith("keras.src.optimizers.legacy") for kind in kinds):
        raise UnsupportedError(f"{expected}, which is of Keras 2; for it write: {STOCK}")
    if any(kind.startswith("tensorflow.") for kind in kinds):
        raise UnsupportedError(f"{expected}; for TensorFlow's own optimizers write: import horovod.tensorflow as hvd")
    if isinstance(optimizer, (str, dict)):
        raise UnsupportedError(f"{expected}; make one with: keras.optimizers.get({optimizer!r})")
    raise UnsupportedError(expected)
