"""What scripts/convergence trains: a CNN on Fashion-MNIST, and a character transformer on English text."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from convergence_methods import METHODS
from convergence_ranks import SimulatedRanks
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from fashion_mnist import read_idx

DATA = Path(os.environ.get("HVD_COMPRESS_DATA") or "~/.cache/hvd_compress/data").expanduser()
RANKS = 4
# Part of the steps during which the learning rate rises; then it falls linearly to 0.
WARM_UP = 0.05

Batch = tuple[torch.Tensor, torch.Tensor]


# --- Models ---------------------------------------------------------------------------


class CNN(nn.Module):
    """Two convolutions and two linear layers, 206,922 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of images of shape (n, 1, 28, 28)."""
        x = images.to(memory_format=torch.channels_last)  # a third faster on CPUs
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: torch.Tensor = self.fc2(x)
        return logits


class Block(nn.Module):
    """Attention and a multi-layer perceptron, each with its norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next block gets, of shape (n, length, width)."""
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        total: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return total


class Transformer(nn.Module):
    """Predicts the next character; two blocks, 113,000 parameters."""

    def __init__(self, characters: int, length: int, width: int = 64, blocks: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.place_embed = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (n * length, characters) for text of shape (n, length)."""
        x = self.embed(text) + self.place_embed.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)  # type: ignore[no-any-return]


# --- Tasks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is trained and how long.

    Attributes:
        steps: of a run; a run of the tuning phase has ``tuning_steps``.
        batch: of each rank.
        rates, momenta: learning rates over ``1 - momentum``, and momenta: the grid that is tried for every method.
    """

    name: str
    steps: int
    tuning_steps: int
    batch: int
    rates: tuple[float, ...]
    momenta: tuple[float, ...] = (0.0, 0.9)
    higher_is_better: ClassVar[bool]

    def model(self, seed: int) -> nn.Module:
        raise NotImplementedError

    def batches(self, seed: int, steps: int, tuning: bool) -> Iterator[list[Batch]]:
        """Yield the batches of all ranks, step by step."""
        raise NotImplementedError

    def score(self, model: nn.Module, tuning: bool) -> float:
        """Return accuracy or perplexity on what was held out for tuning, or for the report."""
        raise NotImplementedError

    def worst(self) -> float:
        """Return the score of a model that has diverged."""
        raise NotImplementedError


@dataclass(frozen=True)
class Images(Task):
    """Fashion-MNIST; tuning holds out the last 5,000 training images, the report has the test images."""

    higher_is_better: ClassVar[bool] = True

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return CNN()

    def batches(self, seed: int, steps: int, tuning: bool) -> Iterator[list[Batch]]:
        (images, labels), _ = _images(tuning)
        generator = torch.Generator().manual_seed(seed)
        step = 0
        while True:
            chunks = torch.randperm(len(images), generator=generator).split(self.batch)
            for start in range(0, len(images) // (self.batch * RANKS) * RANKS, RANKS):
                if step == steps:
                    return
                step += 1
                yield [(images[chosen], labels[chosen]) for chosen in chunks[start : start + RANKS]]

    def score(self, model: nn.Module, tuning: bool) -> float:
        _, (images, labels) = _images(tuning)
        parts = zip(images.split(500), labels.split(500), strict=True)
        return 100 * sum(int((model(x).argmax(1) == y).sum()) for x, y in parts) / len(images)

    def worst(self) -> float:
        return 10.0


@dataclass(frozen=True)
class Text(Task):
    """The King James Bible, by character; the last 5 % are the test, the 5 % before hold out for tuning."""

    length: int = 64
    higher_is_better: ClassVar[bool] = False

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Transformer(_text()[1], self.length)

    def batches(self, seed: int, steps: int, tuning: bool) -> Iterator[list[Batch]]:
        text, _ = _text()
        generator = torch.Generator().manual_seed(seed)
        last = int(0.9 * len(text)) - self.length - 1
        for _ in range(steps):
            starts = torch.randint(last, (RANKS, self.batch, 1), generator=generator) + torch.arange(self.length)
            yield [(text[of_rank], text[of_rank + 1].flatten()) for of_rank in starts]

    def score(self, model: nn.Module, tuning: bool) -> float:
        text, _ = _text()
        start = int((0.9 if tuning else 0.95) * len(text))
        stop = int((0.95 if tuning else 1.0) * len(text)) - 1
        windows = (stop - start) // self.length
        # Every fourth of them, the same ones for all methods.
        starts = start + torch.arange(0, windows, 4)[:, None] * self.length + torch.arange(self.length)
        losses = [F.cross_entropy(model(text[s]), text[s + 1].flatten(), reduction="sum") for s in starts.split(64)]
        return math.exp(min(float(sum(losses)) / starts.numel(), 20.0))

    def worst(self) -> float:
        return float(_text()[1])


TASKS: dict[str, Task] = {
    "images": Images("images", steps=3000, tuning_steps=300, batch=32, rates=(0.1, 0.3, 1.0, 3.0)),
    "text": Text("text", steps=5000, tuning_steps=300, batch=4, rates=(0.3, 1.0, 3.0, 10.0)),
}


@lru_cache(2)
def _images(tuning: bool) -> tuple[Batch, Batch]:
    def part(name: str) -> Batch:
        folder = DATA / "fashion-mnist"
        images = torch.tensor(read_idx(folder / f"{name}-images-idx3-ubyte.gz"))[:, None].float()
        # Fashion-MNIST's mean and standard deviation.
        return (images - 72.94) / 90.02, torch.tensor(read_idx(folder / f"{name}-labels-idx1-ubyte.gz")).long()

    images, labels = part("train")
    if not tuning:
        return (images, labels), part("t10k")
    return (images[:-5000], labels[:-5000]), (images[-5000:], labels[-5000:])


@lru_cache(1)
def _text() -> tuple[torch.Tensor, int]:
    content = (DATA / "king-james" / "text.txt").read_text()
    characters = {c: i for i, c in enumerate(sorted(set(content)))}
    return torch.tensor([characters[c] for c in content]), len(characters)


# --- Training -------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training run; ``rate`` is the optimizer's learning rate."""

    task: str
    method: str
    tuning: bool
    rate: float
    momentum: float
    seed: int
    steps: int

    @property
    def key(self) -> str:
        """Name it; when a model, a batch size or a method itself is changed, results belong into another folder."""
        phase = "tuning" if self.tuning else "final"
        return f"{self.task} {self.method} {phase} {self.rate:.4g} {self.momentum:g} {self.seed} {self.steps}"


