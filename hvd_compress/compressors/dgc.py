"""Deep Gradient Compression.

Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression: reducing the
communication bandwidth for distributed training", ICLR 2018.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, field

from hvd_compress.compressors.topk import TopK
from hvd_compress.errors import ConfigError
from hvd_compress.feedback import Feedback, MomentumCorrection
from hvd_compress.schedule import Steps, warm_up
from hvd_compress.settings import is_whole


@dataclass(frozen=True, eq=False)
class DGC(TopK):
    """:class:`TopK` with momentum correction, momentum factor masking, local clipping and warm-up.

    Momentum is accumulated here, before compression, so **the optimizer must have none**: use
    ``torch.optim.SGD(..., momentum=0)``; a warning says so otherwise.  Tensors that travel dense
    get their momentum after the average.  Weight decay in the optimizer is applied to the
    weights alone, without momentum, which is what decoupled decay means; to have it in the
    momentum add it to the gradient before ``backward`` ends.

    Args:
        ratio: the part of the elements that is sent, or a schedule.
        momentum: in [0, 1).
        nesterov: use Nesterov momentum.
        clip_norm: the norm that each tensor's local gradient is clipped to, times ``N ** -0.5``;
            None does not clip.
        warmup_steps: during so many steps the ratio falls exponentially from 0.25.
        masking: whether momentum is cleared where elements were sent.
        values, min_numel, seed, transport, on_nonfinite: see :class:`TopK`.

    Raises:
        ConfigError: a setting is out of range, or ``feedback`` is given.
    """

    ratio: float | Steps | Callable[[int], float] = 0.001
    momentum: float = field(default=0.9, kw_only=True)
    nesterov: bool = field(default=False, kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    warmup_steps: int = field(default=0, kw_only=True)
    masking: bool = field(default=True, kw_only=True)
    feedback: Feedback | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        correction = MomentumCorrection(self.momentum, self.nesterov, self.masking, self.clip_norm)
        if self.feedback is not None and self.feedback != correction:
            raise ConfigError(f"DGC has a feedback of its own, expected no feedback=, got {self.feedback!r}")
        object.__setattr__(self, "feedback", correction)
        steps = self.warmup_steps
        self._require(is_whole(steps), "warmup_steps", "a whole number, 0 or more")
        if steps:
            self._require(isinstance(self.ratio, numbers.Real), "ratio", "a number, with warmup_steps")
            object.__setattr__(self, "ratio", warm_up(self.ratio, steps, min(4, steps)))  # type: ignore[arg-type]
            object.__setattr__(self, "warmup_steps", 0)
        super().__post_init__()
