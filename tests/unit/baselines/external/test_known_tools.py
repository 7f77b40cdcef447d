"""The external tools that the package knows."""

import re
import subprocess
import sys

import pytest
from fake_tool import DESCRIPTION, load, make_registry

from perturbdiff.baselines.external import known_tools
from perturbdiff.runtime.errors import UserError


@pytest.fixture
def fake(monkeypatch, tmp_path):
    return load(monkeypatch, make_registry(tmp_path))


def test_a_tool_is_its_description_and_its_lock(fake, tmp_path):
    assert (fake.name, fake.title, fake.version) == (
        "fake",
        "Fake",
        "1.0",
    )  # Fake_Tool is fake-tool in a lock
    assert fake.pythons == ((3, 11), (3, 12), (3, 13), (3, 14))
    assert fake.adapter == tmp_path / "adapters" / "run_fake.py"
    assert len(fake.lock_sha256) == 64
    with pytest.raises(ValueError, match="frozen"):
        fake.title = "x"


@pytest.mark.parametrize("name", known_tools.names())
def test_the_tools_of_the_package_are_complete(name):
    tool = known_tools.load(name)
    assert tool.adapter.is_file()
    assert tool.settings, "no settings"
    assert tool.determinism
    assert "measured yet" not in tool.determinism
    assert "linux-x86_64" in tool.platforms
    assert set(tool.resolve("quick", {})) == set(tool.resolve("recommended", {})) == set(tool.settings)
    source = tool.adapter.read_text()
    unused = [name for name in tool.settings if not re.search(rf'(\bsettings\.|\bs\.|["\']){name}\b', source)]
    assert unused == []
    lock = tool.lock.read_text()
    assert "--hash=sha256:" in lock
    assert "/" not in "".join(line for line in lock.splitlines() if line.startswith("    # via -"))


@pytest.mark.parametrize("name", known_tools.names())
def test_an_adapter_loads_no_library_before_it_has_read_its_task(name):
    """In a process of its own, because other tests load these libraries."""
    libraries = {"cpa", "state", "cell_load", "cellflow", "Squidiff", "jax", "lightning", "scvi"}
    code = f"import sys, run_{name}; print(sorted({libraries} & set(sys.modules)))"
    adapters = known_tools.load(name).adapter.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=adapters, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_settings_are_complete_and_options_change_them(fake):
    assert fake.resolve("recommended", {}) == {"epochs": 400, "lr": 1e-3, "norm": True, "loss": "nb"}
    changed = fake.resolve("quick", {"epochs": 5, "lr": 1, "norm": True})
    assert changed == {"epochs": 5, "lr": 1.0, "norm": True, "loss": "gauss"}
    assert [type(value) for value in changed.values()] == [int, float, bool, str]


@pytest.mark.parametrize(
    ("name", "given", "read"), [("epochs", 1e4, 10_000), ("epochs", "1e2", 100), ("lr", "1e-4", 1e-4)]
)
def test_numbers_as_people_write_them(fake, name, given, read):
    got = fake.resolve("quick", {name: given})[name]
    assert (got, type(got)) == (read, type(read))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"epoch": 3},
            "fake has no setting 'epoch', did you mean 'epochs'? settings: epochs, lr, norm, loss",
        ),
        ({"zzz": 3}, "fake has no setting 'zzz'; settings: epochs"),
        ({"epochs": 1.5}, "baseline.options.epochs of fake must be a whole number, not 1.5"),
        ({"epochs": True}, "must be a whole number, not True"),
        ({"lr": "fast"}, "must be a number, not 'fast'"),
        ({"epochs": "nan"}, "must be a whole number, not 'nan'"),
        ({"lr": "nan"}, "must be a number, not 'nan'"),
        ({"norm": 1}, "must be true or false, not 1"),
        ({"loss": 1}, "must be text, not 1"),
    ],
)
def test_wrong_options(fake, options, said):
    with pytest.raises(UserError) as error:
        fake.resolve("quick", options)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[1.0e-3, 1.0e-2, learning rate]", "[1e-3, 1e-2, learning rate]", "settings.lr: "),
        ("[400, 30,", "[400, thirty,", "settings.epochs: "),
        ("[400, 30,", "[400,", "must be [recommended, quick, what it is]"),
        ("[400, 30,", "[400, null,", "settings.epochs"),
        ('python: ">=3.11,<3.15"', "python: 3.1", "python: "),
        ("title: Fake", "", "title: Field required"),
        ("title: Fake", "heading: Fake", "heading: Extra"),
        ("package: Fake_Tool", "package: other", "the lock has no other"),
        ("title: Fake", "title: [", "not valid YAML"),
        (DESCRIPTION, "- 1", "fake.yaml"),
    ],
)
def test_a_wrong_description_says_where(monkeypatch, tmp_path, old, new, said):
    folder = make_registry(tmp_path, DESCRIPTION.replace(old, new))
    with pytest.raises(UserError) as error:
        load(monkeypatch, folder)
    assert said in str(error.value)
    assert str(folder / "fake.yaml") in str(error.value)


def test_an_unknown_tool(fake):
    with pytest.raises(UserError, match="no tool 'fakee', did you mean 'fake'"):
        known_tools.load("fakee")
    with pytest.raises(UserError, match="no tool 'zzz'; tools: fake"):
        known_tools.load("zzz")
