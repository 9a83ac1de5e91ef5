"""Importing the package is cheap: no framework, no MPI, no compiler."""

import json
import subprocess
import sys
import types

import pytest

import hvd_compress

HEAVY = ["torch", "tensorflow", "keras", "tf_keras", "mpi4py", "horovod", "numba", "jax"]
NEUTRAL = [
    "hvd_compress.base",
    "hvd_compress.compressors",
    "hvd_compress.exchange",
    "hvd_compress.ops.numpy",
    "hvd_compress.state",
    "hvd_compress.transport.choose",
    "hvd_compress.transport.horovod",
    "hvd_compress.transport.mpi",
    "hvd_compress.transport.threads",
    "hvd_compress.wire",
]


def loaded_by(statement):
    """Return which heavy packages a fresh interpreter has loaded after ``statement``; warnings are errors."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_importing_the_package_loads_no_framework():
    assert loaded_by("import hvd_compress; hvd_compress.TopK(0.1)") == []


def test_importing_every_neutral_module_loads_no_framework():
    assert loaded_by("import " + ", ".join(NEUTRAL)) == []


def test_the_check_sees_what_is_loaded():
    assert loaded_by("import sys; sys.modules['numba'] = sys") == ["numba"]


def test_all_lists_exactly_the_public_names():
    public = {
        name
        for name, value in vars(hvd_compress).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert sorted(hvd_compress.__all__) == sorted(public | {"__version__"})
    assert len(set(hvd_compress.__all__)) == len(hvd_compress.__all__)


def test_star_import_gives_all():
    names = {}
    exec("from hvd_compress import *", names)
    assert set(hvd_compress.__all__) <= set(names)


@pytest.mark.parametrize("name", [n for n in hvd_compress.__all__ if n.endswith("Error")])
def test_errors_share_one_base_and_can_be_caught_as_builtins(name):
    builtin = {
        "ConfigError": ValueError,
        "UnsupportedError": TypeError,
        "UnboundTensorError": LookupError,
        "WireFormatError": ValueError,
        "TransportError": RuntimeError,
        "ExchangeTimeoutError": hvd_compress.TransportError,
        "NonFiniteGradientError": ArithmeticError,
        "StateError": ValueError,
        "HandshakeError": Exception,
        "HvdCompressError": Exception,
    }[name]
    error = getattr(hvd_compress, name)
    assert issubclass(error, hvd_compress.HvdCompressError)
    assert issubclass(error, builtin)
