"""Things that go wrong, each in a job of its own: ``misuse.py SCENARIO``."""

import logging
import os
import signal
import sys
import time

import horovod.torch as hvd
import torch

import hvd_compress
from hvd_compress import HandshakeError, TopK

logging.basicConfig(format="%(levelname)s %(message)s")


def train(steps=4, compression=None, shapes=None, names=None, before=None):
    torch.manual_seed(0)
    sizes = shapes or {"a": (40, 50), "b": (50, 60)}
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in sizes.items()}
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), 0.1),
        list(zip(names or parameters, parameters.values(), strict=True)),
        compression=compression or TopK(0.05),
    )
    for step in range(steps):
        if before is not None:
            before(step, parameters)
        opt.zero_grad()
        sum((p * (hvd.rank() + 1)).sum() for p in parameters.values()).backward()
        opt.step()
    print(f"rank {hvd.rank()} has finished", flush=True)


def ratio():
    train(compression=TopK(0.05 if hvd.rank() == 0 else 0.01))


def version():
    if hvd.rank() == 1:
        hvd_compress.version.__version__ = "0.0.9"
    train()


def shape():
    train(shapes={"a": (40, 50), "b": (50, 60) if hvd.rank() == 0 else (51, 60)})


def number():
    """The first gradient that Horovod waits for is of a parameter that only rank 1 has."""
    shapes = {"a": (40, 50), "b": (50, 60)}
    train(shapes=shapes if hvd.rank() == 0 else {"a": (40, 50), "aa": (60, 70), "b": (50, 60), "c": (70, 80)})


def frozen_on_one_rank():
    train(before=lambda step, parameters: parameters["a"].requires_grad_(hvd.rank() == 0 or step < 2))


def order():
    train(names=["a", "b"] if hvd.rank() == 0 else ["b", "a"])


def disagreements():
    """Those that all ranks hear of, one after the other: each with an optimizer of its own."""
    for disagree in (ratio, shape, order, other_transport):
        try:
            disagree()
        except HandshakeError as error:
            print(f"{disagree.__name__} on rank {hvd.rank()}: {error}", flush=True)
    print(f"rank {hvd.rank()} has met all of them", flush=True)


def killed():
    def before(step, parameters):
        if step == 2 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train(before=before, steps=1000)


def killed_in_exchange():
    """Rank 1 dies after its tokens are out, so that the others are already in the exchange."""
    die_in_exchange(lambda: os.kill(os.getpid(), signal.SIGKILL))


def raises_in_exchange():
    def fail():
        raise KeyError("a bug of the user's")

    die_in_exchange(fail)


def exits_in_exchange():
    die_in_exchange(lambda: sys.exit(0))


def die_in_exchange(die):
    from hvd_compress.exchange import Exchange

    flush = Exchange._flush

    def dying(self, slot):
        if hvd.rank() == 1 and self._steps.get(slot, 0) == 2:
            time.sleep(1)
            die()
        flush(self, slot)

    Exchange._flush = dying
    train(steps=1000)


def raises():
    def before(step, parameters):
        if step == 2 and hvd.rank() == 1:
            raise KeyError("a bug of the user's")

    train(before=before, steps=1000)


def join():
    """hvd.join() lets the other ranks go on alone, which an exchange of our own cannot."""
    from hvd_compress.transport import base

    base.WARN_AFTER_S = 1.0
    if hvd.rank() == 1:
        train(steps=2)
        hvd.join()
    else:
        train(steps=4)


def no_mpi4py():
    sys.modules["mpi4py.MPI"] = None
    train()


def no_mpi4py_on_one_rank():
    if hvd.rank() == 1:
        sys.modules["mpi4py.MPI"] = None
    train()


def mpi_demanded():
    sys.modules["mpi4py.MPI"] = None
    train(compression=TopK(0.05, transport="mpi"))


def fine():
    train()


def other_transport():
    train(compression=TopK(0.05, transport="horovod" if hvd.rank() else "auto"))


def alone():
    """One process: Horovod's optimizer calls no compressor, direct calls do."""
    compression = TopK(0.05)
    train(compression=compression)
    assert compression.stats()["steps"] == 0
    x = torch.arange(2000.0).reshape(40, 50)
    first = hvd.allreduce(x, name="x", compression=compression)
    second = hvd.allreduce(torch.zeros(40, 50), name="x", compression=compression)
    assert torch.equal(first.reshape(-1)[-100:], x.reshape(-1)[-100:]) and first.count_nonzero() == 100
    assert torch.equal(second.reshape(-1)[-200:-100], x.reshape(-1)[-200:-100]) and second.count_nonzero() == 100


def mpi4py_first():
    train()


if __name__ == "__main__":
    if sys.argv[1] == "mpi4py_first":
        from mpi4py import MPI  # noqa: F401
    hvd.init()
    globals()[sys.argv[1]]()
