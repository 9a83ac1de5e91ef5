"""Which tensors are compressed and which travel dense."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Route(enum.Enum):
    """How a tensor travels."""

    #: Compressed, through the exchange of this package.
    EXCHANGE = "exchange"
    #: As it is, through Horovod's own allreduce.
    DENSE = "dense"


@dataclass(frozen=True)
class SizePolicy:
    """Compress tensors of two or more dimensions that have at least ``min_numel`` elements.

    Biases, normalisation weights and other small tensors are a tiny part of the traffic,
    and training is sensitive to them.
    """

    min_numel: int = 1024

    def route(self, shape: tuple[int, ...]) -> Route:
        """Return how a tensor of this shape travels."""
        if len(shape) < 2 or math.prod(shape) < max(self.min_numel, 1):
            return Route.DENSE
        return Route.EXCHANGE
