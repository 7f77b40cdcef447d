"""Nextflow for the tests of the workflow: found once, each start costs some seconds."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from perturbdiff import datasets

ROOT = Path(__file__).parents[2]

MISSING = "norman19"
"""A published data set that is nowhere."""

FAKE = """#!{python}
# Stands in for the program: keeps its arguments, makes what it is asked for.
import json, os, pathlib, sys
given = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(given) + "\\n")
if given[:2] == ["data", "check"]:
    if "refused" in open("recipe.yaml").read():
        sys.exit("error: no cells")
elif given[:1] == ["data"]:
    pathlib.Path(given[given.index("--out") + 1], "kang18_ifnb_muscat.h5ad").touch()
elif "--out" in given:
    out = pathlib.Path(given[given.index("--out") + 1])
    folder = out.suffix not in (".h5ad", ".html", ".parquet")
    if folder:
        out.mkdir()
    else:
        out.touch()
    for kind in ("manifest", "run"):
        (out / f"{{kind}}.json" if folder else pathlib.Path(f"{{out}}.{{kind}}.json")).write_text('{{"stage": "fake"}}')
    if given[0] == "split":
        pathlib.Path(f"{{out}}.counts.csv").touch()
    if given[0] == "report":
        for part in ("figures", "mqc", "tables"):
            pathlib.Path("report_" + part).mkdir()
