"""Custom training steps, several optimizers, missing and sparse gradients, parts of the world."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import BATCH, STEPS, World
from keras import optimizers as opt
from keras_simulation import SGD, initial_weights, mlp_gradients

import hvd_compress.keras as hvd
from hvd_compress import UnsupportedError


def loss_of(model, x, y):
    return keras.ops.mean(keras.ops.square(model(x, training=True) - y))


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = loss_of(self, x, y)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def test_own_train_step(world):
    model = world.model(cls=OwnStep)
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=world.compression()), "mse")
    world.fit(model)
    simulation = world.simulation(SGD(0.1))
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.weights)


@pytest.mark.parametrize("eager", [False, True])
def test_own_loop_in_two_parts(world, eager):
    """One optimizer, applied to the two layers in turn; their biases are told apart by what is traced."""
    model = world.model()
    optimizer = hvd.DistributedOptimizer(opt.SGD(0.1, momentum=0.9), compression=world.compression())
    variables = model.trainable_variables
    optimizer.build(variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        gradients = tape.gradient(loss, variables)
        optimizer.apply(gradients[:2], variables[:2])
        optimizer.apply_gradients(zip(gradients[2:], variables[2:], strict=True))

    step = step if eager else tf.function(step)
    x, y = world.data()
    for i in range(STEPS):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        step(tf.constant(x[rows]), tf.constant(y[rows]))
    simulation = world.simulation(SGD(0.1, 0.9))
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.weights)


class Two(keras.Model):
    """Two equal models that train in one step, as in a GAN; the parts have the same names."""

    def __init__(self, parts, optimizers):
        super().__init__()
        self.parts, self.own = parts, optimizers

    def train_step(self, data):
        x, y = data
        for part, optimizer, target in zip(self.parts, self.own, (y, -y), strict=True):
            with tf.GradientTape() as tape:
                loss = loss_of(part, x, target)
            optimizer.apply_gradients(
                zip(tape.gradient(loss, part.trainable_weights), part.trainable_weights, strict=True)
            )
        return {"loss": loss}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("accumulate", [None, 2])
def test_two_optimizers_share_a_compressor(world, accumulate, eager):
    compression = world.compression()
    parts = [world.model(), world.model()]
    optimizers = [
        hvd.DistributedOptimizer(opt.SGD(0.1, gradient_accumulation_steps=accumulate), compression=compression)
        for _ in parts
    ]
    model = Two(parts, optimizers)
    model.compile(run_eagerly=eager)
    world.fit(model)
    for part, sign in zip(parts, (1, -1), strict=True):
        simulation = world.simulation(SGD(0.1), accumulate=accumulate or 1)
        for batches in world.batches():
            simulation.step([(x, sign * y) for x, y in batches])
        world.check(part, simulation.weights)


def test_missing_gradients(world):
    """A head that the loss does not see has no gradients."""
    inputs = keras.Input((24,))
    hidden = keras.layers.Dense(48, activation="tanh", name="hidden")(inputs)
    outputs = [keras.layers.Dense(8, name=name)(hidden) for name in ("unused", "output")]
    model = keras.Model(inputs, outputs)
    trained = world.model()
    for name in ("hidden", "output"):
        model.get_layer(name).set_weights(trained.get_layer(name).get_weights())
    model.get_layer("unused").set_weights([np.ones((48, 8)), np.ones(8)])
    optimizer = hvd.DistributedOptimizer(opt.SGD(0.1, weight_decay=0.1), compression=world.compression())

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)[1] - y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    x, y = world.data()
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        for i in range(STEPS):
            rows = slice(i * BATCH, (i + 1) * BATCH)
            step(tf.constant(x[rows]), tf.constant(y[rows]))
    simulation = world.simulation(SGD(0.1), decay=0.1)
    for batches in world.batches():
        simulation.step(batches)
    for name in ("hidden", "output"):
        trained.get_layer(name).set_weights(model.get_layer(name).get_weights())
    world.check(trained, simulation.weights)
    assert world.all_agree((model.get_layer("unused").get_weights()[0] == 1).all())


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_embedding(world, as_dense, eager):
    """Horovod gathers sparse gradients whole; as dense tensors they are compressed."""
    rng = np.random.default_rng(3)
    table = rng.normal(size=(40, 16)).astype(np.float32)
    words = rng.integers(0, 40, (world.size, STEPS * BATCH, 5))
    targets = rng.normal(size=(world.size, STEPS * BATCH, 16)).astype(np.float32)
    inputs = keras.Input((5,), dtype="int32")
    layer = keras.layers.Embedding(40, 16, name="table")
    model = keras.Model(inputs, keras.layers.Lambda(lambda v: keras.ops.mean(v, axis=1))(layer(inputs)))
    model.set_weights([table])
    optimizer = hvd.DistributedOptimizer(opt.SGD(1.0), compression=world.compression(), sparse_as_dense=as_dense)
    model.compile(optimizer, "mse", run_eagerly=eager)
    model.fit(words[world.rank], targets[world.rank], BATCH, shuffle=False, verbose=0)

    expected = table.astype(np.float64)
    reduce = world.reduce() if as_dense else lambda name, gradients: sum(gradients) / world.size
    for i in range(STEPS):
        gradients = []
        for rank in range(world.size):
            w, y = words[rank, i * BATCH : (i + 1) * BATCH], targets[rank, i * BATCH : (i + 1) * BATCH]
            d = 2 * (expected[w].mean(1) - y) / y.size / 5
            g = np.zeros_like(expected)
            np.add.at(g, w.reshape(-1), np.repeat(d, 5, axis=0))
            gradients.append(g)
        expected = expected - reduce("table", gradients)
    world.check(model, [expected])


def test_process_set(world):
    """The ranks of a set train together; the others train by themselves."""
    ranks = [0] if world.size < 3 else [0, world.size - 1]
    subset = hvd.add_process_set(hvd.ProcessSet(ranks))
    model = world.model()
    optimizer = hvd.DistributedOptimizer(opt.SGD(0.1), compression=world.compression(), process_set=subset)
    model.compile(optimizer, "mse")
    world.fit(model)
    member = world.rank in ranks
    reference = world.reduce(ranks)
    if len(ranks) == 1 or not member:  # a set of one is not reduced at all, as in stock Horovod
        reference = lambda name, gradients: gradients[world.rank]  # noqa: E731
    simulation = world.simulation(SGD(0.1))
    simulation.reduce = reference
    for batches in world.batches():
        simulation.step(batches)
    largest = max(np.abs(w).max() for w in simulation.weights)
    pairs = zip(model.get_weights(), simulation.weights, strict=True)
    assert world.all_agree(max(np.abs(w - s).max() for w, s in pairs) <= 1e-6 * largest)
    hvd.remove_process_set(subset)


@pytest.mark.parametrize("scaled", [True, False])
def test_local_variables(world, scaled):
    model = world.model()
    optimizer = hvd.DistributedOptimizer(opt.SGD(0.1), compression=world.compression(), scale_local_gradients=scaled)
    local = model.get_layer("output").kernel
    optimizer.register_local_var(local)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)
    model.compile(optimizer, "mse")
    world.fit(model, steps=1, callbacks=[callback])
    (batches,) = world.batches(1)
    weights = world.model().get_weights()
    grads = [mlp_gradients(weights, x.astype(np.float64), y.astype(np.float64)) for x, y in batches]
    expected = weights[2] - 0.1 * grads[world.rank][2] / (world.size if scaled else 1)
    assert world.all_agree(np.abs(local.numpy() - expected).max() < 1e-6)
    world.same_everywhere([model.get_weights()[i] for i in (0, 1, 3)])


def test_all_ranks_skip_what_is_infinite_on_one(world):
    """Residuals, weights and slots stay as they are, and the scale is halved everywhere."""
    model = world.model()
    compression = world.compression()
    inner = opt.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(opt.LossScaleOptimizer(inner, initial_scale=64.0), compression=compression)
    model.compile(optimizer, "mse")
    x, y = world.data()
    poisoned = x.copy()
    if world.rank == world.size - 1:
        poisoned[2 * BATCH, 0] = np.inf
    model.fit(poisoned, y, BATCH, shuffle=False, verbose=0)
    assert world.all_agree(float(optimizer.dynamic_scale.numpy()) == 32.0)
    simulation = world.simulation(SGD(0.1, 0.9))
    for i, batches in enumerate(world.batches()):
        if i != 2:
            simulation.step(batches)
    world.check(model, simulation.weights)


def test_compile_adds_loss_scaling(world):
    """With mixed_float16 ``compile()`` puts a LossScaleOptimizer around; all ranks skip the same steps."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = world.model()
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = hvd.DistributedOptimizer(opt.SGD(0.1), compression=world.compression())
    model.compile(optimizer, "mse")
    assert isinstance(model.optimizer, opt.LossScaleOptimizer) and model.optimizer is not optimizer
    x, y = world.data()
    x = x.copy()
    if world.rank == 0:
        x[BATCH] = np.inf
    model.fit(x, y, BATCH, shuffle=False, verbose=0)
    assert world.all_agree(float(model.optimizer.dynamic_scale.numpy()) == 2.0**14)
    assert world.all_agree(int(optimizer.iterations.numpy()) == STEPS - 1)
    world.same_everywhere(model.get_weights())


