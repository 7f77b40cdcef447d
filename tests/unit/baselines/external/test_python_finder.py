"""Finding a Python, among stand-ins."""

import json
import sys

import pytest

from perturbdiff.baselines.external import installer
from perturbdiff.runtime.errors import UserError

WANTED = ((3, 97), (3, 98))


def interpreter(path, version="3.97.1", venv=True, fails=0, cpython=True):
    """Write a program that answers as a Python would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    said = json.dumps({"version": version, "venv": venv, "cpython": cpython})
    path.write_text(f"#!/bin/sh\n[ {fails} = 0 ] || exit {fails}\necho '{said}'\n")
    path.chmod(0o755)
    return path


def uv(path, knows=None, fetches=None):
    """Write a uv that keeps the Python ``knows``, or gets to know ``fetches`` by installing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    note = path.with_name("known")
    if knows:
        note.write_text(str(knows))
    install = f"echo {fetches} > {note}" if fetches else "echo 'dns error' >&2; exit 1"
    path.write_text(
        f'#!/bin/sh\ncase "$1 $2" in\n"--version ") echo uv 1 ;;\n"python find") cat {note} 2>/dev/null || exit 2 ;;\n'
        f'"python install") {install} ;;\n*) exit 3 ;;\nesac\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A home and a PATH with nothing in them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for name in ("PYENV_ROOT", "CONDA_PREFIX", "CONDA_EXE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))  # no uv beside it
    return tmp_path


def test_the_running_one_first(home, monkeypatch):
    interpreter(home / "bin/python3.97")
    own = interpreter(home / "own" / "python", "3.98.0")
    monkeypatch.setattr(sys, "version_info", (3, 98, 0))
    assert installer.find(((3, 98),), "x").path == own
    assert installer.find(WANTED, "x").version == "3.97.1"  # the preferred version goes before


def test_a_stub_on_the_path_is_passed_over(home):
    interpreter(home / "bin/python3.97", fails=127)
    interpreter(home / ".pyenv/versions/3.97.1/bin/python3.97")
    newest = interpreter(home / ".pyenv/versions/3.97.9/bin/python3.97", "3.97.9")
    found = installer.find(WANTED, "x")
    assert (found.path, found.version, found.minor) == (newest, "3.97.9", (3, 97))


def test_pyenv_in_another_place(home, monkeypatch):
    monkeypatch.setenv("PYENV_ROOT", str(home / "elsewhere"))
    there = interpreter(home / "elsewhere/versions/3.98.0/bin/python3.98", "3.98.0")
    assert installer.find(WANTED, "x").path == there


def test_environments_of_conda(home, monkeypatch):
    noted = interpreter(home / "somewhere/env/bin/python3.97")
    (home / ".conda").mkdir()
    (home / ".conda/environments.txt").write_text(f"{home / 'gone'}\n{home / 'somewhere/env'}\n")
    assert installer.find(WANTED, "x").path == noted
    noted.unlink()
    base = interpreter(home / "conda/envs/py/bin/python3.98", "3.98.3")
    monkeypatch.setenv("CONDA_EXE", str(home / "conda/bin/conda"))
    assert installer.find(WANTED, "x").path == base


def test_one_that_uv_keeps_or_fetches(home):
    kept = interpreter(home / "uv/python3.97")
    uv(home / "bin/uv", knows=kept)
    assert installer.find(WANTED, "x").path == kept
    (home / "bin/known").unlink()
    uv(home / "bin/uv", fetches=kept)
    assert installer.find(WANTED, "x").path == kept


@pytest.mark.parametrize("with_uv", [False, True])
def test_none_says_what_to_install(home, with_uv, caplog):
    interpreter(home / "bin/python3.97", "3.96.0")  # not what its name says
    interpreter(home / "bin/python3.98", "3.98.0", cpython=False)
    if with_uv:
        uv(home / "bin/uv")
    with pytest.raises(UserError) as error:
        installer.find(WANTED, "cpa")
    assert str(error.value) == (
        "cpa needs Python 3.97 or 3.98, and none was found (running, PATH, pyenv, conda, uv); install one with "
        "'uv python install 3.97', 'pyenv install 3.97' or 'conda create -n py3.97 python=3.97', "
        "or name one with --python PATH"
    )
    assert ("uv cannot fetch Python 3.97: dns error" in caplog.text) == with_uv


def test_one_without_venv_will_do_only_with_uv(home):
    interpreter(home / "bin/python3.97", venv=False)
    with pytest.raises(
        UserError, match="cannot make environments; install its venv module .*python3.97-venv"
    ):
        installer.find(WANTED, "x")
    other = interpreter(home / "bin/python3.98", "3.98.0")
    assert installer.find(WANTED, "x").path == other
    uv(home / "bin/uv")
    assert installer.find(WANTED, "x").path == home / "bin/python3.97"


def test_a_given_one(home):
    interpreter(home / "bin/python3.97", "3.96.0")
    good = interpreter(home / "py/python", "3.98.1")
    assert installer.find(WANTED, "x", given=good).path == good
    for given, said in [
        (home / "none", "no Python that starts"),
        (interpreter(home / "py/broken", fails=1), "no Python that starts"),
        ("python3.97", "this is Python 3.96.0, x needs 3.97 or 3.98"),
        (interpreter(home / "py/lame", venv=False), "cannot make environments"),
    ]:
        with pytest.raises(UserError, match=said):
            installer.find(WANTED, "x", given=given)


def test_the_running_python_answers():
    found = installer.ask(sys.executable)
    assert found is not None
    assert found.minor == sys.version_info[:2]


def test_what_belongs_to_our_python_stays_here(monkeypatch):
    given = {
        **dict.fromkeys(
            ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_USER", "UV_PYTHON"), "x"
        ),
        "PIP_INDEX_URL": "https://there",
        "UV_CACHE_DIR": "/here",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = installer.clean_environment()
    assert {name for name in given if name in found} == {"PIP_INDEX_URL", "UV_CACHE_DIR"}
