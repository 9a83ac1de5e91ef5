"""Operations on PyTorch tensors, on any device, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress.ops.hashing import COUNTER, FIRST, SECOND, SHIFTS

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Devices whose values can be looked at for free.
_NOTHING_TO_WAIT_FOR = {"cpu"}


class TorchOps:
    """The :class:`~hvd_compress.ops.base.Ops` of PyTorch.

    Every shape is known beforehand, so nothing waits for a GPU: no ``nonzero``, no boolean
    indexing, no ``item``.  Only :meth:`to_host` does, once a step, for the payload.
    """

    name = "torch"

    def dtype(self, x: torch.Tensor) -> str:
        """Return the dtype's name."""
        return _NAMES.get(x.dtype, str(x.dtype).removeprefix("torch."))

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return the shape."""
        return tuple(x.shape)

    def flatten(self, x: torch.Tensor) -> torch.Tensor:
        """Return all elements in row-major order, whatever the strides."""
        return x.detach().reshape(-1)

    def reshape(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return ``x`` in another shape."""
        return x.reshape(shape)

    def astype(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        """Convert where necessary."""
        return x.to(_DTYPES[dtype])

    def astype_finite(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        """Convert; finite values beyond the range become its ends."""
        target = _DTYPES[dtype]
        if x.dtype == target:
            return x
        largest = torch.finfo(target).max
        wide = x.to(torch.promote_types(x.dtype, target))
        return torch.where(wide.isfinite(), wide.clamp(-largest, largest), wide).to(target)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return ``a + b``."""
        return a + b

    def scale_(self, x: torch.Tensor, factor: Any) -> torch.Tensor:
        """Multiply in place."""
        return x.mul_(factor)

    def zeros(self, n: int, dtype: str, like: torch.Tensor) -> torch.Tensor:
        """Return ``n`` zeros on the device of ``like``."""
        return torch.zeros(n, dtype=_DTYPES[dtype], device=like.device)

    def where(self, condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Choose one of two tensors by a 0-d boolean."""
        return torch.where(condition, a, b)

    def all_finite(self, x: torch.Tensor) -> torch.Tensor:
        """Tell whether all elements are finite, as a 0-d tensor."""
        return x.isfinite().all()

    def top_k(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """Select exactly, with positions ascending and the lower position winning ties."""
        bits = x.view(_BITS[x.element_size()]) & torch.iinfo(_BITS[x.element_size()]).max
        if x.device.type in _NOTHING_TO_WAIT_FOR and k < bits.numel():
            untied = _untied_top_k(bits, k)
            if untied is not None:
                return untied
        threshold = bits.topk(k, sorted=False).values.min()
        above = bits > threshold
        ties = bits == threshold
        # int32 holds any position: larger tensors are refused at the door.
        missing = k - above.sum(dtype=torch.int32)
        chosen = above | (ties & (ties.cumsum(0, dtype=torch.int32) <= missing))
        return torch.nonzero_static(chosen, size=k).view(-1).to(torch.int32)

    def above(
        self, x: torch.Tensor, threshold: torch.Tensor, capacity: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Select by a threshold."""
        magnitudes = x.abs()
        if x.device.type in _NOTHING_TO_WAIT_FOR:
            chosen = (~(magnitudes <= threshold)).nonzero().view(-1)
            if not 1 <= chosen.numel() <= capacity:
                chosen = self.top_k(x, 1 if not chosen.numel() else capacity)
            padding = (0, capacity - chosen.numel())
            indices = torch.nn.functional.pad(chosen.to(torch.int32), padding)
            values = torch.nn.functional.pad(x.index_select(0, chosen), padding)
            return torch.tensor([chosen.numel()], dtype=torch.int32), indices, values
        indices = self.top_k(x, capacity)
        taken = x.index_select(0, indices)
        largest = torch.arange(capacity, device=x.device) == taken.abs().argmax()
        valid = ~(taken.abs() <= threshold) | largest
        order = (~valid).to(torch.int32).argsort(stable=True)
        indices = torch.where(valid[order], indices[order], 0)
        return valid.sum(dtype=torch.int32)[None], indices, torch.where(valid[order], taken[order], 0)

    def take(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return ``x[indices]``."""
        return x.index_select(0, indices)

    def scatter_add_(self, x: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Add at distinct positions, so that the order of additions cannot matter."""
        return x.index_add_(0, indices, values)

    def fold(
        self, function: Callable[..., torch.Tensor], initial: torch.Tensor, arrays: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Fold over the leading axis."""
        for row in zip(*arrays, strict=True):
            initial = function(initial, *row)
        return initial

    def to_host(self, arrays: list[torch.Tensor]) -> list[np.ndarray]:
        """Copy to the host: for each device one packed transfer."""
        host: list[np.ndarray | None] = [None] * len(arrays)
        by_device: dict[torch.device, list[int]] = {}
        for i, x in enumerate(arrays):
            if x.device.type == "cpu":
                host[i] = _bits_if_bfloat16(x).numpy()
            else:
                by_device.setdefault(x.device, []).append(i)
        for places in by_device.values():
            packed = torch.cat([_as_bytes(arrays[i]) for i in places]).cpu().numpy()
            start = 0
            for i in places:
                stop = start + arrays[i].numel() * arrays[i].element_size()
                flat = packed[start:stop].copy().view(_numpy_dtype(arrays[i].dtype))
                host[i] = flat.reshape(tuple(arrays[i].shape))
                start = stop
        return [x for x in host if x is not None]

    def from_host(self, arrays: list[np.ndarray], dtypes: list[str], like: torch.Tensor) -> list[torch.Tensor]:
        """Copy from the host in one packed transfer."""
        tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]
        if like.device.type != "cpu" and tensors:
            packed = torch.cat([_aligned(_as_bytes(x)) for x in tensors])
            if like.device.type == "cuda":
                packed = packed.pin_memory()
            packed = packed.to(like.device, non_blocking=True)
            moved, start = [], 0
            for x in tensors:
                stop = start + x.numel() * x.element_size()
                moved.append(packed[start:stop].view(x.dtype).view(x.shape))
                start = stop + (-stop) % 8
            tensors = moved
        return [x.view(_DTYPES[name]) if name == "bfloat16" else x for x, name in zip(tensors, dtypes, strict=True)]

    def shared(self, x: torch.Tensor) -> np.ndarray | None:
        """Return a view of what is on the CPU."""
        if x.device.type not in _NOTHING_TO_WAIT_FOR or x.dtype not in (torch.float32, torch.float64):
            return None
        return x.numpy() if type(x) is torch.Tensor and x.is_contiguous() else None

    def move_like(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return ``x`` on the device of ``like``."""
        return x.to(like.device)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Return an independent copy."""
        return x.clone()

    def abs(self, x: torch.Tensor) -> torch.Tensor:
        """Return the magnitudes."""
        return x.abs()

    def floor(self, x: torch.Tensor) -> torch.Tensor:
        """Round down."""
        return x.floor()

    def sqrt(self, x: torch.Tensor) -> torch.Tensor:
        """Return the square roots."""
        return x.sqrt()

    def log(self, x: torch.Tensor) -> torch.Tensor:
        """Return the natural logarithms."""
        return x.log()

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        """Return the exponentials."""
        return x.exp()

    def clip(self, x: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
        """Limit to a range."""
        return x.clamp(low, high)

    def select(self, condition: torch.Tensor, a: torch.Tensor, b: Any) -> torch.Tensor:
        """Choose element by element."""
        return torch.where(condition, a, b)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the last axis."""
        return x.sum(-1, keepdim=True)

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Maximum over the last axis."""
        return x.amax(-1, keepdim=True)

    def rows(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Return rows of ``width`` elements."""
        missing = -x.numel() % width
        return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, width)

    def first(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Return the first elements."""
        return x[:count]

    def concat(self, arrays: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
        """Join arrays."""
        return torch.cat(list(arrays), axis)

    def cumsum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum up."""
        return x.cumsum(-1)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """Return positions of maxima."""
        return x.argmax(-1).to(torch.int32)

    def pick(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return one element of each row."""
        return x.gather(1, positions.to(torch.int64)[:, None])[:, 0]

    def take_rows(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return rows."""
        return x.index_select(0, positions.to(torch.int64))

    def clear_rows(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return a copy with zeros in some rows."""
        return x.index_fill(0, positions.to(torch.int64), 0)

    def add_rows(self, x: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Add to some rows."""
        return x.index_add(0, positions.to(torch.int64), rows)

    def svd(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the singular value decomposition."""
        u, s, vt = torch.linalg.svd(a, full_matrices=False)
        return u, s, vt

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply matrices."""
        return a @ b

    def transpose(self, a: torch.Tensor) -> torch.Tensor:
        """Return the transpose."""
        return a.mT

    def pack(self, codes: torch.Tensor, width: int) -> torch.Tensor:
        """Pack codes into bytes."""
        if width == 8:
            return codes
        if 8 % width:
            codes = torch.stack([(codes >> bit) & 1 for bit in range(width)], dim=1).view(-1)
            width = 1
        columns = self.rows(codes, 8 // width)
        packed = columns[:, 0].clone()
        for i in range(1, 8 // width):
            packed |= columns[:, i] << (i * width)
        return packed

    def unpack(self, packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
        """Return codes."""
        if width == 8:
            return packed
        if 8 % width:
            bits = self.unpack(packed, count * width, 1).view(count, width)
            codes = bits[:, 0].clone()
            for i in range(1, width):
                codes |= bits[:, i] << i
            return codes
        mask = (1 << width) - 1
        codes = torch.stack([(packed >> (i * width)) & mask for i in range(8 // width)], dim=1)
        return codes.view(-1)[:count]

    def uniform(self, n: int, keys: Any, like: torch.Tensor) -> torch.Tensor:
        """Return random numbers in [0, 1)."""
        # PyTorch has no unsigned 32-bit arithmetic: signed products wrap, and shifts are masked.
        x = torch.arange(n, dtype=torch.int32, device=like.device)
        x.mul_(_signed(COUNTER)).add_(_signed(keys[0]))
        x.bitwise_xor_(_shifted(x, SHIFTS[0])).mul_(_signed(FIRST)).bitwise_xor_(_signed(keys[1]))
        x.bitwise_xor_(_shifted(x, SHIFTS[1])).mul_(_signed(SECOND))
        x.bitwise_xor_(_shifted(x, SHIFTS[2]))
        return _shifted(x, 8).to(torch.float32).mul_(2**-24)

    def float_bits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the bits as int64."""
        return x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF

    def from_float_bits(self, bits: torch.Tensor) -> torch.Tensor:
        """Return the numbers that have these bits."""
        return bits.to(torch.int32).view(torch.float32)


def _signed(value: int) -> int:
    """Return the signed 32-bit number with the same bits."""
    return value - (1 << 32) if value >> 31 else value


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right as unsigned numbers are."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _untied_top_k(bits: torch.Tensor, k: int) -> torch.Tensor | None:
    """Return the selection if the k-th largest differs from the next, so that no tie has to be broken."""
    values, positions = bits.topk(k + 1, sorted=False)
    lowest = values.topk(2, largest=False)
    if bool(lowest.values[0] == lowest.values[1]):
        return None
    left_out = int(lowest.indices[0])
    chosen = torch.cat([positions[:left_out], positions[left_out + 1 :]])
    return chosen.to(torch.int32).sort().values


def _bits_if_bfloat16(x: torch.Tensor) -> torch.Tensor:
    # NumPy has no bfloat16; on the host its values travel as the bits that they are.
    return x.view(torch.uint16) if x.dtype == torch.bfloat16 else x


def _numpy_dtype(dtype: torch.dtype) -> str:
    return "uint16" if dtype == torch.bfloat16 else _NAMES[dtype]


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Pad bytes to a multiple of 8, so that what follows can be viewed as any dtype."""
    return torch.nn.functional.pad(x, (0, (-x.numel()) % 8))
