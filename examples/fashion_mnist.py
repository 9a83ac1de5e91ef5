"""What the examples have in common: data, and for TensorFlow command line and table."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress import ConfigError, TopK

DATA = Path(os.environ.get("HVD_COMPRESS_DATA") or "~/.cache/hvd_compress/data").expanduser()

# The folders that scripts/get-data makes, the better one first, with a title and a number of epochs.
DATASETS = {
    "fashion-mnist": ("Fashion-MNIST", 1),
    "mnist-5k": ("MNIST digits, NOT Fashion-MNIST", 10),
}

Data = tuple[np.ndarray, np.ndarray]  # images and labels


def find_data(folder: Path) -> Path:
    """Return the folder of the best data set that ``scripts/get-data`` has put into ``folder``."""
    for name in DATASETS:
        if (folder / name / "train-images-idx3-ubyte.gz").is_file():
            return folder / name
    raise SystemExit(f"no training images in {folder}; fetch them with: scripts/get-data {folder}")


def read_idx(path: Path) -> np.ndarray:
    """Read a gzipped file of MNIST's format: bytes, after a header that gives the shape."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise SystemExit(f"cannot read {path} ({error}); mend it with: scripts/get-data {path.parent.parent}") from None
    header = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:header], ">i4").tolist()
    return np.frombuffer(content[header:], np.uint8).reshape(shape)


def load_data(folder: Path, limit: int | None) -> tuple[Data, Data]:
    """Return training and test images, (n, 28, 28, 1) with mean 0 and variance 1, and their labels."""
    images = read_idx(folder / "train-images-idx3-ubyte.gz")[:limit, ..., None].astype(np.float32)
    labels = read_idx(folder / "train-labels-idx1-ubyte.gz")[:limit].astype(np.int64)
    test_images = read_idx(folder / "t10k-images-idx3-ubyte.gz")[..., None].astype(np.float32)
    test_labels = read_idx(folder / "t10k-labels-idx1-ubyte.gz").astype(np.int64)
    mean, std = images.mean(), images.std()
    return ((images - mean) / std, labels), ((test_images - mean) / std, test_labels)


def batches(data: Data, size: int, rank: int, ranks: int, seed: int) -> Iterator[Data]:
    """Yield this rank's batches of one epoch: all ranks draw one order, and each takes every ranks-th batch."""
    order = np.random.default_rng(seed).permutation(len(data[0]))
    for step in range(len(order) // (size * ranks)):
        start = (step * ranks + rank) * size
        chosen = order[start : start + size]
        yield data[0][chosen], data[1][chosen]


@dataclass
class Result:
    """What a method reached and what it took; bytes are those that one rank sends."""

    method: str
    accuracy: float
    bytes_per_step: float
    ratio: float
    seconds: float


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
        "compression.stats() counts, headers included. Seconds are those of training.",
    ]
    for line in lines:  # one by one, for mpirun marks them
        print(line, flush=True)


def parse_args(what: str) -> argparse.Namespace:
    """Return the command line, checked; ``what`` says in a few words what the example uses."""
    parser = argparse.ArgumentParser(
        description=f"Train a small CNN on Fashion-MNIST with {what}, first without compression, then with TopK "
        "gradient compression, and compare test accuracy and bytes sent. Start it with horovodrun -np 2 or "
        "mpirun -np 2.",
    )
    add = parser.add_argument
    add(
        "--epochs",
        type=int,
        help="passes over the training images, for each method (default: 1, or 10 of MNIST digits)",
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
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"there is no folder {args.json.absolute().parent} to write {args.json.name} to")
    return args


def compare(hvd: Any, args: argparse.Namespace, train: Callable[..., Result]) -> None:
    """Call ``train(args, method, compression, data, test_data)`` for both methods, and report on rank 0."""
    if hvd.size() < 2:
        raise SystemExit("one rank alone sends nothing; start two: horovodrun -np 2 python " + " ".join(sys.argv))
    folder = find_data(args.data)
    name, epochs = DATASETS[folder.name]
    args.epochs = args.epochs or epochs
    data, test_data = load_data(folder, args.limit)
    if len(data[0]) < args.batch_size * hvd.size():
        raise SystemExit(f"{len(data[0])} images are too few for {hvd.size()} ranks with {args.batch_size} a step")
    methods = {"dense": hvd.Compression.none, f"TopK({args.ratio:g})": TopK(args.ratio)}
    results = [train(args, method, compression, data, test_data) for method, compression in methods.items()]
    if hvd.rank() == 0:
        passes = f"{args.epochs} epoch{'' if args.epochs == 1 else 's'}"
        title = f"{name}: {len(data[0]):,} images, {passes}, {hvd.size()} ranks"
        print_table(title, results)
        if args.json:
            settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
            report = {"title": title, "settings": settings, "results": [asdict(r) for r in results]}
            args.json.write_text(json.dumps(report, indent=2) + "\n")
