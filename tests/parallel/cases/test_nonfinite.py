"""NaN and infinity on one rank."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from reference import ReferenceSGD

from hvd_compress import NonFiniteGradientError, UnsupportedError


def wrap(world, **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 30))
    compression = world.topk(**settings)
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=compression
    )
    return model, compression, opt


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["0.weight", "1.bias"])
def test_all_ranks_see_it_and_residuals_do_not(world, caplog, value, where):
    """A skipped step loses nothing: the finite ranks' gradients are sent later."""
    model, compression, opt = wrap(world)
    reference = world.reference()
    expected = ReferenceSGD(model, reference, 0.1)
    for step in range(6):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        if step == 2:
            gradients[where][1].flat[3] = value
        world.backward(model, gradients)
        opt.synchronize()
        finite = all(p.grad.isfinite().all() for p in model.parameters())
        assert world.all_agree(finite == (step != 2))
        if finite:
            with opt.skip_synchronize():
                opt.step()
            expected.step(gradients)
        else:
            shown = [n for n, p in model.named_parameters() if not p.grad.isfinite().all()]
            assert shown == [where]
            opt.zero_grad()
            # What the simulation owes: each rank's whole finite gradient of the skipped step.
            for name, parts in gradients.items():
                if parts[0].ndim < 2:
                    continue
                for rank, g in enumerate(parts):
                    if np.isfinite(g).all():
                        reference.residuals[name, rank] = reference.residuals[name, rank] + g.reshape(-1)
        for entry in compression.state_dict()["parameters"].values():
            assert entry["residual"].isfinite().all()
    expected.check(model)
    world.same_everywhere(model.parameters())
    said = [r.message for r in caplog.records if "NaN or infinity" in r.message]
    assert len(said) == 1 and f"rank 1 in '{where}'" in said[0]


def test_raise_on_every_rank_alike(world):
    model, compression, opt = wrap(world, on_nonfinite="raise")
    gradients = world.gradients(model, 0)
    world.backward(model, gradients)
    opt.step()
    before = {k: v["residual"].clone() for k, v in compression.state_dict()["parameters"].items()}
    opt.zero_grad()
    gradients = world.gradients(model, 1)
    gradients["1.weight"][world.size - 1][0, 0] = np.nan
    world.backward(model, gradients)
    with pytest.raises(NonFiniteGradientError, match=f"rank {world.size - 1} in '1.weight'"):
        opt.step()
    for key, entry in compression.state_dict()["parameters"].items():
        name = key.split("/")[1]
        mine = torch.tensor(gradients[name][world.rank]).reshape(-1)
        owed = before[key] + mine if mine.isfinite().all() else before[key]
        assert torch.equal(entry["residual"], owed), key


def test_raise_for_dense_tensors_alone(world):
    model = torch.nn.Linear(4, 5)
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        model.named_parameters(),
        compression=world.topk(on_nonfinite="raise"),
    )
    gradients = world.gradients(model, 0)
    gradients["bias"][0][2] = np.inf
    world.backward(model, gradients)
    with pytest.raises(NonFiniteGradientError, match="rank 0 in 'bias'"):
        opt.step()


def test_grad_scaler_skips_and_recovers(world):
    """The loss scale halves once for each infinity, on all ranks, and training goes on."""
    model, compression, opt = wrap(world)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    expected = ReferenceSGD(model, world.reference(), 0.1)
    expected.reference.residuals = {}
    for step in range(6):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        scaled = {n: [x * np.float32(scaler.get_scale()) for x in g] for n, g in gradients.items()}
        if step == 2:
            scaled["0.weight"][0][0, 0] = np.inf
        world.backward(model, scaled)
        opt.synchronize()
        scaler._scale if scaler._scale is not None else scaler.scale(torch.ones(1))
        scaler.unscale_(opt)
        before = scaler.get_scale()
        with opt.skip_synchronize():
            scaler.step(opt)
        scaler.update()
        if scaler.get_scale() != before:
            compression.rescale_residuals(scaler.get_scale() / before)
        if step == 2:
            for name, parts in gradients.items():
                if parts[0].ndim == 2:
                    for rank, g in enumerate(parts):
                        if np.isfinite(scaled[name][rank]).all():
                            key = name, rank
                            expected.reference.residuals[key] = expected.reference.residuals[key] + g.reshape(-1)
        else:
            expected.step(gradients)
    assert scaler.get_scale() == 512.0
    expected.check(model)
    world.same_everywhere(model.parameters())


def test_raise_with_hooks_in_another_order_on_each_rank(world):
    """Whichever kind of tensor a rank takes last, there is one exchange a step."""
    model, compression, opt = wrap(world, on_nonfinite="raise")
    expected = ReferenceSGD(model, world.reference(), 0.1)
    names = [name for name, _ in model.named_parameters()]
    for step in range(4):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        for name in names[world.rank % 4 :] + names[: world.rank % 4]:
            world.backward(model, gradients, [name])
        opt.step()
        expected.step(gradients)
    expected.check(model)
    assert compression.stats()["exchanges"] == 4


def test_a_step_that_is_given_up_can_be_undone(world):
    """As after a sum that has overflowed, which the ranks' own gradients do not show."""
    model, compression, opt = wrap(world)
    reference = world.reference()
    expected = ReferenceSGD(model, reference, 0.1)
    for step in range(5):
        opt.zero_grad()
        gradients = world.gradients(model, step)
        world.backward(model, gradients)
        opt.synchronize()
        if step == 2:
            compression.undo_step()
            for name, parts in gradients.items():
                for rank, g in enumerate(parts):
                    if g.ndim > 1:
                        reference.residuals[name, rank] = reference.residuals[name, rank] + g.reshape(-1)
            continue
        with opt.skip_synchronize():
            opt.step()
        expected.step(gradients)
    expected.check(model)
    world.same_everywhere(model.parameters())


def test_a_grad_scaler_without_synchronize_is_refused(world):
    """It would unscale gradients that are then replaced by reduced ones that are still scaled."""
    model, _, opt = wrap(world)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = sum((p * (world.rank + 1)).sum() for p in model.parameters())
    scaler.scale(loss).backward()
    with pytest.raises(UnsupportedError, match=r"call opt\.synchronize\(\) after backward\(\)"):
        scaler.step(opt)
    with pytest.raises(UnsupportedError, match=r"build hvd\.DistributedOptimizer again"):
        opt.synchronize()


def test_a_grad_scaler_that_is_off_changes_nothing(world):
    model, _, opt = wrap(world)
    expected = ReferenceSGD(model, world.reference(), 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(2):
        opt.zero_grad()
        world.backward(model, world.gradients(model, step))
        scaler.step(opt)
        expected.step(world.gradients(model, step))
    expected.check(model)
