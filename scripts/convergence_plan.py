"""Which runs scripts/convergence makes, in which order, and where their results are kept."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import multiprocessing
import sys
from collections.abc import Callable, Container
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence_methods import METHODS
from convergence_tasks import TASKS, Run, Task, train
from tqdm import tqdm

Result = dict[str, Any]
QUICK = 20  # times fewer steps


class Results:
    """One JSON line for every finished run, in a file that is only ever appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[str, Result] = {}
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            try:
                result = json.loads(line)
                self.by_key[result["key"]] = result
            except (ValueError, KeyError, TypeError):
                continue  # cut when the computer went down; it is run again
        self._newline = text != "" and not text.endswith("\n")

    def add(self, run: Run, result: Result) -> None:
        """Keep a result."""
        result = {"key": run.key, **dataclasses.asdict(run), **result}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(("\n" if self._newline else "") + json.dumps(result) + "\n")
        self._newline = False
        self.by_key[run.key] = result

    def get(self, run: Run) -> Result | None:
        """Return the result of a run, None if it has not been made."""
        return self.by_key.get(run.key)


@dataclass(frozen=True)
class Item:
    """A method on a task: the runs of its tuning phase, and those that follow with what it has chosen."""

    task: str
    method: str
    seeds: int
    steps: int
    tuning_steps: int

    def tuning(self) -> list[Run]:
        """Return a short run for each point of the grid, which is the same for all methods but for its unit."""
        task, unit = TASKS[self.task], METHODS[self.method].unit
        return [
            Run(self.task, self.method, True, unit * rate * (1 - momentum), momentum, 0, self.tuning_steps)
            for momentum in task.momenta
            for rate in task.rates
        ]

    def chosen(self, results: Results) -> tuple[float, float] | None:
        """Return the learning rate and momentum of the best short run, None while some are missing."""
        found = [(run, results.get(run)) for run in self.tuning()]
        if any(result is None for _, result in found):
            return None
        sign = 1 if TASKS[self.task].higher_is_better else -1
        # Of equal ones, as when none has learned anything, the first: the smallest rate without momentum.
        run, _ = max(found, key=lambda pair: sign * pair[1]["score"])  # type: ignore[index]
        return run.rate, run.momentum

    def final(self, results: Results) -> list[Run] | None:
        """Return the runs that are reported, None before tuning has ended."""
        chosen = self.chosen(results)
        if chosen is None:
            return None
        rate, momentum = chosen
        return [Run(self.task, self.method, False, rate, momentum, seed, self.steps) for seed in range(self.seeds)]

    def waiting(self, results: Results) -> list[Run]:
        """Return the runs that can be made now."""
        return [run for run in self.final(results) or self.tuning() if results.get(run) is None]

    def left(self, results: Results) -> int:
        """Return the number of steps that are still to be made."""
        final = self.final(results)
        if final is None:
            tuning = sum(results.get(run) is None for run in self.tuning())
            return tuning * self.tuning_steps + self.seeds * self.steps
        return sum(results.get(run) is None for run in final) * self.steps


@dataclass(frozen=True)
class Plan:
    """All that is to be run, the most important first."""

    items: list[Item]

    @classmethod
    def make(cls, only: str = "*", seeds: int | None = None, quick: bool = False) -> Plan:
        """Return what matches a pattern of ``"TASK METHOD"``."""
        items = []
        for method in METHODS:
            for task in TASKS.values():
                if fnmatch.fnmatch(f"{task.name} {method}", only):
                    items.append(_item(task, method, seeds, quick))
        # What has limits first: they are what must hold.
        items.sort(key=lambda item: item.task not in METHODS[item.method].limits)
        return cls(items)


def _item(task: Task, method: str, seeds: int | None, quick: bool) -> Item:
    usual = 1 if quick or task.name not in METHODS[method].limits else 3
    divisor = QUICK if quick else 1
    return Item(task.name, method, seeds or usual, task.steps // divisor, task.tuning_steps // divisor)


def run_all(
    plan: Plan, results: Results, jobs: int, train: Callable[[Run], Result] = train, pool: Any = None
) -> list[str]:
    """Make all runs that are missing, so many at a time, and show how long it will take.

    A run that raises is named, and the others go on.

    Args:
        plan: what to run.
        results: what there is; it is added to.
        jobs: processes.
        train: makes a run.
        pool: of workers; None starts processes.

    Returns:
        The keys of the runs that raised.
    """
    total = sum(item.left(results) for item in plan.items)
    # A new interpreter for each worker: PyTorch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    interactive = sys.stderr.isatty()
    bar = tqdm(total=total, unit="step", mininterval=1 if interactive else 60, smoothing=0.1, dynamic_ncols=interactive)
    with pool or futures.ProcessPoolExecutor(jobs, context) as workers, bar:
        try:
            return _run(plan, results, jobs, train, workers, bar)
        except BaseException:
            # Leaving the pool waits for what it has begun.
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _run(
    plan: Plan, results: Results, jobs: int, train: Callable[[Run], Result], workers: futures.Executor, bar: Any
) -> list[str]:
    under_way: dict[futures.Future[Result], Run] = {}
    failed: list[str] = []
    while True:
        busy = {*failed, *(run.key for run in under_way.values())}
        for run in _ready(plan, results, busy, jobs - len(under_way)):
            under_way[workers.submit(train, run)] = run
        if not under_way:
            return failed
        done, _ = futures.wait(under_way, return_when=futures.FIRST_COMPLETED)
        for future in done:
            run = under_way.pop(future)
            bar.update(run.steps)
            error = future.exception()
            if isinstance(error, Exception) and not isinstance(error, BrokenProcessPool):
                failed.append(run.key)
                bar.write(f"{run.key}: {type(error).__name__}: {error}")
                continue
            result = future.result()
            results.add(run, result)
            bar.write(f"{run.key}: {result['score']:.2f}{' (diverged)' if result['diverged'] else ''}")


def _ready(plan: Plan, results: Results, busy: Container[str], count: int) -> list[Run]:
    ready: list[Run] = []
    for item in plan.items:
        if len(ready) >= count:
            break
        ready += [run for run in item.waiting(results) if run.key not in busy]
    return ready[:count]
