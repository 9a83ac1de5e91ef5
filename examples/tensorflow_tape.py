"""Train a small CNN with ``hvd.DistributedGradientTape`` twice: without compression, and with TopK.

    scripts/get-data
    horovodrun -np 2 python examples/tensorflow_tape.py

The loop is TensorFlow's own, with stock ``horovod.tensorflow`` and any version of Keras; all that
differs between the two runs is the ``compression`` argument of the tape.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import fashion_mnist
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from fashion_mnist import Data, Result

from hvd_compress import TopK

# Input channels, output channels, and whether a convolution (3 x 3) or a dense layer.
LAYERS = [(1, 32, True), (32, 64, True), (64 * 7 * 7, 512, False), (512, 10, False)]


class CNN(tf.Module):
    """Two convolutions and two dense layers: 1.6 million parameters, 98 % of them in one layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.weights, self.biases = [], []
        for i, (before, after, convolution) in enumerate(LAYERS):
            shape = (3, 3, before, after) if convolution else (before, after)
            scale = np.sqrt(2 / np.prod(shape[:-1]))
            self.weights.append(tf.Variable(rng.normal(0, scale, shape).astype("f4"), name=f"weight{i}"))
            self.biases.append(tf.Variable(tf.zeros([after]), name=f"bias{i}"))

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """Return the logits of images of shape (n, 28, 28, 1)."""
        x = images
        for weight, bias in zip(self.weights[:2], self.biases[:2], strict=True):
            x = tf.nn.max_pool2d(tf.nn.conv2d(x, weight, 1, "SAME") + bias, 2, 2, "VALID")
            x = tf.nn.relu(x)
        x = tf.reshape(x, [-1, LAYERS[2][0]])
        x = tf.nn.relu(x @ self.weights[2] + self.biases[2])
        return x @ self.weights[3] + self.biases[3]


def train(args: argparse.Namespace, method: str, compression: Any, data: Data, test_data: Data) -> Result:
    """Train a new model on all ranks, with one method."""
    model = CNN(args.seed)
    variables = model.trainable_variables
    hvd.broadcast_variables(variables, root_rank=0)
    velocities = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor, lr: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
            loss = tf.reduce_mean(losses)
        # This argument is all that it takes.
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for v, velocity, gradient in zip(variables, velocities, tape.gradient(loss, variables), strict=True):
            velocity.assign(args.momentum * velocity + gradient)
            v.assign_sub(lr * velocity)
        return loss

    steps = args.epochs * (len(data[0]) // (args.batch_size * hvd.size()))
    done, started = 0, time.perf_counter()
    for epoch in range(args.epochs):
        for images, labels in fashion_mnist.batches(data, args.batch_size, hvd.rank(), hvd.size(), args.seed + epoch):
            loss = step(tf.constant(images), tf.constant(labels), tf.constant(args.lr * (1 - done / steps), tf.float32))
            done += 1
            if hvd.rank() == 0 and done % max(1, steps // 8) == 0:
                print(f"{method:<12} step {done:>5} of {steps}, loss {float(loss):.3f}", flush=True)
    seconds = time.perf_counter() - started
    dense = 4 * sum(int(tf.size(v)) for v in variables)
    sent = compression.stats()["bytes_sent"] / steps if isinstance(compression, TopK) else dense
    return Result(method, evaluate(model, test_data), sent, dense / sent, seconds)


def evaluate(model: CNN, data: Data) -> float:
    """Return the accuracy on ``data``, of which every rank judges its own part."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in data)
    starts = range(0, len(labels), 500)
    right = sum(int((model(images[i : i + 500]).numpy().argmax(1) == labels[i : i + 500]).sum()) for i in starts)
    total = hvd.allreduce(tf.constant([right, len(labels)], tf.float64), op=hvd.Sum, name="evaluate")
    return float(total[0] / total[1])


if __name__ == "__main__":
    arguments = fashion_mnist.parse_args("TensorFlow's GradientTape and stock Horovod")
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the ranks of a machine share its cores
    fashion_mnist.compare(hvd, arguments, train)
