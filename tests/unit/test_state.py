"""What is remembered by parameter: saving, loading, another number of ranks, and forgetting."""

import copy
import io

import numpy as np
import pytest
import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvd_compress import StateError, TopK
from hvd_compress.state import Runtime


class Owner:
    """Stands for an optimizer."""


def parameters(count=2):
    return [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(count)]


def fill(runtime, owner, params, residuals, label=None, steps=5):
    """Give parameters ``layer0``, ``layer1``, ... residuals, as the first steps would."""
    scope = runtime.scope(owner, label, list(params), WeakIdKeyDictionary)
    for i, (parameter, residual) in enumerate(zip(params, residuals, strict=True)):
        entry = runtime.entry(scope, parameter, f"layer{i}")
        entry.residual, entry.steps = residual, steps
    return scope


def trained(residuals, rank=0, size=1):
    """Return a runtime with one optimizer, and its state."""
    runtime, owner, params = Runtime(), Owner(), parameters(len(residuals))
    fill(runtime, owner, params, residuals)
    return (owner, params, runtime), runtime.state_dict("TopK", rank, size)


def six(*values):
    return [torch.arange(6.0) + v for v in values]


def listed(state):
    return {
        key: (None if p["residual"] is None else p["residual"].tolist(), p["steps"])
        for key, p in state["parameters"].items()
    }


# --- Saving and loading -------------------------------------------------------------------


def test_state_dict_is_plain_and_complete():
    _, state = trained([*six(1), None], rank=2, size=4)
    assert {key: value for key, value in state.items() if key != "parameters"} == {
        "format": "hvd_compress.state",
        "version": 1,
        "compressor": "TopK",
        "rank": 2,
        "size": 4,
    }
    assert listed(state) == {
        "optimizer0/layer0": ([1, 2, 3, 4, 5, 6], 5),
        "optimizer0/layer1": (None, 5),
    }


def test_torch_saves_and_loads_it_with_weights_only():
    _, state = trained([*six(1), None])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert listed(loaded) == listed(state)
    TopK(0.1).load_state_dict(loaded)


@pytest.mark.parametrize("when", ["before the first step", "after the first step"])
def test_round_trip(when):
    _, state = trained(six(1, 10))
    runtime, owner, params = Runtime(), Owner(), parameters()
    if when == "after the first step":
        fill(runtime, owner, params, six(-7, -8), steps=1)
    runtime.load_state_dict(state, "TopK", 0, 1)
    assert listed(runtime.state_dict("TopK", 0, 1)) == listed(state)
    scope = runtime.scope(owner, None, params, WeakIdKeyDictionary)
    entries = [runtime.entry(scope, p, f"layer{i}") for i, p in enumerate(params)]
    assert [entry.residual.tolist() for entry in entries] == [x.tolist() for x in six(1, 10)]
    assert [(entry.steps, entry.restored) for entry in entries] == [(5, True)] * 2
    assert listed(runtime.state_dict("TopK", 0, 1)) == listed(state)


def test_the_public_methods_use_rank_0_of_1_without_horovod():
    compressor, owner, params = TopK(0.1), Owner(), parameters()
    fill(compressor.runtime, owner, params, six(1, 2))
    state = compressor.state_dict()
    assert (state["compressor"], state["rank"], state["size"]) == ("TopK", 0, 1)
    other = TopK(0.5)
    other.load_state_dict(state)
    assert listed(other.state_dict()) == listed(state)


@pytest.mark.parametrize("make", [lambda: torch.ones(6), lambda: np.ones(6)], ids=["torch", "numpy"])
def test_residuals_are_copied_both_ways(make):
    residual = make()
    (*_, runtime), state = trained([residual])
    residual[:] = 7
    saved = state["parameters"]["optimizer0/layer0"]["residual"]
    assert saved.tolist() == [1] * 6
    runtime.load_state_dict(state, "TopK", 0, 1)
    saved[:] = 9
    assert runtime.states()["optimizer0/layer0"].residual.tolist() == [1] * 6


def test_a_state_saved_before_the_first_step_is_a_copy():
    _, state = trained(six(1))
    runtime = Runtime()
    runtime.load_state_dict(state, "TopK", 0, 1)
    runtime.state_dict("TopK", 0, 1)["parameters"]["optimizer0/layer0"]["residual"].zero_()
    assert listed(runtime.state_dict("TopK", 0, 1)) == listed(state)


def test_loading_replaces_and_what_the_state_lacks_is_cleared():
    _, state = trained(six(1, 2))
    runtime, owner, params = Runtime(), Owner(), parameters(3)
    fill(runtime, owner, params, six(7, 8, 9))
    runtime.load_state_dict(state, "TopK", 0, 1)
    last = runtime.states()["optimizer0/layer2"]
    assert (last.residual, last.steps) == (None, 0)


