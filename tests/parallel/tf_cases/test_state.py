"""Checkpoints, NaN and infinity, and what TensorFlow's elastic mode traces."""

import logging

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from conftest import Model, check

from hvd_compress import StateError

SHAPES = [(40, 50), (50,), (30, 70)]


def test_resumed_run_is_the_same_run(world):
    def new():
        model, compression = Model(SHAPES), world.topk()
        return model, compression, tf.function(lambda: model.step(compression))

    def advance(model, step, numbers):
        out = []
        for number in numbers:
            model.want(world.gradients(number, SHAPES), world.rank)
            out += [g.numpy().tobytes() for g in step()]
        return out

    model, _, step = new()
    whole = advance(model, step, range(8))
    model, compression, step = new()
    first = advance(model, step, range(4))
    saved = compression.state_dict()
    model, compression, step = new()
    compression.load_state_dict(saved)
    assert first + advance(model, step, range(4, 8)) == whole
    # Into a compressor that is at work already.
    compression.load_state_dict(saved)
    assert first + advance(model, step, range(4, 8)) == whole


def test_state_of_another_model(world):
    model, compression = Model([(40, 50)]), world.topk()
    model.step(compression)
    saved = compression.state_dict()
    other, compression = Model([(30, 70)]), world.topk()
    compression.load_state_dict(saved)
    with pytest.raises(StateError, match=r"expected 2100 elements .* got 2000"):
        other.step(compression)


@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_on_one_rank(world, value, graph, caplog):
    caplog.set_level(logging.WARNING, "hvd_compress")
    model, compression = Model([(40, 50)]), world.topk()
    step = tf.function(lambda: model.step(compression)) if graph else lambda: model.step(compression)
    expected = world.reference()
    for number in range(5):
        gradients = world.gradients(number, model.shapes)
        if number == 2:
            spoiled = [g.copy() for g in gradients[0]]
            spoiled[-1][3, 4] = value
            model.want([spoiled], world.rank)
            before = compression.state_dict()["parameters"]
            assert not np.isfinite(step()[0].numpy()).all()
            after = compression.state_dict()["parameters"]
            # The rank that had NaN kept what it owed before; on the others this gradient came on top.
            (old,), (new,) = ([e["residual"] for e in x.values()] for x in (before, after))
            added = 0 if world.rank == world.size - 1 else gradients[0][world.rank].reshape(-1)
            np.testing.assert_allclose(new, old + added, atol=1e-6)
            for rank in range(world.size - 1):
                expected.residuals[0, rank] = expected.residuals[0, rank] + gradients[0][rank].reshape(-1)
            continue
        model.want(gradients, world.rank)
        check(step(), [expected.reduce(0, gradients[0])])
    said = [r.getMessage() for r in caplog.records if "NaN or infinity" in r.getMessage()]
    assert len(said) == 1 and f"rank {world.size - 1} in 'w0:0'" in said[0]


@pytest.mark.parametrize("which", ["compressed", "dense"])
def test_nonfinite_raises_on_all_ranks(world, which):
    shape = (40, 50) if which == "compressed" else (7,)
    model, compression = Model([shape]), world.topk(on_nonfinite="raise")
    step = tf.function(lambda: model.step(compression))
    model.want([[np.full(shape, np.inf if rank == 0 else 1.0) for rank in range(world.size)]], world.rank)
    with pytest.raises(tf.errors.OpError, match=r"NonFiniteGradientError: NaN or infinity in the gradient of"):
        step()
    # Nothing hangs afterwards, nothing has stuck, and what the others had sent is still owed.
    expected = world.reference()
    if which == "compressed":
        for rank in range(1, world.size):
            expected.residuals[0, rank] = np.ones(2000)
    gradients = world.gradients(0, [shape])
    model.want(gradients, world.rank)
    check(step(), [expected.reduce(0, gradients[0])])


def test_elastic_mode(world, monkeypatch):
    """Horovod then asks in the graph whether there are several ranks; the number of ranks is not known."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    model, compression, expected = Model(SHAPES), world.topk(), world.reference()
    step = tf.function(lambda: model.step(compression))
    for number in range(4):
        gradients = world.gradients(number, SHAPES)
        model.want(gradients, world.rank)
        check(step(), [expected.reduce(i, g) for i, g in enumerate(gradients)])


def test_a_deleted_model_leaves_nothing(world):
    compression = world.topk()
    for _ in range(3):
        model = Model([(40, 50)])
        model.step(compression)
        del model
        import gc

        gc.collect()
    assert len(compression.state_dict()["parameters"]) <= 1


def test_stats(world):
    model, compression = Model(SHAPES), world.topk()
    step = tf.function(lambda: model.step(compression))
    for _ in range(3):
        step()
    stats = compression.stats()
    assert stats["steps"] == 3 and set(stats["parameters"]) == {"w0:0", "w1:0", "w2:0"}
    assert stats["dense_bytes"] == 3 * 4 * (2000 + 50 + 2100)
    assert stats["parameters"]["w1:0"]["bytes_sent"] == 3 * 4 * 50
    assert hvd.size() > 1 and 5 < stats["ratio"] < 20


def test_saved_model(world, tmp_path):
    """A residual is no part of the model: a module is exported without the function that trains it."""

    class Trained(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable(tf.ones((40, 50)))
            self.compression = world.topk()

        @tf.function(input_signature=[tf.TensorSpec((None, 40))])
        def serve(self, x):
            return x @ self.weight

        @tf.function
        def train(self, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.serve(x))
            tape = hvd.DistributedGradientTape(tape, compression=self.compression)
            self.weight.assign_sub(tape.gradient(loss, [self.weight])[0])

    model = Trained()
    model.train(tf.ones((4, 40)))
    with pytest.raises(KeyError, match="hvd_compress_residual_export_without_the_training_function"):
        tf.saved_model.save(model, str(tmp_path / "whole"), signatures=model.serve)
    export = tf.Module()
    export.weight, export.serve = model.weight, model.serve
    tf.saved_model.save(export, str(tmp_path / "export"), signatures=model.serve)
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    assert (loaded.serve(tf.ones((4, 40))).numpy() == model.serve(tf.ones((4, 40))).numpy()).all()
    # A checkpoint takes the whole.
    saved = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(model=Trained()).restore(saved).assert_consumed()
