"""Only the payload leaves a GPU, in TensorFlow's graphs too.

There is no GPU in the tests, and TensorFlow's CPU build has no kernels for one.  What its
CUDA build has is in ``data/gpu_kernels.json``, which ``scripts/gpu-kernels`` writes.  With it
can be told where a graph's tensors would live: an operation without a kernel, or an argument
that the kernel takes from the host, means a copy.
"""

import json
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
KERNELS = json.loads((HERE / "data/gpu_kernels.json").read_text())
NUMEL = 100 * 200
# Decisions and messages of the host, and what has no kernel because it computes nothing.
ON_THE_HOST = {"PyFunc", "HorovodAllreduce", "HorovodAllgather"}
NOTHING = {"Placeholder", "NoOp", "Const", "If"}


def trace(dtype):
    run = subprocess.run([sys.executable, HERE / "trace_step.py", dtype], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


def kernel(node):
    """Return the arguments and results that the node's GPU kernel has on the host, None without a kernel."""
    for row in KERNELS[node["type"]]:
        if all(node["types"].get(name, names[0]) in names for name, names in row["types"].items()):
            return set(row["host"])
    return None


def full_size_copies(nodes):
    """Return the operations that need a whole gradient on the host."""
    found = []
    for node in nodes:
        sizes = dict(zip(node["arguments"], (size for _, size in node["inputs"]), strict=False))
        sizes.update(zip(node["results"], node["outputs"], strict=False))
        large = {name for name, size in sizes.items() if (size or 0) >= NUMEL}
        if large and node["type"] not in NOTHING:
            host = None if node["type"] in ON_THE_HOST else kernel(node)
            if host is None or large & host:
                found.append(node["type"])
    return found


def round_trips(nodes):
    """Return the operations before the message that a GPU does with what has been on the host."""
    by_name = {node["name"]: node for node in nodes}
    before, stack = [], [name for name, _ in next(n for n in nodes if n["type"] == "PyFunc")["inputs"]]
    while stack:
        node = by_name[stack.pop()]
        if node not in before and node["type"] not in NOTHING:
            before.append(node)
            stack += [name for name, _ in node["inputs"]]
    on_host = {node["name"] for node in before if set(node["results"]) & (kernel(node) or set())}
    return [
        node["type"]
        for node in before
        for argument, (name, _) in zip(node["arguments"], node["inputs"], strict=True)
        if name in on_host and argument not in (kernel(node) or set())
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_payload_leaves_the_device(dtype):
    nodes = trace(dtype)
    assert {"TopKV2", "TensorScatterAdd", "AssignVariableOp", "PyFunc"} <= {node["type"] for node in nodes}
    unknown = {node["type"] for node in nodes} - set(KERNELS) - ON_THE_HOST - NOTHING
    assert not unknown, "add them to scripts/gpu-kernels and run it"
    assert full_size_copies(nodes) == []
    assert round_trips(nodes) == []


def node(kind, dtype, inputs, results=(10,), **types):
    arguments = [f"in{i}" for i in range(len(inputs))]
    return {
        "name": kind,
        "type": kind,
        "types": {"T": dtype, **types},
        "inputs": inputs,
        "arguments": arguments,
        "outputs": list(results),
        "results": ["output"],
    }


def test_the_check_can_fail():
    # As x[:k] or reshape would do with int32 positions of a whole gradient.
    bad = node("Reshape", "int32", [("x", NUMEL)], [NUMEL], Tshape="int32")
    bad["arguments"] = ["tensor"]
    assert full_size_copies([bad]) == ["Reshape"]
    assert full_size_copies([node("PyFunc", "float32", [("x", NUMEL)])]) == ["PyFunc"]
    there = {**node("Reshape", "int32", [], Tshape="int32"), "name": "there"}
    back = {**node("Cast", "int32", [("there", 10)], SrcT="int32", DstT="float64"), "name": "back"}
    back["arguments"] = ["x"]
    assert round_trips([there, back, node("PyFunc", "float32", [("back", 10)])]) == ["Cast"]
