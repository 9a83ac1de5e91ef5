"""``fit`` in every configuration, against the simulation of all ranks."""

import keras
import pytest
from conftest import World
from keras import optimizers as opt
from keras_simulation import SGD, Adam, clip_global_norm, clip_norm, clip_value, mlp_gradients

import hvd_compress.keras as hvd


class OwnSGD(opt.Optimizer):
    """A user's optimizer: SGD, with its own name for things."""

    def __init__(self, learning_rate=0.1, name="own", **kwargs):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * keras.ops.cast(learning_rate, gradient.dtype))


def sgd(**kwargs):
    return lambda: opt.SGD(0.1, **kwargs)


def scaled(**kwargs):
    return lambda: opt.LossScaleOptimizer(opt.SGD(0.1, **kwargs), initial_scale=64.0)


# For each: the optimizer; what DistributedOptimizer and compile() are given; the simulation's
# optimizer and options.
CASES = {
    "sgd": (sgd(), {}, {}, lambda: SGD(0.1), {}),
    "momentum": (sgd(momentum=0.9), {}, {}, lambda: SGD(0.1, 0.9), {}),
    "nesterov": (sgd(momentum=0.9, nesterov=True), {}, {}, lambda: SGD(0.1, 0.9, True), {}),
    "adam": (lambda: opt.Adam(0.01, epsilon=1e-3), {}, {}, lambda: Adam(0.01, 1e-3), {}),
    "own_subclass": (lambda: OwnSGD(0.1), {}, {}, lambda: SGD(0.1), {}),
    "run_eagerly": (sgd(momentum=0.9), {}, {"run_eagerly": True}, lambda: SGD(0.1, 0.9), {}),
    "steps_per_execution": (sgd(), {}, {"steps_per_execution": 4}, lambda: SGD(0.1), {}),
    "clipnorm": (sgd(clipnorm=0.1), {}, {}, lambda: SGD(0.1), {"clip": clip_norm(0.1)}),
    "global_clipnorm": (sgd(global_clipnorm=0.2), {}, {}, lambda: SGD(0.1), {"clip": clip_global_norm(0.2)}),
    "clipvalue": (sgd(clipvalue=0.01), {}, {}, lambda: SGD(0.1), {"clip": clip_value(0.01)}),
    "weight_decay": (sgd(momentum=0.9, weight_decay=0.1), {}, {}, lambda: SGD(0.1, 0.9), {"decay": 0.1}),
    "adamw": (
        lambda: opt.AdamW(0.01, weight_decay=0.1, epsilon=1e-3),
        {},
        {},
        lambda: Adam(0.01, 1e-3),
        {"decay": 0.1},
    ),
    "ema": (
        sgd(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
        {},
        {},
        lambda: SGD(0.1),
        {"ema": 0.8, "ema_every": 3},
    ),
    "accumulation": (sgd(gradient_accumulation_steps=3), {}, {}, lambda: SGD(0.1), {"accumulate": 3}),
    "accumulation_eager": (
        sgd(gradient_accumulation_steps=3),
        {},
        {"run_eagerly": True},
        lambda: SGD(0.1),
        {"accumulate": 3},
    ),
    "accumulation_clipnorm": (
        sgd(gradient_accumulation_steps=2, clipnorm=0.1),
        {},
        {},
        lambda: SGD(0.1),
        {"accumulate": 2, "clip": clip_norm(0.1)},
    ),
    "backward_passes": (
        sgd(),
        {"backward_passes_per_step": 2},
        {},
        lambda: SGD(0.1),
        {"accumulate": 2, "sums": True},
    ),
    "backward_passes_averaged": (
        sgd(momentum=0.9),
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        {},
        lambda: SGD(0.1, 0.9),
        {"accumulate": 2},
    ),
    "sum": (sgd(), {"op": hvd.Sum}, {}, lambda: SGD(0.1), {"average": False}),
    "predivide_groups": (sgd(), {"gradient_predivide_factor": 2.0, "groups": 2}, {}, lambda: SGD(0.1), {}),
    "more_groups_than_gradients": (sgd(), {"groups": 9}, {}, lambda: SGD(0.1), {}),
    "loss_scale_factor": (sgd(loss_scale_factor=8.0), {}, {}, lambda: SGD(0.1), {}),
    "schedule": (
        lambda: opt.SGD(opt.schedules.ExponentialDecay(0.1, 4, 0.5), momentum=0.9),
        {},
        {},
        lambda: SGD(0.1, 0.9),
        {"schedule": lambda step: 0.1 * 0.5 ** (step / 4)},
    ),
    "loss_scaling": (scaled(momentum=0.9), {}, {}, lambda: SGD(0.1, 0.9), {}),
    "loss_scaling_eager": (scaled(), {}, {"run_eagerly": True}, lambda: SGD(0.1), {}),
    "loss_scaling_accumulation": (
        scaled(gradient_accumulation_steps=2),
        {},
        {},
        lambda: SGD(0.1),
        {"accumulate": 2},
    ),
}


# The others are as users have them: the first step makes the optimizer's variables.
BUILT = {"adamw", "nesterov", "clipnorm", "clipvalue", "schedule", "ema", "weight_decay", "loss_scaling_accumulation"}


@pytest.mark.parametrize("case", CASES)
def test_fit(world, case):
    make, arguments, compiled, simulated, options = CASES[case]
    model = world.model()
    optimizer = hvd.DistributedOptimizer(make(), compression=world.compression(), **arguments)
    model.compile(optimizer, "mse", **compiled)
    world.fit(model, build=case in BUILT)
    simulation = world.simulation(simulated(), **options)
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.finish())


