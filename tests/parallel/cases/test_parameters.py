"""Parameters and gradients of every kind, and what can happen to them during training."""

import copy
import gc
import random
import weakref

import horovod.torch as hvd
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from reference import ReferenceSGD


def linear(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 30))


def wrap(world, model, lr=0.1, compression=None, **options):
    compression = compression or world.topk()
    sgd = torch.optim.SGD(model.parameters(), lr)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compression, **options)


class Bag(torch.nn.Module):
    """Nothing but parameters of the given shapes."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape).to(dtype)))


WIRE = {
    torch.float64: lambda x: x,
    torch.float32: lambda x: x,
    torch.float16: lambda x: torch.tensor(x, dtype=torch.float32).half().double().numpy(),
    torch.bfloat16: lambda x: torch.tensor(x, dtype=torch.float32).bfloat16().double().numpy(),
}


@pytest.mark.parametrize("dtype", WIRE)
def test_dtypes(world, dtype):
    """Compressed and dense tensors of every dtype; the residual keeps the rounding error."""
    model = Bag({"large": (40, 50), "bias": (50,), "small": (4, 5)}, dtype)
    reference = world.reference(wire=WIRE[dtype])
    compression = world.topk()
    opt = wrap(world, model, 0.0, compression)
    epsilon = torch.finfo(dtype).eps
    for step in range(4):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        rounded = {n: [torch.tensor(x).to(dtype).double().numpy() for x in g] for n, g in gradients.items()}
        world.backward(model, gradients)
        opt.synchronize()
        for name, p in model.named_parameters():
            assert p.grad.dtype == dtype and p.grad.shape == p.shape
            want = reference.reduce(name, rounded[name])
            error = np.abs(p.grad.double().numpy() - want).max()
            # Dense tensors: Horovod adds up in the gradient's own dtype.
            assert error <= 4 * epsilon * np.abs(want).max() * world.size, (name, error)
        with opt.skip_synchronize():
            opt.step()
    state = compression.state_dict()["parameters"]["optimizer0/large"]
    assert state["residual"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert np.abs(state["residual"].double().numpy() - reference.residuals["large", world.rank]).max() < 1e-5
    world.same_everywhere([p.grad for p in model.parameters()])


def test_odd_shapes(world):
    """Empty, 0-d, one-element and just-large-enough tensors."""
    shapes = {"scalar": (), "empty": (0, 5), "one": (1, 1), "edge": (32, 32), "under": (31, 33), "line": (5000,)}
    model = Bag(shapes)
    expected = ReferenceSGD(model, world.reference(), 0.1)
    opt = wrap(world, model)
    for step in range(3):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        world.backward(model, gradients)
        opt.step()
        expected.step(gradients)
    expected.check(model)
    world.same_everywhere(model.parameters())


def test_non_contiguous_gradients(world):
    """Transposed, strided and channels_last gradients: large ones compressed, small ones dense."""
    model = Bag({"t": (40, 50), "small_t": (6, 5), "c": (20, 8, 3, 5), "small_c": (2, 3, 4, 5), "s": (40, 50)})
    model.c.data = model.c.data.to(memory_format=torch.channels_last)
    expected = ReferenceSGD(model, world.reference(), 0.1)
    opt = wrap(world, model)
    for step in range(3):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        mine = {n: torch.tensor(g[world.rank]) for n, g in gradients.items()}
        layouts = {
            "t": mine["t"].t().contiguous().t(),
            "small_t": mine["small_t"].t().contiguous().t(),
            "c": mine["c"].to(memory_format=torch.channels_last),
            "small_c": mine["small_c"].to(memory_format=torch.channels_last),
            "s": torch.empty(40, 100)[:, ::2].copy_(mine["s"]),
        }
        # Set the gradients as they are, then let Horovod submit them itself.
        for name, p in model.named_parameters():
            assert not layouts[name].is_contiguous()
            p.grad = layouts[name]
        opt.step()
        expected.step(gradients)
    expected.check(model)
    world.same_everywhere(model.parameters())


def test_hooks_in_another_order_on_each_rank(world):
    shapes = {f"p{i}": (33 + i, 40) for i in range(12)}
    model = Bag(shapes)
    expected = ReferenceSGD(model, world.reference(), 0.1)
    compression = world.topk()
    opt = wrap(world, model, compression=compression)
    for step in range(4):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        order = list(shapes)
        random.Random(step * 10 + world.rank).shuffle(order)
        for name in order:
            world.backward(model, gradients, [name])
        opt.step()
        expected.step(gradients)
    expected.check(model)
    world.same_everywhere(model.parameters())


def test_unused_parameters(world):
    """A parameter without gradient on some ranks, or on all, still pays out what it owes."""
    model = Bag({"a": (40, 50), "b": (40, 50), "c": (40, 50)})
    expected = ReferenceSGD(model, world.reference(), 0.1)
    opt = wrap(world, model)
    for step in range(6):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        used = ["a"]
        if step < 3:
            used.append("c")
        if world.rank == 0:
            used.append("b")
        zero = np.zeros((40, 50), np.float32)
        gradients["b"] = [gradients["b"][0], *[zero] * (world.size - 1)]
        if step >= 3:
            gradients["c"] = [zero] * world.size
        world.backward(model, gradients, used)
        opt.step()
        expected.step(gradients)
    expected.check(model)
    world.same_everywhere(model.parameters())


def test_frozen_later(world):
    """A layer frozen after some steps does not move, keeps its residual, and can be thawed."""
    model = Bag({"a": (40, 50), "b": (40, 50)})
    reference = world.reference()
    expected = ReferenceSGD(model, reference, 0.1)
    opt = wrap(world, model)
    for step in range(9):
        frozen = 3 <= step < 6
        model.b.requires_grad_(not frozen)
        before = model.b.detach().clone()
        opt.zero_grad()
        gradients = world.gradients(model, step)
        world.backward(model, gradients, ["a"] if frozen else ["a", "b"])
        opt.step()
        if frozen:
            assert torch.equal(model.b.detach(), before)
            gradients.pop("b")
        expected.step(gradients)
    expected.check(model)
    world.same_everywhere(model.parameters())


def test_all_compressed_layers_frozen(world):
    """Nothing is left to exchange; the exchange pauses, and goes on where it was when layers thaw."""
    model = Bag({"a": (40, 50), "bias": (50,)})
    expected = ReferenceSGD(model, world.reference(), 0.1)
    compression = world.topk()
    opt = wrap(world, model, compression=compression)
    exchanges = []
    for step in range(9):
        frozen = 3 <= step < 6
        model.a.requires_grad_(not frozen)
        opt.zero_grad()
        gradients = world.gradients(model, step)
        world.backward(model, gradients, ["bias"] if frozen else None)
        opt.step()
        if frozen:
            gradients.pop("a")
        expected.step(gradients)
        exchanges.append(compression.stats()["exchanges"])
    # The change is agreed on in the step in which it happens; the other frozen steps send nothing.
    assert exchanges[3] == exchanges[4] == exchanges[5] and exchanges[8] > exchanges[5]
    expected.check(model)
    world.same_everywhere(model.parameters())


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_embedding(world, as_dense):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(100, 20, sparse=True), torch.nn.Linear(20, 60))
    start = model[0].weight.detach().double().numpy().copy()
    opt = wrap(world, model, sparse_as_dense=as_dense)
    reference = world.reference()
    rng = np.random.default_rng(0)
    want = start.copy()
    for _ in range(3):
        opt.zero_grad()
        tokens = rng.integers(0, 100, (world.size, 8))
        weights = rng.standard_normal((world.size, 8, 20)).astype("f4")
        out = model[0](torch.tensor(tokens[world.rank]))
        ((out * torch.tensor(weights[world.rank])).sum() + 0 * model[1](out).sum()).backward()
        opt.step()
        dense = [np.zeros((100, 20)) for _ in range(world.size)]
        for r in range(world.size):
            np.add.at(dense[r], tokens[r], weights[r])
        want -= 0.1 * (reference.reduce("e", dense) if as_dense else np.mean(dense, axis=0))
    assert np.abs(model[0].weight.detach().numpy() - want).max() < 1e-5
    world.same_everywhere(model.parameters())


@pytest.mark.parametrize("shared", [True, False])
def test_two_optimizers(world, shared):
    """A GAN loop: both losses give gradients to the discriminator; states are kept apart."""
    generator, critic = linear(1), linear(2)
    compression = world.topk()
    opts, expected = [], []
    for model in (generator, critic):
        opts.append(wrap(world, model, compression=compression if shared else world.topk()))
        expected.append(ReferenceSGD(model, world.reference(), 0.1))
    for step in range(4):
        opts[1].zero_grad()
        gradients = world.gradients(critic, 2 * step)
        world.backward(critic, gradients)
        opts[1].step()
        expected[1].step(gradients)
        opts[0].zero_grad()
        opts[1].zero_grad()
        ours = world.gradients(generator, 2 * step + 1)
        world.backward(generator, ours)
        opts[0].step()
        expected[0].step(ours)
    for model, reference in zip((generator, critic), expected, strict=True):
        reference.check(model)
        world.same_everywhere(model.parameters())


def test_two_optimizers_of_the_same_parameters(world):
    """Two losses, two optimizers, one tensor: two residuals."""
    model = Bag({"w": (40, 50)})
    compression = world.topk()
    first = hvd.DistributedOptimizer(torch.optim.SGD([model.w], 0.1), [("first", model.w)], compression=compression)
    second = hvd.DistributedOptimizer(torch.optim.SGD([model.w], 0.1), [("second", model.w)], compression=compression)
    reference = world.reference()
    want = model.w.detach().double().numpy().copy()
    for step in range(3):
        first.zero_grad()
        gradients = world.gradients(model, step)
        world.backward(model, gradients)  # the hooks of both fire
        first.synchronize()
        once = reference.reduce("first", gradients["w"])
        with first.skip_synchronize():
            first.step()
        want -= 0.1 * once
        # Horovod's second optimizer reduces what the first has left in p.grad.
        second.synchronize()
        second.zero_grad()
    states = compression.state_dict()["parameters"]
    assert set(states) == {"optimizer0/first", "optimizer1/second"}
    assert np.abs(model.w.detach().numpy() - want).max() < 1e-4
    world.same_everywhere(model.parameters())


def test_parameter_of_another_losss(world):
    """The generator's loss flows through the critic, whose hooks fire though it does not step."""
    generator, critic = linear(1), linear(2)
    compression = world.topk()
    opt_g = wrap(world, generator, compression=compression, backward_passes_per_step=1)
    opt_c = wrap(world, critic, compression=compression, backward_passes_per_step=2)
    expected_g = ReferenceSGD(generator, world.reference(), 0.1)
    expected_c = ReferenceSGD(critic, world.reference(), 0.1)
    for step in range(3):
        opt_g.zero_grad()
        opt_c.zero_grad()
        mine, first, second = (world.gradients(m, 3 * step + i) for i, m in enumerate((generator, critic, critic)))
        world.backward(generator, mine)
        world.backward(critic, first)
        opt_g.step()
        expected_g.step(mine)
        world.backward(critic, second)
        opt_c.step()
        expected_c.step({n: [a + b for a, b in zip(first[n], second[n], strict=True)] for n in first})
    expected_g.check(generator)
    expected_c.check(critic)
    world.same_everywhere([*generator.parameters(), *critic.parameters()])


