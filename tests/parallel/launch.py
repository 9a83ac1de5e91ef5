"""Start real ranks with mpirun or horovodrun."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
BIN = pathlib.Path(sys.executable).parent


@dataclass
class Finished:
    """How a job ended."""

    status: int
    output: str


def command(launcher: str, ranks: int, arguments: list[str]) -> list[str]:
    """Return the command line that runs Python with ``arguments`` on every rank."""
    if launcher == "mpirun":
        start = [str(BIN / "mpirun"), "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    else:
        start = [str(BIN / "horovodrun"), "-np", str(ranks), *launcher.split()[1:]]
    return [*start, sys.executable, *arguments]


def run(launcher: str, ranks: int, arguments: list[str], timeout: float = 300.0, **variables: str) -> Finished:
    """Run a job to its end; kill it, with all its ranks, after ``timeout`` seconds."""
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        **variables,
    }
    process = subprocess.Popen(
        command(launcher, ranks, arguments),
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return Finished(-1, f"{_killed(process)}\n(killed after {timeout} s: it hung)")
    except BaseException:  # the test's own time limit, or the user's Ctrl-C: ranks would go on for ever
        _killed(process)
        raise
    return Finished(process.returncode, output)


def _killed(process: subprocess.Popen) -> str:
    """End a job with all its ranks; return what it has written."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def available(launcher: str) -> str:
    """Return what is missing for ``launcher``, or an empty string."""
    program = launcher.split(maxsplit=1)[0]
    if not (BIN / program).exists() and shutil.which(program) is None:
        return f"{program} is not installed; run scripts/setup"
    return ""


def run_cases(
    folder: str, launcher: str, ranks: int, timeout: float = 1100.0, without: tuple[str, ...] = (), **variables: str
) -> None:
    """Run the files of a folder of cases on real ranks, and require that all pass the same tests."""
    files = sorted(str(path) for path in (HERE / folder).glob("test_*.py") if path.name not in without)
    arguments = ["-m", "pytest", "-x", "--color=no", "-p", "no:cacheprovider", *files]
    finished = run(launcher, ranks, arguments, timeout, HVD_COMPRESS_RANK_TESTS="1", **variables)
    assert finished.status == 0, finished.output[-8000:]
    # Every rank has run, and skipped, the same tests: none is silently left out.
    endings = [line.split(" in ")[0].split(">:")[-1] for line in finished.output.splitlines() if " passed" in line]
    assert len(endings) == ranks and len(set(endings)) == 1, endings


def run_job(script: str, scenario: str, launcher: str = "mpirun", ranks: int = 2, **variables: str) -> Finished:
    """Run a scenario of a script in ``jobs``, which must end by itself; skip where the launcher is missing."""
    if available(launcher):
        pytest.skip(available(launcher))
    # Numba takes longer to be loaded than these few steps.
    variables.setdefault("HVD_COMPRESS_KERNELS", "0")
    finished = run(launcher, ranks, [str(HERE / "jobs" / script), scenario], 100.0, **variables)
    assert "it hung" not in finished.output, finished.output[-3000:]
    return finished