def test_loss_scaling_around_a_distributed_optimizer(world):
    model = world.model()
    inner = hvd.DistributedOptimizer(opt.SGD(0.1), compression=world.compression())
    model.compile(opt.LossScaleOptimizer(inner, initial_scale=64.0), "mse")
    world.fit(model)
    simulation = world.simulation(SGD(0.1))
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.weights)


@pytest.mark.parametrize("callable_map", [False, True])
def test_multi_optimizer(world, callable_map):
    adam, plain = opt.Adam(0.01, epsilon=1e-3), opt.SGD(0.1)
    by_path = lambda variable: adam if "hidden" in variable.path else plain  # noqa: E731
    mapping = by_path if callable_map else opt.OptimizerMap(plain, {"hidden/.*": adam})
    model = world.model()
    model.compile(hvd.DistributedOptimizer(opt.MultiOptimizer(mapping), compression=world.compression()), "mse")
    world.fit(model)
    first, second = Adam(0.01, 1e-3), SGD(0.1)
    simulation = world.simulation([first, first, second, second])
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.weights)


def test_frozen_layer(world):
    model = world.model()
    model.get_layer("hidden").trainable = False
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=world.compression()), "mse")
    world.fit(model)
    simulation = world.simulation(SGD(0.1), frozen=(0, 1))
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.weights)


def test_groups_of_variables(world):
    model = world.model()
    w1, b1, w2, _ = model.trainable_variables
    groups = [[w1, w2], [b1]]  # two of them are called "kernel", and two "bias"
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=world.compression(), groups=groups), "mse")
    world.fit(model)
    simulation = world.simulation(SGD(0.1))
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.weights)


def test_fit_goes_on(world):
    """Several epochs and a second ``fit`` keep residuals and slots."""
    model = world.model()
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1, momentum=0.9), compression=world.compression()), "mse")
    world.fit(model, steps=3, epochs=2)
    world.fit(model, steps=3)
    simulation = world.simulation(SGD(0.1, 0.9))
    for batches in world.batches(3) * 3:
        simulation.step(batches)
    world.check(model, simulation.weights)


BUILT_IN = ["Adadelta", "Adagrad", "Adamax", "Ftrl", "Lion", "Muon", "Nadam", "RMSprop", "ScheduleFreeAdamW", "Lamb"]


@pytest.mark.parametrize("name", [name for name in BUILT_IN if hasattr(opt, name)])
def test_every_other_optimizer(name):
    """They match plain Keras that is given the averaged gradients, where nothing is dropped."""
    world = World(topk=True)
    settings = {"exclude_layers": ["output"]} if name == "Muon" else {}
    make = lambda: getattr(opt, name)(0.01, **settings)  # noqa: E731
    model = world.model()
    model.compile(hvd.DistributedOptimizer(make(), compression=world.compression(ratio=1.0)), "mse")
    # It builds the optimizer; built while Keras traces, ScheduleFreeAdamW would start anew in each step.
    world.fit(model, steps=3, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    plain, simulation = world.model(), world.simulation(SGD(0.1))
    simulation.reduce = lambda name, gradients: sum(gradients) / world.size
    optimizer = make()
    for batches in world.batches(3):
        simulation.weights = [w.astype("float64") for w in plain.get_weights()]
        average = averaged(simulation, batches)
        optimizer.apply([keras.ops.convert_to_tensor(g, "float32") for g in average], plain.trainable_variables)
    world.check(model, [w.astype("float64") for w in plain.get_weights()], tolerance=2e-5)


def averaged(simulation, batches):
    grads = [mlp_gradients(simulation.weights, x.astype("float64"), y.astype("float64")) for x, y in batches]
    return [sum(rank[i] for rank in grads) / len(grads) for i in range(4)]
