"""Keras 2, by the name of tf_keras: the stock optimizer in ``fit``, against the simulation."""

import os
from importlib.metadata import version

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from conftest import check

if os.environ.get("TF_USE_LEGACY_KERAS") != "1" and not version("keras").startswith("2."):
    pytest.skip("TensorFlow has Keras 3 here; set TF_USE_LEGACY_KERAS=1", allow_module_level=True)

import horovod.tensorflow.keras as hvd_keras

# An Embedding would be sparse; Dense(…) layers have gradients that can be written down.
IN, HIDDEN, OUT, ROWS, STEPS = 30, 64, 40, 8, 6
LR = 0.05


def data(rank):
    rng = np.random.default_rng([7, rank])
    return rng.standard_normal((STEPS * ROWS, IN)).astype("f4"), rng.standard_normal((STEPS * ROWS, OUT)).astype("f4")


def new_model():
    tf.keras.utils.set_random_seed(3)
    layers = [tf.keras.layers.Dense(HIDDEN, activation="tanh"), tf.keras.layers.Dense(OUT)]
    model = tf.keras.Sequential([tf.keras.layers.Input((IN,)), *layers])
    for i, layer in enumerate(model.layers):
        layer._name = f"dense{i}"
    return model


def loss_gradients(weights, x, y):
    """Return the float64 gradients of the mean squared error of a two-layer network."""
    a, b, c, d = weights
    hidden = np.tanh(x @ a + b)
    back = 2 * (hidden @ c + d - y) / y.size
    inner = back @ c.T * (1 - hidden**2)
    return [x.T @ inner, inner.sum(0), hidden.T @ back, back.sum(0)]


def simulate(world, start, update, average=True, passes=1, divide=1):
    """Train all ranks in float64; ``update(weights, gradients, step)`` is the optimizer's rule."""
    expected = world.reference(0.1)
    weights = [w.astype(np.float64) for w in start]
    batches = [data(rank) for rank in range(world.size)]
    total, applied = None, 0
    for step in range(STEPS):
        rows = slice(step * ROWS, (step + 1) * ROWS)
        one = [loss_gradients(weights, x[rows].astype("f8"), y[rows].astype("f8")) for x, y in batches]
        total = (
            one
            if total is None
            else [[a + b for a, b in zip(s, t, strict=True)] for s, t in zip(total, one, strict=True)]
        )
        if (step + 1) % passes == 0:
            by_weight = list(zip(*total, strict=True))
            reduced = [expected.reduce(i, list(g), average) / divide for i, g in enumerate(by_weight)]
            update(weights, reduced, applied)
            total, applied = None, applied + 1
    return weights


class SGD:
    def __init__(self, momentum=0.0, clip=None):
        self.momentum, self.clip, self.velocity = momentum, clip, {}

    def __call__(self, weights, gradients, step):
        for i, g in enumerate(gradients):
            if self.clip:
                gradients[i] = g * min(1, self.clip / np.sqrt((g**2).sum()))
            self.velocity[i] = self.momentum * self.velocity.get(i, 0) - LR * gradients[i]
            weights[i] = weights[i] + self.velocity[i]


class Adam:
    def __init__(self):
        self.m, self.v = {}, {}

    def __call__(self, weights, gradients, step):
        for i, g in enumerate(gradients):
            self.m[i] = 0.9 * self.m.get(i, 0) + 0.1 * g
            self.v[i] = 0.999 * self.v.get(i, 0) + 0.001 * g**2
            rate = 0.01 * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
            weights[i] = weights[i] - rate * self.m[i] / (np.sqrt(self.v[i]) + 1e-3)


SETTINGS = {
    "sgd": (lambda: tf.keras.optimizers.SGD(LR), {}, {}, SGD(), {}),
    "legacy sgd": (lambda: tf.keras.optimizers.legacy.SGD(LR), {}, {}, SGD(), {}),
    "momentum": (lambda: tf.keras.optimizers.SGD(LR, momentum=0.9), {}, {}, SGD(0.9), {}),
    "adam": (lambda: tf.keras.optimizers.Adam(0.01, epsilon=1e-3), {}, {}, Adam(), {}),
    "clipnorm": (lambda: tf.keras.optimizers.legacy.SGD(LR, clipnorm=0.05), {}, {}, SGD(clip=0.05), {}),
    "groups": (lambda: tf.keras.optimizers.SGD(LR), {"groups": 2}, {}, SGD(), {}),
    "run_eagerly": (lambda: tf.keras.optimizers.SGD(LR), {}, {"run_eagerly": True}, SGD(), {}),
    "sum": (lambda: tf.keras.optimizers.SGD(LR), {"op": hvd.Sum}, {}, SGD(), {"average": False}),
    "predivide": (lambda: tf.keras.optimizers.SGD(LR), {"gradient_predivide_factor": 2.0}, {}, SGD(), {}),
    "accumulate": (
        lambda: tf.keras.optimizers.legacy.SGD(LR),
        {"backward_passes_per_step": 3},
        {},
        SGD(),
        {"passes": 3},
    ),
    "accumulate and average": (
        lambda: tf.keras.optimizers.legacy.SGD(LR),
        {"backward_passes_per_step": 3, "average_aggregated_gradients": True},
        {},
        SGD(),
        {"passes": 3, "divide": 3},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_fit(world, name):
    make, options, compile_options, update, how = SETTINGS[name]
    model, compression = new_model(), world.topk(0.1)
    start = model.get_weights()
    optimizer = hvd_keras.DistributedOptimizer(make(), compression=compression, **options)
    model.compile(optimizer, "mse", **compile_options)
    x, y = data(world.rank)
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    update.__init__(**{k: v for k, v in vars(update).items() if k in ("momentum", "clip")})
    check(model.get_weights(), simulate(world, start, update, **how))
    world.same_everywhere(model.get_weights())
    assert compression.stats()["ratio"] > 3


def test_two_optimizers_share_one_compressor(world):
    """Of one class, with models of equal shapes: Horovod would give both one traced function."""
    compression = world.topk(0.1)
    models = [new_model(), new_model()]
    start = models[0].get_weights()
    for model in models:
        model.compile(hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(LR), compression=compression), "mse")
    x, y = data(world.rank)
    for model in models:
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    expected = simulate(world, start, SGD())
    for model in models:
        check(model.get_weights(), expected)
    assert {key.split("/")[0] for key in compression.state_dict()["parameters"]} == {"optimizer0", "optimizer1"}
