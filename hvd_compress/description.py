"""What a compressor will do to a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.ops.base import ACCUMULATOR, ITEMSIZE
from hvd_compress.step import TensorSpec
from hvd_compress.wire import is_variable


def describe(compressor: Any, model: Any) -> str:
    """Return a table of what happens to each parameter, and of the bytes a step; see ``Compressor.describe``."""
    rows = [("parameter", "shape", "how", "dense bytes", "sent bytes")]
    dense_total, sent_total, limits = 0, 0, ""
    for name, spec in _parameters(model):
        chosen = compressor.choose(name, spec)
        algorithm = _last_stage(chosen) if chosen.compresses(spec) else chosen
        full = spec.numel * ITEMSIZE[spec.dtype]
        how, sent, limit = "dense", full, ""
        if algorithm.compresses(spec):
            token = 0 if algorithm.collective.sums and not algorithm.two_rounds else ITEMSIZE["float32"]
            sections = (*algorithm.sections(spec), *algorithm.prepared(spec))
            how, sent = repr(algorithm), sum(section.nbytes for section in sections) + token
            # What the data decide has a largest size.
            limit = "<= " if is_variable(sections) else ""
            limits = limits or limit
        rows.append((name, "x".join(map(str, spec.shape)), how, f"{full:,}", f"{limit}{sent:,}"))
        dense_total, sent_total = dense_total + full, sent_total + sent
    ratio = f"{dense_total / sent_total:.1f}x less{' or more' if limits else ''}" if sent_total else ""
    rows.append(("all", "", ratio, f"{dense_total:,}", f"{limits}{sent_total:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        f"{name:{widths[0]}}  {shape:{widths[1]}}  {how:{widths[2]}}  {dense:>{widths[3]}}  {sent:>{widths[4]}}"
        for name, shape, how, dense, sent in rows
    )


def _last_stage(compressor: Any) -> Any:
    try:
        return compressor.stages[-1]
    except UnsupportedError:
        return compressor.at(0)  # a function of the step has no last one


def _parameters(model: Any) -> Iterable[tuple[str, TensorSpec]]:
    """Yield name and spec of the parameters of a PyTorch or Keras model, or of ``(name, tensor)`` pairs."""
    if hasattr(model, "named_parameters"):
        pairs = list(model.named_parameters())
    elif hasattr(model, "trainable_variables"):
        pairs = [(getattr(v, "path", v.name), v) for v in model.trainable_variables]
    else:
        pairs = list(model)
    for name, tensor in pairs:
        dtype = tensor.dtype if isinstance(tensor.dtype, str) else getattr(tensor.dtype, "name", str(tensor.dtype))
        dtype = dtype.removeprefix("torch.")
        if dtype in ACCUMULATOR and getattr(tensor, "requires_grad", True):
            yield name, TensorSpec(tuple(tensor.shape), dtype)
