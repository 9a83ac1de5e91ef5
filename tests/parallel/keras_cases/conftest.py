"""Fixtures of the Keras tests, which run on every rank at once.

All ranks run the same tests in the same order.  A test compares what was gathered from all
ranks, so that it fails on all of them alike.
"""

import importlib.util

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_simulation import HIDDEN, INPUTS, MIN_NUMEL, OUTPUTS, SGD, Simulation, initial_weights, rank_data
from reference import Reference

import hvd_compress.keras as hvd
from hvd_compress import TopK

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
tf.get_logger().setLevel("ERROR")  # retracing is what these tests do
hvd.init()

RATIO = 0.1
# In each of them gradients are added up, scaled or judged in another way.
_SUMS = ("sgd", "sum", "predivide_groups", "backward_passes", "accumulation", "global_clipnorm", "loss_scaling")
MANY_RANKS = {f"test_fit[topk-{name}]" for name in _SUMS}
STEPS, BATCH = 6, 8
ADAPTED = importlib.util.find_spec("hvd_compress.adapters.tensorflow") is not None


def pytest_configure(config):
    # Keras on NumPy 2.
    config.addinivalue_line("filterwarnings", "ignore:__array__ implementation doesn't accept:DeprecationWarning")


def pytest_collection_modifyitems(config, items):
    """Divide the tests: what shows that the number of ranks is right runs on more than two, the rest on two."""
    kept = [item for item in items if _needs_many_ranks(item) == (hvd.size() > 2)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _needs_many_ranks(item):
    return item.name in MANY_RANKS or "process_set" in item.name


@pytest.fixture(params=["none", "topk"])
def world(request):
    if request.param == "topk" and not ADAPTED:
        pytest.skip("there is no adapter for TensorFlow")
    return World(request.param == "topk")


@pytest.fixture
def topk_world():
    return World(True)


class World:
    """The ranks, and what tests need of them."""

    def __init__(self, topk):
        self.rank, self.size, self.topk = hvd.rank(), hvd.size(), topk

    def compression(self, ratio=RATIO, **settings):
        return TopK(ratio, min_numel=MIN_NUMEL, **settings) if self.topk else None

    def reduce(self, ranks=None, average=True):
        """Return a function that reduces as the ranks do."""
        ranks = range(self.size) if ranks is None else ranks
        min_numel = MIN_NUMEL if self.topk else 1 << 60
        reference = Reference(ranks, RATIO, min_numel=min_numel)
        reduce = lambda name, gradients: reference.reduce(name, gradients, average)  # noqa: E731
        reduce.reference = reference
        return reduce

    def model(self, weights=None, cls=keras.Model):
        inputs = keras.Input((INPUTS,))
        hidden = keras.layers.Dense(HIDDEN, activation="tanh", name="hidden")(inputs)
        model = cls(inputs, keras.layers.Dense(OUTPUTS, name="output")(hidden))
        model.set_weights(initial_weights() if weights is None else weights)
        return model

    def simulation(self, optimizers, average=True, **options):
        return Simulation(initial_weights(), self.reduce(average=average), optimizers, **options)

    def data(self, steps=STEPS, seed=0):
        """Return the data of this rank."""
        return rank_data(self.rank, steps, BATCH, seed)

    def batches(self, steps=STEPS, seed=0):
        """Return, for each step, a list of all ranks' batches."""
        everyone = [rank_data(rank, steps, BATCH, seed) for rank in range(self.size)]
        rows = [slice(i * BATCH, (i + 1) * BATCH) for i in range(steps)]
        return [[(x[r], y[r]) for x, y in everyone] for r in rows]

    def fit(self, model, steps=STEPS, epochs=1, seed=0, callbacks=(), build=True):
        """Train; ``build=False`` leaves the optimizer's variables to the first step, which is then traced twice."""
        if build and not model.optimizer.built and model.built:
            model.optimizer.build(model.trainable_variables)
        x, y = self.data(steps, seed)
        return model.fit(x, y, BATCH, epochs, shuffle=False, verbose=0, callbacks=list(callbacks))

    def check(self, model, expected, tolerance=1e-6):
        """Assert that all ranks hold the same bits, and what was simulated."""
        weights = model.get_weights()
        self.same_everywhere(weights)
        largest = max(np.abs(e).max() for e in expected)
        error = max(np.abs(w.astype(np.float64) - e).max() for w, e in zip(weights, expected, strict=True))
        assert error <= tolerance * largest, error / largest

    def check_trained(self, model):
        """Assert that a model was trained on :meth:`data` once, by gradient descent at a rate of 0.1."""
        simulation = self.simulation(SGD(0.1))
        for batches in self.batches():
            simulation.step(batches)
        self.check(model, simulation.weights)

    def same_everywhere(self, arrays):
        """Assert that all ranks hold the same bits."""
        content = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
        everyone = hvd.allgather(np.frombuffer(content, np.uint8)[None]).numpy()
        assert (everyone == everyone[0]).all()

    def all_agree(self, condition):
        """Return whether ``condition`` holds on all ranks."""
        return float(hvd.allreduce(np.float32(bool(condition)), op=hvd.Sum)) == self.size
