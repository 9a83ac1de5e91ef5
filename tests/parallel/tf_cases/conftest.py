"""Fixtures of the TensorFlow tests that run on every rank at once; see ``cases/conftest.py``."""

import gc
import os

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from reference import Reference

from hvd_compress import TopK

MPI = os.environ.get("HVD_COMPRESS_TEST_TRANSPORT") == "mpi"
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
hvd.init()


def pytest_collection_modifyitems(config, items):
    """Divide the tests between the ways in which ``test_tensorflow.py`` starts them.

    What shows that the number of ranks is right runs on more than two, what an order could break also with
    mpi4py in the graph, and the rest on two.
    """
    kept = [item for item in items if _belongs_here(item.path.name, item.name)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _belongs_here(file, name):
    many = name.startswith(("test_options", "test_groups_by_list", "test_process_sets", "test_a_rank_outside"))
    ordered = name.startswith(("test_options", "test_gan", "test_two_models", "test_grouped", "test_only_one_rank"))
    if file == "test_tape.py":
        if hvd.size() > 2:
            return many
        return ordered and "eager" not in name if MPI else not many
    return not (file == "test_exact.py" and MPI and "average" in name)


@pytest.fixture(autouse=True)
def nothing_left_over():
    """Free a test's models, so that what it leaves behind cannot help or harm the next."""
    yield
    gc.collect()


@pytest.fixture
def world():
    return World()


class World:
    """The ranks, and what tests need of them."""

    def __init__(self):
        self.rank, self.size = hvd.rank(), hvd.size()
        self.transport = os.environ.get("HVD_COMPRESS_TEST_TRANSPORT", "auto")

    def topk(self, ratio=0.05, **settings):
        return TopK(ratio, **{"transport": self.transport, **settings})

    def reference(self, ratio=0.05, ranks=None, **settings):
        return Reference(ranks or range(self.size), ratio, **settings)

    def gradients(self, step, shapes, dtype=np.float32):
        """Return ``[gradient of each rank]`` for each shape, the same on all ranks."""
        rng = np.random.default_rng(1000 + step)
        return [[rng.standard_normal(shape).astype(dtype) for _ in range(self.size)] for shape in shapes]

    def same_everywhere(self, tensors):
        """Assert that all ranks hold the same bits."""
        flat = np.concatenate([np.asarray(t, np.float64).reshape(-1) for t in tensors]).view(np.int64)
        everyone = hvd.allgather(tf.constant(flat[None]), name="same_everywhere").numpy()
        assert (everyone == everyone[0]).all()

    def all_agree(self, condition):
        """Return whether ``condition`` holds on all ranks."""
        return hvd.allreduce(tf.constant([float(condition)]), op=hvd.Sum, name="all_agree").numpy()[0] == self.size


class Model:
    """Variables whose gradients are whatever is put into ``wanted``."""

    def __init__(self, shapes, dtype=tf.float32, prefix="w"):
        self.shapes = shapes
        self.variables = [tf.Variable(tf.zeros(s, dtype), name=f"{prefix}{i}") for i, s in enumerate(shapes)]
        self.wanted = [tf.Variable(tf.zeros(s, dtype), trainable=False) for s in shapes]

    def want(self, gradients, rank):
        for wanted, gradient in zip(self.wanted, gradients, strict=True):
            wanted.assign(tf.cast(gradient[rank], wanted.dtype))

    def loss(self):
        return tf.add_n([tf.reduce_sum(v * w) for v, w in zip(self.variables, self.wanted, strict=True)])

    def step(self, compression, **options):
        """Return the reduced gradients by way of a tape."""
        with tf.GradientTape() as tape:
            loss = self.loss()
        tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
        return tape.gradient(loss, self.variables)


def check(got, expected, tolerance=2e-5):
    """Assert agreement relative to the largest element."""
    for g, e in zip(got, expected, strict=True):
        error = np.abs(np.asarray(tf.cast(g, tf.float64)) - e).max(initial=0.0)
        assert error <= tolerance * max(np.abs(e).max(initial=0.0), 1e-3), error
