"""Names that Keras makes up: they differ between ranks and processes, and are lost in saved models."""

import keras
import pytest
from conftest import BATCH, World
from keras import optimizers as opt
from keras_simulation import HIDDEN, INPUTS, OUTPUTS, initial_weights

import hvd_compress.keras as hvd
from hvd_compress import StateError


@keras.saving.register_keras_serializable()
class Subclassed(keras.Model):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.hidden = keras.layers.Dense(HIDDEN, activation="tanh")
        self.rest = keras.Sequential([keras.layers.Dense(OUTPUTS)])

    def build(self, shape):
        self.hidden.build(shape)
        self.rest.build((None, HIDDEN))

    def call(self, x):
        return self.rest(self.hidden(x))


def layers():
    return [keras.layers.Dense(HIDDEN, activation="tanh"), keras.layers.Dense(OUTPUTS)]


def functional():
    inputs = keras.Input((INPUTS,))
    first, second = layers()
    return keras.Model(inputs, second(first(inputs)))


MODELS = {
    "sequential": lambda: keras.Sequential([keras.Input((INPUTS,)), *layers()]),
    "built later": lambda: keras.Sequential(layers()),
    "nested": lambda: keras.Sequential([keras.Input((INPUTS,)), *(keras.Sequential([x]) for x in layers())]),
    "functional": functional,
    "subclassed": Subclassed,
}


def train(world, model, half, optimizer=None):
    if optimizer is not None:
        model.compile(optimizer, "mse")
    x, y = (a[half * 3 * BATCH : (half + 1) * 3 * BATCH] for a in world.data())
    model.fit(x, y, BATCH, shuffle=False, verbose=0)


def start(kind):
    model = MODELS[kind]()
    model.build((None, INPUTS))
    model.set_weights(initial_weights())
    return model


RESUMED = [
    ("sequential", "loaded"),
    ("nested", "loaded"),
    ("functional", "loaded"),
    ("subclassed", "into a compressor at work"),
    ("built later", "into a compressor at work"),
]


@pytest.mark.parametrize(("kind", "how"), RESUMED)
def test_resumed_with_other_names(topk_world, kind, how, tmp_path):
    world = topk_world
    for _ in range(world.rank * 9):  # dense_10 comes before dense_9, as text
        keras.layers.Dense(1)
    compression, model = world.compression(), start(kind)
    train(world, model, 0, hvd.DistributedOptimizer(opt.SGD(0.1), compression=compression))
    state = compression.state_dict()
    weights = model.get_weights()

    compression = world.compression()
    if how == "loaded":
        model.save(tmp_path / "model.keras")
        model = hvd.load_model(tmp_path / "model.keras", compression=compression)
    else:
        model = start(kind)
        model.compile(hvd.DistributedOptimizer(opt.SGD(0.1), compression=compression), "mse")
    if how == "into a compressor at work":
        train(world, model, 0)
    model.set_weights(weights)
    compression.load_state_dict(state)
    train(world, model, 1)
    world.check_trained(model)


def test_another_model_is_still_refused():
    world = World(topk=True)
    compression, model = world.compression(), start("sequential")
    train(world, model, 0, hvd.DistributedOptimizer(opt.SGD(0.1), compression=compression))
    state, compression = compression.state_dict(), world.compression()
    compression.load_state_dict(state)
    model = world.model()  # its layers are called hidden and output
    with pytest.raises(StateError, match="parameters that this optimizer has not"):
        train(world, model, 0, hvd.DistributedOptimizer(opt.SGD(0.1), compression=compression))
