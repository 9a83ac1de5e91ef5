"""What once went wrong with other methods than top-k."""

import copy
import gc
import time
import weakref

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import hvd_compress as hc


def made(compression, sizes=((40, 64), (64,)), lr=0.05):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in sizes]
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    sgd = torch.optim.SGD(parameters, lr)
    return parameters, hvd.DistributedOptimizer(sgd, named_parameters=named, compression=compression)


def step(world, parameters, opt, number, apply=True, spoil=None):
    opt.zero_grad()
    loss = 0
    for i, p in enumerate(parameters):
        g = np.random.default_rng([number, i, world.rank]).standard_normal(p.shape).astype(np.float32)
        if spoil == i and world.rank == world.size - 1:
            g.flat[0] = np.nan
        loss = loss + (p * torch.from_numpy(g)).sum()
    loss.backward()
    opt.synchronize()
    if apply:
        with opt.skip_synchronize():
            opt.step()


def test_a_state_is_saved_where_all_travels_dense(world):
    for compression in (hc.Switch({0: hc.NoCompression(), 9: hc.TopK(0.1)}), hc.Policy({"*": None})):
        parameters, opt = made(compression)
        step(world, parameters, opt, 0)
        assert compression.state_dict()["size"] == world.size


def test_momentum_of_dense_tensors_is_the_same_on_other_numbers_of_ranks(world):
    compression = hc.DGC(0.1, momentum=0.5)
    parameters, opt = made(compression)
    for number in range(3):
        step(world, parameters, opt, number)
    state = compression.state_dict()
    (dense,) = [entry for key, entry in state["parameters"].items() if key.endswith("/p1")]
    assert set(dense["common"]) == {"momentum"} and "memory" not in dense
    # As if it came from a run of one rank.
    alone = copy.deepcopy(state)
    alone.update(rank=0, size=1)
    fresh = hc.DGC(0.1, momentum=0.5)
    fresh.load_state_dict([alone])
    loaded = fresh.state_dict()["parameters"]
    (same,) = [entry for key, entry in loaded.items() if key.endswith("/p1")]
    assert torch.equal(same["common"]["momentum"], dense["common"]["momentum"])
    world.same_everywhere([same["common"]["momentum"]])


@pytest.mark.parametrize("late", [0, 1])
def test_settings_are_compared_where_nothing_is_gathered(world, late):
    """No rank may wait for what another, which has heard of the difference first, does not send."""
    parameters, opt = made(hc.RandomK(0.1, seed=world.rank))
    time.sleep(0.5 if world.rank == late else 0.0)
    with pytest.raises(hc.HandshakeError, match=r"RandomK\.seed is 0 on rank 0 and 1 on rank 1"):
        step(world, parameters, opt, 0)


def test_settings_of_direct_calls_are_compared_where_nothing_is_gathered(world):
    compression, x = hc.RandomK(0.1, seed=world.rank), torch.ones(40, 50)
    with pytest.raises(hc.HandshakeError, match=r"RandomK\.seed is 0 on rank 0 and 1 on rank 1"):
        hvd.allreduce(x, name="x", compression=compression)
    compression = hc.RandomK(0.1)
    for _ in range(2):
        hvd.allreduce(x, name="x", compression=compression)
    assert compression.stats()["handshake_bytes"] == 8


@pytest.mark.parametrize("make", [lambda f: hc.PowerSGD(2, feedback=f), lambda f: hc.TopK(0.1, feedback=f)])
def test_ef21_after_nan_in_one_of_two_tensors(world, make):
    """The estimates' sum stays the sum of the estimates."""
    compression = make(hc.EF21())
    parameters, opt = made(compression, sizes=((40, 64), (64, 48)))
    for number in range(4):
        step(world, parameters, opt, number, apply=number != 2, spoil=0 if number == 2 else None)
    for entry in compression.state_dict()["parameters"].values():
        total = hvd.allreduce(entry["memory"]["estimate"], op=hvd.Sum, name="estimates")
        averaged = entry.get("averages") == ["estimates"]
        assert averaged == (compression.collective is hc.Collective.ALLREDUCE)
        total = total / world.size if averaged else total
        assert torch.allclose(total, entry["common"]["estimates"], atol=1e-3)


