"""The ranks that scripts/convergence simulates do what real ranks do."""

import pathlib
import sys

import horovod.torch as hvd
import pytest
import torch
import torch.nn.functional as F
from all_methods import METHODS

import hvd_compress as hc

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "scripts"))
from convergence_ranks import SimulatedRanks

# What these send goes through the exchange of the package, which adds up in rank order: no bit may differ.
GATHERED = {
    "topk": lambda: hc.TopK(0.02),
    "dgc": lambda: hc.DGC(0.02, momentum=0.9, warmup_steps=4),
    **{
        name: METHODS[name]
        for name in ("qsgd", "topk-int8", "onebit", "signsgd", "threshold", "topk-ef21", "topk-int8-residual")
    },
}
# Horovod's allreduce adds these up, in an order of its own; with two ranks there is only one order.
REDUCED = {
    name: METHODS[name] for name in ("powersgd", "powersgd-two", "powersgd-two-fp16", "randomk", "coordinated", "fp16")
}
TENSORS = {"wide": (40, 64), "deep": (64, 3, 5, 2), "bias": (64,)}


def model():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in TENSORS.items()}


def updates(world, compression, steps):
    """Return what real ranks make of given gradients, and what simulated ones do."""
    parameters = model()
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), 0.1), named_parameters=list(parameters.items()), compression=compression
    )
    ranks = SimulatedRanks(compression, world.size)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        gradients = [{n: torch.randn(s, generator=generator) for n, s in TENSORS.items()} for _ in range(world.size)]
        opt.zero_grad()
        sum((p * gradients[world.rank][name]).sum() for name, p in parameters.items()).backward()
        opt.step()
        expected = ranks.average(gradients)
        yield {name: (p.grad, expected[name]) for name, p in parameters.items()}
    stats = compression.stats()
    assert stats["dense_bytes"] == ranks.dense_bytes
    # Where their number varies with what a rank has, these are the bytes of the first rank.
    assert world.all_agree(world.rank > 0 or stats["bytes_sent"] == ranks.bytes_sent)


@pytest.mark.parametrize("method", GATHERED)
def test_what_is_gathered_has_the_same_bits(world, method):
    for pairs in updates(world, GATHERED[method](), 6):
        for name in ("wide", "deep"):
            assert torch.equal(*pairs[name]), name
        torch.testing.assert_close(*pairs["bias"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", REDUCED)
def test_what_is_reduced_agrees_but_for_the_order_of_additions(world, method):
    half = "fp16" in method
    for pairs in updates(world, REDUCED[method](), 6):
        for got, expected in pairs.values():
            if world.size == 2 and not half:
                assert torch.equal(got, expected)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-2 if half else 1e-4)


@pytest.mark.parametrize("method", ["topk", "dgc", "qsgd", "powersgd"])
def test_training_is_the_same(world, method):
    """A model that computes its own gradients, with the momentum that scripts/convergence gives it."""
    make = {**GATHERED, **REDUCED}[method]
    trained = [network() for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.0 if method == "dgc" else 0.9) for m in trained]
    opt = hvd.DistributedOptimizer(optimizers[0], named_parameters=trained[0].named_parameters(), compression=make())
    ranks = SimulatedRanks(make(), world.size)
    names = [name for name, _ in trained[1].named_parameters()]
    for step in range(5):
        generator = torch.Generator().manual_seed(100 + step)
        batches = [
            (torch.randn(16, 20, generator=generator), torch.randint(5, (16,), generator=generator))
            for _ in range(world.size)
        ]
        x, y = batches[world.rank]
        opt.zero_grad()
        F.cross_entropy(trained[0](x), y).backward()
        opt.step()
        parameters = list(trained[1].parameters())
        parts = [torch.autograd.grad(F.cross_entropy(trained[1](x), y), parameters) for x, y in batches]
        averages = ranks.average([dict(zip(names, part, strict=True)) for part in parts])
        for name, p in zip(names, parameters, strict=True):
            p.grad = averages[name]
        optimizers[1].step()
    world.same_everywhere(trained[0].parameters())
    for real, simulated in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        if world.size == 2 and method != "powersgd":
            assert torch.equal(real, simulated)
        # The biases differ in the last bits, and with them all that follows.
        torch.testing.assert_close(real, simulated, rtol=1e-3, atol=1e-4)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 40), torch.nn.Linear(40, 5)
    )
