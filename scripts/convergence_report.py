"""The tables and the picture that scripts/convergence makes of its results."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from convergence_methods import METHODS
from convergence_plan import Item, Plan, Results
from convergence_tasks import RANKS, TASKS, Task

# Where no limit is set for a method, what counts as losing: points of accuracy, per cent of perplexity.
USUAL_LIMIT = {"images": 1.0, "text": 2.0}
UNITS = {"images": "points", "text": "%"}
TITLES = {
    "images": "Fashion-MNIST, test accuracy in per cent (higher is better)",
    "text": "King James Bible, perplexity a character (lower is better)",
}


@dataclass(frozen=True)
class Row:
    """What a method has reached on a task."""

    method: str
    scores: list[float]
    bytes_a_step: float
    ratio: float
    rate: float
    momentum: float
    diverged: bool

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)


def rows_of(plan: Plan, results: Results, task: str) -> list[Row]:
    """Return the methods of which at least one reported run is there, in the plan's order."""
    rows = [_row(item, results) for item in plan.items if item.task == task]
    return [row for row in rows if row is not None]


def _row(item: Item, results: Results) -> Row | None:
    runs = item.final(results) or []
    found = [result for result in map(results.get, runs) if result is not None]
    if not found:
        return None
    sent = statistics.fmean(result["bytes"] for result in found)
    return Row(
        item.method,
        [result["score"] for result in found],
        sent,
        found[0]["dense_bytes"] / sent,
        runs[0].rate,
        runs[0].momentum,
        any(result["diverged"] for result in found),
    )


def loss(task: str, row: Row, dense: Row) -> float:
    """Return by how much a method is worse than dense: in points of accuracy, or per cent of perplexity."""
    if TASKS[task].higher_is_better:
        return dense.mean - row.mean
    return 100 * (row.mean / dense.mean - 1)


def _line(task: str, row: Row, dense: Row | None) -> str:
    spread = f" ± {statistics.stdev(row.scores):.2f}" if len(row.scores) > 1 else ""
    against, verdict = "", ""
    if dense is not None and row.method != "dense":
        worse = loss(task, row, dense)
        sign = -worse if TASKS[task].higher_is_better else worse
        against = f"{sign:+.2f}"
        method = METHODS[row.method]
        limit = method.limits.get(task)
        if worse > (limit or USUAL_LIMIT[task]):
            outside = f"**outside its limit of {limit:g}**" if limit else "loses"
            verdict = f"{outside}: {'it diverged; ' if row.diverged else ''}{method.why or 'not explained'}"
        elif limit:
            verdict = f"within its limit of {limit:g}"
    return (
        f"| `{row.method}` | {row.mean:.2f}{spread} | {len(row.scores)} | {against} | {row.bytes_a_step:,.0f} | "
        f"{row.ratio:,.1f}x | {row.rate:.3g} / {row.momentum:g} | {verdict} |"
    )


