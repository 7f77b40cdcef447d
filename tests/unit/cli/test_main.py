"""The command line: help without heavy imports, exit codes, no traceback for a user."""

import json
import subprocess
import sys

import pytest
from typer.main import get_command

from perturbdiff.cli import main, options
from perturbdiff.cli.options import Program, Work
from perturbdiff.runtime.errors import INTERRUPTED, StoppedEarly, UserError

HEAVY = ("torch", "numpy", "pandas", "anndata", "scanpy", "zarr", "pydantic", "rich")


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from perturbdiff.cli import main as cli
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


def test_store_info_and_recipes_import_little(trained):
    code = """
import sys
from perturbdiff.cli import main as cli
for words in (["store", "info", sys.argv[1]], ["config", "show", "demo"]):
    sys.argv[1:] = words
    try:
        cli.main()
    except SystemExit as stop:
        assert not stop.code
print([name for name in ("torch", "anndata", "zarr", "pandas", "dask", "scipy", "rich") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(trained / "store")], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "conditions" in done.stdout
    assert done.stderr == ""


def test_a_command_that_takes_long_speaks_first(run_cli, monkeypatch):
    monkeypatch.setattr("perturbdiff.doctor.diagnose", lambda folder=None: [])
    assert "INFO doctor: loading libraries and inputs" in run_cli("doctor", "--json").err
    assert run_cli("--quiet", "doctor", "--json").err == ""
    assert "loading" not in run_cli("doctor", "--help").err


def test_every_command_speaks_first_but_those_that_are_quick():
    def leaves(command, words=()):
        if not hasattr(command, "commands"):
            return {" ".join(words): isinstance(command, Work)}
        return {k: v for n, one in command.commands.items() for k, v in leaves(one, (*words, n)).items()}

    silent = {name for name, speaks in leaves(get_command(main.app)).items() if not speaks}
    quick = {"config show", "config schema", "data list", "store info", "bundle info"}
    assert silent == quick | {f"baseline {word}" for word in ("list", "show", "remove")}


def test_an_interrupt_gets_a_sentence_wherever_it_comes(run_cli, monkeypatch):
    def interrupted(folder=None):
        raise KeyboardInterrupt

    monkeypatch.setattr("perturbdiff.doctor.diagnose", interrupted)
    outcome = run_cli("doctor")
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == INTERRUPTED
    assert "Traceback" not in outcome.err


def test_an_interrupt_while_the_command_line_is_read_gets_a_sentence(run_cli, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Program, "make_context", interrupted)
    outcome = run_cli("doctor")
    assert outcome.code == 130
    assert outcome.err == f"{INTERRUPTED}\n"


def test_an_interrupt_while_the_command_line_is_imported_gets_a_sentence():
    code = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "perturbdiff.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from perturbdiff.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == f"{INTERRUPTED}\n"


def test_an_interrupt_within_a_library_s_callback_is_not_lost():
    code = """
import signal, sys, time
import perturbdiff.doctor
class Held:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
def slow(folders):
    Held()
    time.sleep(300)
perturbdiff.doctor.diagnose = slow
sys.argv = ["perturbdiff", "doctor"]
from perturbdiff.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == INTERRUPTED
    assert "Traceback" not in done.stderr


def test_an_interrupt_says_nothing_of_the_tasks_that_a_library_leaves_unfinished():
    code = """
import atexit, logging, sys
import perturbdiff.doctor
async def task():
    pass
def interrupted(folders):
    import signal
    atexit.register(logging.getLogger("a.library").warning, "a thread did not finish")
    held = task()
    signal.raise_signal(signal.SIGINT)
perturbdiff.doctor.diagnose = interrupted
sys.argv = ["perturbdiff", "doctor"]
from perturbdiff.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == INTERRUPTED


def test_threads_that_wait_do_not_spin_unless_the_user_says_so(monkeypatch):
    code = "import os, perturbdiff; print(os.environ['OMP_WAIT_POLICY'])"
    for given, found in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if given:
            monkeypatch.setenv("OMP_WAIT_POLICY", given)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == found


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
    assert "max_epochs: 15" in run_cli("config", "show", "recommended").out


@pytest.mark.parametrize("text", ["3", "1/x", "4/4", "/2"])
def test_bad_shard(text):
    with pytest.raises(UserError, match="I/N"):
        options.shard_of(text)


def test_bad_pair():
    with pytest.raises(UserError, match="STORE:SPLIT"):
        options.store_and_split("store")
