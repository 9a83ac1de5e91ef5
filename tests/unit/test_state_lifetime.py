"""How long state lives: optimizers and parameters come and go, residuals go with the parameters."""

import gc
import io
import math
import weakref

import numpy as np
import pytest
import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvd_compress import ConfigError, TensorSpec, TopK
from hvd_compress.adapters.torch.encoding import encode as _encode
from hvd_compress.state import Runtime, process_set_key


class Owner:
    """Stands for an optimizer."""

    def __init__(self, *parameters):
        self.parameters = parameters


def parameters(count=2):
    return [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(count)]


def scope_of(runtime, owner):
    return runtime.scope(owner, None, list(owner.parameters), WeakIdKeyDictionary)


def step(runtime, owner, value=1.0):
    """Give every parameter of an optimizer a residual."""
    scope = scope_of(runtime, owner)
    for i, parameter in enumerate(owner.parameters):
        entry = runtime.entry(scope, parameter, f"layer{i}")
        entry.residual, entry.steps = torch.full((6,), value), entry.steps + 1
    return scope


def test_a_scope_is_found_again_by_its_owner():
    runtime, owner, other = Runtime(), Owner(*parameters()), Owner(*parameters())
    first, second = step(runtime, owner), step(runtime, other)
    assert scope_of(runtime, owner) is first
    assert scope_of(runtime, other) is second
    assert (first.label, second.label) == ("optimizer0", "optimizer1")
    direct = runtime.scope("torch", "allreduce", [], dict)
    assert runtime.scope("torch", "allreduce", [], dict) is direct
    assert (first.owned, direct.owned, first.orphaned, direct.orphaned) == (True, False, False, False)


def test_a_parameter_is_found_by_identity_and_its_name_does_not_matter():
    runtime, owner = Runtime(), Owner(*parameters())
    scope = step(runtime, owner)
    one, two = owner.parameters
    assert runtime.entry(scope, one, "renamed") is runtime.entry(scope, one, "layer0")
    assert runtime.entry(scope, one, "layer0") is not runtime.entry(scope, two, "layer0")


@pytest.mark.parametrize("cycle", [False, True])
def test_a_new_optimizer_of_the_same_parameters_inherits_the_residuals(cycle):
    runtime, params = Runtime(), parameters()
    old = Owner(*params)
    step(runtime, old, 3.0)
    if cycle:
        old.itself = old  # as real optimizers are, through their hooks
    del old
    new = Owner(*params)
    scope = scope_of(runtime, new)
    assert scope.label == "optimizer0"
    entries = [runtime.entry(scope, p, f"layer{i}") for i, p in enumerate(params)]
    assert [e.residual.tolist() for e in entries] == [[3.0] * 6] * 2
    assert runtime.scopes == [scope]


def test_two_living_optimizers_of_the_same_parameters_have_states_of_their_own():
    runtime, params = Runtime(), parameters()
    one, two = Owner(*params), Owner(*params)
    step(runtime, one, 1.0)
    step(runtime, two, 2.0)
    assert sorted(runtime.states()) == [f"optimizer{o}/layer{i}" for o in (0, 1) for i in (0, 1)]
    assert runtime.states()["optimizer0/layer0"].residual[0] == 1.0


def test_residuals_are_freed_with_the_parameters_and_their_optimizer():
    compressor = TopK(0.5)
    owner = Owner(*parameters())
    scope = scope_of(compressor.runtime, owner)
    residuals = []
    for i, parameter in enumerate(owner.parameters):
        state = compressor.runtime.entry(scope, parameter, f"layer{i}")
        _encode(compressor, torch.ones(2, 3), TensorSpec((2, 3), "float32"), "w", state)
        residuals.append(weakref.ref(state.residual))
    parameter_refs = [weakref.ref(p) for p in owner.parameters]
    assert all(ref() is not None for ref in residuals)
    del parameter, state, owner, scope
    gc.collect()
    assert [ref() for ref in parameter_refs] == [None, None], "the compressor keeps parameters alive"
    assert [ref() for ref in residuals] == [None, None]
    assert compressor.state_dict()["parameters"] == {}


def test_residuals_outlive_the_optimizer_while_the_parameters_live():
    runtime, params = Runtime(), parameters()
    owner = Owner(*params)
    step(runtime, owner)
    ref = weakref.ref(owner)
    del owner
    gc.collect()
    assert ref() is None, "the compressor keeps the optimizer alive"
    assert sorted(runtime.states()) == ["optimizer0/layer0", "optimizer0/layer1"]


def test_a_compressor_that_is_dropped_is_freed():
    compressor, owner = TopK(0.5), Owner(*parameters())
    step(compressor.runtime, owner)
    ref = weakref.ref(compressor.runtime)
    del compressor
    gc.collect()
    assert ref() is None


def test_the_label_of_a_model_that_is_gone_is_free_again():
    """Else a state saved from a fresh process does not fit: its keys begin with ``optimizer0``."""
    runtime = Runtime()
    owner = Owner(*parameters())
    step(runtime, owner)
    del owner
    gc.collect()
    assert scope_of(runtime, Owner(*parameters())).label == "optimizer0"


def test_two_optimizers_that_split_an_old_one_have_different_labels():
    """States are saved under label and name, and names of different modules may be equal."""
    runtime, params = Runtime(), parameters()
    owner = Owner(*params)
    step(runtime, owner)
    del owner
    gc.collect()
    parts = [Owner(p) for p in params]
    scopes = [scope_of(runtime, part) for part in parts]
    assert all(scope.entries for scope in scopes), "both take over their residual"
    assert scopes[0].label != scopes[1].label


