"""TensorFlow on real ranks: the cases of ``tf_cases``, and what goes wrong."""

import functools
import re

import pytest
from launch import available, run_cases, run_job

job = functools.partial(run_job, "tf_misuse.py")
#: launcher, ranks, transport, and what need not be run that way, since it is in another one; see also
#: ``tf_cases/conftest.py``.
WAYS = {
    "mpirun-4": ("mpirun", 4, "auto", ("methods", "lifetime", "refused", "state", "tf_keras")),
    "mpirun-2-mpi4py": ("mpirun", 2, "mpi", ("methods", "lifetime", "state", "tf_keras")),
    "gloo-2": ("horovodrun --gloo", 2, "auto", ("exact", "refused")),
}


@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("cases")
@pytest.mark.parametrize("way", WAYS)
def test_cases(way):
    launcher, ranks, transport, without = WAYS[way]
    if available(launcher):
        pytest.skip(available(launcher))
    variables = {"HVD_COMPRESS_TEST_TRANSPORT": transport, "TF_USE_LEGACY_KERAS": "1"}
    files = tuple(f"test_{name}.py" for name in without)
    run_cases("tf_cases", launcher, ranks, without=files, **variables)


@pytest.mark.xdist_group("cases")
def test_cases_beside_pytorch():
    run_cases("tf_cases/beside_torch", "mpirun", 2)


HEARD = {
    "ratio": r"TopK.ratio is 0.05 on rank 0 and 0.01 on rank 1",
    "transport": r"TopK.transport is 'mpi' on rank 0 and 'horovod' on rank 1",
    "shape": r"the shape of parameter 'v1:0' is \[50, 60\] on rank 0 and \[51, 60\] on rank 1",
}
DISAGREES = "rank 1 does not agree with rank 0: "


def test_ranks_that_disagree():
    """All of them raise, and can go on with other variables."""
    finished = job("disagreements")
    assert finished.status == 0, finished.output[-3000:]
    for scenario, expected in HEARD.items():
        for rank in range(2):
            said = f"{scenario} on rank {rank}: {DISAGREES}{expected}"
            assert re.search(said, finished.output), (said, finished.output[-3000:])
    assert "has finished" not in finished.output
    assert finished.output.count("has met all of them") == 2


def test_ranks_that_disagree_while_horovod_waits():
    finished = job("number")
    assert finished.status != 0
    expected = f"HandshakeError: {DISAGREES}parameter 'v2:0' is absent on rank 0 and present on rank 1"
    assert re.search(expected, finished.output), finished.output[-3000:]
    assert "has finished" not in finished.output


def test_a_rank_that_leaves_ends_the_job():
    finished = job("exits")
    assert finished.status != 0, finished.output[-3000:]
    assert "rank 0 has finished" not in finished.output


def test_waiting_is_reported_and_can_be_ended():
    """After ``hvd.join`` Horovod itself waits for ever, inside the graph."""
    finished = job("join", HVD_COMPRESS_TIMEOUT="5")
    assert finished.status != 0
    assert "rank 0 has finished" not in finished.output
    waits = r"WARNING rank 0 of 2 has waited \d+ s for the other ranks in the exchange of 'v\d:0'; usual causes: .*join"
    assert re.search(waits, finished.output), finished.output[-3000:]
    assert re.search(r"rank 0 of 2 gave up on the exchange of 'v\d:0' after \d+ s", finished.output)


def test_mpi_demanded_but_missing():
    finished = job("mpi_without_mpi4py")
    assert finished.status != 0
    assert re.search(r"TransportError: transport='mpi' was asked for, but rank 0 cannot exchange through mpi4py",
                     finished.output), finished.output[-3000:]  # fmt: skip


def test_nothing_is_said_when_all_is_well():
    finished = job("fine")
    assert finished.status == 0 and "WARNING" not in finished.output.replace("WARNING: All log", ""), finished.output
