"""Shared settings of all tests."""

import os

# One thread a rank, and the same in every test, so that four ranks fit on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
