"""Train a small CNN with Keras 2 (tf_keras) and stock Horovod twice: without compression, and with TopK.

    scripts/get-data
    horovodrun -np 2 python examples/tf_keras_fashion_mnist.py

TensorFlow 2.16 and later bring Keras 3; TF_USE_LEGACY_KERAS=1 makes ``tf.keras`` Keras 2 again, by
way of the package tf_keras.  With older ones the example runs as it is.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import fashion_mnist
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from fashion_mnist import Data, Result

from hvd_compress import TopK

keras = tf.keras


def make_model() -> Any:
    """Return two convolutions and two dense layers: 1.6 million parameters, 98 % of them in ``fc1``."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
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


def train(args: argparse.Namespace, method: str, compression: Any, data: Data, test_data: Data) -> Result:
    """Train a new model on all ranks, with one method."""
    keras.utils.set_random_seed(args.seed)
    model = make_model()
    steps = len(data[0]) // (args.batch_size * hvd.size())
    schedule = keras.optimizers.schedules.PolynomialDecay(args.lr, args.epochs * steps, end_learning_rate=0.0)
    optimizer = keras.optimizers.SGD(schedule, momentum=args.momentum)
    # This argument is all that it takes.
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

    def mine() -> Any:
        for epoch in range(args.epochs):
            yield from fashion_mnist.batches(data, args.batch_size, hvd.rank(), hvd.size(), args.seed + epoch)

    if hvd.rank() == 0:
        print(f"\n{method}", flush=True)
    started = time.perf_counter()
    model.fit(
        mine(),
        steps_per_epoch=steps,
        epochs=args.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    seconds = time.perf_counter() - started
    dense = 4 * sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    sent = compression.stats()["bytes_sent"] / (args.epochs * steps) if isinstance(compression, TopK) else dense
    return Result(method, evaluate(model, test_data), sent, dense / sent, seconds)


def evaluate(model: Any, data: Data) -> float:
    """Return the accuracy on ``data``, of which every rank judges its own part."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in data)
    right = (model.predict(images, batch_size=500, verbose=0).argmax(1) == labels).sum()
    total = hvd.allreduce(np.array([right, len(labels)], np.float64), op=hvd.Sum)
    return float(total[0] / total[1])


if __name__ == "__main__":
    arguments = fashion_mnist.parse_args("Keras 2 and stock Horovod")
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the ranks of a machine share its cores
    fashion_mnist.compare(hvd, arguments, train)
