"""``fit`` with other methods than top-k, against the simulation of all ranks."""

import numpy as np
import pytest
from all_methods import METHODS
from all_methods import Simulation as Ranks
from keras import optimizers as opt
from keras_simulation import SGD

import hvd_compress.keras as hvd


@pytest.mark.parametrize("method", ["powersgd", "qsgd", "topk-warm-up", "dgc", "randomk-block", "switch"])
def test_fit_topk_and_others(topk_world, method):
    world = topk_world
    model, ranks = world.model(), Ranks(METHODS[method](), world.size)
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=METHODS[method]()), "mse")
    world.fit(model)
    simulation = world.simulation(SGD(0.1))
    simulation.reduce = lambda name, gradients: ranks.average(name, [g.astype(np.float32) for g in gradients])
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.finish(), tolerance=1e-4)


def test_dgc_and_an_optimizer_with_momentum_topk(topk_world, caplog):
    model = topk_world.model()
    optimizer = hvd.DistributedOptimizer(opt.SGD(0.1, momentum=0.9), compression=METHODS["dgc"]())
    model.compile(optimizer, "mse")
    topk_world.fit(model, steps=1)
    assert "DGC accumulates momentum itself, and so does the optimizer it is used with (momentum=0.9)" in caplog.text