def test_ef21_in_a_policy_cannot_be_undone(world):
    compression = hc.Policy({}, default=hc.TopK(0.1, feedback=hc.EF21()))
    parameters, opt = made(compression)
    step(world, parameters, opt, 0, apply=False)
    with pytest.raises(hc.UnsupportedError, match="EF21"):
        compression.undo_step()


def test_copies_of_a_policy_work(world):
    policy = copy.deepcopy(hc.Policy({"p1": None}, default=hc.TopK(0.1)))
    parameters, opt = made(policy)
    step(world, parameters, opt, 0)
    assert policy.stats()["steps"] == 1


def test_positions_of_a_leader_are_not_rescaled(world):
    compression = hc.CoordinatedTopK(0.05, by="leader")
    parameters, opt = made(compression)
    step(world, parameters, opt, 0)
    before = compression.state_dict()["parameters"]["optimizer0/p0"]["common"]["leaders"]
    compression.rescale_residuals(0.5)
    assert torch.equal(compression.state_dict()["parameters"]["optimizer0/p0"]["common"]["leaders"], before)
    step(world, parameters, opt, 1)
    world.same_everywhere(parameters)


def test_two_selections_over_the_model(world):
    policy = hc.Policy({"p0": hc.TopK(0.01, scope="model")}, default=hc.TopK(0.5, scope="model"))
    parameters, opt = made(policy, sizes=((40, 64), (64, 48)))
    step(world, parameters, opt, 0)
    kept = {key[-2:]: entry["residual"] for key, entry in policy.state_dict()["parameters"].items()}
    sent = {key: int((x == 0).sum()) for key, x in kept.items()}
    assert sent == {"p0": 26, "p1": 1536}


def test_a_selection_over_the_model_keeps_no_optimizer_alive(world):
    compression = hc.TopK(0.1, scope="model")
    parameters, opt = made(compression)
    step(world, parameters, opt, 0)
    watched = weakref.ref(opt)
    del parameters, opt
    gc.collect()
    assert watched() is None


def test_a_frozen_bias_does_not_move_by_momentum(world):
    parameters, opt = made(hc.DGC(0.1))
    step(world, parameters, opt, 0)
    parameters[1].requires_grad_(False)
    before = parameters[1].detach().clone()
    opt.zero_grad()
    (parameters[0] * 2.0).sum().backward()
    opt.step()
    assert torch.equal(parameters[1], before)


@pytest.mark.parametrize("feedback", [hc.EF21(), hc.MomentumCorrection()])
def test_a_state_of_another_size_is_refused_whatever_it_holds(world, feedback):
    compression = hc.TopK(0.1, feedback=feedback)
    step(world, *made(compression), 0)
    state, compression = compression.state_dict(), hc.TopK(0.1, feedback=feedback)
    compression.load_state_dict(state)
    parameters, opt = made(compression, sizes=((40, 65), (64,)))
    with pytest.raises(
        hc.StateError, match=r"expected 2600 elements in the .* got 2560: the loaded state is of another"
    ):
        step(world, parameters, opt, 1)


FEEDBACKS = {
    "momentum": (hc.MomentumCorrection(), hc.ErrorFeedback(), r"expected residual, got momentum"),
    "estimate": (hc.EF21(), hc.ErrorFeedback(), r"expected residual, got estimate and estimates"),
    "residual": (hc.ErrorFeedback(), hc.EF21(), r"expected estimate and estimates, got residual"),
    "none": (hc.ErrorFeedback(), None, r"expected nothing to be remembered, got residual"),
}


@pytest.mark.parametrize("what", FEEDBACKS)
def test_a_state_of_another_feedback_is_refused(world, what):
    before, after, message = FEEDBACKS[what]
    compression = hc.TopK(0.1, feedback=before)
    step(world, *made(compression), 0)
    fresh = hc.TopK(0.1, feedback=after)
    fresh.load_state_dict(compression.state_dict())
    with pytest.raises(hc.StateError, match=message):
        step(world, *made(fresh), 1)


