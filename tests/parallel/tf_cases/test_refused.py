"""What cannot work is refused, on all ranks alike, before anything waits."""

import re

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from conftest import Model

from hvd_compress import TopK, UnboundTensorError, UnsupportedError

BIG = (40, 50)


@pytest.mark.parametrize("op", ["Min", "Max", "Product", "Adasum"])
def test_ops(world, op):
    with pytest.raises(UnsupportedError, match=rf"expected op=hvd.Average or op=hvd.Sum for 't', got {op}"):
        hvd.allreduce(tf.ones(BIG), name="t", op=getattr(hvd, op), compression=world.topk())


def test_adasum_tape(world):
    with pytest.raises(UnsupportedError, match="got Adasum"):
        Model([BIG]).step(world.topk(), op=hvd.Adasum)


def test_integers(world):
    with pytest.raises(UnsupportedError, match=r"expected a gradient of float16, .* for 't', got int32"):
        hvd.allreduce(tf.ones(BIG, tf.int32), name="t", compression=world.topk())


def test_reducescatter(world):
    with pytest.raises(UnsupportedError, match=r"hvd\.reducescatter cannot be compressed"):
        hvd.reducescatter(tf.ones(BIG), name="t", compression=world.topk())


def test_unknown_shape(world):
    @tf.function(input_signature=[tf.TensorSpec([None, 50])])
    def step(x):
        return hvd.allreduce(x, name="t", compression=world.topk())

    with pytest.raises(UnsupportedError, match=r"expected a tensor of known shape for 't', got \(None, 50\)"):
        step(tf.ones(BIG))


def test_xla(world):
    model, compression = Model([BIG]), world.topk()
    step = tf.function(lambda: model.step(compression), jit_compile=True)
    with pytest.raises(UnsupportedError, match=r"cannot run inside XLA; expected jit_compile=False"):
        step()


def test_other_code(world):
    with pytest.raises(UnboundTensorError, match=r"was called by other code than Horovod's"):
        world.topk().compress(tf.ones(BIG))


def test_stock_optimizer_around_keras_3(world):
    keras = pytest.importorskip("keras", minversion="3.0", reason="Keras 3 is not installed")
    stock = pytest.importorskip("horovod.tensorflow.keras")
    line = re.escape("import hvd_compress.keras as hvd")
    with pytest.raises(UnsupportedError, match=line):
        stock.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TopK(0.01))