def test_bfloat16_gradients(world):
    """Horovod has no bfloat16; the gradients of a pure bfloat16 model are reduced all the same."""
    inputs = keras.Input((24,))
    model = keras.Model(inputs, keras.layers.Dense(16, dtype="bfloat16", name="brain")(inputs))
    optimizer = hvd.DistributedOptimizer(opt.SGD(0.1), compression=world.compression())
    model.compile(optimizer, "mse")
    x, y = world.data()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, np.tile(y, 2), BATCH, shuffle=False, verbose=0, callbacks=[callback])
    world.same_everywhere([w.astype(np.float32) for w in model.get_weights()])


@pytest.mark.parametrize("accumulate", [None, 2])
def test_names_that_differ_between_ranks(accumulate):
    """Keras numbers layers and optimizers; a rank that has made more of them finds the others all the same."""
    world = World(topk=False)
    for _ in range(world.rank):
        keras.layers.Dense(1)
        opt.SGD(0.1)
    model = keras.Sequential([keras.Input((24,)), keras.layers.Dense(48, activation="tanh"), keras.layers.Dense(8)])
    model.set_weights(initial_weights())
    optimizer = opt.LossScaleOptimizer(opt.SGD(0.1, gradient_accumulation_steps=accumulate))
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    world.fit(model)
    simulation = world.simulation(SGD(0.1), accumulate=accumulate or 1)
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.weights)


