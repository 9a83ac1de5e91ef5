"""Methods through stock Horovod's tape, against the same simulation as under PyTorch."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from all_methods import LOOSE, METHODS, Simulation

import hvd_compress as hc

LR = 0.05
SHAPES = {"first": (40, 64), "bias": (64,)}
# Of every kind of payload, state and schedule at least one: each is traced anew, which takes its time.
CHOSEN = [
    "fp16",
    "topk-int8",
    "topk-warm-up",
    "topk-ef21",
    "randomk-block",
    "dgc-nesterov",
    "qsgd",
    "natural",
    "signum",
    "onebit",
    "vector-unbiased",
    "powersgd",
    "powersgd-fp16",
    "powersgd-two",
    "topk-int8-residual",
    "switch",
]


def train(world, variables, compression, steps, gradients_of):
    names = list(variables)

    @tf.function
    def step(targets):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variables[name] * targets[name]) for name in names])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for variable, gradient in zip(variables.values(), tape.gradient(loss, list(variables.values())), strict=True):
            variable.assign_sub(LR * gradient)

    for number in steps:
        gradients = gradients_of(number)
        step({name: tf.constant(gradients[name][world.rank]) for name in names})


def made():
    rng = np.random.default_rng(1)
    return {
        name: tf.Variable(rng.standard_normal(shape).astype(np.float32), name=name) for name, shape in SHAPES.items()
    }


def gradients_of(world):
    def gradients(number):
        rng = np.random.default_rng(1000 + number)
        return {n: [rng.standard_normal(s).astype(np.float32) for _ in range(world.size)] for n, s in SHAPES.items()}

    return gradients


@pytest.mark.parametrize("method", CHOSEN)
def test_method(world, method):
    variables, compression = made(), METHODS[method]()
    start = {name: v.numpy() for name, v in variables.items()}
    expected = {name: weights.copy() for name, weights in start.items()}
    simulation, gradients = Simulation(METHODS[method](), world.size), gradients_of(world)
    train(world, variables, compression, range(10), gradients)
    for number in range(10):
        for name, parts in gradients(number).items():
            expected[name] -= np.float32(LR) * simulation.average(f"{name}:0", parts)
    world.same_everywhere(list(variables.values()))
    for name, variable in variables.items():
        difference = np.linalg.norm(variable.numpy() - expected[name])
        moved = np.linalg.norm(expected[name] - start[name])
        assert difference <= (0.1 if method in LOOSE else 1e-3) * moved, (name, difference / moved)
    assert compression.stats()["bytes_sent"] > 0


@pytest.mark.parametrize("method", ["powersgd", "dgc"])
def test_a_state_goes_on_in_a_new_process(world, method):
    """As much of it as can be seen in one: new variables, a new compressor, and the state that was saved."""
    ends = []
    for interrupted in (False, True):
        variables, compression = made(), METHODS[method]()
        train(world, variables, compression, range(5), gradients_of(world))
        if interrupted:
            state, values = compression.state_dict(), {name: v.numpy() for name, v in variables.items()}
            variables, compression = made(), METHODS[method]()
            for name, value in values.items():
                variables[name].assign(value)
            compression.load_state_dict(state)
        train(world, variables, compression, range(5, 8), gradients_of(world))
        ends.append(np.concatenate([v.numpy().ravel() for v in variables.values()]))
    assert np.array_equal(*ends)


@pytest.mark.parametrize("method", ["powersgd", "powersgd-two"])
def test_a_nan_on_one_rank_is_forgotten_by_powersgd(world, method):
    variables, compression = made(), METHODS[method]()
    gradients = gradients_of(world)
    train(world, variables, compression, range(3), gradients)
    before, values = compression.state_dict()["parameters"]["tape/first:0"], variables["first"].numpy()

    def spoiled(number):
        changed = gradients(number)
        changed["first"][world.size - 1][3, 4] = np.nan
        return changed

    train(world, variables, compression, [3], spoiled)
    assert np.isnan(variables["first"].numpy()).all()
    variables["first"].assign(values)
    after = compression.state_dict()["parameters"]["tape/first:0"]
    assert after["steps"] == before["steps"]
    assert np.array_equal(after["common"]["factor"], before["common"]["factor"])
    assert np.isfinite(after["residual"]).all()
    train(world, variables, compression, range(3, 6), gradients)
    assert np.isfinite(variables["first"].numpy()).all()
    world.same_everywhere(list(variables.values()))


def test_what_a_graph_cannot_do_is_refused(world):
    switch = hc.Switch({0: hc.PowerSGD(1), 5: hc.PowerSGD(3)})
    for compression in (switch, hc.TopK(lambda step: 0.1)):
        with pytest.raises(hc.UnsupportedError, match="for all steps"):
            train(world, made(), compression, range(1), gradients_of(world))
