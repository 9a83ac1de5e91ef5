"""Optimizers that are copied, models that are trained, saved and wrapped in every order."""

import copy

import keras
import numpy as np
import pytest
from keras import optimizers as opt
from keras_simulation import HIDDEN, INPUTS, OUTPUTS, initial_weights

import hvd_compress.keras as hvd
from hvd_compress import StateError, TopK

BATCH = 8


def sequential(names=("sa", "sb"), hidden=HIDDEN):
    layers = [keras.layers.Dense(hidden, "tanh", name=names[0]), keras.layers.Dense(OUTPUTS, name=names[1])]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers])
    if hidden == HIDDEN:
        model.set_weights(initial_weights())
    return model


def trained(world, model, compression, steps=3):
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=compression), "mse")
    x, y = world.data()
    model.fit(x[: steps * BATCH], y[: steps * BATCH], BATCH, shuffle=False, verbose=0)
    return compression.state_dict()


def test_a_sequential_model_is_saved_and_resumed_topk(topk_world, tmp_path):
    """Keras drops its name from the paths of variables."""
    world, compression = topk_world, topk_world.compression()
    model = sequential()
    state = trained(world, model, compression)
    path = str(tmp_path / f"model{world.rank}.keras")
    model.save(path)
    model = keras.models.load_model(path)
    compression = world.compression()
    compression.load_state_dict(state)
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=compression), "mse")
    x, y = world.data()
    model.fit(x[3 * BATCH :], y[3 * BATCH :], BATCH, shuffle=False, verbose=0)
    world.check_trained(model)


def test_the_state_of_another_model_is_still_refused_topk(topk_world):
    world = topk_world
    state = trained(world, sequential(), world.compression())
    compression = world.compression()
    compression.load_state_dict(state)
    with pytest.raises(StateError, match="the loaded state is of another model"):
        trained(world, sequential(hidden=HIDDEN + 8), compression)


def test_a_copy_is_distributed_topk(topk_world):
    world = topk_world
    first = hvd.DistributedOptimizer(opt.SGD(0.1, momentum=0.9), compression=world.compression())
    model = world.model()
    model.compile(first, "mse")
    world.fit(model, steps=2)
    second = copy.deepcopy(first)
    assert type(second) is type(first) and second is not first
    assert all(np.array_equal(a, b) for a, b in zip(first.variables, second.variables, strict=True))
    other = world.model()
    fresh = copy.deepcopy(hvd.DistributedOptimizer(opt.SGD(0.1), compression=world.compression()))
    other.compile(fresh, "mse")
    world.fit(other)
    world.check_trained(other)


def test_a_trained_model_is_distributed_afterwards_topk(topk_world):
    """The step that it has traced would not reduce anything."""
    world = topk_world
    model = world.model()
    model.compile(opt.SGD(0.1), "mse")
    x = np.zeros((BATCH, INPUTS), np.float32)
    model.fit(x, np.zeros((BATCH, OUTPUTS), np.float32), BATCH, verbose=0)
    model.set_weights(initial_weights())
    hvd.DistributedOptimizer(model.optimizer, compression=world.compression())
    world.fit(model)
    world.check_trained(model)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_topk(topk_world, policy):
    """Sending every element is what Horovod does without compression, but for the rounding of its 16-bit sums.

    At smaller ratios rounding decides which elements are sent, and no simulation can follow.
    """
    world, weights = topk_world, []
    for compression in (TopK(1.0, min_numel=256), None):
        keras.mixed_precision.set_global_policy(policy)
        try:
            model = world.model()
        finally:
            keras.mixed_precision.set_global_policy("float32")
        model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=compression), "mse")
        world.fit(model)
        world.same_everywhere(model.get_weights())
        weights.append(model.get_weights())
    for one, other, start in zip(*weights, initial_weights(), strict=True):
        moved = np.linalg.norm(other - start)
        assert moved > 0
        assert np.linalg.norm(one - other) <= 0.01 * moved
