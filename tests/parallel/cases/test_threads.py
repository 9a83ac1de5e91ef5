"""Two training loops in two threads of one process, each with a compressor of its own."""

import threading

import horovod.torch as hvd
import numpy as np
import pytest
import torch

STEPS = 8


def train(world, which, results, delay, transport):
    """Train one parameter; ``results`` gets it, and what it should be."""
    compression, expected = world.topk(transport=transport), world.reference()
    parameter = torch.nn.Parameter(torch.zeros(40, 50))
    # Stock Horovod pairs gradients by these names, so they must differ.
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], 1.0), named_parameters=[(f"weight{which}", parameter)], compression=compression
    )
    total = 0.0
    for step in range(STEPS):
        if delay:
            threading.Event().wait(0.02)
        rng = np.random.default_rng([step, which])
        gradients = [rng.standard_normal((40, 50)).astype(np.float32) for _ in range(world.size)]
        opt.zero_grad()
        (parameter * torch.tensor(gradients[world.rank])).sum().backward()
        opt.step()
        named = hvd.allreduce(torch.tensor(gradients[world.rank]), name=f"direct{which}", compression=compression)
        total = total - expected.reduce("w", gradients)
        direct = expected.reduce("direct", gradients)
        results[which].append(
            max(np.abs(parameter.detach().numpy() - total).max(), np.abs(named.numpy() - direct).max())
        )


@pytest.mark.parametrize("transport", ["auto", "horovod"])
def test_two_loops_in_two_threads(world, transport):
    """The ranks' threads run in different order, so nothing may be paired by order."""
    results = [[], []]
    threads = [
        threading.Thread(target=train, args=(world, which, results, which == world.rank % 2, transport), daemon=True)
        for which in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    done = all(len(r) == STEPS and max(r) < 1e-4 for r in results)
    assert world.all_agree(done), results
