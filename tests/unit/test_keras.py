"""``hvd_compress.keras`` without ranks: names, refusals, and what is saved."""

import inspect
import subprocess
import sys
import types

import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("horovod.tensorflow")

if int(keras.__version__.split(".")[0]) < 3:
    pytest.skip(f"Keras 3 is not installed, but {keras.__version__}", allow_module_level=True)

import tensorflow as tf  # noqa: E402
from keras import optimizers as opt  # noqa: E402

import hvd_compress.keras as hvd  # noqa: E402
from hvd_compress import ConfigError, TopK, UnsupportedError  # noqa: E402
from hvd_compress.keras.requirements import check_keras, check_optimizer  # noqa: E402

# Keras on NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

# Names of horovod.tensorflow.keras that are absent, and why.
ABSENT = {
    "elastic": "its state is written for Keras 2; elastic training with Keras 3 is not offered yet",
    "is_version_greater_equal_than": "Horovod's own helper, imported there",
}


def horovod_names():
    """Return the public names of Horovod's module and of its callbacks."""
    import horovod.tensorflow.keras as stock

    names = [name for name, value in vars(stock).items() if not isinstance(value, types.ModuleType)]
    modules = ["callbacks", "elastic"]
    return [name for name in names + modules if not name.startswith("_")], stock


def test_every_name_of_horovod_is_there():
    names, stock = horovod_names()
    missing = [name for name in names if not hasattr(hvd, name)]
    assert sorted(missing) == sorted(name for name in ABSENT if name in names)
    callbacks = [name for name, value in vars(stock.callbacks).items() if isinstance(value, type)]
    assert [name for name in callbacks if not hasattr(hvd.callbacks, name)] == []


def test_arguments_are_horovods():
    names, stock = horovod_names()
    functions = [name for name in names if inspect.isfunction(getattr(stock, name, None)) and name not in ABSENT]
    assert "DistributedOptimizer" in functions
    for name in functions:
        expected = list(inspect.signature(getattr(stock, name)).parameters)
        assert list(inspect.signature(getattr(hvd, name)).parameters) == expected, name
    for name in [n for n, v in vars(stock.callbacks).items() if isinstance(v, type)]:
        expected = list(inspect.signature(getattr(stock.callbacks, name)).parameters)
        assert list(inspect.signature(getattr(hvd.callbacks, name)).parameters)[: len(expected)] == expected, name


def test_all_lists_the_public_names():
    public = {name for name, value in vars(hvd).items() if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(hvd, name), types.ModuleType)} - {"callbacks"}
    assert sorted(hvd.__all__) == sorted(public - modules - {"check_keras"})


@pytest.mark.parametrize(
    ("version", "backend", "message"),
    [
        ("2.15.0", "tensorflow", "import horovod.tensorflow.keras as hvd"),
        ("3.4.1", "tensorflow", "expects Keras 3.5 or newer, got 3.4.1"),
        ("3.9.0", "torch", "expects Keras's TensorFlow backend, got 'torch'"),
    ],
)
def test_other_keras_is_refused(version, backend, message):
    with pytest.raises(ImportError, match=message):
        check_keras(version, backend)


@pytest.mark.parametrize("version", ["3.5.0", "3.15.1", "4.0.0.dev1"])
def test_newer_keras_is_taken(version):
    check_keras(version, "tensorflow")


def test_other_optimizers_are_refused():
    tf_keras = pytest.importorskip("tf_keras")
    for optimizer in (tf_keras.optimizers.SGD(0.1), tf_keras.optimizers.legacy.SGD(0.1)):
        with pytest.raises(UnsupportedError, match=r"of Keras 2; for it write: import horovod\.tensorflow\.keras"):
            hvd.DistributedOptimizer(optimizer)
    import tensorflow as tf

    with pytest.raises(UnsupportedError, match=r"import horovod\.tensorflow as hvd"):
        check_optimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    with pytest.raises(UnsupportedError, match=r"make one with: keras.optimizers.get\('sgd'\)"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(UnsupportedError, match=r"expected an optimizer of Keras 3 .*, got builtins.int"):
        hvd.DistributedOptimizer(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "Max"}, "op must be Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor is for op=Average"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be a whole number, 1 or more, got 0"),
        ({"backward_passes_per_step": True}, "backward_passes_per_step must be a whole number"),
        ({"groups": 0}, "groups must be a positive number"),
        ({"groups": "all"}, "groups must be a positive number"),
        ({"groups": [["kernel"]]}, "expected variables of Keras or TensorFlow, got str"),
        ({"compression": TopK}, r"compression must be an instance, such as TopK\(...\)"),
        ({"compression": "topk"}, "compression must have the methods compress and decompress"),
    ],
)
def test_wrong_arguments(arguments, message):
    optimizer = opt.SGD(0.1)
    with pytest.raises(ConfigError, match=message):
        hvd.DistributedOptimizer(optimizer, **arguments)
    assert type(optimizer) is opt.SGD


def test_num_groups_is_deprecated():
    with pytest.warns(DeprecationWarning, match="num_groups is called groups"):
        optimizer = hvd.DistributedOptimizer(opt.SGD(0.1), num_groups=2)
    assert optimizer._hvd_update.reduction.settings.groups == 2


