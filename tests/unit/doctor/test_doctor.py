"""The doctor speaks of what it finds, also when programs are missing, old, silent or never answer."""

import json
import sys
import time
from pathlib import Path

import pytest

from perturbdiff import doctor
from perturbdiff.doctor import checks, job, machine, programs


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Return a folder that is the whole PATH, on a machine without job or container, whose PyTorch sees nothing."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("JAVA_HOME", "APPTAINER_CONTAINER", "TMPDIR", "CUDA_VISIBLE_DEVICES", "PD_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    for name in list(doctor.os.environ):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(job, "_MARK", tmp_path / "no-container")
    monkeypatch.setattr(machine, "_DEVICES", tmp_path / "dev")
    torch_sees(monkeypatch)
    return folder


def torch_sees(monkeypatch, *names, cuda="13.2", warnings=""):
    seen = {"version": "2.15.0", "cuda": cuda, "names": names, "warnings": warnings}
    monkeypatch.setattr(machine, "_PROBE", f"print({json.dumps(seen)!r})")


def found(*places: Path) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.diagnose(places)}


def test_a_bare_machine_is_told_what_to_install(only, tmp_path):
    checks = found(tmp_path)
    for name in ("Java", "Nextflow", "Slurm", "Apptainer", "GPU"):
        assert checks[name].status == "absent"
        assert checks[name].remedy
    assert checks["Python"].status == checks["torch"].status == "ok"
    assert "job" not in checks
    assert "image" not in checks
    assert "→" in doctor.render(list(checks.values()))


def test_versions_are_read(only, tmp_path):
    program(only, "java", "echo 'openjdk version \"21.0.2\" 2024-01-16' >&2")
    program(only, "nextflow", "echo '      version 25.04.4 build 5950'")
    program(only, "sbatch", "echo 'slurm 23.11.4'")
    program(only, "apptainer", "echo 'apptainer version 1.3.4'")
    program(
        only,
        "sinfo",
        "echo 'gpu|up|2-00:00:00|4|64|515000+|gpu:a100:8'; echo 'old|drain|infinite|1|8|8000|(null)'",
    )
    checks = doctor.diagnose([tmp_path])
    by_name = {check.name: check.found for check in checks}
    assert by_name["Java"] == "21.0.2"
    assert by_name["Nextflow"].startswith("25.04.4")
    assert by_name["Slurm"] == "slurm 23.11.4"
    assert by_name["Apptainer"] == "apptainer version 1.3.4"
    partitions = [(check.status, check.found) for check in checks if check.name == "partition"]
    assert partitions == [
        ("ok", "gpu: jobs up to 2-00:00:00; 4 nodes with 64 CPUs, 503 GiB, gpu:a100:8"),
        ("note", "old: no time limit; 1 nodes with 8 CPUs, 8 GiB, no GPU; drain"),
    ]


def test_what_is_too_old_or_silent_is_a_problem(only, tmp_path):
    program(only, "java", "echo 'java version \"1.8.0_292\"' >&2")
    program(only, "nextflow", "echo '      version 23.10.1 build 5891'")
    program(only, "sbatch", "echo 'slurm 23.11.4'")
    program(only, "apptainer", "echo 'apptainer version 1.1.9-1.el8'")
    program(only, "sinfo", "exit 1")
    checks = found(tmp_path)
    assert {checks[n].status for n in ("Java", "Nextflow", "Slurm", "Apptainer")} == {"problem"}


def test_an_installed_nextflow_is_found_in_the_project(only, tmp_path):
    home = tmp_path / ".cache" / "nextflow" / "25.04.4"
    home.mkdir(parents=True)
    program(home, "nextflow", "echo '      version 25.04.4 build 5950'")
    assert found(tmp_path)["Nextflow"].status == "ok"


def test_nothing_that_hangs_holds_the_doctor(only, tmp_path, monkeypatch):
    # a launcher whose child keeps the pipe open, and a check that never returns
    program(only, "nextflow", "/bin/sleep 60 & /bin/sleep 60")
    monkeypatch.setattr(programs, "ask", lambda *a, **k: checks.ask(*a, **(k | {"timeout": 0.5})))
    monkeypatch.setattr(checks, "LIMIT", 3.0)
    monkeypatch.setattr(machine, "memory", lambda: time.sleep(60))
    start = time.monotonic()
    result = found(tmp_path)
    assert time.monotonic() - start < 15
    assert result["Nextflow"].status == "absent"
    assert result["memory"].status == "problem"
    assert "no answer within 3 s" in result["memory"].found


