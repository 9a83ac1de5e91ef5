"""Checkpoints on real ranks."""

import io

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from hvd_compress import StateError


def start(world, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 30))
    compression = world.topk()
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model.named_parameters(), compression=compression
    )
    return model, compression, opt


def train(world, model, opt, steps):
    for step in steps:
        opt.zero_grad()
        world.backward(model, world.gradients(model, step))
        opt.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_resumed_is_bit_identical(world):
    model, compression, opt = start(world)
    train(world, model, opt, range(8))
    whole = [p.detach().clone() for p in model.parameters()]
    del opt

    model, compression, opt = start(world)
    train(world, model, opt, range(4))
    saved = through_a_file({"m": model.state_dict(), "o": opt.state_dict(), "c": compression.state_dict()})
    del opt

    model, compression, opt = start(world, seed=7)
    model.load_state_dict(saved["m"])
    opt.load_state_dict(saved["o"])
    compression.load_state_dict(saved["c"])
    train(world, model, opt, range(4, 8))
    for a, b in zip(whole, model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_loaded_into_a_running_compressor(world):
    model, compression, opt = start(world)
    train(world, model, opt, range(2))
    saved = {"m": {k: v.clone() for k, v in model.state_dict().items()}, "c": compression.state_dict()}
    momentum = {k: v["momentum_buffer"].clone() for k, v in opt.state_dict()["state"].items()}
    train(world, model, opt, range(2, 5))
    first = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(saved["m"])
    compression.load_state_dict(saved["c"])
    for p, buffer in zip(model.parameters(), momentum.values(), strict=True):
        opt.state[p]["momentum_buffer"].copy_(buffer)
    train(world, model, opt, range(2, 5))
    for a, b in zip(first, model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_other_number_of_ranks(world):
    """States of five pretended ranks: what is owed, sum over N, stays."""
    shape = {"optimizer0/0.weight": 2000, "optimizer0/1.weight": 1500}
    old = []
    for rank in range(5):
        rng = np.random.default_rng(rank)
        parameters = {
            key: {"residual": torch.tensor(rng.standard_normal(n), dtype=torch.float32), "steps": 3}
            for key, n in shape.items()
        }
        old.append(
            {
                "format": "hvd_compress.state",
                "version": 1,
                "compressor": "TopK",
                "rank": rank,
                "size": 5,
                "parameters": parameters,
            }
        )
    model, compression, opt = start(world)
    compression.load_state_dict(old)
    loaded = compression.state_dict()["parameters"]
    for key, n in shape.items():
        owed = sum(s["parameters"][key]["residual"].double() for s in old) / 5
        mine = loaded[key]["residual"]
        mine = torch.zeros(n) if mine is None else mine
        now = hvd.allreduce(mine.double(), name=f"owed.{key}")
        assert torch.allclose(now, owed, atol=1e-6)
    train(world, model, opt, range(2))
    world.same_everywhere(model.parameters())


def test_wrong_files_are_refused(world):
    model, compression, opt = start(world)
    train(world, model, opt, range(2))
    saved = compression.state_dict()
    other = (world.rank + 1) % world.size
    with pytest.raises(StateError, match=f"expected the state of rank {world.rank} of {world.size}, got that of"):
        compression.load_state_dict({**saved, "rank": other})
    renamed = {k.replace("0.weight", "other"): v for k, v in saved["parameters"].items()}
    with pytest.raises(StateError, match=r"parameters that this model lacks.*optimizer0/other"):
        compression.load_state_dict({**saved, "parameters": renamed})
    # Refused at the first step where the model is not known before.
    del opt
    model, compression, opt = start(world)
    compression.load_state_dict({**saved, "parameters": renamed})
    with pytest.raises(StateError, match=r"\['0.weight', '1.weight'\], got \['optimizer0/other'\]"):
        train(world, model, opt, range(1))


def test_wrong_shape_is_refused(world):
    model, compression, opt = start(world)
    train(world, model, opt, range(1))
    saved = compression.state_dict()
    del opt
    model, compression, opt = start(world)
    saved["parameters"]["optimizer0/1.weight"]["residual"] = torch.zeros(77)
    compression.load_state_dict(saved)
    with pytest.raises(StateError, match=r"expected 1500 elements in the residual of '1.weight', got 77"):
        train(world, model, opt, range(1))
