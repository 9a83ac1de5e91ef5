"""Things that go wrong under TensorFlow, each in a job of its own: ``tf_misuse.py SCENARIO``."""

import logging
import sys

import horovod.tensorflow as hvd
import tensorflow as tf

import hvd_compress.transport.base
from hvd_compress import HandshakeError, TopK

logging.basicConfig(format="%(levelname)s %(message)s")
tf.config.threading.set_inter_op_parallelism_threads(2)


def train(steps=4, compression=None, shapes=((40, 50), (50, 60)), before=None):
    variables = [tf.Variable(tf.ones(shape), name=f"v{i}") for i, shape in enumerate(shapes)]
    compression = compression or TopK(0.05)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) for v in variables]) * (hvd.rank() + 1.0)
        return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, variables)

    for number in range(steps):
        if before is not None:
            before(number)
        step()
    print(f"rank {hvd.rank()} has finished", flush=True)


def fine():
    train()


def ratio():
    train(compression=TopK(0.05 if hvd.rank() == 0 else 0.01))


def transport():
    train(compression=TopK(0.05, transport="mpi" if hvd.rank() == 0 else "horovod"))


def shape():
    train(shapes=((40, 50), (50, 60) if hvd.rank() == 0 else (51, 60)))


def number():
    train(shapes=((40, 50), (50, 60)) if hvd.rank() == 0 else ((40, 50), (50, 60), (60, 70)))


def disagreements():
    """Those that all ranks hear of, one after the other."""
    for disagree in (ratio, transport, shape):
        try:
            disagree()
        except HandshakeError as error:
            print(f"{disagree.__name__} on rank {hvd.rank()}: {error}", flush=True)
    print(f"rank {hvd.rank()} has met all of them", flush=True)


def mpi_without_mpi4py():
    sys.modules["mpi4py"] = None
    train(compression=TopK(0.05, transport="mpi"))


def exits():
    def leave(number):
        if number == 2 and hvd.rank() == 1:
            sys.exit(3)

    train(before=leave)


def join():
    hvd_compress.transport.base.WARN_AFTER_S = 2.0
    train(steps=4 if hvd.rank() == 0 else 2)
    hvd.join()


hvd.init()
globals()[sys.argv[1]]()
