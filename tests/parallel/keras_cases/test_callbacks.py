"""The callbacks."""

import keras
import numpy as np
import pytest
from conftest import BATCH, World
from keras import optimizers as opt
from keras_simulation import SGD, initial_weights

import hvd_compress.keras as hvd
from hvd_compress import ConfigError, HandshakeError, UnsupportedError

callbacks = hvd.callbacks


class Recorder(keras.callbacks.Callback):
    """Keeps weights and learning rates from before each batch."""

    def __init__(self):
        super().__init__()
        self.weights, self.rates = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.weights.append(self.model.get_weights())
        self.rates.append(float(self.model.optimizer.learning_rate))


def test_broadcast_comes_before_the_first_step(world):
    model = world.model(initial_weights(seed=world.rank))
    optimizer = hvd.DistributedOptimizer(opt.SGD(0.1 + world.rank, momentum=0.9), compression=world.compression())
    optimizer.build(model.trainable_variables)
    for variable in optimizer.momentums:
        variable.assign(variable + world.rank)
    model.compile(optimizer, "mse")
    recorder = Recorder()
    world.fit(model, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0), recorder])
    world.same_everywhere(recorder.weights[0])
    first = zip(recorder.weights[0], initial_weights(seed=0), strict=True)
    assert world.all_agree(all((w == i).all() for w, i in first))
    world.same_everywhere(v.numpy() for v in optimizer.variables)
    simulation = world.simulation(SGD(0.1, 0.9))
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.weights)


def test_broadcast_of_a_model_without_input_shape():
    """Its weights come with the first batch, and are broadcast after it."""
    world = World(topk=False)
    keras.utils.set_random_seed(world.rank)
    model = keras.Sequential([keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dense(8)])
    model.compile(hvd.DistributedOptimizer(opt.Adam(0.01)), "mse")
    world.fit(model, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)])
    world.same_everywhere(v.numpy() for v in model.trainable_variables)
    world.same_everywhere(v.numpy() for v in model.optimizer.variables)


def test_broadcast_of_different_models_is_an_error():
    world = World(topk=False)
    model = world.model()
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1) if world.rank else opt.Adam()), "mse")
    with pytest.raises(HandshakeError, match="build and load models and optimizers alike on all ranks"):
        world.fit(model, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)])


def test_broadcast_variables(world):
    model = world.model(initial_weights(seed=world.rank))
    hvd.broadcast_variables(model.weights, root_rank=world.size - 1)
    expected = initial_weights(seed=world.size - 1)
    assert world.all_agree(all((w == e).all() for w, e in zip(model.get_weights(), expected, strict=True)))


def test_metrics_are_averaged():
    world = World(topk=False)
    logs = {"b": float(world.rank), "a": np.float32(2.0), "text": "kept", "c": 1e-9}
    callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    mean = (world.size - 1) / 2
    assert world.all_agree(logs == {"b": mean, "a": 2.0, "text": "kept", "c": 1e-9})


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b c")])
def test_metrics_of_other_names_are_an_error(names):
    world = World(topk=False)
    logs = dict.fromkeys(names[world.rank % 2].split(), 1.0)
    with pytest.raises(HandshakeError, match="metrics of the same names"):
        callbacks.MetricAverageCallback().on_epoch_end(0, logs)


def test_warm_up(world):
    """The learning rate rises with every batch, and momentum is corrected as it does."""
    model, recorder = world.model(), Recorder()
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.2, momentum=0.9), compression=world.compression()), "mse")
    warm_up = callbacks.LearningRateWarmupCallback(initial_lr=0.2, warmup_epochs=2, verbose=1)
    history = world.fit(model, steps=3, epochs=3, callbacks=[warm_up, recorder]).history
    epochs = [min(2.0, (i + 1) / 3) for i in range(9)]
    rates = [0.2 / world.size * (epoch * (world.size - 1) / 2 + 1) for epoch in epochs]
    assert world.all_agree(np.allclose(recorder.rates, rates, rtol=1e-6))
    assert world.all_agree(np.allclose(history["lr"], rates[2::3], rtol=1e-6))

    optimizer, before = SGD(0.2, 0.9), 0.2
    simulation = world.simulation(optimizer, schedule=lambda step: rates[step])
    for rate, batches in zip(rates, world.batches(3) * 3, strict=True):
        optimizer.momentum, before = 0.9 * rate / before, rate
        simulation.step(batches)
    world.check(model, simulation.weights, tolerance=2e-6)


