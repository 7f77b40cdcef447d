"""The examples of these pages of docs/ run, in order, as they are printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = {
    page: re.findall(r"^```(bash|python)\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    for page in (
        "quickstart.md",
        "usage.md",
        "embeddings.md",
        "sampling.md",
        "training.md",
        "vocabulary.md",
        "store.md",
        "export.md",
    )
}
MADE = {
    "quickstart.md": ("first/report.html", "first/again/metrics.csv"),
    "usage.md": ("report.html", "from_python.h5ad"),
    "embeddings.md": ("new.h5ad",),
    "training.md": ("early.h5ad", "finetuned/model.safetensors", "few/model.safetensors"),
    "sampling.md": ("two.h5ad", "all.h5ad", "random.h5ad"),
    "vocabulary.md": ("aligned.h5ad",),
    "store.md": ("all.h5ad",),
    "export.md": ("counts.h5ad", "for_scorer.h5ad", "metrics/counts/metrics.csv"),
}
SIMULATED = re.compile(r"(perturbdiff simulate .*--cells) (?:1500|2000|3000) ")
FEWER = r"\1 1200" + "".join(
    f" --set simulate.{name}={number}" for name, number in
    {"genes": 300, "knockdowns": 4, "drugs": 1, "cytokines": 1}.items()
) + " "  # fmt: skip
"""A screen of 8 perturbations instead of 20: what costs is the comparison of all with all."""
AGAIN = "perturbdiff run sim/counts.h5ad --out second --config plan/recipe.yaml"
ENVIRONMENT = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
STAGES = ("simulate", "preprocess", "split", "stats", "train", "pretrain", "finetune", "sample")
STAGES += ("run", "init", "baseline", "evaluate", "ceiling", "merge", "report", "doctor", "config", "store")
STAGES += ("export", "calibrate")


def test_every_command_has_an_example():
    assert AGAIN in "".join(code for _, code in BLOCKS["quickstart.md"])
    pages = (*BLOCKS["usage.md"], *BLOCKS["quickstart.md"])
    shown = "".join(code for language, code in pages if language == "bash")
    assert [s for s in STAGES if not re.search(rf"^perturbdiff {s}\b", shown, re.M)] == []


@pytest.mark.slow
def test_the_five_minutes_of_the_readme(tmp_path, quick_program):
    """As it stands, but with fewer cells and perturbations, and with 20 steps of training and 4 of sampling."""
    section = (DOCS.parent / "README.md").read_text().partition("## Five minutes")[2]
    (code,) = re.findall(r"^```bash\n\. \.venv/bin/activate\n(.*?)^```", section, re.M | re.S)
    code, runs = re.subn(
        r"^(perturbdiff run .*)$", r"\1 --set train.max_steps=20 --set sample.num_steps=4", code, flags=re.M
    )
    code, screens = SIMULATED.subn(FEWER, code)
    assert runs == screens == 1
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PATH": f"{quick_program}:{ENVIRONMENT['PATH']}"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / done.stdout.splitlines()[-1]).name == "report.html"
    assert (tmp_path / done.stdout.splitlines()[-1]).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("page", BLOCKS)
def test_examples_run(tmp_path, page, quick_program):
    environment = {**ENVIRONMENT, "PATH": f"{quick_program}:{ENVIRONMENT['PATH']}"}
    for language, text in BLOCKS[page]:
        # exit code 1: this machine lacks something
        code = text.replace("perturbdiff doctor", "perturbdiff doctor || [ $? = 1 ]")
        code = SIMULATED.sub(FEWER, code)
        # the second whole run of a page: tests/unit/screen/test_run.py runs an edited recipe
        code = code.replace(AGAIN, AGAIN.replace("perturbdiff run", "perturbdiff init"))
        command = (
            ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
        )
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    for name in MADE[page]:
        assert (tmp_path / name).stat().st_size > 10_000, name
