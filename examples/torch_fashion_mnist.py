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
import gzip
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from hvd_compress import ConfigError, TopK

DATA = Path(os.environ.get("HVD_COMPRESS_DATA") or "~/.cache/hvd_compress/data").expanduser()

# The folders that scripts/get-data makes, the better one first.
DATASETS = {
    "fashion-mnist": "Fashion-MNIST",
    "mnist-5k": "5,000 MNIST digits, NOT Fashion-MNIST (which scripts/get-data could not fetch)",
}

Images = tuple[torch.Tensor, torch.Tensor]


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
        x = images.to(memory_format=torch.channels_last)  # on CPUs a third faster
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: torch.Tensor = self.fc2(x)
        return logits


def find_data(folder: Path) -> tuple[Path, str]:
    """Return the data set below ``folder`` and its title.

    Raises:
        SystemExit: there is none.
    """
    for name, title in DATASETS.items():
        if (folder / name).is_dir():
            return folder / name, title
    raise SystemExit(f"no data in {folder}; fetch it with: scripts/get-data {folder}")


def read_idx(path: Path) -> torch.Tensor:
    """Read one gzipped file of the MNIST format: bytes, after a header that gives the shape."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise SystemExit(f"cannot read {path} ({error}); fetch it again with scripts/get-data") from None
    header = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:header], ">i4")
    return torch.tensor(np.frombuffer(content[header:], np.uint8)).reshape(*shape.tolist())


def load_data(folder: Path, limit: int | None) -> tuple[Images, Images]:
    """Return training and test images, (n, 1, 28, 28) with mean 0 and variance 1, and their labels."""
    train, test = (
        (read_idx(folder / f"{part}-images-idx3-ubyte.gz")[:, None], read_idx(folder / f"{part}-labels-idx1-ubyte.gz"))
        for part in ("train", "t10k")
    )
    train = train[0][:limit], train[1][:limit]
    std, mean = torch.std_mean(train[0].float())
    return (train[0].sub(mean).div(std), train[1].long()), (test[0].sub(mean).div(std), test[1].long())


# --- Training -------------------------------------------------------------------------


@dataclass
class Result:
    """What a method reached and what it took; bytes are those that one rank sends."""

    method: str
    accuracy: float = 0.0
    bytes_per_step: float = 0.0
    ratio: float = 1.0
    seconds: float = 0.0
    #: (steps, bytes sent, test accuracy), the last one at the end of training.
    curve: list[tuple[int, float, float]] = field(default_factory=list)


def train(args: argparse.Namespace, method: str, compression: Any, data: Images, test_data: Images) -> Result:
    """Train a new model with one method; a collective call, of which all ranks return the same but for times."""
    torch.manual_seed(args.seed)
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    images, labels = data
    steps_per_epoch = len(images) // (args.batch_size * hvd.size())
    steps = args.epochs * steps_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    # The picture's axis of bytes is logarithmic, and so is the spacing of its points.
    evaluations = {round(step) for step in np.geomspace(max(1, steps / 256), steps, 9)}

    result = Result(method)
    bar = tqdm(total=steps, desc=f"{method:<12}", unit="step", ncols=88, mininterval=0.5, disable=hvd.rank() != 0)
    step = 0
    for epoch in range(args.epochs):
        # The same shuffle on every rank, of which each takes every size-th batch.
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
                result.accuracy = accuracy(model, test_data)
                result.curve.append((step, bytes_sent(compression, model, step), result.accuracy))
                bar.set_postfix_str(f"test {result.accuracy:.1%}")
    bar.close()

    result.bytes_per_step = bytes_sent(compression, model, step) / step
    result.ratio = gradient_bytes(model) / result.bytes_per_step
    return result


def gradient_bytes(model: nn.Module) -> int:
    """Return the size of the model's gradients, which is what a dense step sends."""
    return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def bytes_sent(compression: Any, model: nn.Module, steps: int) -> float:
    """Return what this rank has sent in so many steps."""
    if isinstance(compression, TopK):
        return float(compression.stats()["bytes_sent"])
    return float(steps * gradient_bytes(model))


@torch.no_grad()
def accuracy(model: nn.Module, data: Images) -> float:
    """Return the accuracy on ``data``, of which every rank judges its own part."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in data)
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(500), labels.split(500), strict=True))
    model.train()
    total = hvd.allreduce(torch.tensor([right, len(labels)], dtype=torch.float64), op=hvd.Sum, name="accuracy")
    return float(total[0] / total[1])


# --- Report ---------------------------------------------------------------------------


def print_table(title: str, results: list[Result]) -> None:
    """Print what each method reached and took."""
    print()
    print(title)
    print()
    print(f"{'method':<14}{'test accuracy':>14}{'bytes a step':>15}{'ratio':>9}{'seconds':>10}")
    for r in results:
        print(f"{r.method:<14}{r.accuracy:>14.2%}{r.bytes_per_step:>15,.0f}{r.ratio:>8,.0f}x{r.seconds:>10.1f}")
    print()
    print("Bytes are what one rank sends: for dense the size of its gradients, for TopK what compression.stats()")
    print("counts, headers included.  Seconds are those of training, without evaluation.")


def draw(path: Path, title: str, results: list[Result]) -> None:
    """Draw test accuracy over bytes sent."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for r, color in zip(results, ("tab:gray", "tab:blue"), strict=True):
        axes.plot([b for _, b, _ in r.curve], [100 * a for _, _, a in r.curve], "o-", color=color, label=r.method)
    axes.set(xscale="log", title=title, xlabel="bytes sent by each rank", ylabel="test accuracy in %")
    axes.legend()
    figure.savefig(path, dpi=150)


# --- Command line ---------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    """Return the checked command line."""
    parser = argparse.ArgumentParser(
        description="Train a small CNN on Fashion-MNIST with stock Horovod, then with TopK gradient compression, "
        "and compare test accuracy and bytes sent. Start it with horovodrun or mpirun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epochs", type=int, default=4, help="passes over the training images, for each method")
    add("--batch-size", type=int, default=32, help="images a step on each rank")
    add("--lr", type=float, default=0.05, help="learning rate at the start; falls linearly to 0")
    add("--momentum", type=float, default=0.9, help="momentum of SGD")
    add("--ratio", type=float, default=0.001, help="part of each gradient's elements that TopK sends")
    add("--seed", type=int, default=0, help="seed of the weights and of the order of images")
    add("--limit", type=int, help="use the first LIMIT training images only, for a quick run")
    add("--data", type=Path, default=DATA, help="folder that scripts/get-data has filled")
    add("--out", type=Path, default=Path("demo.png"), help="the picture to draw")
    add("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    args = parser.parse_args()
    return args


def main() -> None:
    """Train with both methods and report."""
    args = parse_args()
    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))

    folder, name = find_data(args.data)
    data, test_data = load_data(folder, args.limit)
    methods = {"dense": hvd.Compression.none, f"TopK({args.ratio:g})": TopK(args.ratio)}
    if os.environ.get("ONLY"): methods = {k:v for k,v in methods.items() if k.startswith(os.environ["ONLY"])}
    results = [train(args, method, compression, data, test_data) for method, compression in methods.items()]
    print_table(name, results) if hvd.rank()==0 else 0


if __name__ == "__main__":
    main()
