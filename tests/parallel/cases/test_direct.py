"""``hvd.allreduce`` and ``hvd.grouped_allreduce`` called directly with ``compression=``."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import hvd_compress as hc


def gradients(world, step, shape=(40, 50)):
    rng = np.random.default_rng(step)
    return [rng.standard_normal(shape).astype("f4") for _ in range(world.size)]


@pytest.mark.parametrize("average", [True, False])
def test_named_calls_keep_residuals(world, average):
    compression, reference = world.topk(), world.reference()
    for step in range(4):
        for name in ("one", "two"):
            g = gradients(world, step + (name == "two") * 100)
            mine = torch.tensor(g[world.rank])
            got = hvd.allreduce(mine, name=name, compression=compression, op=hvd.Average if average else hvd.Sum)
            assert torch.equal(mine, torch.tensor(g[world.rank])), "the input was changed"
            assert np.abs(got.numpy() - reference.reduce(name, g, average)).max() < 1e-5
            world.same_everywhere([got])


def test_scale_factors_and_the_old_average_argument(world):
    g = gradients(world, 1)
    mine = torch.tensor(g[world.rank])
    total = world.reference().reduce("x", g, average=False)
    got = hvd.allreduce(mine, name="a", compression=world.topk(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert np.abs(got.numpy() - 1.5 * total).max() < 1e-4
    got = hvd.allreduce(mine, average=False, name="b", compression=world.topk())
    assert np.abs(got.numpy() - total).max() < 1e-4


def test_unnamed_calls_have_no_residual_and_say_so(world, caplog):
    compression = world.topk()
    for step, shape in enumerate([(40, 50), (40, 50), (50, 60), (40, 50)]):
        g = gradients(world, step, shape)
        got = hvd.allreduce(torch.tensor(g[world.rank]), compression=compression)
        want = world.reference(feedback=False).reduce("x", g)
        assert np.abs(got.numpy() - want).max() < 1e-5
    said = [r.message for r in caplog.records if "without name=" in r.message]
    assert len(said) == 1


def test_unnamed_calls_draw_anew(world):
    """Each call would otherwise send the same elements, or round the same way."""
    positions = hc.RandomK(0.1)
    x = torch.ones(40, 50)
    drawn = [hvd.allreduce(x, compression=positions) for _ in range(2)]
    for one in drawn:
        world.same_everywhere([one])
    assert not torch.equal(*drawn)
    noise = hc.QSGD(2)
    x = torch.linspace(0, 1, 2000).reshape(40, 50)
    assert not torch.equal(*(hvd.allreduce(x, compression=noise) for _ in range(2)))


def test_two_rounds_in_direct_calls(world):
    compression = hc.PowerSGD(2, alternating=False)
    x = torch.outer(torch.arange(40.0), torch.ones(50)) * (world.rank + 1)
    mean = torch.outer(torch.arange(40.0), torch.ones(50)) * (world.size + 1) / 2
    for name in ("x", None):
        got = hvd.allreduce(x, name=name, compression=compression)
        assert torch.allclose(got, mean, atol=1e-3)
    got = hvd.grouped_allreduce([x, 2 * x], name="g", compression=compression, op=hvd.Sum)
    assert torch.allclose(got[1], 2 * mean * world.size, atol=1e-2)


def test_grouped(world):
    compression, reference = world.topk(), world.reference()
    shapes = [(40, 50), (7,), (50, 30), ()]
    for step in range(3):
        groups = [gradients(world, 10 * step + i, shape) for i, shape in enumerate(shapes)]
        got = hvd.grouped_allreduce(
            [torch.tensor(g[world.rank]) for g in groups], name="group", compression=compression
        )
        for i, g in enumerate(groups):
            assert np.abs(got[i].numpy() - reference.reduce(f"group.{i}", g)).max() < 1e-5
        world.same_everywhere(got)
    assert compression.stats()["exchanges"] == 3, "one exchange a call"


def test_grouped_with_the_same_tensor_twice(world):
    compression = world.topk()
    g = gradients(world, 5)
    mine = torch.tensor(g[world.rank])
    got = hvd.grouped_allreduce([mine, mine], name="twice", compression=compression)
    want = world.reference().reduce("x", g)
    for result in got:
        assert np.abs(result.numpy() - want).max() < 1e-5


def test_many_layouts_in_turn(world):
    """Named calls whose shape changes are noticed on all ranks and agreed on anew."""
    compression = world.topk(feedback=None)
    for step, shape in enumerate([(40, 50), (60, 50), (60, 50), (40, 50)]):
        g = gradients(world, step, shape)
        got = hvd.allreduce(torch.tensor(g[world.rank]), name="x", compression=compression)
        want = world.reference(feedback=False).reduce("x", g)
        assert np.abs(got.numpy() - want).max() < 1e-5


def test_bound_parameters(world):
    """Other code than Horovod's may call the interface, once parameters are bound."""
    model = torch.nn.Linear(40, 50)
    compression, reference = world.topk(), world.reference()
    model.weight.grad = torch.zeros(50, 40)
    with pytest.raises(LookupError, match=r"call compression.bind\(model.named_parameters\(\)\) first"):
        compression.compress(model.weight.grad)
    compression.bind(model.named_parameters())
    for step in range(3):
        g = gradients(world, step, (50, 40))
        model.weight.grad = torch.tensor(g[world.rank])
        token, ctx = compression.compress(model.weight.grad)
        token = hvd.allreduce(token, name="token")
        got = compression.decompress(token, ctx)
        assert np.abs(got.numpy() - reference.reduce("w", g)).max() < 1e-5