def test_a_check_that_breaks_leaves_the_others_their_say(only, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: {}["total"])
    checks = found(tmp_path)
    assert checks["memory"].status == "problem"
    assert "KeyError" in checks["memory"].found
    assert checks["Python"].status == "ok"


def test_accounts_are_those_of_the_site(only, tmp_path):
    assert found(tmp_path)["accounts"].status == "absent"
    program(only, "sacctmgr", "echo 'lab42||normal,long'; echo 'lab42|gpu|'")
    assert found(tmp_path)["accounts"].found == "lab42 (qos normal,long); lab42 (partition gpu)"


def test_a_job_says_what_it_was_given(only, tmp_path, monkeypatch):
    end = int(time.time()) + 3 * 3600 + 300
    given = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURMD_NODENAME": "node7",
        "SLURM_CPUS_PER_TASK": "10000",
        "SLURM_MEM_PER_NODE": "2048",
        "SLURM_JOB_END_TIME": str(end),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    checks = found(tmp_path)
    assert checks["job"].found == "4711 in partition gpu on node7"
    assert checks["time left"].found == "3 h 04 min (SLURM_JOB_END_TIME)"
    assert checks["job CPUs"].status == "note"
    assert checks["job CPUs"].found.startswith("10000 given by the job")
    assert checks["job memory"].found.startswith("2.0 GiB given by the job")
    assert "accounts" not in checks


@pytest.mark.parametrize(
    ("end", "squeue", "status", "said"),
    [
        ("60", None, "note", "too short"),
        ("soon", None, "problem", "seconds since 1970"),
        (None, "1:02:03", "note", "PD_END_TIME"),
        (None, None, "note", "unknown in here"),
    ],
)
def test_a_job_whose_end_is_near_or_unknown(only, monkeypatch, end, squeue, status, said):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    if end:
        monkeypatch.setenv("PD_END_TIME", str(int(time.time()) + int(end)) if end.isdigit() else end)
    if squeue:
        program(only, "squeue", f"echo {squeue}")
    check = job.time_left()
    assert check.status == status
    assert said in check.found + check.remedy
    assert (squeue or "") in check.found


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_JOB_GPUS": "0,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1f,GPU-2a,GPU-3c"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
    ],
)
def test_gpus_of_the_job_are_counted(only, monkeypatch, variables, number):
    assert job.gpus_given() is None
    for name, value in ({"SLURM_JOB_ID": "1"} | variables).items():
        monkeypatch.setenv(name, value)
    assert job.gpus_given() == number


def test_gpus_given_but_not_seen_are_explained(only, tmp_path, monkeypatch):
    def gpu() -> doctor.Check:
        check = machine.gpus()
        assert check.status == "problem"
        assert check.found == "2 given by the job, 0 seen by PyTorch 2.15.0"
        return check

    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "shows no NVIDIA device" in gpu().remedy
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert "nvidia-smi" in gpu().remedy
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/perturbdiff.sif")
    assert "--nv" in gpu().remedy
    program(
        only,
        "nvidia-smi",
        'if [ $# = 0 ]; then echo "| CUDA Version: 12.4 |"; else echo "NVIDIA A100, 550.1"; fi',
    )
    assert "the driver is for CUDA 12.4" in gpu().remedy
    torch_sees(monkeypatch, cuda="12.8", warnings="CUDA initialization: out of order")
    assert "out of order" in gpu().remedy
    torch_sees(monkeypatch, cuda=None)
    assert "without CUDA" in gpu().remedy


def test_gpus_that_are_seen(only, monkeypatch):
    torch_sees(monkeypatch, "A100 (80 GiB)", "A100 (80 GiB)")
    assert machine.gpus().found == "A100 (80 GiB), A100 (80 GiB), CUDA 13.2"
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    assert machine.gpus().status == "note"
    torch_sees(monkeypatch)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    assert machine.gpus().found == "none given by the job"


