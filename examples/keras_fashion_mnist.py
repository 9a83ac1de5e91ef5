"""Train a small CNN with Keras 3 on Fashion-MNIST twice: with plain Horovod, and with TopK gradient compression.

    scripts/get-data
    horovodrun -np 2 python examples/keras_fashion_mnist.py

Both runs start from the same weights, see the same images in the same order and use the same
settings; all that differs is the ``compression`` argument of ``hvd.DistributedOptimizer``.  At the
end rank 0 prints what each method reached and what it sent.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_compress.keras as hvd  # instead of horovod.tensorflow.keras, which does nothing under Keras 3
from hvd_compress import ConfigError, TopK

DATA = Path(os.environ.get("HVD_COMPRESS_DATA") or "~/.cache/hvd_compress/data").expanduser()

# The folders that scripts/get-data makes, the better one first, with a title and a number of epochs.
DATASETS = {
    "fashion-mnist": ("Fashion-MNIST", 2),
    "mnist-5k": ("MNIST digits, NOT Fashion-MNIST", 20),
}

Data = tuple[np.ndarray, np.ndarray]  # images and labels


# --- Model and data -------------------------------------------------------------------


def make_model() -> keras.Model:
    """Return two convolutions and two dense layers: 1.6 million parameters, 98 % of them in ``fc1``."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, padding="same", name="conv1"),
            layers.MaxPooling2D(2),
            layers.ReLU(),
            layers.Conv2D(64, 3, padding="same", name="conv2"),
            layers.MaxPooling2D(2),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(512, activation="relu", name="fc1"),
            layers.Dense(10, name="fc2"),
        ]
    )


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


class Batches(keras.utils.PyDataset):
    """This rank's batches: the order is the same on every rank, and each takes every size-th batch of it."""

    def __init__(self, data: Data, batch_size: int, seed: int) -> None:
        super().__init__()
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.epoch = 0
        self.shuffle()

    def shuffle(self) -> None:
        """Draw the order of the images in this epoch."""
        self.order = np.random.default_rng(self.seed + self.epoch).permutation(len(self.data[0]))

    def on_epoch_end(self) -> None:
        """Go on to the next epoch."""
        self.epoch += 1
        self.shuffle()

    def __len__(self) -> int:
        return len(self.data[0]) // (self.batch_size * hvd.size())

    def __getitem__(self, index: int) -> Data:
        start = (index * hvd.size() + hvd.rank()) * self.batch_size
        chosen = self.order[start : start + self.batch_size]
        return self.data[0][chosen], self.data[1][chosen]


# --- Training -------------------------------------------------------------------------


@dataclass
class Result:
    """What a method reached and what it took; bytes are those that one rank sends."""

    method: str
    accuracy: float
    bytes_per_step: float
    ratio: float
    seconds: float


def train(args: argparse.Namespace, method: str, compression: Any, data: Data, test_data: Data) -> Result:
    """Train a new model on all ranks, with one method."""
    keras.utils.set_random_seed(args.seed)
    model = make_model()
    batches = Batches(data, args.batch_size, args.seed)
    steps = args.epochs * len(batches)
    schedule = keras.optimizers.schedules.PolynomialDecay(args.lr, steps, end_learning_rate=0.0)
    optimizer = keras.optimizers.SGD(schedule, momentum=args.momentum)
    # This argument is all that it takes.
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    if isinstance(compression, TopK):
        # Puts compression_ratio, bytes_sent and residual_norm into what Keras logs.
        callbacks.insert(1, hvd.callbacks.CompressionStats(compression))
    if hvd.rank() == 0:
        print(f"\n{method}", flush=True)
    started = time.perf_counter()
    verbose = 2 if hvd.rank() == 0 else 0
    history = model.fit(batches, epochs=args.epochs, shuffle=False, verbose=verbose, callbacks=callbacks).history
    seconds = time.perf_counter() - started

    gradient_bytes = sum(np.asarray(v.numpy()).nbytes for v in model.trainable_variables)
    sent = sum(history["bytes_sent"]) / steps if "bytes_sent" in history else gradient_bytes
    return Result(method, evaluate(model, test_data), sent, gradient_bytes / sent, seconds)


def evaluate(model: keras.Model, data: Data) -> float:
    """Return the accuracy on ``data``, of which every rank judges its own part."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in data)
    right = (model.predict(images, batch_size=500, verbose=0).argmax(1) == labels).sum()
    total = hvd.allreduce(np.array([right, len(labels)], np.float64), op=hvd.Sum)
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
        "compression.stats() counts, headers included. Seconds are those of fit().",
    ]
    for line in lines:  # one by one, for mpirun marks them
        print(line, flush=True)


# --- Command line ---------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(
        description="Train a small CNN with Keras 3 on Fashion-MNIST with plain Horovod, then with TopK gradient "
        "compression, and compare test accuracy and bytes sent. Start it with horovodrun -np 2 or mpirun -np 2.",
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


def main() -> None:
    """Train with both methods, and report."""
    args = parse_args()
    hvd.init()
    if hvd.size() < 2:
        raise SystemExit("one rank alone sends nothing; start two: horovodrun -np 2 python " + " ".join(sys.argv))
    # The ranks of a machine share its cores.
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)

    folder = find_data(args.data)
    name, epochs = DATASETS[folder.name]
    args.epochs = args.epochs or epochs
    data, test_data = load_data(folder, args.limit)
    if len(data[0]) < args.batch_size * hvd.size():
        raise SystemExit(f"{len(data[0])} images are too few for {hvd.size()} ranks with {args.batch_size} a step")

    methods = {"dense": None, f"TopK({args.ratio:g})": TopK(args.ratio)}
    results = [train(args, method, compression, data, test_data) for method, compression in methods.items()]

    if hvd.rank() == 0:
        passes = f"{args.epochs} epoch{'' if args.epochs == 1 else 's'}"
        title = f"{name}: {len(data[0]):,} images, {passes}, {hvd.size()} ranks, Keras {keras.__version__}"
        print_table(title, results)
        if args.json:
            settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
            report = {"title": title, "settings": settings, "results": [asdict(r) for r in results]}
            args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