def test_small_tensors_can_be_differentiated_through(world):
    x = torch.ones(5, requires_grad=True)
    (hvd.allreduce(x, name="d", compression=world.topk()) * torch.arange(5.0)).sum().backward()
    assert torch.equal(x.grad, torch.arange(5.0))
    y = torch.ones(50, 50, requires_grad=True)
    with pytest.raises(TypeError, match=r"cannot be differentiated through for 'e'; pass tensor.detach\(\)"):
        hvd.allreduce(y, name="e", compression=world.topk())


REFUSED = {
    "int": (lambda c: hvd.allreduce(torch.ones(40, 50, dtype=torch.int64), name="i", compression=c), "got int64"),
    "complex": (lambda c: hvd.allreduce(torch.ones(40, 50) * 1j, name="c", compression=c), "got complex64"),
    "max": (lambda c: hvd.allreduce(torch.ones(40, 50), name="m", op=hvd.Max, compression=c), "got Max"),
    "min": (lambda c: hvd.allreduce(torch.ones(40, 50), name="m", op=hvd.Min, compression=c), "got Min"),
    "product": (lambda c: hvd.allreduce(torch.ones(4, 5), name="m", op=hvd.Product, compression=c), "got Product"),
    "adasum": (lambda c: hvd.allreduce(torch.ones(40, 50), name="m", op=hvd.Adasum, compression=c), "got Adasum"),
    "reducescatter": (
        lambda c: hvd.reducescatter(torch.ones(40, 50), name="r", compression=c),
        "hvd.reducescatter cannot be compressed",
    ),
    "grouped_reducescatter": (
        lambda c: hvd.grouped_reducescatter([torch.ones(40, 50)], name="r", compression=c),
        "hvd.grouped_reducescatter cannot be compressed",
    ),
    "array": (lambda c: c.compress(np.ones((40, 50))), "expected a tensor of one of torch, tensorflow, got ndarray"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(world, what):
    call, message = REFUSED[what]
    with pytest.raises(TypeError, match=message):
        call(world.topk())


def test_adasum_optimizer_is_refused(world):
    if world.size not in (2, 4):
        pytest.skip("Adasum needs a power of two ranks")
    model = torch.nn.Linear(40, 50)
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=world.topk(), op=hvd.Adasum
    )
    with pytest.raises(TypeError, match="op=Adasum cannot be compressed"):
        model(torch.ones(2, 40)).sum().backward()
        opt.step()


def test_a_process_set_that_takes_the_number_of_another(world):
    """Horovod gives the number of a set that was removed to the next one."""
    if world.size < 3:
        pytest.skip("needs 3 ranks")
    compression, x = world.topk(0.05), torch.arange(2000.0).reshape(40, 50) * (world.rank + 1)
    for members in ([0, 1], [1, 2]):
        one = hvd.add_process_set(members)
        if world.rank in members:
            got = hvd.allreduce(x, name="x", compression=compression, process_set=one)
            # Were the residual of the other set used as well, this would be more.
            assert got.max().item() == 1999 * (sum(members) + 2) / 2
        hvd.remove_process_set(one)
    assert world.all_agree(True)
