"""What one rank alone frees or keeps must not show in what ranks have in common."""

import gc

import pytest
import tensorflow as tf
from conftest import Model, check

SHAPES = [(40, 50), (50,), (30, 70)]


@pytest.fixture
def uncollected():
    """Leave garbage where it is until a test collects it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Cycle(Model):
    """Like a real model it is part of a reference cycle."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.itself = self


@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize("how", ["collects", "keeps"])
def test_models_that_come_and_go(world, uncollected, how, graph):
    """Rank 0 alone collects the garbage; or the others do, while it keeps its models to save the best."""
    compression, kept = world.topk(), []
    for trial in range(3):
        model, expected = Cycle(SHAPES), world.reference()
        step = (lambda m=model: m.step(compression)) if not graph else tf.function(lambda m=model: m.step(compression))
        for number in range(2):
            gradients = world.gradients(10 * trial + number, SHAPES)
            model.want(gradients, world.rank)
            got = step()
            check(got, [expected.reduce(i, g) for i, g in enumerate(gradients)])
            world.same_everywhere(got)
        if world.rank == 0 and how == "keeps":
            kept.append(model)
        del model, step
        if (world.rank == 0) == (how == "collects"):
            gc.collect()


def test_a_new_model_is_kept_under_the_names_of_the_old(world, uncollected):
    """On every rank, though none but rank 0 has collected the old one: a fresh process has these names."""
    compression = world.topk()
    for _ in range(3):
        model = Cycle(SHAPES)
        model.step(compression)
        names = list(compression.state_dict()["parameters"])
        del model
        if world.rank == 0:
            gc.collect()
    assert world.all_agree(names == ["tape/w0:0", "tape/w2:0"])
    assert set(compression.stats()["parameters"]) == {"w0:0", "w1:0", "w2:0"}


def test_two_compressors_at_once(world):
    """Their variables have equal names, and their messages are under way at the same time."""
    models, expected = [Model(SHAPES), Model(SHAPES)], [world.reference(), world.reference()]
    compressions = [world.topk(), world.topk()]

    @tf.function
    def step():
        return [m.step(c) for m, c in zip(models, compressions, strict=True)]

    for number in range(4):
        gradients = [world.gradients(10 * number + which, SHAPES) for which in range(2)]
        for model, mine in zip(models, gradients, strict=True):
            model.want(mine, world.rank)
        for got, mine, reference in zip(step(), gradients, expected, strict=True):
            check(got, [reference.reduce(i, g) for i, g in enumerate(mine)])