def test_twice_is_refused():
    for optimizer in (
        hvd.DistributedOptimizer(opt.SGD(0.1)),
        opt.LossScaleOptimizer(hvd.DistributedOptimizer(opt.SGD(0.1))),
        opt.MultiOptimizer(opt.OptimizerMap(hvd.DistributedOptimizer(opt.SGD(0.1)))),
    ):
        with pytest.raises(ConfigError, match="not distributed yet"):
            hvd.DistributedOptimizer(optimizer)


def test_accumulation_that_does_not_fit():
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=3; expected the same number"):
        hvd.DistributedOptimizer(opt.SGD(0.1, gradient_accumulation_steps=3), backward_passes_per_step=2)
    built = opt.SGD(0.1)
    built.build([keras.Variable([1.0])])
    with pytest.raises(ConfigError, match="expected an optimizer that is not built yet"):
        hvd.DistributedOptimizer(built, backward_passes_per_step=2)
    assert type(built) is opt.SGD


def test_adafactor_is_warned_of():
    with pytest.warns(UserWarning, match="Adafactor divides by zero"):
        hvd.DistributedOptimizer(opt.Adafactor(0.1), compression=TopK(0.1))
    hvd.DistributedOptimizer(opt.Adafactor(0.1))


def test_float8_is_refused():
    variable = keras.Variable([1.0])
    variable.overwrite_with_gradient = True
    with pytest.raises(UnsupportedError, match="float8"):
        hvd.DistributedOptimizer(opt.SGD(0.1)).apply([keras.ops.ones(1)], [variable])


class Own(opt.SGD):
    pass


@pytest.mark.parametrize("cls", [opt.SGD, opt.Adam, opt.Lion, Own])
def test_config_is_that_of_the_plain_optimizer(cls):
    plain = cls(0.1, clipnorm=1.0, name="mine")
    config = plain.get_config()
    optimizer = hvd.DistributedOptimizer(plain)
    assert optimizer is plain and isinstance(optimizer, cls)
    assert optimizer.__class__ is cls and type(optimizer).__name__ == cls.__name__
    assert optimizer.get_config() == config
    assert type(cls.from_config(optimizer.get_config())) is cls
    described = keras.saving.serialize_keras_object(optimizer)
    assert described == keras.saving.serialize_keras_object(cls(0.1, clipnorm=1.0, name="mine"))
    assert opt.get(optimizer) is optimizer


def test_a_new_optimizer_of_its_class_is_plain():
    optimizer = hvd.DistributedOptimizer(opt.SGD(0.25))
    assert isinstance(optimizer, type(optimizer)) and issubclass(type(optimizer), opt.SGD)
    config = optimizer.get_config()
    for make in (
        lambda: type(optimizer).from_config(config),
        lambda: optimizer.from_config(config),
        lambda: type(optimizer)(0.25),
    ):
        with pytest.warns(UserWarning, match="a new SGD is not distributed"):
            made = make()
        assert type(made) is opt.SGD and float(made.learning_rate) == 0.25
    assert type(opt.deserialize(opt.serialize(optimizer))) is opt.SGD


def test_updates_that_were_not_reduced_are_an_error_at_the_end_of_fit():
    """A step that the user has traced cannot be found, and dropped, but what it did can be seen."""
    optimizer = opt.SGD(0.1)
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    step = tf.function(lambda: optimizer.apply([tf.ones(1)]))
    step()
    hvd.DistributedOptimizer(optimizer)
    optimizer.finalize_variable_values([variable])
    step()
    with pytest.raises(UnsupportedError, match="has made 1 updates with gradients that were not reduced"):
        optimizer.finalize_variable_values([variable])


LOAD = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("horovod", "hvd_compress", "mpi4py"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import keras
model = keras.models.load_model(sys.argv[1])
x = keras.ops.ones((8, 3))
model.fit(x, x[:, :2], verbose=0)
print(type(model.optimizer).__name__, int(model.optimizer.iterations))
"""


@pytest.mark.parametrize("wrapped", ["SGD", "LossScaleOptimizer", "MultiOptimizer"])
def test_a_saved_model_loads_without_horovod(wrapped, tmp_path):
    hvd.init()
    inner = opt.Adam(0.01)
    optimizers = {
        "SGD": lambda: opt.SGD(0.1, momentum=0.9),
        "LossScaleOptimizer": lambda: opt.LossScaleOptimizer(inner),
        "MultiOptimizer": lambda: opt.MultiOptimizer(opt.OptimizerMap(inner)),
    }
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    model.compile(hvd.DistributedOptimizer(optimizers[wrapped]()), "mse")
    x = keras.ops.ones((8, 3))
    model.fit(x, x[:, :2], verbose=0)  # with one rank
    path = tmp_path / "model.keras"
    model.save(path)
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [wrapped, "2"]

    loaded = hvd.load_model(path, custom_optimizers=[Own])
    assert loaded.optimizer.__class__ is type(optimizers[wrapped]())
    with pytest.raises(ConfigError, match="not distributed yet"):
        hvd.DistributedOptimizer(loaded.optimizer)


def test_legacy_optimizers_are_refused():
    with pytest.raises(UnsupportedError, match="legacy_opts=False"):
        hvd.load_model("model.keras", legacy_opts=True)


def test_stats_want_a_compressor_of_this_package():
    with pytest.raises(ConfigError, match="expected a compressor such as"):
        hvd.callbacks.CompressionStats(hvd.Compression.fp16)
