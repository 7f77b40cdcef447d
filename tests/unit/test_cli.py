"""The command line: help without heavy imports, exit codes, no traceback for a user."""

import json
import subprocess
import sys

import pytest

from perturbdiff import cli_options
from perturbdiff.errors import StoppedEarly, UserError

HEAVY = ("torch", "numpy", "pandas", "anndata", "scanpy", "zarr", "lightning", "pydantic", "rich")


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from perturbdiff import cli
sys.argv = ["perturbdiff", "--help"]
try:
    cli.main()
except SystemExit as stop:
    assert not stop.code
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "preprocess" in done.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("wrong column"), 2), (StoppedEarly("out of time"), 75), (ValueError("bug"), 1)],
)
def test_exit_codes(run_cli, monkeypatch, error, code):
    def fail(folder=None):
        raise error

    monkeypatch.setattr("perturbdiff.doctor.diagnose", fail)
    outcome = run_cli("doctor")
    assert outcome.code == code
    assert str(error) in outcome.err
    assert ("Traceback" in outcome.err) == (code == 1)


def test_unknown_command_and_missing_option_are_the_users(run_cli):
    assert run_cli("prepare").code == 2
    outcome = run_cli("baseline", "control", "store")
    assert outcome.code == 2
    assert "--split" in outcome.err


def test_schema_is_json_and_names_descriptions(run_cli):
    schema = json.loads(run_cli("config", "schema").out)
    assert "max_steps" in schema["$defs"]["TrainConfig"]["properties"]


def test_presets_are_listed_and_shown(run_cli):
    assert "recommended" in run_cli("config", "show").out.split()
    assert "max_epochs: 10" in run_cli("config", "show", "recommended").out


@pytest.mark.parametrize("text", ["3", "1/x", "4/4", "/2"])
def test_bad_shard(text):
    with pytest.raises(UserError, match="I/N"):
        cli_options.shard_of(text)


def test_bad_pair():
    with pytest.raises(UserError, match="STORE:SPLIT"):
        cli_options.store_and_split("store")
