"""The methods that scripts/convergence compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import hvd_compress as hc

Make = Callable[[float, int], hc.Compressor]


@dataclass(frozen=True)
class Method:
    """A row of the tables.

    Attributes:
        make: returns a new compressor for this momentum and number of steps.
        limits: by task, how far from dense it may end: points of accuracy, or per cent of perplexity.
        unit: of the learning rate.  1, but for methods whose result has the magnitude 1 instead of the gradient's.
        why: said where it loses.
    """

    make: Make
    limits: dict[str, float]
    unit: float = 1.0
    why: str = ""


def _method(
    make: Callable[[], hc.Compressor], images: float = 0, text: float = 0, unit: float = 1.0, why: str = ""
) -> Method:
    limits = {task: limit for task, limit in (("images", images), ("text", text)) if limit}
    return Method(lambda momentum, steps: make(), limits, unit, why)


_SLOW = "little arrives in the first steps of so short a run"
_NO_FEEDBACK = "what is not sent is lost for good, since it has no feedback"
_NOISE = "the noise of an unbiased estimate from few numbers; it takes a smaller learning rate and more steps"
_SIGN = "signs alone forget which elements are large, and small gradients weigh as much as large ones"

#: The most important ones first: this is the order in which they are run.
METHODS: dict[str, Method] = {
    "dense": _method(hc.NoCompression, images=100, text=100),
    "DGC(0.001)": Method(
        lambda momentum, steps: hc.DGC(0.001, momentum=momentum, warmup_steps=steps // 4),
        {"images": 0.5, "text": 2.0},
        why=_SLOW,
    ),
    "TopK(0.01)": _method(lambda: hc.TopK(0.01), 0.5, 2.0, why=_SLOW),
    "QSGD(4)": _method(lambda: hc.QSGD(4), 0.5, 2.0),
    "PowerSGD(4)": _method(lambda: hc.PowerSGD(4), 0.5, 2.0, why=_SLOW),
    "TopK(0.01, Int8)": _method(lambda: hc.TopK(0.01, values=hc.Int8()), 0.5, why=_SLOW),
    "Int8": _method(hc.Int8, 0.5),
    "TopK(0.001)": _method(lambda: hc.TopK(0.001), 1.0, why=_SLOW),
    "OneBit": _method(hc.OneBit, 1.0),
    # One seed each.
    "EFSign": _method(hc.EFSign),
    "SignSGD": _method(hc.SignSGD, unit=0.003, why=_SIGN),
    "TernGrad": _method(hc.TernGrad, why=_NOISE),
    "FP16": _method(hc.FP16),
    "BF16": _method(hc.BF16),
    "Signum": _method(hc.Signum, unit=0.003, why=_SIGN),
    "Natural": _method(hc.Natural),
    "QSGD(2)": _method(lambda: hc.QSGD(2), why=_NOISE),
    "QSGD(4, l2)": _method(lambda: hc.QSGD(4, norm="l2"), why=_NOISE),
    "TopK(0.001, Int8)": _method(lambda: hc.TopK(0.001, values=hc.Int8()), why=_SLOW),
    "TopK(0.01, QSGD(2))": _method(lambda: hc.TopK(0.01, values=hc.QSGD(bits=2)), why=_SLOW),
    "TopK(0.01, EFSign)": _method(lambda: hc.TopK(0.01, values=hc.EFSign()), why=_SLOW),
    "TopK(0.001, warm-up)": Method(
        lambda momentum, steps: hc.TopK(hc.warm_up(0.001, max(4, steps // 4))), {}, why=_SLOW
    ),
    "TopK(0.01, decay 0.9)": _method(
        lambda: hc.TopK(0.01, feedback=hc.ErrorFeedback(0.9)), why="a residual that fades is partly lost"
    ),
    "TopK(0.01, bf16 residual)": _method(lambda: hc.TopK(0.01, feedback=hc.ErrorFeedback(dtype="bfloat16")), why=_SLOW),
    "TopK(0.01, int8 residual)": _method(lambda: hc.TopK(0.01, feedback=hc.ErrorFeedback(dtype="int8")), why=_SLOW),
    "TopK(0.01, EF21)": _method(
        lambda: hc.TopK(0.01, feedback=hc.EF21()),
        why="the estimate follows gradients that are noisy from step to step only slowly",
    ),
    "TopK(0.01, no feedback)": _method(lambda: hc.TopK(0.01, feedback=None), why=_NO_FEEDBACK),
    "RandomK(0.1)": _method(lambda: hc.RandomK(0.1), why=_NOISE),
    "RandomK(0.01, feedback)": _method(
        lambda: hc.RandomK(0.01, feedback=hc.ErrorFeedback()), why="an element waits 100 steps for its turn"
    ),
    "RandomK(0.01, blocks)": _method(
        lambda: hc.RandomK(0.01, block=16, feedback=hc.ErrorFeedback()), why="an element waits 100 steps for its turn"
    ),
    "RandomK(0.01, rolling)": _method(
        lambda: hc.RandomK(0.01, order="rolling", feedback=hc.ErrorFeedback()),
        why="an element waits 100 steps for its turn",
    ),
    "Threshold(0.01)": _method(lambda: hc.Threshold(0.01), why="the threshold is not the gradient's"),
    "AdaptiveThreshold(0.01)": _method(lambda: hc.AdaptiveThreshold(0.01), why=_SLOW),
    "AdaptiveThreshold(0.01, sample)": _method(lambda: hc.AdaptiveThreshold(0.01, fit="sample"), why=_SLOW),
    "CoordinatedTopK(0.01)": _method(
        lambda: hc.CoordinatedTopK(0.01, chunk=64), why="whole chunks are sent, chosen one gradient ago"
    ),
    "CoordinatedTopK(0.01, leader)": _method(
        lambda: hc.CoordinatedTopK(0.01, by="leader"), why="positions are those of one rank, one gradient ago"
    ),
    "DGC(0.01, nesterov)": Method(
        lambda momentum, steps: hc.DGC(0.01, momentum=momentum, nesterov=True, warmup_steps=steps // 4), {}, why=_SLOW
    ),
    "PowerSGD(1)": _method(lambda: hc.PowerSGD(1), why=_SLOW),
    "PowerSGD(4, two rounds)": _method(lambda: hc.PowerSGD(4, alternating=False), why=_SLOW),
    "PowerSGD(4, FP16)": _method(lambda: hc.PowerSGD(4, factors=hc.FP16()), why=_SLOW),
    "PowerSGD(4) after 10 %": Method(
        lambda momentum, steps: hc.Switch({0: hc.NoCompression(), steps // 10: hc.PowerSGD(4)}), {}, why=_SLOW
    ),
    "SVD(4)": _method(lambda: hc.SVD(4), why=_SLOW),
    "SVD(4, atomo)": _method(lambda: hc.SVD(4, sampling="atomo"), why=_NOISE),
    "VectorQuantizer": _method(hc.VectorQuantizer, why="256 codewords cover 16 dimensions thinly"),
    "VectorQuantizer(4, 64, unbiased)": _method(lambda: hc.VectorQuantizer(4, 64, unbiased=True), why=_NOISE),
    "Policy": _method(
        lambda: hc.Policy({"*embed*": None, "fc1.*": hc.PowerSGD(4), "conv*": hc.Int8()}, default=hc.TopK(0.01)),
        why=_SLOW,
    ),
}
