"""Run every file of ``cases`` on real ranks: launchers, rank counts, transports."""

import pytest
from launch import available, run_cases

#: launcher, ranks, transport (None: what "auto" chooses).
WAYS = {
    "mpirun-4": ("mpirun", 4, None),
    "horovodrun-2": ("horovodrun", 2, None),
    "gloo-2": ("horovodrun --gloo", 2, None),
    "mpirun-3-hvd-allgather": ("mpirun", 3, "horovod"),
}


# All methods go the same ways; two of them are enough, with mpi4py and without.
METHODS = ("test_methods.py", "test_convergence.py")
WITHOUT = {"horovodrun-2": METHODS, "mpirun-3-hvd-allgather": METHODS}


@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("cases")
@pytest.mark.parametrize("way", WAYS)
def test_cases(way):
    launcher, ranks, transport = WAYS[way]
    if available(launcher):
        pytest.skip(available(launcher))
    without = WITHOUT.get(way, ())
    run_cases("cases", launcher, ranks, without=without, HVD_COMPRESS_TEST_TRANSPORT=transport or "auto")