def test_schedule_in_stairs():
    world = World(topk=False)
    model, recorder = world.model(), Recorder()
    model.compile(hvd.DistributedOptimizer(opt.RMSprop(0.1, momentum=0.5)), "mse")
    schedule = [
        callbacks.LearningRateScheduleCallback(0.1, multiplier=0.5, start_epoch=1, end_epoch=3),
        callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.01 * epoch, start_epoch=3),
    ]
    world.fit(model, steps=2, epochs=4, callbacks=[*schedule, recorder])
    assert world.all_agree(np.allclose(recorder.rates[::2], [0.1, 0.1, 0.05, 0.003], rtol=1e-6))


def test_learning_rates_that_cannot_be_set_are_refused():
    world = World(topk=False)
    model = world.model()
    scheduled = opt.SGD(opt.schedules.ExponentialDecay(0.1, 4, 0.5))
    several = opt.MultiOptimizer(opt.OptimizerMap(opt.SGD(0.1)))
    for optimizer in (scheduled, several):
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        with pytest.raises(UnsupportedError, match="learning rate"):
            world.fit(model, callbacks=[callbacks.LearningRateWarmupCallback(0.1)])


def test_compression_stats():
    world = World(topk=True)
    pytest.importorskip("hvd_compress.adapters.tensorflow")
    model, compression = world.model(), world.compression()
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=compression), "mse")
    stats = [callbacks.CompressionStats(compression), callbacks.MetricAverageCallback()]
    history = world.fit(model, steps=3, epochs=2, callbacks=stats).history
    simulation = world.simulation(SGD(0.1))
    norms = []
    for _ in range(2):
        for batches in world.batches(3):
            simulation.step(batches)
        residuals = simulation.reduce.reference.residuals
        squares = [sum((r**2).sum() for (_, q), r in residuals.items() if q == rank) for rank in range(world.size)]
        norms.append(np.sqrt(squares).mean())
    assert world.all_agree(np.allclose(history["residual_norm"], norms, rtol=1e-5))
    assert world.all_agree(history["bytes_sent"][0] > 0)
    # Positions and values of a tenth, and everything of the biases.
    assert world.all_agree(all(2 < ratio < 10 for ratio in history["compression_ratio"]))
    total = compression.stats()["bytes_sent"]
    assert world.all_agree(sum(history["bytes_sent"]) == pytest.approx(total, rel=0.2))


def test_best_model_checkpoint(tmp_path):
    world = World(topk=False)
    model = world.model()
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1)), "mse")
    best = callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ConfigError, match="filepath"):
        best.on_train_begin()
    best.filepath = str(tmp_path / f"best{world.rank}.keras")
    world.fit(model, callbacks=[best])
    loaded = keras.models.load_model(best.filepath)
    assert world.all_agree(loaded.optimizer.__class__ is opt.SGD)


def test_values():
    """allreduce and its like."""
    world = World(topk=False)
    mean, total = (world.size - 1) / 2, world.size * (world.size - 1) / 2
    assert world.all_agree(float(hvd.allreduce(float(world.rank))) == mean)
    assert world.all_agree(float(hvd.allreduce(float(world.rank), name="v", op=hvd.Sum)) == total)
    assert world.all_agree(list(hvd.allgather([world.rank]).numpy()) == list(range(world.size)))
    assert world.all_agree(int(hvd.broadcast(world.rank, root_rank=1)) == 1)
    part = hvd.reducescatter(np.arange(world.size, dtype=np.float32), op=hvd.Sum)
    assert world.all_agree(list(part.numpy()) == [world.rank * world.size])
    with pytest.raises(UnsupportedError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    assert BATCH > 0
