"""Run every file of ``cases`` on real ranks: launchers, rank counts, transports."""

import pytest
from launch import HERE, available, run

FILES = sorted(path.name for path in (HERE / "cases").glob("test_*.py"))
#: launcher, ranks, transport (None: what "auto" chooses).
WAYS = {
    "mpirun-4": ("mpirun", 4, None),
    "mpirun-2": ("mpirun", 2, None),
    "horovodrun-2": ("horovodrun", 2, None),
    "gloo-2": ("horovodrun --gloo", 2, None),
    "mpirun-3-hvd-allgather": ("mpirun", 3, "horovod"),
}


@pytest.mark.parametrize("way", WAYS)
def test_cases(way):
    launcher, ranks, transport = WAYS[way]
    if available(launcher):
        pytest.skip(available(launcher))
    files = [str(HERE / "cases" / name) for name in FILES]
    arguments = ["-m", "pytest", "-x", "--color=no", "-p", "no:cacheprovider", *files]
    variables = {"HVD_COMPRESS_RANK_TESTS": "1", "HVD_COMPRESS_TEST_TRANSPORT": transport or "auto"}
    finished = run(launcher, ranks, arguments, timeout=540, **variables)
    assert finished.status == 0, finished.output[-8000:]
    # Every rank has run, and skipped, the same tests: none is silently left out.
    endings = [line.split(" in ")[0].split(">:")[-1] for line in finished.output.splitlines() if " passed" in line]
    assert len(endings) == ranks and len(set(endings)) == 1, endings