def test_moved_to_another_dtype(world):
    """``model.double()`` in the middle of training keeps residuals."""
    model = linear()
    reference = world.reference()
    expected = ReferenceSGD(model, reference, 0.1)
    opt = wrap(world, model)
    for step in range(6):
        if step == 3:
            opt.zero_grad()
            model.double()
        opt.zero_grad()
        gradients = world.gradients(model, step)
        world.backward(model, gradients)
        opt.step()
        expected.step(gradients)
    assert model[0].weight.dtype == torch.float64
    expected.check(model)
    world.same_everywhere(model.parameters())


def test_wrapped_again(world):
    """A new optimizer over the same parameters takes over what the old one owed."""
    model = linear()
    expected = ReferenceSGD(model, world.reference(), 0.1)
    compression = world.topk()
    for start in (0, 3, 6):
        opt = wrap(world, model, compression=compression)
        for step in range(start, start + 3):
            opt.zero_grad()
            gradients = world.gradients(model, step)
            world.backward(model, gradients)
            opt.step()
            expected.step(gradients)
        opt.zero_grad()
        del opt
        gc.collect()
    expected.check(model)
    world.same_everywhere(model.parameters())
    assert set(compression.state_dict()["parameters"]) == {"optimizer0/0.weight", "optimizer0/1.weight"}


