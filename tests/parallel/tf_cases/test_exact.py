"""Output and residual, bit for bit, against float32 NumPy."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from conftest import Model

SHAPES = [(40, 50), (30, 70), (16, 3, 5, 5)]
RATIO = 0.02
STEPS = 40


class Exact:
    """All ranks, in the order of operations that the package promises, in float32."""

    def __init__(self, size, average):
        self.size, self.average, self.residuals = size, average, {}

    def reduce(self, name, gradients):
        total = np.zeros(gradients[0].size, np.float32)
        for rank, gradient in enumerate(gradients):
            a = self.residuals.get((name, rank), np.float32(0)) + gradient.reshape(-1)
            chosen = np.sort(np.argsort(-np.abs(a), kind="stable")[: int(np.ceil(RATIO * a.size))])
            total[chosen] += a[chosen]
            a[chosen] -= a[chosen]
            self.residuals[name, rank] = a
        factor = np.float32(1 if self.average else self.size) / np.float32(self.size)
        return (total * factor).reshape(gradients[0].shape)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("how", ["function", "eager", "direct", "direct in a function"])
def test_bits(world, how, op):
    expected, compression = Exact(world.size, op == hvd.Average), world.topk(RATIO)
    model = Model(SHAPES)

    def direct():
        return [
            hvd.allreduce(tf.convert_to_tensor(w), name=f"t{i}", op=op, compression=compression)
            for i, w in enumerate(model.wanted)
        ]

    def tape():
        return model.step(compression, op=op)

    step = direct if "direct" in how else tape
    if "function" in how:
        step = tf.function(step)
    for number in range(STEPS):
        gradients = world.gradients(number, SHAPES)
        model.want(gradients, world.rank)
        for i, got in enumerate(step()):
            assert got.numpy().tobytes() == expected.reduce(i, gradients[i]).tobytes(), (number, i)
    residuals = [entry["residual"] for entry in compression.state_dict()["parameters"].values()]
    assert len(residuals) == len(SHAPES)
    for i, residual in enumerate(residuals):
        assert residual.tobytes() == expected.residuals[i, world.rank].tobytes()
    stats = compression.stats()
    assert stats["steps"] == STEPS and stats["exchanges"] == STEPS * len(SHAPES)