def test_a_gpu_of_the_machine_that_torch_cannot_use(only, tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    program(
        only, "nvidia-smi", 'if [ $# = 0 ]; then echo "CUDA Version: 11.4"; else echo "Tesla V100, 470.1"; fi'
    )
    check = machine.gpus()
    assert (check.status, check.found) == (
        "problem",
        "Tesla V100, 470.1 (driver), not usable by PyTorch 2.15.0",
    )
    assert "the driver is for CUDA 11.4" in check.remedy


def test_torch_that_does_not_load_is_a_problem(only, monkeypatch):
    monkeypatch.setattr(machine, "_PROBE", "raise ImportError")
    assert machine.gpus().status == "problem"
    monkeypatch.setattr(machine, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(machine, "_PATIENCE", 0.5)
    assert machine.gpus().status == "note"


def test_in_a_container_it_says_which_image_and_asks_for_no_programs(only, tmp_path, monkeypatch):
    mark = tmp_path / "singularity.d"
    mark.mkdir()
    labels = {"title": "perturbdiff", "version": "0.1.0", "revision": "abc123"}
    (mark / "labels.json").write_text(
        json.dumps({f"org.opencontainers.image.{k}": v for k, v in labels.items()})
    )
    monkeypatch.setattr(job, "_MARK", mark)
    for name, value in {
        "APPTAINER_CONTAINER": "/images/perturbdiff.sif",
        "PD_IMAGE_ID": "sha256:00ff",
        "HOME": str(tmp_path / "home"),
        "MPLCONFIGDIR": "/tmp/matplotlib",
        "NUMBA_CACHE_DIR": "/tmp/numba",
    }.items():
        monkeypatch.setenv(name, value)
    checks = found(tmp_path)
    assert checks["image"].found == "/images/perturbdiff.sif, version 0.1.0, revision abc123, sha256:00ff"
    assert checks["home"].found.startswith("not visible, not needed")
    assert not {"Java", "Nextflow", "Slurm", "Apptainer", "accounts"} & set(checks)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "home" / ".cache"))
    assert "NUMBA_CACHE_DIR" in job.home().remedy
    (mark / "labels.json").write_text("{}")
    assert job.image().status == "note"


def test_temporary_files_need_a_folder_that_is_there(only, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    assert machine.temporary_files().status == "problem"
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/perturbdiff.sif")
    assert f"--bind {tmp_path / 'gone'}" in machine.temporary_files().remedy
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(machine.tempfile, "tempdir", None)
    assert machine.temporary_files().found.endswith(f"free in {tmp_path}")
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda folder: machine.shutil._ntuple_diskusage(64, 0, 64 << 20)
    )
    assert machine.temporary_files().status == "problem"


