"""scripts/setup with a Python of which pip builds nothing: what it repairs, and what it does not trust."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

SETUP = pathlib.Path(__file__).parents[2] / "scripts" / "setup"

# Stands for python3 and for the environment's python.  What was installed is a file in the environment.
PYTHON = """\
#!{executable}
import os, pathlib, shutil, subprocess, sys

me, arguments = pathlib.Path(__file__), sys.argv[1:]
horovod = me.parent.parent / "horovod"
if arguments[:2] == ["-m", "venv"]:
    bin = pathlib.Path(arguments[2]) / "bin"
    bin.mkdir(parents=True)
    shutil.copy2(me, bin / "python")
    (bin.parent / "pyvenv.cfg").touch()
elif arguments[:3] == ["-m", "pip", "wheel"]:
    if "BUILD_FAILS" in os.environ:
        sys.exit("error: the compiler was killed")
    (pathlib.Path(arguments[arguments.index("-w") + 1]) / "horovod-0.28.1-any.whl").write_text("works")
elif arguments[:2] == ["-m", "pip"]:
    wheels = [a for a in arguments if a.endswith(".whl")]
    if wheels:
        shutil.copy(wheels[0], horovod)
elif arguments[0].endswith("check-setup.py"):
    works = horovod.exists() and horovod.read_text() == "works"
    sys.exit(0 if works else "check failed: horovod")
elif arguments[0] == "-":
    print("0123456789abcdef")
elif "purelib" in arguments[1]:
    print(me.parent.parent)
else:
    sys.exit(subprocess.run([{executable!r}, *arguments]).returncode)
"""


@pytest.fixture
def setup(tmp_path):
    python = tmp_path / "python3"
    python.write_text(textwrap.dedent(PYTHON).format(executable=sys.executable))
    python.chmod(0o755)

    def run(**variables):
        environment = {**os.environ, "PYTHON": str(python), "HVD_COMPRESS_CACHE": str(tmp_path / "cache"), **variables}
        finished = subprocess.run(
            [SETUP, tmp_path / "venv"], env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        finished.works = (tmp_path / "venv" / "horovod").exists()
        return finished

    run.wheels = lambda: list((tmp_path / "cache").glob("horovod-*/*.whl"))
    return run


def test_builds_once(setup):
    first = setup()
    assert first.returncode == 0 and first.works, first.stderr
    assert "compiling" in first.stdout and len(setup.wheels()) == 1
    second = setup()
    assert second.returncode == 0 and second.stdout.startswith("setup: ready")


def test_a_build_that_was_interrupted_is_made_again(setup):
    failed = setup(BUILD_FAILS="1")
    assert failed.returncode != 0 and "ready" not in failed.stdout
    assert "the compiler was killed" in failed.stderr and "Horovod did not build" in failed.stderr
    again = setup()
    assert again.returncode == 0 and again.works and "compiling" in again.stdout, again.stderr


def test_an_empty_folder_of_wheels_is_no_wheel(setup):
    """An earlier version made the folder before the wheel, and then took it for one."""
    setup()
    wheel = setup.wheels()[0]
    wheel.unlink()
    (wheel.parent.parent.parent / "venv" / ".hvd_compress-setup").unlink()
    again = setup()
    assert again.returncode == 0 and again.works and "compiling" in again.stdout, again.stdout


def test_a_cached_wheel_that_does_not_work_is_compiled_again(setup):
    setup()
    wheel = setup.wheels()[0]
    wheel.write_text("was linked with something else")
    (wheel.parent.parent.parent / "venv" / ".hvd_compress-setup").unlink()
    again = setup()
    assert again.returncode == 0 and "does not work here" in again.stdout and again.works
    assert setup.wheels()[0].read_text() == "works"


def test_what_stops_working_is_built_anew(setup):
    setup()
    environment = setup.wheels()[0].parent.parent.parent / "venv"
    (environment / "horovod").unlink()
    again = setup()
    assert again.returncode == 0 and again.works
    assert "does not work and is built anew" in again.stdout and "check failed: horovod" in again.stderr
