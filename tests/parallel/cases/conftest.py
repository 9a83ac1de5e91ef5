"""Fixtures of the tests that run on every rank at once.

All ranks run the same tests in the same order.  A test compares what was gathered from all
ranks, so that it fails on all of them alike.
"""

import gc
import os

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from reference import Reference

from hvd_compress import TopK

hvd.init()


@pytest.fixture(autouse=True)
def nothing_left_over():
    """Free a test's optimizers, and let Horovod finish what a test has left under way.

    Horovod knows operations by name, and the names recur in the next test.
    """
    yield
    gc.collect()
    hvd.barrier()


@pytest.fixture
def world():
    return World()


class World:
    """The ranks, and what tests need of them."""

    def __init__(self, ratio=0.05, **settings):
        self.rank, self.size = hvd.rank(), hvd.size()
        self.ratio = ratio
        settings.setdefault("transport", os.environ.get("HVD_COMPRESS_TEST_TRANSPORT", "auto"))
        self.settings = settings

    def topk(self, ratio=None, **settings):
        return TopK(ratio or self.ratio, **{**self.settings, **settings})

    def reference(self, ratio=None, ranks=None, **settings):
        return Reference(ranks or range(self.size), ratio or self.ratio, **settings)

    def gradients(self, model, step, dtype=np.float32):
        """Return ``{name: [gradient of each rank]}``, the same on all ranks."""
        names = [name for name, _ in model.named_parameters()]
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        rng = np.random.default_rng(1000 + step)
        return {n: [rng.standard_normal(shapes[n]).astype(dtype) for _ in range(self.size)] for n in names}

    def backward(self, model, gradients, names=None):
        """Compute exactly these gradients of this rank, through autograd and Horovod's hooks."""
        loss = 0
        for name, p in model.named_parameters():
            if names is None or name in names:
                loss = loss + (p * torch.as_tensor(gradients[name][self.rank], dtype=p.dtype)).sum()
        loss.backward()

    def same_everywhere(self, tensors):
        """Assert that all ranks hold the same bits."""
        flat = torch.cat([t.detach().reshape(-1).double() for t in tensors])
        everyone = hvd.allgather(flat[None].view(torch.int64), name="same_everywhere")
        for other in everyone:
            assert torch.equal(other, everyone[0])

    def all_agree(self, condition):
        """Return whether ``condition`` holds on all ranks."""
        return hvd.allreduce(torch.tensor([float(condition)]), op=hvd.Sum, name="all_agree").item() == self.size