def test_what_images_need_to_be_built_and_run(only, tmp_path, monkeypatch):
    etc = tmp_path / "etc"
    etc.mkdir()
    monkeypatch.setattr(programs, "_ETC", etc)
    monkeypatch.setattr(programs, "_FUSE", tmp_path / "fuse")
    monkeypatch.setattr(programs.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(programs, "user_name", lambda: "ada")
    program(
        only,
        "apptainer",
        f"""[ "$1" = buildcfg ] && echo LIBEXECDIR={tmp_path}/libexec || echo 'apptainer version 1.4.5'""",
    )

    def statuses() -> list[tuple[str, str]]:
        return [(check.status, check.found) for check in programs.apptainer()[1:]]

    running, building = statuses()
    assert running == ("note", f"not seen: squashfuse, {tmp_path}/fuse for ordinary users, user namespaces")
    assert building == ("absent", f"--fakeroot is not possible: ada is not in {etc}/subuid and {etc}/subgid")
    (tmp_path / "fuse").touch()
    program(only, "squashfuse", "true")
    program(only, "unshare", "true")
    program(only, "fakeroot", "true")
    running, building = statuses()
    assert running == ("ok", "mounted by squashfuse, in a user namespace: no unpacking")
    assert building[0] == "note"
    for name in ("subuid", "subgid"):
        (etc / name).write_text("someone:100000:65536\nada:165536:65536\n")
    assert statuses()[1] == ("ok", "--fakeroot: ada has subordinate ids")
    program(only, "unshare", "exit 1")
    starter = tmp_path / "libexec" / "apptainer" / "bin" / "starter-suid"
    starter.parent.mkdir(parents=True)
    starter.touch()
    starter.chmod(0o4755)
    assert statuses()[0] == ("ok", "mounted by the kernel (setuid installation)")


@pytest.mark.parametrize(
    ("mount", "sharing", "locks"),
    [
        ("lustre rw,flock", "ok", "ok"),
        ("lustre rw,localflock", "ok", "note"),
        ("nfs4 rw,local_lock=none", "ok", "ok"),
        ("nfs rw,nolock", "ok", "note"),
        ("fuse.sshfs rw", "ok", "ok"),
        ("tmpfs rw", "note", "ok"),
        ("xfs rw", "note", "ok"),
    ],
)
def test_folders_are_known_by_their_file_system(only, tmp_path, monkeypatch, mount, sharing, locks):
    program(only, "sbatch", "echo slurm 23.11.4")
    place = tmp_path / "my scratch"
    place.mkdir()
    mounts = tmp_path / "mounts"
    escaped = str(place).replace(" ", "\\040")
    mounts.write_text(
        f"/dev/vda / ext4 rw 0 0\nserver:/x {escaped} {mount} 0 0\nb {place.parent}/other xfs rw 0 0\n"
    )
    monkeypatch.setattr(machine, "_MOUNTS", mounts)
    checks = {check.name: check for check in machine.look_at_folder(place / "results" / "new", required=True)}
    assert checks["sharing"].status == sharing
    assert checks["locks"].status == locks
    assert mount.split()[0] in checks["folder"].found
    assert "not there yet" in checks["folder"].found
    assert ("quota" in checks["folder"].found) == mount.startswith(("lustre", "nfs"))
    assert not list(place.iterdir())


def test_locks_that_do_not_hold_are_told(only, tmp_path, monkeypatch):
    monkeypatch.setattr(machine.fcntl, "flock", lambda *a: None)
    check = found(tmp_path)["locks"]
    assert (check.status, check.found) == ("note", f"{tmp_path}: flock is given to a second process too")

    def refused(*a):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(machine.fcntl, "flock", refused)
    assert "Function not implemented" in found(tmp_path)["locks"].found
    monkeypatch.setattr(machine.os, "utime", lambda *a: None)
    assert found(tmp_path)["locks"].status == "problem"
    assert not list(tmp_path.glob(".perturbdiff*"))


def test_a_folder_that_cannot_be_used_is_a_problem(only, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert found(tmp_path / "file" / "below")["folder"].status == "problem"
    monkeypatch.setattr(machine.os, "access", lambda *a: False)
    assert found(tmp_path)["writing"].status == "problem"
    monkeypatch.chdir(tmp_path)
    assert found()["writing"].status == "note"
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda p: machine.shutil._ntuple_diskusage(1, 0, 1 << 30)
    )
    assert found(tmp_path)["folder"].status == "problem"


def test_several_folders_and_json(only, tmp_path, run_cli):
    (tmp_path / "a").mkdir()
    done = run_cli("doctor", "--json", "--folder", tmp_path / "a", "--folder", tmp_path / "b")
    told = json.loads(done.out)
    assert done.code == (1 if told["problems"] else 0)
    assert [c["found"].split(":")[0] for c in told["checks"] if c["name"] == "folder"] == [
        str(tmp_path / "a"),
        str(tmp_path / "b"),
    ]
    assert set(told["checks"][0]) == {"name", "status", "found", "remedy"}


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("absent", 0), ("problem", 1)])
def test_only_a_problem_changes_the_exit_code(run_cli, monkeypatch, status, code):
    monkeypatch.setattr(doctor, "diagnose", lambda places: [doctor.Check("disk", status, "some", "")])
    assert run_cli("doctor").code == code


def test_the_probe_tells_what_torch_sees():
    told = json.loads(
        (checks.ask(sys.executable, "-c", machine._PROBE, timeout=120, alone=True) or "").splitlines()[-1]
    )
    assert set(told) == {"version", "cuda", "names", "warnings"}
