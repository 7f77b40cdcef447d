"""Environments of external methods, made by uv, with a tool that is a wheel of one line."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_tool import DESCRIPTION, load, make_registry, make_wheel, serve

from perturbdiff.baselines.external import tool_environments
from perturbdiff.baselines.external.installer import Installation
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.locks import locked

HERE = Path(sys.executable)
pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not here")


@pytest.fixture
def place(monkeypatch, tmp_path):
    """An empty place for environments."""
    monkeypatch.setenv("PD_BASELINES", str(tmp_path / "env"))
    monkeypatch.delenv("PD_WAIT", raising=False)
    return tmp_path / "env"


@pytest.fixture
def tool(monkeypatch, tmp_path, place):
    """The fake tool, which is not installed yet."""
    return serve(monkeypatch, tmp_path)


@pytest.fixture
def made(monkeypatch):
    """Count the environments that are made."""
    calls, make = [], Installation.make

    def counted(*arguments):
        calls.append(arguments)
        return make(*arguments)

    monkeypatch.setattr(Installation, "make", counted)
    return calls


def test_installs_the_lock_and_nothing_else(tool, place, monkeypatch, tmp_path):
    ours = {"PYTHONPATH": "registry", "PYTHONHOME": "nowhere", "UV_TARGET": "lost", "UV_PYTHON": "3.6"}
    for name, value in ours.items():  # none of these may reach the installer
        monkeypatch.setenv(name, str(tmp_path / value))
    found = tool_environments.install(tool)
    assert found.folder == place / f"fake-1.0-{tool.lock_sha256[:8]}"
    record = json.loads((found.folder / "installed.json").read_text())
    assert record["lock_sha256"] == tool.lock_sha256
    assert record["python"] == sys.version.split()[0]
    assert record["installer"].split()[0] == "uv"
    assert tool_environments.python_of(tool) == found.folder / "env" / "bin" / "python"
    there = [p.name for p in (found.folder / "env").glob("lib/python*/site-packages/*.dist-info")]
    assert there == ["fake_tool-1.0.dist-info"]
    assert "import fake_tool" in (found.folder / "install.log").read_text()
    assert not (tmp_path / "lost").exists()


@pytest.fixture
def home(tool, monkeypatch, tmp_path):
    """A home and a PATH without any Python. Conda is in the home and has noted two environments."""
    program = shutil.which("uv")
    assert program
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").symlink_to(program)
    (tmp_path / ".conda").mkdir()
    (tmp_path / ".conda" / "environments.txt").write_text(f"{tmp_path / 'gone'}\n{tmp_path / 'noted'}\n")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "nowhere"))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    given = {"HOME": "", "PATH": "bin", "CONDA_EXE": "conda/bin/conda", "UV_PYTHON_INSTALL_DIR": "kept"}
    for name, value in given.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    return tmp_path


@pytest.mark.parametrize("folder", [".pyenv/versions/3", "noted", "conda", "conda/envs/py", "nowhere"])
def test_a_python_that_is_not_on_the_path_is_found(tool, home, folder):
    with pytest.raises(
        UserError, match=r"needs Python 3.11 or .* or 3.14, and none was found .*--python PATH"
    ):
        tool_environments.install(tool)
    (home / folder / "bin").mkdir(parents=True)
    (home / folder / "bin" / "python3").symlink_to(HERE.resolve())
    tool_environments.install(tool)
    assert f"{home / folder}/bin" in (tool_environments.folder_of(tool) / "install.log").read_text()


def test_a_stub_on_the_path_is_passed_over(tool, home):
    for folder, text in (("bin", "#!/bin/sh\nexit 127\n"), (".pyenv/versions/3/bin", None)):
        (home / folder).mkdir(parents=True, exist_ok=True)
        for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
            if text:
                (home / folder / name).write_text(text)
                (home / folder / name).chmod(0o755)
            else:
                (home / folder / name).symlink_to(HERE.resolve())
    assert tool_environments.install(tool).record["python"] == sys.version.split()[0]


def test_a_named_python(tool, monkeypatch, tmp_path):
    assert tool_environments.install(tool, HERE).record["python"] == sys.version.split()[0]
    other = load(
        monkeypatch, make_registry(tmp_path / "other", DESCRIPTION.replace(">=3.11,<3.15", ">=3.7,<3.9"))
    )
    with pytest.raises(UserError, match=r"--python .*: this is Python 3\..*, fake needs 3.7 or 3.8"):
        tool_environments.install(other, HERE, force=True)
    for path in (tmp_path / "none", Path("/bin/true")):
        with pytest.raises(UserError, match="needs Python 3.7 or 3.8, and none was found"):
            tool_environments.install(other, path, force=True)
    assert tool_environments.installed(other) is None


def test_what_is_there_is_not_made_again_unless_forced(tool, made):
    first = tool_environments.install(tool, HERE)
    assert tool_environments.install(tool).record == first.record
    assert len(made) == 1
    tool_environments.install(tool, HERE, force=True)
    assert len(made) == 2


def test_another_lock_is_another_environment(tool, made, monkeypatch, tmp_path):
    tool_environments.install(tool, HERE)
    with tool.lock.open("a") as lock:
        lock.write("# and a word more\n")
    other = load(monkeypatch, tmp_path / "registry" / "tools")
    assert tool_environments.installed(other) is None
    with pytest.raises(
        UserError, match="fake is not installed in .*: run 'perturbdiff baseline install fake'"
    ):
        tool_environments.python_of(other)
    tool_environments.install(other, HERE)
    assert [folder.name[:9] for folder in tool_environments.remove(other)] == ["fake-1.0-"] * 2
    assert tool_environments.installed(tool) is None
    assert tool_environments.remove(other) == []


@pytest.mark.parametrize("error", [UserError("no"), KeyboardInterrupt()])
def test_an_interrupted_installation_leaves_its_log_alone(tool, place, made, monkeypatch, error):
    run = Installation.run

    def fail(self, doing, *arguments):
        run(self, doing, *arguments)
        if doing.startswith("trying"):
            raise error

    monkeypatch.setattr(Installation, "run", fail)
    with pytest.raises(type(error)):
        tool_environments.install(tool, HERE)
    assert tool_environments.installed(tool) is None
    left = {p.name for p in tool_environments.folder_of(tool).iterdir()}
    assert left == {".lock", "install.log"}


def test_what_a_killed_one_left_is_removed(tool, made):
    folder = tool_environments.folder_of(tool)
    (folder / "env" / "bin").mkdir(parents=True)
    (folder / "env" / "half").write_text("x")
    (folder / ".lock").touch()
    tool_environments.install(tool, HERE)
    assert not (folder / "env" / "half").exists()


def test_two_at_once(tool, made, monkeypatch):
    with locked(tool_environments.folder_of(tool), "another"):
        with pytest.raises(UserError, match="another installation of fake is using this folder"):
            tool_environments.install(tool, HERE)
    assert made == []


def test_the_second_waits_if_asked_and_takes_what_the_first_made(tool, made, monkeypatch):
    monkeypatch.setenv("PD_WAIT", "60")
    folder, results = tool_environments.folder_of(tool), []
    with locked(folder, "another"):
        second = threading.Thread(target=lambda: results.append(tool_environments.install(tool, HERE)))
        second.start()
        time.sleep(1.5)  # it looks every 2 s
        (folder / "installed.json").write_text(json.dumps({"lock_sha256": tool.lock_sha256}))
    second.join(30)
    assert made == []
    assert results[0].folder == folder


def test_a_python_that_is_gone(tool, made):
    found = tool_environments.install(tool, HERE)
    (found.folder / "env" / "bin" / "python").unlink()
    with pytest.raises(UserError, match="Python of this environment is gone: .*--force"):
        tool_environments.python_of(tool)
    tool_environments.install(tool, HERE)
    assert tool_environments.python_of(tool).exists()


def test_room_and_platform_are_looked_at_first(tool, made, monkeypatch, tmp_path):
    big = load(
        monkeypatch, make_registry(tmp_path / "big", DESCRIPTION.replace("size_gb: 0.001", "size_gb: 1.0e+9"))
    )
    with pytest.raises(
        UserError, match=r"takes 1000000000.0 GB and .* GB free; .* name another place in PD_BASELINES"
    ):
        tool_environments.install(big, HERE)
    text = DESCRIPTION.replace("[linux-x86_64, linux-aarch64, darwin-arm64]", "[plan9-mips]")
    far = load(monkeypatch, make_registry(tmp_path / "far", text))
    with pytest.raises(UserError, match="fake 1.0 is locked for plan9-mips; this machine is"):
        tool_environments.install(far, HERE)
    assert made == []


def test_a_place_that_cannot_be_written(tool, made, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PD_BASELINES", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write"):
        tool_environments.install(tool, HERE)


def test_the_place(monkeypatch, tmp_path):
    monkeypatch.delenv("PD_BASELINES", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert tool_environments.root() == tmp_path / "data" / "perturbdiff" / "baselines"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tool_environments.root() == tmp_path / ".local" / "share" / "perturbdiff" / "baselines"


def test_a_changed_package_is_refused(tool, tmp_path):
    make_wheel(tmp_path / "wheels", "VALUE = 2\n")
    with pytest.raises(UserError, match="not the one that was locked.*log: .*install.log"):
        tool_environments.install(tool, HERE)
    assert tool_environments.installed(tool) is None


@pytest.mark.parametrize("told", ["variable", "file"])
def test_no_network(tool, monkeypatch, tmp_path, told):
    for name in ("UV_NO_INDEX", "PIP_FIND_LINKS", "UV_FIND_LINKS", "UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    if told == "variable":  # uv is told of pip's
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    else:
        python = Path(sys.base_prefix, "bin", "python3")
        if subprocess.run([python, "-m", "pip", "--version"], check=False).returncode:
            pytest.skip("this Python has no pip")
        monkeypatch.setattr(sys, "executable", str(python))
        (tmp_path / "pip.conf").write_text("[global]\nindex-url = http://127.0.0.1:9/simple\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(
        UserError, match="fake: installing its packages failed: .*index cannot be reached.*127.0.0.1:9"
    ):
        tool_environments.install(tool)


def test_a_tool_that_cannot_be_imported(tool, monkeypatch, tmp_path):
    digest = make_wheel(tmp_path / "wheels", "raise ImportError('libgone.so: cannot open')\n")
    broken = load(monkeypatch, make_registry(tmp_path / "registry", digest=digest))
    with pytest.raises(
        UserError, match=r"trying it \('import fake_tool'\) failed: ImportError: libgone.so: cannot open"
    ):
        tool_environments.install(broken, HERE)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full: .*PD_BASELINES"),
        ("Hash mismatch for `x==1`", "not the one that was locked"),
        ("cause: invalid peer certificate: UnknownIssuer", "PIP_CERT or SSL_CERT_FILE"),
        ("HTTP status client error (403 Forbidden) for url", "wants a login or refuses"),
        ("cause: dns error", "cannot be reached from here: set PIP_INDEX_URL or a proxy"),
        ("error: command 'gcc' failed: No such file or directory", "there is no compiler that can"),
        ("Because x was not found in the package registry", "lacks a locked package"),
        ("warning: [Errno 30] Read-only file system: '/opt'", "name another place in PD_BASELINES"),
        ("Killed", "failed: Killed"),
        ("", "it printed nothing"),
    ],
)
def test_reasons(tmp_path, said, reason):
    with pytest.raises(UserError, match=reason):
        Installation("x", ((3, 11),), tmp_path / "log").run(
            "that", ("/bin/sh", "-c", f'echo "{said}"; echo; exit 1')
        )
    assert (tmp_path / "log").read_text().startswith("$ /bin/sh -c")
