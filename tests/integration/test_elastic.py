"""A real elastic job that grows by a worker: residuals keep what is owed, ranks stay identical."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "parallel"))

import pytest
from launch import available, run

JOB = str(pathlib.Path(__file__).parent / "elastic_job.py")


def test_growing_job(tmp_path):
    if available("horovodrun"):
        pytest.skip(available("horovodrun"))
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    # A network interface must be named, or Horovod waits for a second host.
    launcher = f"horovodrun --network-interface lo --min-np 2 --max-np 3 --host-discovery-script {discover}"
    finished = run(launcher, 2, [JOB, str(hosts)], timeout=180)
    assert finished.status == 0, finished.output[-3000:]
    change = re.search(r"RESIZED 2 to 3, owed changed by (\S+)", finished.output)
    assert change and float(change[1]) < 1e-5, finished.output[-3000:]
    assert "DONE 3 workers, identical True" in finished.output