def train(run: Run) -> dict[str, Any]:
    """Train one model, and return the score, the bytes a step and the CPU seconds it took."""
    torch.set_num_threads(1)
    started = time.process_time()
    task = TASKS[run.task]
    model = task.model(run.seed)
    compressor = METHODS[run.method].make(run.momentum, run.steps)
    ranks = SimulatedRanks(compressor, RANKS)
    # Two momenta would be applied one after the other.
    momentum = 0.0 if compressor.has_momentum else run.momentum
    optimizer = torch.optim.SGD(model.parameters(), run.rate, momentum=momentum)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (WARM_UP * run.steps), (1 - step / run.steps) / (1 - WARM_UP))
    )
    names, parameters = zip(*model.named_parameters(), strict=True)
    finite = True
    for batches in task.batches(run.seed, run.steps, run.tuning):
        gradients, losses = [], []
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            losses.append(loss.detach())
            gradients.append(dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)))
        finite = bool(torch.stack(losses).mean() < 1e4)  # false for NaN too
        if not finite:
            break
        averages = ranks.average(gradients)
        for name, p in zip(names, parameters, strict=True):
            p.grad = averages[name]
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        score = task.score(model, run.tuning) if finite else task.worst()
    done = max(1, ranks.steps)
    return {
        "score": score if math.isfinite(score) else task.worst(),
        "diverged": not finite,
        "bytes": ranks.bytes_sent / done,
        "dense_bytes": ranks.dense_bytes / done,
        "seconds": round(time.process_time() - started, 1),
    }
