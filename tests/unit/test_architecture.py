"""The arrows between modules point down, and the library keeps off global state.

Everything is read from the source, so nothing needs to be importable.
"""

import ast
from pathlib import Path

import pytest

import hvd_compress

ROOT = Path(hvd_compress.__file__).parent
PACKAGE = "hvd_compress"

# From low to high; a module may import its own package and strictly lower levels.
LEVELS = [
    {"errors", "version", "identity", "naming", "settings"},
    {"ops", "wire"},
    {"kernels"},
    {"transport", "step", "schedule", "policy", "telemetry", "packing"},
    {"layout", "feedback", "checkpoint", "description"},
    {"exchange"},
    {"state"},
    {"base"},
    {"compressors", "codec"},
    {"factory"},
    {"adapters", "elastic", "testing"},
    {"__init__"},
    {"keras"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
# The element sizes in ops/base.py are facts that the wire format shares.
ALLOWED = {("wire", "hvd_compress.ops.base")}

FRAMEWORKS = {"torch", "tensorflow", "keras", "tf_keras", "horovod", "mpi4py", "numba", "jax"}
# What belongs to a framework, by file or folder; it is loaded when that framework's first tensor comes.
MAY_IMPORT = {
    "ops/torch.py": {"torch"},
    "kernels/cpu.py": {"numba"},
    "adapters/torch": {"torch"},
    "ops/tensorflow.py": {"tensorflow"},
    "adapters/tensorflow": {"tensorflow"},
    "keras": {"tensorflow", "keras", "horovod"},
}
# These find Horovod and MPI when they are used, never when they are imported.
MAY_LOAD_LATE = {"transport", "adapters", "elastic"}

FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def tree_of(path):
    return ast.parse((ROOT / path).read_text())


def part_of(module):
    """Return the top-level part of a dotted module name: ``hvd_compress.wire.bits`` -> ``wire``."""
    return module.split(".")[1] if "." in module else "__init__"


def part_of_file(path):
    return path.parts[0] if len(path.parts) > 1 else path.stem


def is_module(name):
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported(tree):
    """Yield the dotted name of everything that is imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where an arrow points"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if node.module.startswith(PACKAGE) and is_module(full) else node.module


def upward_arrows(part, tree):
    """Return the imports of ``tree``, in ``part``, that point up or sideways."""
    inside = [name for name in imported(tree) if name == PACKAGE or name.startswith(PACKAGE + ".")]
    return [
        name
        for name in inside
        if part_of(name) != part and (part, name) not in ALLOWED and LEVEL[part_of(name)] >= LEVEL[part]
    ]


def dotted(node):
    """Return ``a.b.c`` for such an expression, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def global_random(tree):
    """Return uses of a global random generator."""
    own = {"default_rng", "Generator", "SeedSequence", "PCG64", "Philox"}
    drawing = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like", "randn_like"}
    seeding = {"torch.manual_seed", "torch.seed", "torch.random.manual_seed"}
    found = []
    for node in ast.walk(tree):
        name = dotted(node)
        head, _, last = name.rpartition(".")
        numpy = head in ("np.random", "numpy.random") and last not in own
        unkeyed = (
            isinstance(node, ast.Call)
            and dotted(node.func) in {f"torch.{f}" for f in drawing}
            and all(keyword.arg != "generator" for keyword in node.keywords)
        )
        if numpy or unkeyed or name in seeding or head == "random":
            found.append(name or dotted(node.func))
    return found


def late_loads(tree):
    """Return the frameworks that ``importlib.import_module("...")`` names."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    loads = (node.args[0] for node in calls if dotted(node.func).endswith("import_module") and node.args)
    return {node.value.split(".")[0] for node in loads if isinstance(node, ast.Constant)} & FRAMEWORKS


def test_every_module_has_a_level():
    parts = {part_of_file(path) for path in FILES}
    assert parts == set(LEVEL), "give a new module or package its level here, and say so in the documentation"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path):
    assert upward_arrows(part_of_file(path), tree_of(path)) == []


@pytest.mark.parametrize("path", FILES, ids=str)
def test_frameworks_are_imported_only_where_they_are_adapted(path):
    names = {name.split(".")[0] for name in imported(tree_of(path))} & FRAMEWORKS
    allowed = [frameworks for place, frameworks in MAY_IMPORT.items() if path.is_relative_to(place)]
    assert names <= set().union(*allowed)
    if part_of_file(path) not in MAY_LOAD_LATE and not allowed:
        assert late_loads(tree_of(path)) == set()


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_print_no_assert_no_global_random_numbers(path):
    tree = tree_of(path)
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Call) and dotted(n.func) == "print"]
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Assert)], "raise an error of errors.py"
    assert global_random(tree) == []


@pytest.mark.parametrize(
    ("part", "source", "arrows"),
    [
        ("wire", "from hvd_compress import state", ["hvd_compress.state"]),
        ("wire", "def f():\n    from hvd_compress.base import TopK", ["hvd_compress.base"]),
        ("policy", "import hvd_compress.feedback", ["hvd_compress.feedback"]),
        ("base", "from hvd_compress import TopK", ["hvd_compress"]),
        ("wire", "from hvd_compress.ops.numpy import NumpyOps", ["hvd_compress.ops.numpy"]),
        ("wire", "from hvd_compress.ops.base import ITEMSIZE", []),
        ("wire", "from hvd_compress.wire import bits", []),
        ("base", "from hvd_compress.state import Runtime", []),
    ],
)
def test_the_arrow_check_can_fail(part, source, arrows):
    assert upward_arrows(part, ast.parse(source)) == arrows


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("np.random.rand(3)", 1),
        ("np.random.seed(0)", 1),
        ("torch.manual_seed(0)", 1),
        ("torch.randn(3)", 1),
        ("torch.randn(3, generator=g)", 0),
        ("random.shuffle(x)", 1),
        ("np.random.default_rng(0).random(3)", 0),
    ],
)
def test_the_random_check_can_fail(source, found):
    assert len(global_random(ast.parse(source))) == found


def test_the_late_load_check_can_fail():
    assert late_loads(ast.parse("importlib.import_module('torch.nn')")) == {"torch"}
