"""Train a small CNN on Fashion-MNIST twice: with stock Horovod, and with TopK gradient compression.

    scripts/get-data
    horovodrun -np 2 python examples/torch_fashion_mnist.py

Both runs start from the same weights, see the same images in the same order and use the same
settings; all that differs is the ``compression`` argument of ``hvd.DistributedOptimizer``.  At the
end rank 0 prints what each method reached and what it sent, and draws test accuracy over the
bytes sent.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from fashion_mnist import DATA, DATASETS, find_data, read_idx
from torch import nn
from tqdm import tqdm

from hvd_compress import ConfigError, TopK

# Passes over the training images of the data sets that scripts/get-data makes.
EPOCHS = {"fashion-mnist": 2, "mnist-5k": 20}

# mpirun gives ranks a terminal without a size, and may put a mark behind the bar: narrow is safe.
BAR: dict[str, Any] = {
    "bar_format": "{desc}{percentage:4.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    "ncols": 68,
    "nrows": 24,
    "file": sys.stdout,
}

Data = tuple[torch.Tensor, torch.Tensor]  # images and labels


# --- Model and data -------------------------------------------------------------------


class CNN(nn.Module):
    """Two convolutions and two linear layers: 1.6 million parameters, 98 % of them in ``fc1``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 7 * 7, 512)
        self.fc2 = nn.Linear(512, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of images of shape (n, 1, 28, 28)."""
        x = images.to(memory_format=torch.channels_last)  # a third faster on CPUs
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: torch.Tensor = self.fc2(x)
        return logits


def load_data(folder: Path, limit: int | None) -> tuple[Data, Data]:
    """Return training and test images, (n, 1, 28, 28) with mean 0 and variance 1, and their labels."""
    images = torch.tensor(read_idx(folder / "train-images-idx3-ubyte.gz"))[:limit, None].float()
    labels = torch.tensor(read_idx(folder / "train-labels-idx1-ubyte.gz"))[:limit].long()
    test_images = torch.tensor(read_idx(folder / "t10k-images-idx3-ubyte.gz"))[:, None].float()
    test_labels = torch.tensor(read_idx(folder / "t10k-labels-idx1-ubyte.gz")).long()
    std, mean = torch.std_mean(images)
    return (images.sub_(mean).div_(std), labels), (test_images.sub_(mean).div_(std), test_labels)


# --- Training -------------------------------------------------------------------------


@dataclass
class Result:
    """What a method reached and what it took; bytes are those that one rank sends."""

    method: str
    accuracy: float = 0.0
    bytes_per_step: float = 0.0
    ratio: float = 1.0
    seconds: float = 0.0
    #: Steps, bytes sent and test accuracy, several times during training.
    curve: list[tuple[int, int, float]] = field(default_factory=list)


def train(args: argparse.Namespace, method: str, compression: Any, data: Data, test_data: Data) -> Result:
    """Train a new model on all ranks, with one method."""
    torch.manual_seed(args.seed)
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    # This argument is all that it takes.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    images, labels = data
    steps_per_epoch = len(images) // (args.batch_size * hvd.size())
    steps = args.epochs * steps_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    # Evenly spaced on the logarithmic axis of the picture.
    evaluations = {round(step) for step in np.geomspace(max(1, steps / 256), steps, 9)}

    result = Result(method)
    bar = tqdm(total=steps, desc=f"{method:<11}", disable=hvd.rank() != 0, **BAR)
    step = 0
    for epoch in range(args.epochs):
        # The same order on every rank; each takes every size-th batch of it.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed + epoch))
        for batch in order.split(args.batch_size)[hvd.rank() :: hvd.size()][:steps_per_epoch]:
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            result.seconds += time.perf_counter() - started
            step += 1
            bar.update()
            if step in evaluations:
                result.accuracy = evaluate(model, test_data)
                result.curve.append((step, bytes_sent(compression, model, step), result.accuracy))
                bar.set_postfix_str(f"test {result.accuracy:.1%}")
    bar.close()

    result.bytes_per_step = bytes_sent(compression, model, steps) / steps
    result.ratio = gradient_bytes(model) / result.bytes_per_step
    return result


def gradient_bytes(model: nn.Module) -> int:
    """Return the size of the model's gradients, which is what a dense step sends."""
    return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def bytes_sent(compression: Any, model: nn.Module, steps: int) -> int:
    """Return what this rank has sent in so many steps."""
    if isinstance(compression, TopK):
        sent: int = compression.stats()["bytes_sent"]
        return sent
    return steps * gradient_bytes(model)


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> float:
    """Return the accuracy on ``data``, of which every rank judges its own part."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in data)
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(100), labels.split(100), strict=True))
    model.train()
    total = hvd.allreduce(torch.tensor([right, len(labels)], dtype=torch.float64), op=hvd.Sum, name="evaluate")
    return float(total[0] / total[1])


# --- Report ---------------------------------------------------------------------------


def print_table(title: str, results: list[Result]) -> None:
    """Print what each method reached and what it took."""
    lines = ["", title, "", f"{'method':<12} {'test accuracy':>14} {'bytes a step':>13} {'ratio':>7} {'seconds':>8}"]
    lines += [
        f"{r.method:<12} {r.accuracy:>14.2%} {r.bytes_per_step:>13,.0f} {r.ratio:>6,.0f}x {r.seconds:>8.1f}"
        for r in results
    ]
    lines += [
        "",
        "Bytes are what each rank sends: for dense the size of its gradients, for TopK what",
        "compression.stats() counts, headers included. Seconds are those of training alone.",
    ]
    for line in lines:  # one by one, for mpirun marks them
        print(line, flush=True)


def draw(path: Path, title: str, results: list[Result]) -> None:
    """Draw test accuracy over bytes sent."""
    mpl.use("Agg")  # no display is needed
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for r, color in zip(results, ("#777777", "#0b62a4"), strict=True):
        _, sent, accuracy = zip(*r.curve, strict=True)
        axes.plot(sent, [100 * a for a in accuracy], "o-", color=color, lw=2)
        axes.annotate(
            f"{r.method}\n{r.accuracy:.1%}, {megabytes(sent[-1])}",
            (sent[-1], 100 * r.accuracy),
            xytext=(0, 10),
            textcoords="offset points",
            ha="center",
            color=color,
            weight="bold",
        )
    axes.set(xscale="log", xlabel="bytes sent by each rank", ylabel="test accuracy (%)", ylim=(0, 110))
    axes.set_title(f"{title}\n{results[-1].ratio:,.0f} times fewer bytes a step", fontsize=11)
    axes.xaxis.set_major_formatter(lambda value, _: megabytes(value))
    axes.set_yticks(range(0, 101, 20))
    axes.minorticks_off()
    axes.margins(x=0.12)
    axes.grid(color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def megabytes(value: float) -> str:
    """Return a number of bytes for people."""
    unit = next((unit for unit in (1e9, 1e6, 1e3) if value >= unit), 1)
    return f"{value / unit:.3g} {({1e9: 'GB', 1e6: 'MB', 1e3: 'kB', 1: 'B'})[unit]}"


# --- Command line ---------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        description="Train a small CNN on Fashion-MNIST with stock Horovod, then with TopK gradient compression, "
        "and compare test accuracy and bytes sent. Start it with horovodrun -np 2 or mpirun -np 2.",
    )
    add = parser.add_argument
    add(
        "--epochs",
        type=int,
        help="passes over the training images, for each method (default: 2, or 20 of MNIST digits)",
    )
    add("--batch-size", type=int, default=32, help="images in a step of one rank (default: %(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate, falling linearly to 0 (default: %(default)s)")
    add("--momentum", type=float, default=0.9, help="momentum of SGD (default: %(default)s)")
    add("--ratio", type=float, default=0.001, help="part of the gradient that TopK sends (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the weights and the order of images (default: %(default)s)")
    add("--limit", type=int, metavar="N", help="train on the first N images only, for a quick look")
    add(
        "--data", type=Path, default=DATA, metavar="DIR", help="what scripts/get-data has filled (default: %(default)s)"
    )
    add("--out", type=Path, default=Path("demo.png"), metavar="FILE", help="picture to draw (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write settings and results to FILE")
    args = parser.parse_args()

    for name in ("epochs", "batch_size", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
    if not args.lr > 0:
        parser.error(f"--lr must be above 0, got {args.lr}")
    if not 0 <= args.momentum < 1:
        parser.error(f"--momentum must be in [0, 1), got {args.momentum}")
    try:
        TopK(args.ratio)
    except ConfigError as error:
        parser.error(f"--ratio: {error}")
    for path in (args.out, args.json):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {path.absolute().parent} to write {path.name} to")
    return args


def main() -> None:
    """Train with both methods, and report."""
    args = parse_args()
    hvd.init()
    if hvd.size() < 2:
        raise SystemExit("one rank alone sends nothing; start two: horovodrun -np 2 python " + " ".join(sys.argv))
    # The ranks of a machine share its cores.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))

    folder = find_data(args.data)
    name, _ = DATASETS[folder.name]
    args.epochs = args.epochs or EPOCHS[folder.name]
    data, test_data = load_data(folder, args.limit)
    if len(data[0]) < args.batch_size * hvd.size():
        raise SystemExit(f"{len(data[0])} images are too few for {hvd.size()} ranks with {args.batch_size} a step")

    methods = {"dense": hvd.Compression.none, f"TopK({args.ratio:g})": TopK(args.ratio)}
    results = [train(args, method, compression, data, test_data) for method, compression in methods.items()]

    if hvd.rank() == 0:
        passes = f"{args.epochs} epoch{'' if args.epochs == 1 else 's'}"
        title = f"{name}: {len(data[0]):,} images, {passes}, {hvd.size()} ranks"
        print_table(title, results)
        draw(args.out, title, results)
        print(f"Picture: {args.out.absolute()}")
        if args.json:
            settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
            report = {"title": title, "settings": settings, "results": [asdict(r) for r in results]}
            args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
