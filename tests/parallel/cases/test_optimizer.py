"""Every option of ``hvd.DistributedOptimizer``, against the simulation."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from reference import ReferenceSGD


def make_model(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 40, 3), torch.nn.Linear(48, 40), torch.nn.BatchNorm1d(7), torch.nn.Linear(40, 30, bias=False)
    )


def train(world, model, optimizer, expected, steps=6, passes=1):
    for step in range(steps):
        optimizer.zero_grad()
        total = None
        for i in range(passes):
            gradients = world.gradients(model, step * passes + i)
            world.backward(model, gradients)
            total = gradients if total is None else {n: [*map(np.add, total[n], g)] for n, g in gradients.items()}
        optimizer.step()
        expected.step(total)
    expected.check(model)
    world.same_everywhere(model.parameters())


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_op(world, op):
    model = make_model()
    expected = ReferenceSGD(model, world.reference(), 0.1, average=op == hvd.Average)
    compression = world.topk()
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=compression, op=op
    )
    train(world, model, opt, expected)
    stats = compression.stats()
    assert stats["exchanges"] == stats["steps"] == 6, "one exchange a step"


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_gradient_predivide_factor(world, factor):
    model = make_model()
    expected = ReferenceSGD(model, world.reference(), 0.1)
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        model.named_parameters(),
        compression=world.topk(),
        gradient_predivide_factor=factor,
    )
    train(world, model, opt, expected)


def test_backward_passes_per_step(world):
    model = make_model()
    expected = ReferenceSGD(model, world.reference(), 0.1)
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        model.named_parameters(),
        compression=world.topk(),
        backward_passes_per_step=2,
    )
    train(world, model, opt, expected, passes=2)


@pytest.mark.filterwarnings("ignore:Parameter `num_groups`:DeprecationWarning")
@pytest.mark.parametrize("how", ["num_groups", "groups=2", "groups=list"])
def test_groups(world, how):
    model = make_model()
    expected = ReferenceSGD(model, world.reference(), 0.1)
    parameters = list(model.parameters())
    options = {
        "num_groups": {"num_groups": 2},
        "groups=2": {"groups": 2},
        "groups=list": {"groups": [[parameters[0], parameters[1], parameters[3]], [parameters[2], parameters[6]]]},
    }[how]
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=world.topk(), **options
    )
    train(world, model, opt, expected)


def test_group_of_several_dtypes(world):
    model = make_model()
    model[3].half()
    model[1].bfloat16()
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=world.topk(), groups=1
    )
    for step in range(3):
        opt.zero_grad()
        world.backward(model, world.gradients(model, step))
        opt.step()
    world.same_everywhere(model.parameters())


def test_without_named_parameters(world):
    model = make_model()
    expected = ReferenceSGD(model, world.reference(), 0.1)
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), compression=world.topk())
    train(world, model, opt, expected)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_other_optimizers_stay_identical(world, optimizer):
    model = make_model()
    opt = hvd.DistributedOptimizer(
        optimizer(model.parameters(), 0.01), model.named_parameters(), compression=world.topk()
    )
    for step in range(5):
        opt.zero_grad()
        world.backward(model, world.gradients(model, step))
        opt.step()
    world.same_everywhere(model.parameters())


def test_process_sets(world):
    """Even and odd ranks train separately, each its own model."""
    if world.size < 4:
        pytest.skip("needs 4 ranks")
    halves = [list(range(0, world.size, 2)), list(range(1, world.size, 2))]
    sets = [hvd.add_process_set(ranks) for ranks in halves]
    mine = world.rank % 2
    model = make_model(seed=mine)
    expected = ReferenceSGD(model, world.reference(ranks=halves[mine]), 0.1)
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        model.named_parameters(),
        compression=world.topk(),
        process_set=sets[mine],
    )
    for step in range(4):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        world.backward(model, gradients)
        opt.step()
        expected.step(gradients)
    expected.check(model)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = hvd.allgather(flat[None], name="halves")
    assert torch.equal(everyone[0], everyone[2]) and torch.equal(everyone[1], everyone[3])
    assert not torch.equal(everyone[0], everyone[1])
    for process_set in sets:
        hvd.remove_process_set(process_set)


def test_process_set_and_world_with_one_compressor(world):
    """Ranks outside a process set have opened fewer exchanges, which must not matter."""
    if world.size < 3:
        pytest.skip("needs 3 ranks")
    pair = hvd.add_process_set([0, 1])
    compression = world.topk()
    g = [np.random.default_rng(r).standard_normal((40, 50)).astype("f4") for r in range(world.size)]
    if world.rank < 2:
        got = hvd.allreduce(torch.tensor(g[world.rank]), name="pair", compression=compression, process_set=pair)
        want = world.reference(ranks=[0, 1]).reduce("pair", g)
        assert np.abs(got.numpy() - want).max() < 1e-5
    got = hvd.allreduce(torch.tensor(g[world.rank]), name="all", compression=compression)
    assert np.abs(got.numpy() - world.reference().reduce("all", g)).max() < 1e-5
    hvd.remove_process_set(pair)


def test_synchronize_clip_skip_synchronize(world):
    model = make_model()
    reference = world.reference()
    expected = ReferenceSGD(model, reference, 0.1)
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=world.topk()
    )
    for step in range(4):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        world.backward(model, gradients)
        opt.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with opt.skip_synchronize():
            opt.step()
        reduced = {n: reference.reduce(n, g) for n, g in gradients.items()}
        norm = np.sqrt(sum((r**2).sum() for r in reduced.values()))
        for name, r in reduced.items():
            expected.parameters[name] -= 0.1 * r * min(1.0, 1.0 / (norm + 1e-6))
    expected.check(model)
    world.same_everywhere(model.parameters())


def test_accumulation_identity(world):
    """Over a run: what was applied plus the mean residual is the sum of the true means."""
    model = make_model()
    start = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    compression = world.topk(0.01)
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 1.0), model.named_parameters(), compression=compression
    )
    true = dict.fromkeys(start, 0.0)
    for step in range(8):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        world.backward(model, gradients)
        opt.step()
        for n, g in gradients.items():
            true[n] = true[n] + np.mean(g, axis=0, dtype=np.float64)
    for key, entry in compression.state_dict()["parameters"].items():
        name = key.split("/", 1)[1]
        owed = hvd.allreduce(entry["residual"].double(), name=f"owed.{name}").numpy()
        applied = start[name] - dict(model.named_parameters())[name].detach().double().numpy()
        assert np.abs(applied + owed.reshape(applied.shape) - true[name]).max() < 2e-5
