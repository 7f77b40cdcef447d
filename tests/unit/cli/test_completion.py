"""The Tab key: commands, options, presets, keys, parts, methods, and files where nothing else fits."""

import os
import shutil
import subprocess
import sys

import pytest


@pytest.fixture
def answer(run_cli, monkeypatch):
    """Return a function from variables that a shell sets to what the program answers."""

    def answered(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        outcome = run_cli()
        assert (outcome.code, outcome.err) == (0, "")
        return outcome.out

    return answered


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ([], "sa", {"sample"}),
        (["train", "store"], "--spl", {"--split"}),
        (["train", "store", "--config"], "rec", {"recommended", "recommended-pretrain"}),
        (["config", "show"], "kang", {"kang18"}),
        (["train", "store", "--set"], "train.max_", {"train.max_steps=", "train.max_epochs="}),
        (["sample", "bundle", "store", "--part"], "", {"train", "valid", "test"}),
        (["baseline"], "ne", {"nearest-context"}),
        (["baseline"], "in", {"install"}),
        (["train"], "sto", set()),
        (["train", "store", "--split"], "sp", set()),
    ],
)
def test_what_is_offered(answer, words, incomplete, expected):
    line = ["perturbdiff", *words, incomplete]
    told = answer(
        _PERTURBDIFF_COMPLETE="complete_bash", COMP_WORDS="\n".join(line), COMP_CWORD=str(len(line) - 1)
    )
    assert set(told.split()) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_offered_the_same(answer, shell):
    variables = {"_PERTURBDIFF_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    parts = answer(**variables, _TYPER_COMPLETE_ARGS="perturbdiff sample bundle store --part tes")
    assert "test" in parts
    assert "train" not in parts
    files = answer(**variables, _TYPER_COMPLETE_ARGS="perturbdiff train sto").strip()
    assert files == ("_files" if shell == "zsh" else "")


def test_bash_completes_names_and_files(tmp_path):
    """In a real shell: our names, and the shell's files where we offer none."""
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    (tmp_path / "store").mkdir()
    program = tmp_path / "bin" / "perturbdiff"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m perturbdiff "$@"\n')
    program.chmod(0o755)
    script = tmp_path / "completion.sh"
    script.write_text(
        """
source <(perturbdiff --show-completion bash 2>/dev/null || true)
complete -p perturbdiff
COMP_WORDS=(perturbdiff sample bundle store --part tes); COMP_CWORD=5
_perturbdiff_completion perturbdiff; echo "part: ${COMPREPLY[*]}"
COMP_WORDS=(perturbdiff train sto); COMP_CWORD=2
_perturbdiff_completion perturbdiff; echo "file: ${COMPREPLY[*]}"
"""
    )
    search = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", str(script)], cwd=tmp_path, capture_output=True, text=True, check=True,
        env=os.environ | {"PATH": search, "SHELL": "/bin/bash"},
    )  # fmt: skip
    assert "complete -o default -F _perturbdiff_completion perturbdiff" in done.stdout
    assert "part: test" in done.stdout
    assert "file: \n" in done.stdout