def test_nothing_is_kept_alive(world):
    """Parameters, optimizers and residuals go when the model does."""
    compression = world.topk()
    model = linear()
    opt = wrap(world, model, compression=compression)
    world.backward(model, world.gradients(model, 0))
    opt.step()
    watched = [weakref.ref(model[0].weight), weakref.ref(opt)]
    residuals = [weakref.ref(s.residual) for s in compression.runtime.states().values()]
    assert len(residuals) == 2
    del model, opt
    gc.collect()
    assert [r() for r in watched + residuals] == [None] * 4
    assert compression.state_dict()["parameters"] == {}


def test_checkpoint_and_deep_copy(world):
    """``torch.utils.checkpoint`` runs backward passes inside the backward pass."""
    model = linear()
    reference = copy.deepcopy(model)
    opt = wrap(world, model)
    plain = wrap(world, reference)
    for step in range(3):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step * 10 + world.rank))
        for m, o, reentrant in ((model, opt, True), (reference, plain, None)):
            o.zero_grad()
            x.requires_grad_()
            h = m[0](x) if reentrant is None else torch.utils.checkpoint.checkpoint(m[0], x, use_reentrant=True)
            m[1](torch.relu(h)).square().mean().backward()
            o.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    world.same_everywhere(model.parameters())


