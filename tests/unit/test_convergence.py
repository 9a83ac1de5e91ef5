"""scripts/convergence: choice of settings, going on after a stop, report."""

import concurrent.futures as futures
import json
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))
import convergence_tasks as tasks
from convergence_methods import METHODS
from convergence_plan import Plan, Results, run_all
from convergence_report import rows_of, table, write_report

DENSE_BYTES = 1000.0


def fake(run):
    """Pretend to train: the best learning rate over ``1 - momentum`` is about 0.3, momentum better than none."""
    away = abs(run.rate / METHODS[run.method].unit / (1 - run.momentum) - 0.3)
    worse = 3 * (run.method == "TopK(0.01)")
    score = 90 - away + run.momentum - worse + 0.1 * run.seed
    score = score if run.task == "images" else 100 - score
    sent = DENSE_BYTES if run.method == "dense" else 10.0
    return {"score": score, "diverged": False, "bytes": sent, "dense_bytes": DENSE_BYTES, "seconds": 1.0}


def run_with_threads(plan, results, train=fake, jobs=2):
    run_all(plan, results, jobs, train, futures.ThreadPoolExecutor(jobs))


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "deep" / "results.jsonl")


def test_every_method_can_be_made_and_every_listed_one_has_a_row():
    kinds = {type(method.make(0.9, steps)) for method in METHODS.values() for steps in (10, 1000)}
    import hvd_compress.compressors as compressors

    assert set(compressors.ALL.values()) <= kinds


def test_all_methods_are_tuned_over_the_same_grid():
    grids = set()
    for item in Plan.make("images *").items:
        unit = METHODS[item.method].unit
        grids.add(tuple((round(run.rate / unit, 9), run.momentum, run.steps) for run in item.tuning()))
    assert len(grids) == 1


def test_the_best_short_run_decides(results):
    plan = Plan.make("images SignSGD")
    (item,) = plan.items
    assert item.final(results) is None
    run_with_threads(plan, results)
    rate, momentum = item.chosen(results)
    assert momentum == 0.9
    assert rate == pytest.approx(0.3 * 0.1 * METHODS["SignSGD"].unit)


def test_lower_is_better_for_perplexity(results):
    plan = Plan.make("text dense")
    run_with_threads(plan, results)
    assert plan.items[0].chosen(results)[1] == 0.9


def test_it_goes_on_where_it_was_stopped(results):
    plan = Plan.make("images dense")
    made = []

    def stops(run):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(run.key)
        return fake(run)

    with pytest.raises(KeyboardInterrupt):
        run_with_threads(plan, results, stops, jobs=1)
    # The computer went down in the middle of a line.
    with results.path.open("a") as file:
        file.write('{"key": "images dense fin')
    again = Results(results.path)
    assert set(again.by_key) == set(made)
    expected = plan.items[0].left(again)

    def counts(run):
        assert run.key not in made
        made.append(run.key)
        return fake(run)

    run_with_threads(plan, again, counts)
    assert expected == plan.items[0].steps * 3 + plan.items[0].tuning_steps * (len(made) - 3 - 3)
    assert plan.items[0].left(again) == 0
    lines = results.path.read_text().splitlines()
    assert len([line for line in lines if line.endswith("}") and json.loads(line)]) == len(made)
    # Nothing is left to do.
    run_with_threads(plan, Results(results.path), lambda run: pytest.fail(run.key))


def test_a_run_that_fails_does_not_stop_the_others(results):
    plan = Plan.make("images PowerSGD(4)")
    plan.items.extend(Plan.make("images dense").items)

    def fails(run):
        if run.method != "dense" and run.momentum:
            raise ValueError("no such thing")
        return fake(run)

    failed = run_all(plan, results, 2, fails, futures.ThreadPoolExecutor(2))
    assert len(failed) == 4
    assert plan.items[0].final(results) is None and plan.items[1].left(results) == 0


def test_only_and_seeds_and_quick():
    assert [item.method for item in Plan.make("text DGC*").items] == ["DGC(0.001)", "DGC(0.01, nesterov)"]
    assert [item.seeds for item in Plan.make("text DGC*").items] == [3, 1]
    assert [item.seeds for item in Plan.make("text DGC*", seeds=2).items] == [2, 2]
    (quick,), (full,) = Plan.make("text dense", quick=True).items, Plan.make("text dense").items
    assert quick.seeds == 1 and quick.steps * 20 == full.steps
    assert not Plan.make("nothing").items


def test_the_most_important_methods_come_first():
    limited = [item.task in METHODS[item.method].limits for item in Plan.make().items]
    assert limited == sorted(limited, reverse=True)
    assert limited.count(True) == 14


def test_the_report_says_who_loses_and_why(results, tmp_path):
    plan = Plan.make("* dense")
    plan.items.extend(Plan.make("* TopK(0.01)").items)
    run_with_threads(plan, results)
    rows = rows_of(plan, results, "images")
    assert [row.method for row in rows] == ["dense", "TopK(0.01)"]
    assert rows[0].mean == pytest.approx(91.0, abs=0.5) and rows[1].ratio == 100
    lines = "\n".join(table("images", rows))
    assert "-3.00" in lines and "**outside its limit of 0.5**" in lines and METHODS["TopK(0.01)"].why in lines
    text, picture = write_report(plan, results, tmp_path / "docs")
    assert "100.0x" in text.read_text() and "chosen for each method alone" in text.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_report_of_nothing_says_so(results, tmp_path):
    text, _ = write_report(Plan.make(), results, tmp_path)
    assert text.read_text().count("Not run yet") == 2


@pytest.mark.parametrize("method", ["dense", "TopK(0.01)", "DGC(0.001)"])
def test_training_learns(monkeypatch, method):
    """On images with a bar whose place tells the label, dense learns, and all send what they should."""
    generator = torch.Generator().manual_seed(0)
    labels = 2 * torch.randint(5, (128,), generator=generator)
    images = torch.randn(128, 1, 28, 28, generator=generator) * 0.1
    images += 3 * torch.nn.functional.one_hot(labels * 3, 28)[:, None, None, :]
    monkeypatch.setattr(tasks, "_images", lambda tuning: ((images, labels), (images, labels)))
    result = tasks.train(tasks.Run("images", method, False, 0.1, 0.9, 0, 12))
    assert not result["diverged"] and result["dense_bytes"] == 4 * 206_922
    assert result["score"] > (60 if method == "dense" else 15)
    assert result["bytes"] == result["dense_bytes"] if method == "dense" else result["bytes"] < 400_000


def test_what_diverges_is_said(monkeypatch):
    images, labels = torch.randn(256, 1, 28, 28), torch.randint(10, (256,))
    monkeypatch.setattr(tasks, "_images", lambda tuning: ((images, labels), (images, labels)))
    result = tasks.train(tasks.Run("images", "dense", True, 1e6, 0.9, 0, 25))
    assert result["diverged"] and result["score"] == 10.0
