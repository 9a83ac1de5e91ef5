"""Train a small CNN with Keras 3 on Fashion-MNIST twice: with plain Horovod, and with TopK gradient compression.

    scripts/get-data
    horovodrun -np 2 python examples/keras_fashion_mnist.py

Both runs start from the same weights, see the same images in the same order and use the same
settings; all that differs is the ``compression`` argument of ``hvd.DistributedOptimizer``.  At the
end rank 0 prints what each method reached and what it sent.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import fashion_mnist
import keras
import numpy as np
import tensorflow as tf
from fashion_mnist import Data, Result

import hvd_compress.keras as hvd  # instead of horovod.tensorflow.keras, which does nothing under Keras 3
from hvd_compress import TopK


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


if __name__ == "__main__":
    arguments = fashion_mnist.parse_args("Keras 3 and hvd_compress.keras")
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the ranks of a machine share its cores
    fashion_mnist.compare(hvd, arguments, train)