def test_a_bound_scope_belongs_to_no_optimizer():
    runtime, owner = Runtime(), Owner(*parameters())
    bound = runtime.scope(runtime, "bound", [], WeakIdKeyDictionary)
    assert runtime.scope(runtime, "bound", [], WeakIdKeyDictionary) is bound
    assert scope_of(runtime, owner).label == "optimizer0"
    assert not bound.orphaned


def test_the_direct_calls_of_each_framework_have_a_scope():
    runtime = Runtime()
    first = runtime.scope("torch", "allreduce", [], dict)
    second = runtime.scope("tensorflow", "allreduce", [], dict)
    assert runtime.scope("torch", "allreduce", [], dict) is first is not second
    assert (first.label, second.label) == ("allreduce", "allreduce.tensorflow")
    runtime.entry(first, "x", "x").residual = torch.ones(2)
    runtime.entry(second, "x", "x").residual = np.zeros(3, np.float32)
    fresh = Runtime()
    fresh.load_state_dict(runtime.state_dict("TopK", 0, 1), "TopK", 0, 1)
    for framework, size in (("torch", 2), ("tensorflow", 3)):
        scope = fresh.scope(framework, "allreduce", [], dict)
        fresh.check_all_restored_used(scope)  # direct calls may come and go
        assert fresh.entry(scope, "x", "x").residual.shape == (size,)


def test_a_label_does_not_depend_on_when_garbage_is_collected():
    runtime, owner = Runtime(), Owner(*parameters())
    step(runtime, owner)
    owner.itself = owner
    for parameter in owner.parameters:
        parameter.itself = parameter
    del owner, parameter
    assert scope_of(runtime, Owner(*parameters())).label == "optimizer0"


def test_exchanges_are_numbered_by_process_set():
    runtime = Runtime()
    assert [runtime.next_exchange(n) for n in ("0", "0", "7", "0", "7")] == ["0.0", "0.1", "7.0", "0.2", "7.1"]


def test_process_sets_of_one_number_are_told_apart():
    class Set:
        def __init__(self, number, ranks):
            self.process_set_id, self.ranks = number, ranks

    keys = [process_set_key(Set(*which)) for which in [(0, [0, 1, 2]), (1, [0, 1]), (1, [1, 2]), (2, [0, 1])]]
    assert keys[0] == "0" and len(set(keys)) == 4
    assert process_set_key(Set(0, None)) == "0"


def test_an_optimizer_inherits_from_all_that_are_gone():
    runtime, params = Runtime(), parameters(3)
    one, two = Owner(params[0]), Owner(*params[1:])
    step(runtime, one, 1.0)
    step(runtime, two, 2.0)
    del one, two
    scope = scope_of(runtime, Owner(*params))
    assert [scope.entries[p].residual.tolist() for p in params] == [[1.0] * 6, [2.0] * 6, [2.0] * 6]


def test_forgetting_exchanges_keeps_the_residuals():
    runtime, owner = Runtime(), Owner(*parameters())
    scope = step(runtime, owner)
    scope.exchanges[0] = object()
    runtime.forget_exchanges()
    assert scope.exchanges == {}
    assert runtime.states()["optimizer0/layer0"].residual is not None


# --- The loss scale -------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.5, 2, 2.0**16])
def test_rescaling_multiplies_live_and_restored_residuals(factor):
    compressor, owner = TopK(0.5), Owner(*parameters())
    step(compressor.runtime, owner, 3.0)
    saved = compressor.state_dict()
    compressor.rescale_residuals(factor)
    assert [s.residual.tolist() for s in compressor.runtime.states().values()] == [[3.0 * factor] * 6] * 2
    fresh = TopK(0.5)
    fresh.load_state_dict(saved)
    fresh.rescale_residuals(factor)
    assert [p["residual"].tolist() for p in fresh.state_dict()["parameters"].values()] == [[3.0 * factor] * 6] * 2
    assert saved["parameters"]["optimizer0/layer0"]["residual"].tolist() == [3.0] * 6


def test_rescaling_what_has_no_residual_yet():
    compressor, owner = TopK(0.5), Owner(*parameters(1))
    scope = scope_of(compressor.runtime, owner)
    compressor.runtime.entry(scope, owner.parameters[0], "w")
    compressor.rescale_residuals(2.0)
    assert compressor.runtime.states()["optimizer0/w"].residual is None


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf, "2", None])
def test_a_wrong_factor_is_refused(factor):
    with pytest.raises(ConfigError, match="the factor must be a positive finite number, got "):
        TopK(0.5).rescale_residuals(factor)


def test_numpy_residuals_too():
    runtime = Runtime()
    scope = runtime.scope("torch", "allreduce", [], dict)
    runtime.entry(scope, "w", "w").residual = np.ones(3, np.float32)
    runtime.rescale(0.5)
    state = runtime.state_dict("TopK", 0, 1)
    residual = state["parameters"]["allreduce/w"]["residual"]
    assert (residual.dtype, residual.tolist()) == (np.float32, [0.5] * 3)


def test_direct_calls_may_come_and_go_after_loading():
    """Names of ``hvd.allreduce`` are not a model: a name that does not come again is no error."""
    runtime = Runtime()
    scope = runtime.scope("torch", "allreduce", [], dict)
    runtime.entry(scope, "metric", "metric").residual = torch.ones(2)
    file = io.BytesIO()
    torch.save(runtime.state_dict("TopK", 0, 1), file)
    file.seek(0)
    fresh = Runtime()
    fresh.load_state_dict(torch.load(file, weights_only=True), "TopK", 0, 1)
    again = fresh.scope("torch", "allreduce", [], dict)
    fresh.entry(again, "loss", "loss")
    fresh.check_all_restored_used(again)
    assert fresh.entry(again, "metric", "metric").residual.tolist() == [1.0, 1.0]
