"""The doctor speaks of what it finds, also when programs are missing, old or silent."""

from pathlib import Path

import pytest

from perturbdiff import doctor


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Return a folder that is the whole PATH."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return tools


def found(folder: Path) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.diagnose(folder)}


def test_a_bare_machine_is_told_what_to_install(only, tmp_path):
    checks = found(tmp_path)
    for name in ("Java", "Nextflow", "Slurm", "Apptainer"):
        assert checks[name].status == "absent"
        assert checks[name].remedy
    assert checks["Python"].status == checks["torch"].status == "ok"
    assert "→" in doctor.render(list(checks.values()))


def test_versions_are_read(only, tmp_path):
    program(only, "java", "echo 'openjdk version \"21.0.2\" 2024-01-16' >&2")
    program(only, "nextflow", "echo '      version 25.04.4 build 5950'")
    program(only, "sbatch", "echo 'slurm 23.11.4'")
    program(only, "sinfo", "echo 'gpu* up 4 nodes gpu:a100:8'")
    checks = found(tmp_path)
    assert checks["Java"].found == "21.0.2"
    assert checks["Nextflow"].found.startswith("25.04.4")
    assert checks["Slurm"].found == "slurm 23.11.4: gpu* up 4 nodes gpu:a100:8"


def test_what_is_too_old_or_silent_is_a_problem(only, tmp_path):
    program(only, "java", "echo 'java version \"1.8.0_292\"' >&2")
    program(only, "nextflow", "echo '      version 23.10.1 build 5891'")
    program(only, "sbatch", "echo 'slurm 23.11.4'")
    program(only, "sinfo", "exit 1")
    checks = found(tmp_path)
    assert {checks[n].status for n in ("Java", "Nextflow", "Slurm")} == {"problem"}


def test_an_installed_nextflow_is_found_in_the_project(only, tmp_path):
    home = tmp_path / ".cache" / "nextflow" / "25.04.4"
    home.mkdir(parents=True)
    program(home, "nextflow", "echo '      version 25.04.4 build 5950'")
    assert found(tmp_path)["Nextflow"].status == "ok"