def test_closure_is_refused(world):
    """Stock Horovod never reduces a closure's gradients; that must not pass in silence."""
    model = linear()
    opt = wrap(world, model)

    def closure():
        opt.zero_grad()
        world.backward(model, world.gradients(model, 0))
        return 0.0

    with pytest.raises(TypeError, match=r"opt.step\(closure\) computes gradients that stock Horovod never reduces"):
        opt.step(closure)


def test_closure_that_synchronizes(world):
    """Inside ``skip_synchronize`` a closure may synchronise itself, which is right."""
    model = linear()
    expected = ReferenceSGD(model, world.reference(), 0.1)
    opt = wrap(world, model)
    for step in range(3):

        def closure(step=step):
            opt.zero_grad()
            world.backward(model, world.gradients(model, step))
            opt.synchronize()
            return 0.0

        with opt.skip_synchronize():
            opt.step(closure)
        expected.step(world.gradients(model, step))
    expected.check(model)
    world.same_everywhere(model.parameters())


def test_closure_without_backward(world):
    model = linear()
    expected = ReferenceSGD(model, world.reference(), 0.1)
    opt = wrap(world, model)
    for step in range(2):
        opt.zero_grad()
        world.backward(model, world.gradients(model, step))
        assert opt.step(lambda: 1.5) == 1.5
        expected.step(world.gradients(model, step))
    expected.check(model)


def test_unfrozen_later_is_said(world, caplog):
    """Stock Horovod has no hook for a parameter that was frozen when it was wrapped."""
    model = linear()
    model[1].weight.requires_grad_(False)
    opt = wrap(world, model)
    model[1].weight.requires_grad_(True)
    for step in range(2):
        opt.zero_grad()
        world.backward(model, world.gradients(model, step))
        opt.step()
    messages = [r.message for r in caplog.records if "stock Horovod never reduces" in r.message]
    assert len(messages) == 1 and messages[0].startswith("1 of 4 parameters")
