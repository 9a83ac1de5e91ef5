"""One compressor that serves PyTorch and TensorFlow in one process.

In a folder of its own, that is in processes of its own: Horovod's process sets belong to the
framework whose module was imported last, so what comes after these tests could use none.
"""

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from conftest import Model, check

from hvd_compress import TransportError
from hvd_compress.transport.horovod import HorovodTransport

torch = pytest.importorskip("torch")
hvd_torch = pytest.importorskip("horovod.torch")
hvd_torch.init()


def test_direct_calls_of_two_frameworks(world):
    """One compressor, one process, and even one name."""
    compression, expected = world.topk(), [world.reference(), world.reference()]

    def step(number):
        gradients = [world.gradients(10 * number + which, [(40, 50)])[0] for which in range(2)]
        mine = [g[world.rank] for g in gradients]
        got = [
            hvd_torch.allreduce(torch.tensor(mine[0]), name="x", compression=compression).numpy(),
            hvd.allreduce(tf.constant(mine[1]), name="x", compression=compression).numpy(),
        ]
        check(got, [one.reduce("x", g) for one, g in zip(expected, gradients, strict=True)])
        return got

    for number in range(3):
        step(number)
    saved = compression.state_dict()
    assert list(saved["parameters"]) == ["allreduce/x", "allreduce.tensorflow/x"]
    last = step(3)
    expected = [world.reference(), world.reference()]
    compression = world.topk()
    compression.load_state_dict(saved)
    for number in range(3):
        for which, one in enumerate(expected):
            one.reduce("x", world.gradients(10 * number + which, [(40, 50)])[0])
    assert all((a == b).all() for a, b in zip(step(3), last, strict=True))


def test_bound_parameters_of_two_frameworks(world):
    compression, model = world.topk(), Model([(40, 50)])
    parameter = torch.nn.Parameter(torch.zeros(40, 50))
    compression.bind([("weight", parameter)])
    compression.bind([("weight", model.variables[0])])
    expected = [world.reference(), world.reference()]
    for number in range(3):
        gradients = [world.gradients(10 * number + which, [(40, 50)])[0] for which in range(2)]
        model.want(gradients[:1], world.rank)
        parameter.grad = torch.tensor(gradients[1][world.rank])
        token, ctx = compression.compress(parameter.grad)
        of_torch = compression.decompress(hvd_torch.allreduce(token, name="token"), ctx)
        got = [model.step(compression)[0], of_torch.numpy()]
        check(got, [one.reduce(0, g) for one, g in zip(expected, gradients, strict=True)])
    assert set(compression.state_dict()["parameters"]) == {"tape/weight", "bound/weight"}


def test_a_process_set_of_the_other_framework(world):
    """Horovod adds it to the framework that was imported last, whatever module is asked."""
    theirs = hvd.add_process_set([0])
    try:
        with pytest.raises(TransportError, match=r"import horovod\.tensorflow last"):
            HorovodTransport(theirs, "theirs", "tensorflow")
    finally:
        hvd.remove_process_set(theirs)