def test_horovods_own_compression():
    world = World(topk=False)
    model = world.model()
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=hvd.Compression.fp16), "mse")
    world.fit(model)
    simulation = world.simulation(SGD(0.1))
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.weights, tolerance=1e-3)


def test_saved_and_resumed(world, tmp_path):
    """A ``.keras`` file and each rank's residuals take up training where it stopped."""
    folder = tmp_path if world.rank == 0 else None
    path = str(hvd_object(str(tmp_path / "model.keras") if folder else None))
    compression = world.compression()
    model = world.model()
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1, momentum=0.9), compression=compression), "mse")
    x, y = world.data()
    half = 3 * BATCH
    model.fit(x[:half], y[:half], BATCH, shuffle=False, verbose=0)
    state = compression.state_dict() if world.topk else None
    if world.rank == 0:
        model.save(path)
    hvd.allreduce(0.0)

    compression = world.compression()
    model = hvd.load_model(path, compression=compression)
    if world.topk:
        compression.load_state_dict(state)
    assert type(model.optimizer) is not opt.SGD and model.optimizer.__class__ is opt.SGD
    model.fit(x[half:], y[half:], BATCH, shuffle=False, verbose=0)
    simulation = world.simulation(SGD(0.1, 0.9))
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.weights)
    if world.topk:
        names = sorted(name.split("/", 1)[1] for name in state["parameters"])
        assert world.all_agree({"hidden/kernel", "output/kernel"} <= set(names)), names


def hvd_object(value):
    """Return rank 0's string."""
    content = np.frombuffer((value or "").encode().ljust(4096), np.uint8)
    return hvd.broadcast(content, 0).numpy().tobytes().decode().strip()


class Around(opt.SGD):
    """Applies gradients by itself."""

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(0.1 * gradient)


class AroundByUpdateStep(opt.SGD):
    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            self.update_step(gradient, variable, 0.1)


@pytest.mark.parametrize("cls", [Around, AroundByUpdateStep])
@pytest.mark.parametrize("eager", [False, True])
def test_gradients_that_are_not_reduced_are_an_error(cls, eager):
    world = World(topk=False)
    model = world.model()
    model.compile(hvd.DistributedOptimizer(cls(0.1)), "mse", run_eagerly=eager)
    with pytest.raises(UnsupportedError, match="not reduced"):
        world.fit(model)


def test_xla_is_refused_or_switched_off(world):
    model = world.model()
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=world.compression()), "mse", jit_compile=True)
    with pytest.raises(UnsupportedError, match=r"compile\(..., jit_compile=False\)"):
        world.fit(model)
    model = world.model()
    model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=world.compression()), "mse", jit_compile=True)
    world.fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    simulation = world.simulation(SGD(0.1))
    for batches in world.batches():
        simulation.step(batches)
    world.check(model, simulation.weights)


def test_a_step_traced_before_is_not_used():
    world = World(topk=False)
    model = world.model()
    model.compile(opt.SGD(0.1), "mse")
    world.fit(model, steps=1)
    hvd.DistributedOptimizer(model.optimizer)
    world.fit(model, steps=2, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    world.same_everywhere(model.get_weights())


def test_loss_scaling_that_cannot_agree_is_refused():
    world = World(topk=False)
    model = world.model()
    inner = opt.SGD(0.1)
    outer = opt.LossScaleOptimizer(inner)
    outer.build(model.trainable_variables)
    hvd.DistributedOptimizer(inner)
    model.compile(outer, "mse")
    with pytest.raises(UnsupportedError, match=r"expected DistributedOptimizer\(LossScaleOptimizer"):
        world.fit(model)
