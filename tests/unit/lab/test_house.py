"""What the package keeps to: a name stands for one module, folders and functions fit in a head."""

import house
import pytest


@pytest.fixture(scope="module")
def found():
    return house.modules()


def test_no_module_name_stands_twice(found):
    assert house.named_twice(found) == {}


def test_folders_and_functions_are_small(found):
    assert house.largest_folder(found)[1] <= 20
    assert [(m.path, name) for m in found for name, lines, _ in m.functions if lines > 95] == []


def test_comments_and_docstrings_are_no_code(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text(
        '"""One.\n\nTwo."""\n\n# three\ndef f(a, *, b):\n    """Four."""\n    return (a,\n            b)\n'
    )
    module = house.read(tmp_path / "a.py")
    assert (module.lines, module.code, module.functions) == (9, 3, [("f", 3, 2)])
