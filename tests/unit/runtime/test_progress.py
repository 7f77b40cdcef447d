"""The log on standard error and in the file that PD_LOG names."""

import re

import pytest

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / "logs" / "run.log"
    monkeypatch.setenv("PD_LOG", str(path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return path


def test_one_file_tells_of_all_attempts(run_cli, tmp_path, log, monkeypatch):
    out = tmp_path / "sim"
    given = ("simulate", "--config", "tiny", "--cells", 900, "--out", out)
    assert run_cli("simulate", "--config", "nothing", "--out", out).code == 2
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert run_cli(*given).code == 0
    assert run_cli(*given).code == 0
    lines = log.read_text().splitlines()
    assert all(re.match(TIME, line) for line in lines)
    begun = [i for i, line in enumerate(lines) if "========" in line]
    assert len(begun) == 3
    assert re.search(r"host \S+, process \d+: perturbdiff simulate --config nothing --out ", lines[begun[0]])
    assert "process" in lines[begun[1]]
    assert "Slurm job 77: perturbdiff simulate" in lines[begun[1]]
    assert re.search(r"exit code 2 after \d+ s: error: .*nothing", lines[begun[1] - 1])
    assert re.search(r"exit code 0 after \d+ s$", lines[begun[2] - 1])
    assert re.search(rf"{TIME} INFO simulate: .*up to date", lines[-2])


def test_a_usage_error_is_told(run_cli, tmp_path, log):
    assert run_cli("simulate", "--out", tmp_path / "x", "--cells", "many").code == 2
    assert re.search(
        r"exit code 2 after \d+ s: error: perturbdiff simulate: --cells many: ",
        log.read_text().splitlines()[-1],
    )


def test_help_and_version_leave_no_trace(run_cli, log):
    assert run_cli("--version").code == 0
    assert run_cli("simulate", "--help").code == 0
    assert not log.exists()


def test_a_log_that_cannot_be_written_is_said_once_and_ends_nothing(run_cli, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PD_LOG", str(tmp_path / "file" / "run.log"))
    outcome = run_cli("simulate", "--config", "tiny", "--cells", 900, "--out", tmp_path / "sim")
    assert outcome.code == 0
    assert outcome.err.count("cannot be written: ") == 1
    assert "PD_LOG" in outcome.err


def test_a_bug_leaves_its_trace(run_cli, tmp_path, log, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("perturbdiff.simulation.simulation_stage.simulate", broken)
    assert run_cli("simulate", "--out", tmp_path / "x").code == 1
    text = log.read_text()
    assert "this is a bug in perturbdiff" in text
    assert "ZeroDivisionError: oops" in text
    assert text.splitlines()[-1].endswith("exit code 1 after 0 s")
