"""What this process may use of the machine's memory."""

import psutil

from perturbdiff.runtime import resources


def test_limits_of_the_job_are_read_from_either_kind_of_cgroup(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "_CGROUPS", tmp_path)
    lines = tmp_path / "own"
    monkeypatch.setattr(resources, "_OWN_GROUPS", lines)
    lines.write_text("0::/system.slice/job_7/step_0\n")
    group = tmp_path / "system.slice" / "job_7"
    (group / "step_0").mkdir(parents=True)
    (group / "step_0" / "memory.max").write_text("max\n")
    (group / "memory.max").write_text("4096\n")
    assert resources.cgroup_limit() == 4096
    lines.write_text("4:memory:/slurm/uid_1/job_7\n3:cpuset:/\n")
    group = tmp_path / "memory" / "slurm" / "uid_1" / "job_7"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("8192\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{1 << 62}\n")
    assert resources.cgroup_limit() == 8192
    (group / "memory.limit_in_bytes").unlink()
    assert resources.cgroup_limit() is None


def test_no_more_is_available_than_the_job_may_use(monkeypatch):
    monkeypatch.setattr(resources, "cgroup_limit", lambda: 4096)
    assert resources.available() == 4096
    monkeypatch.setattr(resources, "cgroup_limit", lambda: None)
    assert resources.available() <= psutil.virtual_memory().total