def table(task: str, rows: list[Row]) -> list[str]:
    """Return the lines of a task's table, the most bytes first."""
    dense = next((row for row in rows if row.method == "dense"), None)
    lines = [
        f"| method | mean ± std | seeds | against dense ({UNITS[task]}) | bytes a step | ratio | rate / momentum | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_line(task, row, dense) for row in sorted(rows, key=lambda row: -row.bytes_a_step)]


def _grid(task: Task) -> str:
    rates = ", ".join(f"{rate:g}" for rate in task.rates)
    return f"{rates} times (1 - momentum), with momentum {' and '.join(f'{m:g}' for m in task.momenta)}"


def _intro(plan: Plan) -> list[str]:
    lines = [
        "# What every method reaches, and what it sends",
        "",
        "Written by `scripts/convergence --report` from the runs of `scripts/convergence`.",
        "",
        f"{RANKS} ranks, SGD, a learning rate that rises for 5 % of the steps and then falls linearly to 0.",
        "The ranks are simulated in one process; `tests/parallel/cases/test_convergence.py` shows on real ranks",
        "that this is the same arithmetic. Bytes are those that one rank contributes in a step, as",
        "`compression.stats()` counts them: payloads, headers, tensors that travel dense, and Horovod's tokens.",
        "How often they cross the network is another matter: see the README on allgather and allreduce.",
        "",
        "Learning rate and momentum were chosen for each method alone, `dense` included, in the same way: short runs",
        "over one grid, judged on training data that was held out.",
        "",
    ]
    for name, task in TASKS.items():
        items = [item for item in plan.items if item.task == name]
        if items:
            lines += [
                f"- {name}: {items[0].steps:,} steps, {task.batch} examples a rank; grid of learning rates "
                f"{_grid(task)}; {items[0].tuning_steps:,} steps each."
            ]
    units = [f"`{name}` ({method.unit:g})" for name, method in METHODS.items() if method.unit != 1]
    return [
        *lines,
        "- For methods whose result has the magnitude 1 instead of the gradient's the grid is scaled: "
        f"{', '.join(units)}.",
        "- DGC has its momentum in itself, all others in the optimizer.",
        "",
        "Where a method is worse than dense by more than the limit that is set for it, or by more than "
        f"{USUAL_LIMIT['images']:g} point or {USUAL_LIMIT['text']:g} %",
        "where none is set, the table says so, and the likely reason.",
        "",
        "![Accuracy and perplexity over bytes a step](results.png)",
        "",
    ]


def write_report(plan: Plan, results: Results, docs: Path) -> list[Path]:
    """Write results.md and results.png, and return their paths."""
    docs.mkdir(parents=True, exist_ok=True)
    by_task = {task: rows_of(plan, results, task) for task in TASKS}
    lines = _intro(plan)
    for task, rows in by_task.items():
        asked = [item for item in plan.items if item.task == task]
        lines += [f"## {TITLES[task]}", ""]
        if len(rows) < len(asked):
            missing = [item.method for item in asked if item.method not in {row.method for row in rows}]
            lines += [f"Not run yet: {', '.join(f'`{method}`' for method in missing)}.", ""]
        lines += [*table(task, rows), ""] if rows else []
    text, picture = docs / "results.md", docs / "results.png"
    text.write_text("\n".join(lines).rstrip() + "\n")
    draw(by_task, picture)
    return [text, picture]


def draw(by_task: dict[str, list[Row]], path: Path) -> None:
    """Draw scores over bytes a step."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(1, len(by_task), figsize=(13, 6.5), layout="constrained")
    for axes, (task, rows) in zip(all_axes, by_task.items(), strict=True):
        axes.set(xscale="log", xlabel="bytes that a rank sends in a step", title=TITLES[task].replace(", ", "\n", 1))
        axes.grid(color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
        if not rows:
            continue
        best, worst = _range(task, rows)
        axes.set_ylim(*sorted((best, worst)))
        if not TASKS[task].higher_is_better:
            axes.invert_yaxis()
        for row in rows:
            color = "#0b62a4" if task in METHODS[row.method].limits else "#999999"
            outside = (row.mean < worst) if TASKS[task].higher_is_better else (row.mean > worst)
            y = worst if outside else row.mean
            axes.plot(row.bytes_a_step, y, "v" if outside else "o", color=color, ms=6, clip_on=False)
            note = f"{row.method} ({row.mean:.1f})" if outside else row.method
            axes.annotate(
                note, (row.bytes_a_step, y), xytext=(4, 3), textcoords="offset points", fontsize=7, color=color,
                rotation=20,
            )  # fmt: skip
        dense = next((row for row in rows if row.method == "dense"), None)
        if dense is not None:
            axes.axhline(dense.mean, color="#777777", lw=1, ls="--")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _range(task: str, rows: list[Row]) -> tuple[float, float]:
    """Return the ends of the axis: methods that learn nothing would squeeze all others together."""
    scores = [row.mean for row in rows]
    if TASKS[task].higher_is_better:
        best = max(scores)
        return best + 0.5, max(min(scores) - 0.3, best - 8)
    best = min(scores)
    return best * 0.98, min(max(scores) * 1.02, best * 1.35)