def test_a_state_of_another_model_is_refused_where_nothing_is_gathered(world):
    compression = hc.PowerSGD(2)
    step(world, *made(compression, sizes=((40, 64), (64, 64))), 0)
    fresh = hc.PowerSGD(2)
    fresh.load_state_dict(compression.state_dict())
    with pytest.raises(hc.StateError, match=r"the loaded state has parameters that this optimizer has not.*p1"):
        step(world, *made(fresh), 1)


def test_a_policy_from_some_step_on(world):
    switch = hc.Switch({0: hc.NoCompression(), 2: hc.Policy({"p0": hc.PowerSGD(2)}, default=hc.TopK(0.1))})
    parameters, opt = made(switch, sizes=((40, 64), (64, 64)))
    sent = []
    for number in range(4):
        step(world, parameters, opt, number)
        sent.append(switch.stats()["bytes_sent"] - sum(sent))
    assert sent[0] == sent[1] and sent[2] < sent[0] / 4
    world.same_everywhere(parameters)


@pytest.mark.parametrize("make", [hc.OneBit, hc.VectorQuantizer, lambda: hc.PowerSGD(2), lambda: hc.SVD(2)])
def test_sums_that_overflow_are_not_remembered(world, make):
    compression = make()
    parameters, opt = made(compression)
    opt.zero_grad()
    (parameters[0] * (3e38 if world.rank == 0 else 1.0)).sum().backward()
    opt.synchronize()
    finite = bool(parameters[0].grad.isfinite().all())
    assert world.all_agree(finite) or world.all_agree(not finite)
    for entry in compression.state_dict()["parameters"].values():
        assert bool(entry["residual"].isfinite().all())


def test_residuals_of_half_precision_stay_finite_when_they_are_rescaled(world):
    compression = hc.TopK(0.1, feedback=hc.ErrorFeedback(dtype="float16"))
    step(world, *made(compression), 0)
    for _ in range(20):
        compression.rescale_residuals(2.0)
    (residual,) = [entry["residual"] for entry in compression.state_dict()["parameters"].values()]
    assert residual.abs().max().item() == 65504 and bool(residual.isfinite().all())


def test_two_rounds_take_two_allreduces_of_all_tensors_together(world):
    """However many tensors there are, and beside what is gathered."""
    compression = hc.Policy({"p2": hc.TopK(0.1)}, default=hc.PowerSGD(2, alternating=False))
    parameters, opt = made(compression, sizes=((40, 64), (40, 64), (64, 64), (30, 50, 2)))
    names = []
    asynchronous = hvd.allreduce_async

    def counting(tensor, **arguments):
        names.append(arguments["name"])
        return asynchronous(tensor, **arguments)

    hvd.allreduce_async = counting
    try:
        for number in range(3):
            step(world, parameters, opt, number, apply=number != 1, spoil=2 if number == 1 else None)
    finally:
        hvd.allreduce_async = asynchronous
    assert len(names) == 6
    world.same_everywhere(parameters)
    factor = 2 * (40 + 64)
    assert compression.stats()["parameters"]["p0"]["bytes_sent"] == 3 * (4 * factor + 4)


def test_residuals_of_8_bits_take_a_quarter_of_the_memory(world):
    compression = hc.TopK(0.1, feedback=hc.ErrorFeedback(dtype="int8"))
    parameters, opt = made(compression)
    for number in range(3):
        step(world, parameters, opt, number)
    (state,) = compression.runtime.states().values()
    kept = state.memory()["residual"]
    assert kept.codes.dtype == torch.uint8 and kept.codes.nbytes + kept.scales.nbytes <= 1.02 * parameters[0].numel()
    # Checkpoints hold plain numbers.
    saved = compression.state_dict()["parameters"]["optimizer0/p0"]["residual"]
    assert saved.dtype == torch.float32 and torch.equal(saved, kept.unpack())
    compression.rescale_residuals(2.0)
    assert torch.equal(compression.state_dict()["parameters"]["optimizer0/p0"]["residual"], 2 * saved)
    fresh = hc.TopK(0.1, feedback=hc.ErrorFeedback(dtype="int8"))
    fresh.load_state_dict(compression.state_dict())
    assert torch.equal(fresh.state_dict()["parameters"]["optimizer0/p0"]["residual"], 2 * saved)
