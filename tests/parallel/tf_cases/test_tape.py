"""Every option of ``hvd.DistributedGradientTape`` and ``hvd.allreduce``, against the simulation."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from conftest import Model, check

from hvd_compress import TopK, UnsupportedError

SHAPES = [(40, 50), (50,), (30, 70), (8, 8)]


def run(world, model, step, expected, steps=6, average=True, tolerance=2e-5):
    for number in range(steps):
        gradients = world.gradients(number, model.shapes)
        model.want(gradients, world.rank)
        got = step()
        check(got, [expected.reduce(i, g, average) for i, g in enumerate(gradients)], tolerance)
        world.same_everywhere([tf.cast(g, tf.float64) for g in got])


pytestmark = pytest.mark.filterwarnings("ignore:Parameter `num_groups`:DeprecationWarning")

OPTIONS = {
    "average": {},
    "sum": {"op": hvd.Sum},
    "predivide": {"gradient_predivide_factor": 2.0},
    "num_groups": {"num_groups": 2},
    "device_dense": {"device_dense": "/cpu:0"},
}


@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(world, name, graph):
    model, compression = Model(SHAPES), world.topk()

    def step():
        return model.step(compression, **OPTIONS[name])

    run(world, model, tf.function(step) if graph else step, world.reference(), average=name != "sum")


def test_groups_by_list(world):
    model, compression = Model(SHAPES), world.topk()
    groups = [[model.variables[2], model.variables[0]], [model.variables[3]]]
    run(world, model, tf.function(lambda: model.step(compression, groups=groups)), world.reference())


def test_process_sets(world):
    if world.size < 4:
        pytest.skip("needs 4 ranks: Horovod does not reduce over a single one")
    sets = [hvd.add_process_set(list(range(first, world.size, 2))) for first in (0, 1)]
    try:
        mine = sets[world.rank % 2]
        model, compression = Model(SHAPES), world.topk()
        expected = world.reference(ranks=range(world.rank % 2, world.size, 2))
        step = tf.function(lambda: model.step(compression, process_set=mine))
        for number in range(4):
            gradients = world.gradients(number, SHAPES)
            model.want(gradients, world.rank)
            check(step(), [expected.reduce(i, g) for i, g in enumerate(gradients)])
    finally:
        for one in sets:
            hvd.remove_process_set(one)


def test_a_rank_outside_of_the_process_set(world):
    if world.size < 3:
        pytest.skip("needs 3 ranks")
    some = hvd.add_process_set([0, 1])
    try:
        model, compression = Model(SHAPES), world.topk()
        expected = world.reference(ranks=[0, 1])
        gradients = world.gradients(0, SHAPES)
        model.want(gradients, world.rank)
        got = tf.function(lambda: model.step(compression, process_set=some))()
        alone = [g[world.rank] for g in gradients]
        check(got, [expected.reduce(i, g) for i, g in enumerate(gradients)] if world.rank < 2 else alone)
    finally:
        hvd.remove_process_set(some)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(tf.float64, 1e-12), (tf.float16, 2e-3), (tf.bfloat16, 1e-2)], ids=["f64", "f16", "bf16"]
)
def test_dtypes(world, dtype, tolerance):
    model, compression = Model(SHAPES, dtype), world.topk()

    def to_wire(x):
        return tf.cast(tf.cast(tf.cast(x, tf.float32), dtype), tf.float64).numpy() if dtype != tf.float64 else x

    expected = world.reference(wire=to_wire)
    step = tf.function(lambda: model.step(compression))
    for number in range(5):
        # What is a multiple of 1/4 has the same value in all dtypes.
        gradients = [[np.round(g * 4) / 4 for g in ranks] for ranks in world.gradients(number, SHAPES, np.float64)]
        model.want(gradients, world.rank)
        got = step()
        assert [g.dtype for g in got] == [dtype] * len(SHAPES)
        check(got, [expected.reduce(i, g) for i, g in enumerate(gradients)], tolerance)
    kept = {e["residual"].dtype.name for e in compression.state_dict()["parameters"].values()}
    assert kept == {"float64" if dtype == tf.float64 else "float32"}


def test_other_batch_sizes_trace_again(world):
    compression, variable = world.topk(), tf.Variable(tf.ones((40, 50)), name="w")
    expected, traces = world.reference(), []

    @tf.function(reduce_retracing=False)
    def step(batch):
        traces.append(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(batch, variable) ** 2)
        return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])[0]

    for number, rows in enumerate([3, 3, 5, 3, 2, 5]):
        batches = world.gradients(number, [(rows, 40)])[0]
        got = step(tf.constant(batches[world.rank]))
        x = [b.astype(np.float64) for b in batches]
        check([got], [expected.reduce("w", [2 * b.T @ (b @ np.ones((40, 50))) for b in x])])
    assert len(traces) == 3
    assert len(compression.state_dict()["parameters"]) == 1


def test_only_one_rank_traces_again(world):
    """As with a last batch that is shorter on one rank."""
    compression, variable = world.topk(), tf.Variable(tf.ones((40, 50)), name="w")

    @tf.function(reduce_retracing=False)
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(batch, variable))
        return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])[0]

    step(tf.ones((4, 40)))
    step(tf.ones((3 if world.rank == 0 else 4, 40)))
    got = step(tf.ones((4, 40)))
    world.same_everywhere([got])


@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
def test_two_models_share_one_compressor(world, graph):
    """Of equal shapes: TensorFlow would use one trace, and so one residual, for both."""
    compression = world.topk()
    models = [Model(SHAPES, prefix="a"), Model(SHAPES, prefix="b")]
    references = [world.reference(), world.reference()]
    steps = [lambda m=m: m.step(compression) for m in models]
    if graph:
        steps = [tf.function(step) for step in steps]
    for number in range(5):
        for which, (model, step, expected) in enumerate(zip(models, steps, references, strict=True)):
            gradients = world.gradients(10 * number + which, SHAPES)
            model.want(gradients, world.rank)
            check(step(), [expected.reduce(i, g) for i, g in enumerate(gradients)])
    assert len(compression.state_dict()["parameters"]) == 4


def test_one_tensor_is_the_gradient_of_two_variables(world):
    compression = world.topk()
    a, b = (tf.Variable(tf.ones((40, 50)), name=name) for name in "ab")
    expected = world.reference()

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((a + b) * x)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, [a, b])

    for number in range(4):
        gradients = world.gradients(number, [(40, 50)])[0]
        mean = expected.reduce("w", gradients)
        check(step(tf.constant(gradients[world.rank])), [mean, mean])
    assert [e["steps"] for e in compression.state_dict()["parameters"].values()] == [4, 4]


@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize("dense", [True, False])
def test_embedding(world, dense, graph):
    compression = world.topk()
    table = tf.Variable(tf.ones((60, 40)), name="table")
    expected = world.reference()

    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows) * tf.cast(rows + 1, tf.float32)[:, None])
        tape = hvd.DistributedGradientTape(tape, compression=compression, sparse_as_dense=dense)
        return tape.gradient(loss, [table])[0]

    step = tf.function(step) if graph else step
    for number in range(4):
        rows = [np.random.default_rng([number, r]).integers(0, 60, 9) for r in range(world.size)]
        whole = [np.zeros((60, 40)) for _ in range(world.size)]
        for ids, grad in zip(rows, whole, strict=True):
            np.add.at(grad, ids, ids[:, None] + 1.0)
        got = step(tf.constant(rows[world.rank]))
        if dense:
            check([got], [expected.reduce("table", whole)])
        else:
            check([tf.convert_to_tensor(got)], [np.mean(whole, axis=0)])
    assert len(compression.state_dict()["parameters"]) == int(dense)


@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
def test_grouped_allreduce(world, graph):
    compression, expected = world.topk(), world.reference()
    shapes = [(40, 50), (30, 60), (5,)]

    def reduce(tensors):
        return hvd.grouped_allreduce(tensors, name="group", compression=compression)

    step = tf.function(reduce) if graph else reduce
    for number in range(4):
        gradients = world.gradients(number, shapes)
        got = step([tf.constant(g[world.rank]) for g in gradients])
        check(got, [expected.reduce(i, g) for i, g in enumerate(gradients)])
    names = list(compression.state_dict()["parameters"])
    assert names == ["allreduce/group.0", "allreduce/group.1"]


@pytest.mark.parametrize("scales", [(0.5, 1.0), (1.0, 3.0), (0.25, 2.0)])
def test_scales(world, scales):
    compression, expected = world.topk(), world.reference()
    gradients = world.gradients(0, [(40, 50)])[0]
    got = hvd.allreduce(
        tf.constant(gradients[world.rank]),
        name="t",
        compression=compression,
        prescale_factor=scales[0],
        postscale_factor=scales[1],
    )
    check([got], [scales[0] * scales[1] * expected.reduce("t", gradients)])


def test_identity_of_error_feedback(world):
    """What was applied plus what is owed is what was to be applied."""
    model, compression = Model([(40, 50)]), world.topk()
    step = tf.function(lambda: model.step(compression))
    applied = true = 0.0
    for number in range(12):
        gradients = world.gradients(number, model.shapes)
        model.want(gradients, world.rank)
        applied = applied + step()[0].numpy().astype(np.float64)
        true = true + np.mean(np.asarray(gradients[0], np.float64), axis=0)
    (entry,) = compression.state_dict()["parameters"].values()
    owed = hvd.allreduce(tf.constant(entry["residual"], tf.float64), name="owed").numpy().reshape(40, 50)
    np.testing.assert_allclose(applied + owed, true, atol=1e-5)


def test_without_feedback(world):
    model, compression = Model([(40, 50)]), world.topk(feedback=None)
    run(world, model, tf.function(lambda: model.step(compression)), world.reference(feedback=False))
    assert compression.state_dict()["parameters"] == {"tape/w0:0": {"residual": None, "steps": 6}}


def test_unnamed_direct_calls_keep_nothing(world):
    compression = world.topk()
    gradients = world.gradients(0, [(40, 50)])[0]
    for _ in range(2):
        got = hvd.allreduce(tf.constant(gradients[world.rank]), compression=compression)
        check([got], [world.reference(feedback=False).reduce("t", gradients)])
    assert compression.state_dict()["parameters"] == {}


class Gan:
    """Two models of equal shapes; tapes watch the variables of both."""

    def __init__(self, world, graph):
        self.world, self.graph = world, graph
        self.models = [Model(SHAPES, prefix="g"), Model(SHAPES, prefix="d")]
        self.references = [world.reference(), world.reference()]

    def losses(self):
        one, two = (model.loss() for model in self.models)
        return one + 0 * two, two + 0 * one

    def run(self, step, steps=4):
        step = tf.function(step) if self.graph else step
        for number in range(steps):
            gradients = [self.world.gradients(10 * number + which, SHAPES) for which in range(2)]
            for model, mine in zip(self.models, gradients, strict=True):
                model.want(mine, self.world.rank)
            for got, mine, expected in zip(step(), gradients, self.references, strict=True):
                check(got, [expected.reduce(i, g) for i, g in enumerate(mine)])


@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize("how", ["two tapes", "persistent", "wrapped first", "by a function"])
def test_gan(world, how, graph):
    gan, compression = Gan(world, graph), world.topk()
    g, d = (model.variables for model in gan.models)

    def wrap(tape):
        return hvd.DistributedGradientTape(tape, compression=compression)

    def two_tapes():
        with tf.GradientTape() as one, tf.GradientTape() as two:
            losses = gan.losses()
        one = hvd.DistributedGradientTape(one, compression=compression)
        two = hvd.DistributedGradientTape(two, compression=compression)
        return one.gradient(losses[0], g), two.gradient(losses[1], d)

    def persistent():
        with tf.GradientTape(persistent=True) as tape:
            losses = gan.losses()
        one = hvd.DistributedGradientTape(tape, compression=compression)
        two = hvd.DistributedGradientTape(tape, compression=compression)
        return one.gradient(losses[0], g), two.gradient(losses[1], d)

    def wrapped_first():
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression) as one:
            loss = gan.losses()[0]
        of_g = one.gradient(loss, g)
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression) as two:
            loss = gan.losses()[1]
        return of_g, two.gradient(loss, d)

    def by_a_function():
        with tf.GradientTape() as one, tf.GradientTape() as two:
            losses = gan.losses()
        return wrap(one).gradient(losses[0], g), wrap(two).gradient(losses[1], d)

    ways = {"two tapes": two_tapes, "persistent": persistent, "wrapped first": wrapped_first}
    gan.run(ways.get(how, by_a_function))
    assert len(compression.state_dict()["parameters"]) == 4


@pytest.mark.parametrize("how", ["one tape", "a loop"])
def test_what_cannot_be_told_apart_is_refused(world, how):
    gan, compression = Gan(world, False), world.topk()

    def one_tape():
        with tf.GradientTape(persistent=True) as tape:
            losses = gan.losses()
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return [tape.gradient(loss, model.variables) for loss, model in zip(losses, gan.models, strict=True)]

    def a_loop():
        gradients = []
        with tf.GradientTape() as one, tf.GradientTape() as two:
            losses = gan.losses()
        for plain, loss, model in zip((one, two), losses, gan.models, strict=True):
            tape = hvd.DistributedGradientTape(plain, compression=compression)
            gradients.append(tape.gradient(loss, model.variables))
        return gradients

    with pytest.raises(UnsupportedError, match=r"first used for the variables 'g0:0', .* and now, .* for 'd0:0'"):
        gan.run(one_tape if how == "one tape" else a_loop)
    gan = Gan(world, True)
    gan.run(one_tape if how == "one tape" else a_loop)


def test_an_eager_step_is_traced_once_for_each_place_that_calls_it(world):
    model, expected, traces = Model(SHAPES), world.reference(), []

    class Counting(TopK):
        def encode(self, *arguments):
            traces.append(1)
            return super().encode(*arguments)

    compression = Counting(0.05, transport=world.transport)

    def check_step(number, got):
        check(got, [expected.reduce(i, g) for i, g in enumerate(world.gradients(number, SHAPES))])

    for number in range(0, 12, 2):
        model.want(world.gradients(number, SHAPES), world.rank)
        check_step(number, model.step(compression))
        model.want(world.gradients(number + 1, SHAPES), world.rank)
        check_step(number + 1, model.step(compression))
    assert len(traces) == 2 * 2  # two places, two compressed tensors
