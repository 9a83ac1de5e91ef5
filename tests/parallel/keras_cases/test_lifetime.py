"""What one rank alone frees or keeps must not show in what ranks have in common."""

import gc

import pytest
from keras import optimizers as opt
from keras_simulation import SGD

import hvd_compress.keras as hvd


@pytest.fixture
def uncollected():
    """Leave garbage where it is until a test collects it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "how, topk, eager",
    [("collects", True, False), ("collects", True, True), ("keeps", True, False), ("keeps", False, False)],
)
def test_models_that_come_and_go(topk_world, uncollected, how, topk, eager):
    """Rank 0 alone collects the garbage; or the others do, while it keeps its models to save the best."""
    world = type(topk_world)(topk)
    compression, kept = world.compression(), []
    for _ in range(3):
        model = world.model()
        model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=compression), "mse", run_eagerly=eager)
        world.fit(model)
        simulation = world.simulation(SGD(0.1))
        for batches in world.batches():
            simulation.step(batches)
        world.check(model, simulation.weights)
        if world.rank == 0 and how == "keeps":
            kept.append(model)
        del model
        if (world.rank == 0) == (how == "collects"):
            gc.collect()


def test_a_new_model_is_kept_under_the_names_of_the_old(world, uncollected):
    """On every rank, though none but rank 0 has collected the old one: a fresh process has these names."""
    if not world.topk:
        pytest.skip("nothing is kept")
    compression = world.compression()
    for _ in range(3):
        model = world.model()
        model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=compression), "mse")
        world.fit(model, steps=1)
        names = list(compression.state_dict()["parameters"])
        del model
        if world.rank == 0:
            gc.collect()
    assert world.all_agree(names == ["optimizer0/hidden/kernel", "optimizer0/output/kernel"]), names
