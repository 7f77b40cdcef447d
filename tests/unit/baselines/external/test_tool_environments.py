"""Environments of methods of others, with a tool that is a wheel of one line."""

import json
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_tool import DESCRIPTION, load, make_registry, make_wheel

from perturbdiff.baselines.external import installer, tool_environments
from perturbdiff.runtime.errors import UserError
from perturbdiff.runtime.locks import locked

HERE = Path(sys.executable)


@pytest.fixture
def place(monkeypatch, tmp_path):
    """An empty place for environments."""
    monkeypatch.setenv("PD_BASELINES", str(tmp_path / "env"))
    monkeypatch.delenv("PD_WAIT", raising=False)
    return tmp_path / "env"


@pytest.fixture
def tool(monkeypatch, tmp_path, place):
    """The fake tool; packages come from a folder alone."""
    digest = make_wheel(tmp_path / "wheels")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "wheels")}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv(f"UV_{name}", value)
    return load(monkeypatch, make_registry(tmp_path / "registry", digest=digest))


@pytest.fixture
def made(monkeypatch):
    """Count environments instead of making them: an interpreter that always succeeds."""
    calls = []

    def make(folder, python, lock, steps):
        calls.append(python.version)
        steps.log.write_text("said\n")
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to("/bin/true")
        return "nothing 1"

    monkeypatch.setattr(installer, "make", make)
    return calls


def needs_uv():
    if not installer.find_uv():
        pytest.skip("uv is not here")


@pytest.mark.parametrize("by", ["uv", "pip"])
def test_installs_the_lock_and_nothing_else(tool, place, monkeypatch, tmp_path, by):
    needs_uv() if by == "uv" else monkeypatch.setattr(installer, "find_uv", lambda: None)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "registry"))  # ours must not be seen
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "lost"))
    found = tool_environments.install(tool, HERE)
    assert found.folder == place / f"fake-1.0-{tool.lock_sha256[:8]}"
    record = json.loads((found.folder / "installed.json").read_text())
    assert record["lock_sha256"] == tool.lock_sha256
    assert record["python"] == sys.version.split()[0]
    assert record["installer"].split()[0] == by
    assert tool_environments.python_of(tool) == found.folder / "env" / "bin" / "python"
    there = {p.name for p in (found.folder / "env").glob("lib/python*/site-packages/*.dist-info")}
    assert {name for name in there if not name.startswith(("pip-", "setuptools-"))} == {
        "fake_tool-1.0.dist-info"
    }
    assert "import fake_tool" in (found.folder / "install.log").read_text()
    assert not (tmp_path / "lost").exists()


def test_what_is_there_is_not_made_again_unless_forced(tool, made):
    first = tool_environments.install(tool, HERE)
    assert tool_environments.install(tool).record == first.record
    assert len(made) == 1
    tool_environments.install(tool, HERE, force=True)
    assert len(made) == 2


def test_another_lock_is_another_environment(tool, made, monkeypatch, tmp_path):
    tool_environments.install(tool, HERE)
    other = load(monkeypatch, make_registry(tmp_path / "registry", digest="1" * 64))
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
    def probe(*_):
        raise error

    monkeypatch.setattr(tool_environments, "_probe", probe)
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


@pytest.mark.parametrize("by", ["uv", "pip"])
def test_a_changed_package_is_refused(tool, monkeypatch, tmp_path, by):
    needs_uv() if by == "uv" else monkeypatch.setattr(installer, "find_uv", lambda: None)
    make_wheel(tmp_path / "wheels", "VALUE = 2\n")
    with pytest.raises(UserError, match="not the one that was locked.*log: .*install.log"):
        tool_environments.install(tool, HERE)
    assert tool_environments.installed(tool) is None


@pytest.mark.parametrize("by", ["uv", "pip"])
def test_no_network(tool, monkeypatch, by):
    needs_uv() if by == "uv" else monkeypatch.setattr(installer, "find_uv", lambda: None)
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "PIP_FIND_LINKS", "UV_FIND_LINKS", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # uv is told of pip's
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(UserError, match="fake: installing its packages failed: .*index cannot be reached"):
        tool_environments.install(tool, HERE)


def test_a_tool_that_cannot_be_imported(tool, monkeypatch, tmp_path):
    needs_uv()
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
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "not the one that was locked"),
        ("SSLError(SSLCertVerificationError(1, 'certificate verify failed'))", "PIP_CERT or SSL_CERT_FILE"),
        ("ERROR: HTTP error 403 while getting", "wants a login or refuses"),
        ("cause: dns error", "cannot be reached from here: set PIP_INDEX_URL or a proxy"),
        ("error: command 'gcc' failed: No such file or directory", "there is no compiler that can"),
        ("ERROR: No matching distribution found for x==1", "lacks a locked package"),
        ("warning: [Errno 30] Read-only file system: '/opt'", "name another place in PD_BASELINES"),
        ("Killed", "failed: Killed"),
        ("", "it said nothing"),
    ],
)
def test_reasons(tmp_path, said, reason):
    steps = installer.Steps("x", tmp_path / "log", "PD_BASELINES")
    with pytest.raises(UserError, match=reason):
        steps.run("that", ("/bin/sh", "-c", f'echo "{said}"; echo; exit 1'))
    assert (tmp_path / "log").read_text().startswith("$ /bin/sh -c")
