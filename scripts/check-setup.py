"""Check that the environment which runs this works: imports, and two ranks through MPI and Horovod."""

import os
import pathlib
import subprocess
import sys

RANK = """
import numpy, torch
from mpi4py import MPI
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
assert hvd.size() == 2 and total == 3.0, (hvd.size(), total)
assert hvd.mpi_enabled() and hvd.gloo_built(), "Horovod was built without MPI or without Gloo"
got = numpy.empty(2, "i4")
MPI.COMM_WORLD.Allgather(numpy.array([hvd.rank()], "i4"), got)
assert got.tolist() == [0, 1], got
import hvd_compress
hvd.shutdown()
"""
TENSORFLOW = "import horovod.tensorflow as hvd, tf_keras; assert hvd.mpi_built() and hvd.gloo_built()"


def main() -> int:
    """Run all checks side by side; print what failed and return the exit status."""
    bin_dir = pathlib.Path(sys.executable).parent
    env = {
        **os.environ,
        "PATH": f"{bin_dir}{os.pathsep}{os.environ.get('PATH', '')}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    mpirun = [str(bin_dir / "mpirun"), "--oversubscribe", "-np", "2"]
    checks = {
        "two ranks with mpirun, mpi4py and horovod.torch": [*mpirun, sys.executable, "-c", RANK],
        "horovod.tensorflow and tf_keras": [sys.executable, "-c", TENSORFLOW],
        "one process without mpirun": [sys.executable, "-c", "import horovod.torch as hvd; hvd.init()"],
        "horovodrun": [str(bin_dir / "horovodrun"), "--version"],
    }
    missing = [command[0] for command in checks.values() if not pathlib.Path(command[0]).exists()]
    if missing:
        print(f"check failed: {', '.join(missing)} missing", file=sys.stderr)
        return 1
    running = {
        name: subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name, command in checks.items()
    }
    status = 0
    for name, process in running.items():
        try:
            output, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            output, process.returncode = "no answer within 120 s", 1
        if process.returncode:
            print(f"check failed: {name}\n{output[-2000:]}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
