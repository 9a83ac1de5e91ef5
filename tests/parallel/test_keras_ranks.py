"""Keras 3: every file of ``keras_cases`` on real ranks, and a script of 2023."""

import re
from importlib.metadata import version

import pytest
from launch import HERE, available, run, run_cases

if int(version("keras").split(".")[0]) < 3:
    pytest.skip(f"Keras 3 is not installed, but {version('keras')}", allow_module_level=True)

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_LOG_LEVEL": "error"}


@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("cases")
@pytest.mark.parametrize("ranks", [2, 4])
def test_cases(ranks):
    if available("mpirun"):
        pytest.skip(available("mpirun"))
    run_cases("keras_cases", "mpirun", ranks, **QUIET)


def test_script_of_2023(tmp_path):
    """It runs after its import has been changed, and its checkpoints load without Horovod."""
    if available("mpirun"):
        pytest.skip(available("mpirun"))
    finished = run("mpirun", 2, [str(HERE / "jobs" / "keras_2023.py"), str(tmp_path)], timeout=200, **QUIET)
    assert finished.status == 0, finished.output[-8000:]
    losses = re.findall(r"rank (\d) of 2: loss (\S+) weights (\S+)", finished.output)
    assert sorted(rank for rank, _, _ in losses) == ["0", "1"], finished.output[-3000:]
    assert losses[0][1:] == losses[1][1:]  # averaged over the ranks, and trained together
    assert (tmp_path / "checkpoint-3.keras").exists()
