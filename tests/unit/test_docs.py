"""The code in the documentation runs, as it stands there."""

import re
from pathlib import Path

import numpy as np
import pytest

from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.step import TensorSpec
from hvd_compress.testing import check_compressor

DOCS = Path(__file__).parents[2] / "docs"


def test_write_your_own():
    text = (DOCS / "write-your-own.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "write-your-own.md", "exec"), names)
    assert len(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].splitlines()) <= 30
    spec, ops = TensorSpec((2, 24), "float32"), NumpyOps()
    x = np.arange(48, dtype=np.float32)
    decoded = names["RowMeans"]().decode(names["RowMeans"]().encode(x, spec, ops).arrays, spec, ops)
    assert decoded.tolist() == [7.5] * 16 + [23.5] * 16 + [39.5] * 16
    check_compressor(names["Means"](width=8))
    with pytest.raises(ValueError, match=r"Means.width must be a whole number, 1 or more, got 0"):
        names["Means"](width=0)
