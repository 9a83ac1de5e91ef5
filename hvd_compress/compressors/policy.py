"""Different compressors for different parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_compress.base import Compressor
from hvd_compress.compressors.casts import NoCompression
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.ops.base import Array, Ops
from hvd_compress.settings import ShortRepr
from hvd_compress.step import FIRST, Payload, Step, TensorSpec


@dataclass(frozen=True)
class Rule(ShortRepr):
    """Which parameters a rule of a :class:`Policy` is for: those that fulfil all of it.

    Args:
        name: a pattern of names as in a shell, such as ``"*.bias"`` or ``"encoder.*"``.
        min_numel: fewest elements.
        max_numel: most elements, or None.
        ndim: the number of dimensions, or None for any.
        module: the name of the class of the module or layer it belongs to, such as
            ``"Embedding"``, or None for any; needs ``policy.bind_modules(model)``.
    """

    name: str = "*"
    min_numel: int = 0
    max_numel: int | None = None
    ndim: int | None = None
    module: str | None = None

    def fits(self, name: str, spec: TensorSpec, module: str | None) -> bool:
        """Tell whether a parameter fulfils the rule."""
        return (
            fnmatch.fnmatchcase(name, self.name)
            and spec.numel >= self.min_numel
            and (self.max_numel is None or spec.numel <= self.max_numel)
            and (self.ndim is None or len(spec.shape) == self.ndim)
            and (self.module is None or module == self.module)
        )


#: What the field leaves dense besides biases, normalisation weights and small tensors, which every compressor
#: leaves dense by itself: embeddings.
EMBEDDINGS: Mapping[str | Rule, Compressor | None] = {"*embed*": None, "*wte.*": None, "*wpe.*": None}


@dataclass(frozen=True, eq=False)
class Policy(Compressor):
    """Choose a compressor for each parameter, by its name, size, dimensions or module.

    The first rule that fits decides; where none does, ``default``.  A compressor still leaves
    dense what is too small for it.

    Args:
        rules: ``{pattern or Rule: compressor or None}``; None lets parameters travel dense.
            Without rules, embeddings are left dense, found by the usual names.
        default: for all other parameters.
        transport, on_nonfinite: see :class:`~hvd_compress.base.Compressor`; those of the
            compressors in the rules do not matter.

    Raises:
        ConfigError: a rule is of another kind.

    Example::

        Policy({"*embed*": None, Rule(ndim=4): PowerSGD(2)}, default=TopK(0.001))
    """

    rules: Mapping[str | Rule, Compressor | None] = field(default_factory=lambda: dict(EMBEDDINGS))
    default: Compressor | None = None

    def __post_init__(self) -> None:
        self._require(self.default is None or _usable(self.default), "default", "a compressor or None")
        self._require(isinstance(self.rules, Mapping), "rules", "{pattern or Rule: compressor or None}")
        for key, compressor in self.rules.items():
            if not isinstance(key, (str, Rule)) or not (compressor is None or _usable(compressor)):
                raise ConfigError(
                    f"Policy.rules expected {{pattern or Rule: compressor or None}}, got {key!r}: {compressor!r}"
                )
        self._leave_to_members()
        super().__post_init__()

    def bind_modules(self, model: Any) -> None:
        """Learn which module each parameter belongs to, for rules with ``module``.

        Args:
            model: a ``torch.nn.Module`` or a Keras model.
        """
        self._modules.update(modules_of(model))

    def choose(self, name: str | None, spec: TensorSpec) -> Compressor:
        """Return the compressor of a parameter.

        Raises:
            ConfigError: a rule asks for a module, and ``bind_modules`` was not called.
        """
        modules = self._modules
        for key, compressor in self.rules.items():
            rule = Rule(key) if isinstance(key, str) else key
            if rule.module is not None and not modules:
                raise ConfigError(f"{rule!r} asks for a module; call policy.bind_modules(model) first")
            if rule.fits(name or "", spec, modules.get(name or "")):
                return self._or_dense(compressor)
        return self._or_dense(self.default)

    def _or_dense(self, compressor: Compressor | None) -> Compressor:
        dense: Compressor = self.derived("dense", NoCompression)
        return dense if compressor is None else compressor

    @property
    def _modules(self) -> dict[str, str]:
        """What ``bind_modules`` has learnt; copies have to learn it again."""
        return self.derived("modules", dict)  # type: ignore[no-any-return]

    @property
    def has_momentum(self) -> bool:
        """Whether any of them accumulates momentum."""
        return any(c is not None and c.has_momentum for c in (self.default, *self.rules.values()))

    def compresses(self, spec: TensorSpec) -> bool:
        """Whether any of them does."""
        return any(c is not None and c.compresses(spec) for c in (self.default, *self.rules.values()))

    def encode(self, x: Array, spec: TensorSpec, ops: Ops, step: Step = FIRST) -> Payload:
        """Refuse: :meth:`choose` says who does it."""
        raise UnsupportedError("Policy does not compress itself; use choose(name, spec)")

    def decode(self, arrays: Sequence[Array], spec: TensorSpec, ops: Ops) -> Array:
        """Refuse: :meth:`choose` says who does it."""
        raise UnsupportedError("Policy does not decompress itself; use choose(name, spec)")


def _usable(compressor: Any) -> bool:
    return isinstance(compressor, Compressor) and not isinstance(compressor, Policy)


def modules_of(model: Any) -> dict[str, str]:
    """Return ``{parameter name: name of the class of its module}`` of a PyTorch or Keras model."""
    if hasattr(model, "named_modules"):
        return {
            f"{prefix}.{name}" if prefix else name: type(module).__name__
            for prefix, module in model.named_modules()
            for name, _ in module.named_parameters(recurse=False)
        }
    found: dict[str, str] = {}
    for layer in _layers(model):
        for variable in getattr(layer, "_trainable_variables", None) or layer.trainable_variables:
            found.setdefault(getattr(variable, "path", variable.name), type(layer).__name__)
    return found


def _layers(model: Any) -> Iterable[Any]:
    for layer in getattr(model, "layers", []):
        yield from _layers(layer)
        yield layer
