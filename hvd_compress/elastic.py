"""Residuals in elastic training, where workers come and go.

::

    import hvd_compress.elastic

    hvd_compress.elastic.register()
    state = hvd.elastic.TorchState(model=model, optimizer=opt, compression=compression, batch=0)
"""

from __future__ import annotations

import importlib
from typing import Any

from hvd_compress.base import Compressor
from hvd_compress.state import world


class CompressionStateHandler:
    """What ``hvd.elastic.TorchState`` needs to know of a compressor.

    Every worker keeps its own residuals; they are never broadcast.  When the number of
    workers changes they are scaled, so that what is still owed (their sum over that number)
    stays the same; only what a lost worker owed is lost.
    """

    def __init__(self, value: Compressor) -> None:
        self.set_value(value)

    def set_value(self, value: Compressor) -> None:
        """Handle another compressor from now on."""
        self.value = value
        self._size = world()[1]
        self.save()

    def save(self) -> None:
        """Remember the residuals at a commit."""
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        """Go back to the last commit; Horovod may be shut down at this point."""
        saved = self._saved
        self.value.runtime.load_state_dict(saved, saved["compressor"], saved["rank"], saved["size"])

    def sync(self) -> None:
        """Adapt to the workers there are now, and connect to them anew at the next step."""
        size = world()[1]
        runtime = self.value.runtime
        runtime.forget_exchanges()
        if size != self._size:
            runtime.rescale(size / self._size)
            self._size = size
        self.save()


def register() -> None:
    """Let ``hvd.elastic.TorchState`` take compressors; call it before the state is made."""
    elastic: Any = importlib.import_module("horovod.torch.elastic.state")
    registry = elastic.get_handler_registry()
    if (Compressor, CompressionStateHandler) not in registry:
        elastic.set_handler_registry([*registry, (Compressor, CompressionStateHandler)])
