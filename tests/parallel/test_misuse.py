"""Mistakes and accidents end with a clear message on every rank, and never hang."""

import functools
import re
import time

import pytest
from launch import run_job

job = functools.partial(run_job, "misuse.py")

HEARD = {
    "ratio": r"TopK.ratio is 0.05 on rank 0 and 0.01 on rank 1",
    "shape": r"the shape of parameter 'b' is \[50, 60\] on rank 0 and \[51, 60\] on rank 1",
    "order": r"the shape of parameter 'a' is \[40, 50\] on rank 0 and \[50, 60\] on rank 1",
    "other_transport": r"TopK.transport is 'auto' on rank 0 and 'horovod' on rank 1",
}
# A version cannot change within a process; and in the others Horovod itself waits for what one rank lacks.
ALONE = {
    "version": r"the version of hvd_compress is '?[\w.]+'? on rank 0 and '?0.0.9'? on rank 1",
    "number": r"parameter 'aa' is absent on rank 0 and present on rank 1",
    "frozen_on_one_rank": r"parameter 'a' is present on rank 0 and absent on rank 1",
}
DISAGREES = "rank 1 does not agree with rank 0: "


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_ranks_that_disagree(launcher):
    """All of them raise, and can go on with another optimizer."""
    finished = job("disagreements", launcher)
    assert finished.status == 0, finished.output[-3000:]
    for scenario, expected in HEARD.items():
        for rank in range(2):
            said = f"{scenario} on rank {rank}: {DISAGREES}{expected}"
            assert re.search(said, finished.output), (said, finished.output[-3000:])
    assert "has finished" not in finished.output
    assert finished.output.count("has met all of them") == 2


@pytest.mark.parametrize(
    "scenario, launcher", [*((scenario, "mpirun") for scenario in ALONE), ("number", "horovodrun --gloo")]
)
def test_ranks_whose_disagreement_ends_the_job(scenario, launcher):
    finished = job(scenario, launcher)
    assert finished.status != 0
    # mpirun stops the others as soon as one has ended, so at least one rank has said it;
    # test_exchange.py holds that all ranks raise it.
    assert re.search(f"HandshakeError: {DISAGREES}{ALONE[scenario]}", finished.output), finished.output[-3000:]
    assert "has finished" not in finished.output


# With MPI horovodrun starts mpirun, which then sees to the ranks; without it Horovod's own launcher does.
@pytest.mark.parametrize(
    "scenario, launcher",
    [
        *((s, "mpirun") for s in ("killed", "killed_in_exchange", "raises", "raises_in_exchange", "exits_in_exchange")),
        ("killed_in_exchange", "horovodrun"),
        *((s, "horovodrun --gloo") for s in ("killed_in_exchange", "raises", "exits_in_exchange")),
    ],
)
def test_a_rank_that_leaves_ends_the_job(scenario, launcher):
    start = time.monotonic()
    finished = job(scenario, launcher)
    assert finished.status != 0, finished.output[-3000:]
    assert "rank 0 has finished" not in finished.output
    assert time.monotonic() - start < 90


def test_waiting_is_reported_and_can_be_ended():
    finished = job("join", HVD_COMPRESS_TIMEOUT="4")
    assert finished.status != 0
    assert re.search(
        r"WARNING rank 0 of 2 has waited \d+ s for the other ranks in exchange 2 of 2 tensors \('a', 'b'\); usual "
        r"causes: .*hvd.join\(\)",
        finished.output,
    ), finished.output[-3000:]
    assert re.search(r"rank 0 of 2 gave up on exchange 2 .* after \d+ s \(HVD_COMPRESS_TIMEOUT\)", finished.output)


@pytest.mark.parametrize("scenario", ["no_mpi4py", "no_mpi4py_on_one_rank"])
def test_without_mpi4py(scenario):
    finished = job(scenario)
    assert finished.status == 0, finished.output[-3000:]
    said = re.findall(r"WARNING rank (\d) cannot exchange through mpi4py: mpi4py cannot be imported .* pip install "
                      r"mpi4py; exchanging through hvd.allgather instead", finished.output)  # fmt: skip
    assert said == ["0" if scenario == "no_mpi4py" else "1"]


def test_without_mpi():
    finished = job("fine", "horovodrun --gloo")
    assert finished.status == 0, finished.output[-3000:]
    assert len(re.findall("Horovod runs without MPI .* exchanging through hvd.allgather instead", finished.output)) == 1


def test_without_thread_support():
    finished = job("fine", HOROVOD_MPI_THREADS_DISABLE="1")
    assert finished.status == 0, finished.output[-3000:]
    assert re.search("MPI was started without MPI_THREAD_MULTIPLE.*exchanging through hvd.allgather", finished.output)


def test_mpi_demanded_but_missing():
    finished = job("mpi_demanded")
    assert finished.status != 0
    assert re.search("TransportError: transport='mpi' was asked for, but rank 0 cannot exchange through mpi4py: mpi4py "
                     "cannot be imported", finished.output), finished.output[-3000:]  # fmt: skip


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_one_process(launcher):
    finished = job("alone", launcher, ranks=1)
    assert finished.status == 0, finished.output[-3000:]


@pytest.mark.parametrize("scenario", ["fine", "mpi4py_first"])
def test_either_import_order(scenario):
    finished = job(scenario)
    assert finished.status == 0 and "WARNING" not in finished.output, finished.output[-3000:]