print("0.0")
"""


@dataclass
class Ran:
    """One finished Nextflow command."""

    code: int
    output: str
    folder: Path
    outdir: Path

    def tasks(self) -> list[dict[str, str]]:
        """Rows of the newest trace."""
        newest = max((self.outdir / "pipeline_info").glob("trace_*.tsv"), key=lambda p: p.stat().st_mtime)
        with newest.open() as handle:
            return list(csv.DictReader(handle, delimiter="\t"))

    def ran(self) -> list[str]:
        """Names of the tasks that ran and ended well, without workflow names."""
        return sorted(t["name"].split(":")[-1] for t in self.tasks() if t["status"] == "COMPLETED")


class Nextflow:
    """Starts Nextflow in a folder of its own."""

    def __init__(self, program: str, folder: Path, stand_ins: Path, classes: Path) -> None:
        self.program, self.folder, self.stand_ins, self.classes = program, folder, stand_ins, classes
        self.path = [Path(sys.executable).parent]

    def environment(self, parser: str) -> dict[str, str]:
        known = f" -XX:SharedArchiveFile={self.classes}" if self.classes.exists() else ""
        return os.environ | {
            "PATH": ":".join([*map(str, self.path), os.environ["PATH"]]),
            "NXF_SYNTAX_PARSER": parser,
            "NXF_ANSI_LOG": "false",
            "NXF_OFFLINE": "true",
            "NXF_OPTS": f"-Xms128m -Xmx1g -XX:+UseSerialGC -Xlog:disable{known}",
            "PERTURBDIFF_DATA": str(self.stand_ins),
        }

    def __call__(self, *arguments: str, parser: str = "v2", timeout: float = 1800) -> Ran:
        environment, partial = self.environment(parser), self.classes.with_suffix(f".{os.getpid()}")
        if not self.classes.exists() and "-stub" in arguments:
            # the classes that are loaded are kept, which spares others two seconds
            environment["NXF_OPTS"] += f" -XX:ArchiveClassesAtExit={partial}"
        done = subprocess.run(
            [self.program, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if partial.exists():
            partial.rename(self.classes) if done.returncode == 0 else partial.unlink()
        # 25.04 warns of valid selectors
        lines = [
            line
            for line in (done.stdout + done.stderr).splitlines()
            if "Unrecognized config option" not in line
        ]
        return Ran(done.returncode, "\n".join(lines), self.folder, self.folder / "out")

    def run(self, *arguments: str, parser: str = "v2", timeout: float = 1800) -> Ran:
        fixed = ("run", str(ROOT / "main.nf"), "-profile", "test", "--outdir", "out")
        return self(*fixed, *arguments, parser=parser, timeout=timeout)


class Questions:
    """A Nextflow that answers questions about the workflow for as long as it runs, so that each needs no start."""

    def __init__(self, nextflow: Nextflow) -> None:
        for path in ROOT.iterdir():
            if path.name != "main.nf" and not path.name.startswith("."):
                (nextflow.folder / path.name).symlink_to(path)
        (nextflow.folder / "main.nf").write_text(Path(__file__).with_name("questions.nf").read_text())
        self.methods = nextflow.folder / "none"
        self._process = subprocess.Popen(
            [nextflow.program, "run", "main.nf", "-profile", "test"],
            cwd=nextflow.folder,
            env=nextflow.environment("v2") | {"PD_BASELINES": str(self.methods)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _answer(self, **question) -> tuple[Any, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        said = []
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            said.append("it has ended")
        for line in self._process.stdout:
            if line.startswith("answer: "):
                return json.loads(line.removeprefix("answer: "))[0], "".join(said)
            said.append(line)
        raise AssertionError("".join(said))

    def refusal(self, folder: Path, *, stub: bool = True, **given: object) -> str:
        """Return why the workflow refuses these parameters before any task; results would go to ``folder/out``."""
        told, _ = self._plan(folder, stub, given)
        assert told is not None, "nothing is refused"
        return told

    def plan(self, folder: Path, **given: object) -> str:
        """Return what the workflow says before its first task; the plan is in ``folder/out``."""
        told, said = self._plan(folder, True, given)
        assert told is None, told
        return said

    def _plan(self, folder: Path, stub: bool, given: dict[str, object]) -> tuple[str | None, str]:
        usual = {"outdir": str(folder / "out"), "ckpt_dir": str(folder / "checkpoints")}
        return self._answer(folder=str(folder), stub=stub, given=usual | given)

    def recipe(self, folder: Path, preset: str, overrides: str) -> dict[str, Any]:
        """Return the values that the workflow finds in a preset, or a file in a folder, and a cell of overrides."""
        return self._answer(folder=str(folder), preset=preset, overrides=overrides)[0]

    def end(self) -> None:
        self._process.communicate(timeout=600)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.pipeline)


@pytest.fixture(scope="session")
def program() -> str:
    """Path of Nextflow, or the test is skipped."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Java is missing: the workflow is not tested here")
    found = subprocess.run([ROOT / "bin" / "get-nextflow"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"Nextflow cannot be had here: {found.stderr.strip().splitlines()[-1]}")
    return found.stdout.strip()


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory) -> Path:
    """Empty files under the names of the published data sets but one: enough for a plan."""
    folder = tmp_path_factory.mktemp("published")
    for name, dataset in datasets.registered().items():
        if name == MISSING:
            continue
        path = folder / dataset.file.format(part=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


@pytest.fixture(scope="session")
def nextflow_in(program, stand_ins):
    """Return a function: folder → `Nextflow` that runs there."""
    # kept for the next time: Java does without, if it does not fit
    java = Path(shutil.which("java") or Path(os.environ["JAVA_HOME"]) / "bin" / "java").resolve()
    known = sha256(f"{program} {java} {java.stat().st_mtime}".encode()).hexdigest()[:12]
    classes = ROOT / ".cache" / "tests" / f"{known}.jsa"
    classes.parent.mkdir(parents=True, exist_ok=True)
    return lambda folder: Nextflow(program, folder, stand_ins, classes)


@pytest.fixture(scope="session")
def questions(nextflow_in, tmp_path_factory) -> Iterator[Questions]:
    """What the workflow refuses, without a start of Nextflow for each case."""
    started = Questions(nextflow_in(tmp_path_factory.mktemp("questions")))
    yield started
    started.end()


@pytest.fixture
def nextflow(nextflow_in, tmp_path) -> Nextflow:
    return nextflow_in(tmp_path)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a program in place of ours, and return a function that gives the arguments of its calls."""
    log = tmp_path / "calls.txt"
    program = tmp_path / "bin" / "perturbdiff"
    program.parent.mkdir()
    program.write_text(FAKE.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))  # its folder comes first in PATH
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]
