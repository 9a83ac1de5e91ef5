"""Elastic training that grows from two to three workers, for ``test_elastic.py``."""

import sys

import horovod.torch as hvd
import torch

import hvd_compress.elastic
from hvd_compress import TopK

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(40, 50)
sgd = torch.optim.SGD(model.parameters(), 0.1)
compression = TopK(0.05)
opt = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), compression=compression)
hosts = sys.argv[1]


def owed():
    """Return what all workers together still owe: the mean residual, zero where there is none."""
    parts = compression.state_dict()["parameters"]
    mine = parts["optimizer0/weight"]["residual"] if parts else None
    mine = torch.zeros(2000) if mine is None else mine
    return hvd.allreduce(mine.double(), name="owed")


@hvd.elastic.run
def train(state):
    if state.size and state.size != hvd.size():
        change = (owed() - state.owed).abs().max().item()
        if hvd.rank() == 0:
            print(f"RESIZED {state.size} to {hvd.size()}, owed changed by {change:.2e}", flush=True)
    while state.step < 400:
        opt.zero_grad()
        g = torch.Generator().manual_seed(1000 * state.step + hvd.rank())
        (model.weight * torch.randn(50, 40, generator=g)).sum().backward()
        opt.step()
        state.step += 1
        if state.step % 5 == 0:
            state.size, state.owed = hvd.size(), owed()
            if state.step == 20 and hvd.rank() == 0:
                with open(hosts, "w") as file:
                    file.write("localhost:3\n")
            if hvd.size() == 3 and state.step >= 60:
                break
            state.commit()
    everyone = hvd.allgather(model.weight.detach()[None], name="weights")
    same = all(torch.equal(everyone[0], other) for other in everyone)
    if hvd.rank() == 0:
        print(f"DONE {hvd.size()} workers, identical {same}", flush=True)


hvd_compress.elastic.register()
train(hvd.elastic.TorchState(model=model, optimizer=opt, compression=compression, step=0, size=0, owed=None))