def change(**changes):
    return lambda state: {**state, **changes}


ALL_RANKS = "expected the states of all ranks of one run, each once, got "
REFUSED = {
    "format": (change(format="pickle"), "expected a dict from compression.state_dict(), got pickle"),
    "no format": (lambda s: {"state": s}, "expected a dict from compression.state_dict(), got a dict without 'format'"),
    "no dict": (lambda s: "x", "expected a dict from compression.state_dict(), got str"),
    "None": (lambda s: None, "expected a dict from compression.state_dict(), got NoneType"),
    "version": (change(version=2), "expected state version 1, got 2"),
    "compressor": (change(compressor="SignSGD"), "expected the state of a TopK, got that of a SignSGD"),
    "rank": (
        change(rank=1),
        "expected the state of rank 0 of 2, got that of rank 1 of 2; "
        "every rank must load the state that it has saved itself",
    ),
    "size": (
        change(size=4),
        "expected the state of rank 0 of 2, got that of rank 0 of 4; "
        "to go on with another number of ranks pass the list of all ranks' states",
    ),
    "one state twice": (
        lambda s: [s, s],
        f"{ALL_RANKS}rank 0 of 2, rank 0 of 2",
    ),
    "a missing state": (lambda s: [s], f"{ALL_RANKS}rank 0 of 2"),
    "mixed sizes": (
        lambda s: [s, {**s, "rank": 1, "size": 3}],
        f"{ALL_RANKS}rank 0 of 2, rank 1 of 3",
    ),
    "a list of others": (lambda s: [s, {**s, "rank": 1, "version": 9}], "expected state version 1, got 9"),
    "no states": (lambda s: [], f"{ALL_RANKS}none"),
    "another model": (
        lambda s: {**s, "parameters": {"optimizer0/other": s["parameters"]["optimizer0/layer0"]}},
        "the state has parameters that this model lacks: expected ['optimizer0/layer0', 'optimizer0/layer1'], "
        "got ['optimizer0/other']",
    ),
    "another shape": (
        lambda s: {**s, "parameters": {"optimizer0/layer0": {"residual": torch.zeros(4), "steps": 1}}},
        "expected 6 elements in the residual of 'optimizer0/layer0', got 4",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(what):
    spoil, message = REFUSED[what]
    (*alive, runtime), state = trained(six(1, 2), rank=0, size=2)
    before = listed(runtime.state_dict("TopK", 0, 2))
    with pytest.raises(StateError) as caught:
        runtime.load_state_dict(spoil(copy.deepcopy(state)), "TopK", 0, 2)
    assert str(caught.value) == message
    assert listed(runtime.state_dict("TopK", 0, 2)) == before
    assert alive


def test_a_state_refused_at_its_second_parameter_changes_nothing():
    (*alive, runtime), state = trained(six(1, 2))
    before = listed(state)
    for parameter in state["parameters"].values():
        parameter["residual"] = torch.zeros(6)
    state["parameters"]["optimizer0/layer1"]["residual"] = torch.zeros(4)
    with pytest.raises(StateError):
        runtime.load_state_dict(state, "TopK", 0, 1)
    assert listed(runtime.state_dict("TopK", 0, 1)) == before
    assert alive


@pytest.mark.parametrize("field", ["compressor", "rank", "size", "parameters"])
def test_a_state_without_a_field_is_refused(field):
    _, state = trained(six(1))
    del state[field]
    with pytest.raises(StateError):
        Runtime().load_state_dict(state, "TopK", 0, 1)


def test_a_state_of_another_model_is_found_at_the_first_step():
    _, state = trained(six(1, 2))
    runtime, owner, params = Runtime(), Owner(), parameters(1)
    runtime.load_state_dict(state, "TopK", 0, 1)
    scope = runtime.scope(owner, None, params, WeakIdKeyDictionary)
    runtime.entry(scope, params[0], "layer1")
    message = r"expected some of \['layer1'\], got \['optimizer0/layer0'\]"
    with pytest.raises(StateError, match=message):
        runtime.check_all_restored_used(scope)
    runtime.check_all_restored_used(scope)  # said once


# --- Another number of ranks -----------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (4, 3), (3, 1), (1, 4), (3, 3), (1, 1)])
@pytest.mark.parametrize("order", [1, -1])
def test_redistribution_keeps_what_is_owed(old, new, order):
    """Averages divide by the number of ranks, so it is the sum of residuals over that number."""
    states = [trained([torch.arange(6.0) * 12 + rank, None], rank, old)[1] for rank in range(old)]
    before = copy.deepcopy([listed(s) for s in states])
    shares = []
    for rank in range(new):
        runtime = Runtime()
        runtime.load_state_dict(states[::order], "TopK", rank, new)
        parts = runtime.state_dict("TopK", rank, new)["parameters"]
        assert parts["optimizer0/layer1"] == {"residual": None, "steps": 5}
        assert parts["optimizer0/layer0"]["steps"] == 5
        shares.append(parts["optimizer0/layer0"]["residual"])
    due = sum(s["parameters"]["optimizer0/layer0"]["residual"].double() for s in states) / old
    got = sum(share.double() for share in shares if share is not None) / new
    # The factor new / old is rounded once, to float32, in each of at most 4 shares.
    torch.testing.assert_close(got, due, rtol=4 * 2**-24, atol=0)
    assert [listed(s) for s in states] == before
    if new == old:
        assert [s.tolist() for s in shares] == [
            s["parameters"]["optimizer0/layer0"]["residual"].tolist() for s in states
        ]


def two_states(**parameters_of_rank):
    _, state = trained(six(1))
    one = state["parameters"]["optimizer0/layer0"]
    names = [parameters_of_rank["zero"], parameters_of_rank["one"]]
    return [{**state, "rank": r, "size": 2, "parameters": dict.fromkeys(names[r], one)} for r in range(2)]


def test_a_parameter_that_rank_1_lacks_is_refused():
    with pytest.raises(StateError, match="expected 'a/y' in the states of all ranks, but rank 1 lacks it"):
        Runtime().load_state_dict(two_states(zero=["a/x", "a/y"], one=["a/x"]), "TopK", 0, 1)


@pytest.mark.parametrize(("zero", "one", "rank", "size"), [(["a/x"], ["a/x", "a/y"], 0, 1), (["a/y"], ["a/x"], 0, 2)])
def test_a_parameter_that_any_rank_lacks_is_refused_on_every_rank(zero, one, rank, size):
    with pytest.raises(StateError, match="in the states of all ranks"):
        Runtime().load_state_dict(two_states(zero=zero, one=one), "TopK", rank, size)


GARBAGE = {
    "residual a list": {"optimizer0/layer0": {"residual": [1.0] * 6, "steps": 1}},
    "residual a number": {"optimizer0/layer0": {"residual": 1.0, "steps": 1}},
    "residual of integers": {"optimizer0/layer0": {"residual": torch.arange(6), "steps": 1}},
    "residual complex": {"optimizer0/layer0": {"residual": torch.zeros(6, dtype=torch.complex64), "steps": 1}},
    "residual not flat": {"optimizer0/layer0": {"residual": torch.zeros(2, 3), "steps": 1}},
    "residual NaN": {"optimizer0/layer0": {"residual": torch.full((6,), float("nan")), "steps": 1}},
    "residual infinite": {"optimizer0/layer0": {"residual": np.full(6, -np.inf, np.float32), "steps": 1}},
    "no residual": {"optimizer0/layer0": {"steps": 1}},
    "no steps": {"optimizer0/layer0": {"residual": None}},
    "steps a word": {"optimizer0/layer0": {"residual": None, "steps": "1"}},
    "steps negative": {"optimizer0/layer0": {"residual": None, "steps": -1}},
    "entry None": {"optimizer0/layer0": None},
    "no label": {"layer0": {"residual": None, "steps": 1}},
    "key a number": {3: {"residual": None, "steps": 1}},
    "no dict": [1, 2],
}


@pytest.mark.parametrize("fresh", [True, False], ids=["before the first step", "while training"])
@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_refused_and_changes_nothing(what, fresh):
    alive, state = trained(six(1))
    runtime = Runtime() if fresh else alive[2]
    before = listed(runtime.state_dict("TopK", 0, 1))
    with pytest.raises(StateError, match="expected "):
        runtime.load_state_dict({**state, "parameters": GARBAGE[what]}, "TopK", 0, 1)
    assert listed(runtime.state_dict("TopK", 0, 1)) == before


def test_what_is_loaded_does_not_go_to_a_model_that_is_gone():
    (owner, params, runtime), state = trained(six(1))
    owner.itself = owner  # only the garbage collector can free it
    del owner
    runtime.load_state_dict(state, "TopK", 0, 1)
    new = Owner()
    scope = runtime.scope(new, None, params, WeakIdKeyDictionary)
    entry = runtime.entry(scope, params[0], "layer0")
    assert entry.restored and torch.equal(entry.residual, six(1)[0])


def test_a_state_is_not_saved_while_gradients_are_queued():
    class Busy:
        busy = True

    (_, _, runtime), _ = trained(six(1))
    runtime.scopes[0].exchanges["0"] = Busy()
    with pytest.raises(StateError, match=r"between steps.*opt\.synchronize\(\)"):
        runtime.state_dict("TopK", 0, 1)
