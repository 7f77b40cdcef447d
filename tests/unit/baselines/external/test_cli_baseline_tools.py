"""perturbdiff baseline install, list, show and remove."""

import shutil

import pytest
import typer
from fake_tool import serve
from typer.testing import CliRunner

from perturbdiff.baselines.external import tool_environments
from perturbdiff.cli.baseline_commands import mount
from perturbdiff.runtime.errors import UserError

pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not here")


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Run a command with the fake tool."""
    monkeypatch.setenv("PD_BASELINES", str(tmp_path / "env"))
    serve(monkeypatch, tmp_path)
    app = typer.Typer(pretty_exceptions_enable=False)
    mount(app)

    def run(*words):
        done = CliRunner().invoke(app, words)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done

    return run


def test_install_says_the_licence_and_prints_the_folder(call, tmp_path):
    done = call("install", "fake")
    assert "Fake 1.0, licence: MIT; see https://example.org/fake" in done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{tmp_path / 'env'}/fake-1.0-")


def test_an_unknown_name_installs_nothing(call, tmp_path):
    with pytest.raises(UserError, match="no tool 'fak', did you mean 'fake'"):
        call("install", "fake", "fak")
    assert not (tmp_path / "env").exists()


def test_list(call):
    def lines():
        return [line.split() for line in call("list").stdout.splitlines()]

    assert ["linear", "built", "in"] in lines()
    assert ["fake", "1.0", "not", "installed", "MIT"] in lines()
    call("install", "fake")
    assert ["fake", "1.0", "installed", "MIT"] in lines()


def test_show(call):
    text = call("show", "fake").stdout
    for line in [
        "title        Fake (Fake_Tool 1.0)",
        "cite         Nobody 2025",
        "installed    no",
        "  name    recommended  quick",
        "  epochs  400          30     passes over the training cells",
        "  norm    true         false  normalise",
    ]:
        assert line in text.splitlines()
    call("install", "fake")
    assert "(Python 3." in call("show", "fake").stdout


def test_remove(call, tmp_path):
    assert call("remove", "fake").stdout == "fake: nothing to remove\n"
    call("install", "fake")
    assert call("remove", "fake").stdout.startswith(f"fake: {tmp_path / 'env'}/fake-1.0-")
    assert list((tmp_path / "env").iterdir()) == []
    assert tool_environments.root() == tmp_path / "env"
