"""Profiles, images and what Slurm says: what each combination gives a task, and what is refused before any task."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BARE = {
    "process_low": (1, 2, 8),
    "process_medium": (4, 12, 32),
    "process_preprocess": (4, 12, 32),
    "process_sample": (8, 12, 64),
    "process_gpu": (8, 24, 64),
    "process_external": (8, 24, 64),
}
SMALL = {
    "process_low": (1, 2, 3),
    "process_medium": (1, 2, 3),
    "process_preprocess": (1, 2, 3),
    "process_sample": (1, 2, 3),
    "process_gpu": (1, 1, 3),
    "process_external": (1, 1, 3),
}
PROFILES = {
    "standard": None,  # as much as this machine has
    "gpu": None,
    "apptainer": BARE,
    "standard,apptainer": None,
    "slurm": BARE,
    "slurm,site": BARE,
    "slurm,apptainer": BARE,
    "slurm,singularity": BARE,
    "singularity,slurm": BARE,
    "singularity": BARE,
    "docker": BARE,
    "podman": BARE,
    "slurm,conda": BARE,
    "slurm,multinode": BARE,
    "slurm,multinode,site": BARE,
    "test": SMALL,
    "test,apptainer": SMALL,
    "test,slurm": SMALL,
    "slurm,test": SMALL,
    "test,slurm,multinode,site": SMALL,
}
FITTING = [
    ["standard"], ["test"], ["gpu"], ["slurm"], ["test", "slurm"], ["test", "gpu"], ["standard", "test"],
]  # fmt: skip
PROBLEMS = [
    (["apptainer"], {}, "apptainer needs an image: --container FILE.sif"),
    (["standard"], {"container": "docker://image"}, "--container is used with -profile slurm or apptainer"),
    (["slurm", "gpu"], {}, "-profile slurm and gpu exclude each other"),
    (["standard", "slurm"], {}, "-profile slurm and standard exclude each other"),
    (["slurm", "docker"], {}, "docker needs an image: --container NAME"),
    (["slurm", "multinode", "singularity"], {"container": "docker://x", "num_nodes": 2}, "leave singularity out"),
    (["slurm"], {"container": "docker://x", "dask_scheduler": "slurm:2"}, "slurm:2: an image has no sbatch"),
    (["singularity", "slurm"], {"container": "docker://x"}, "write -profile slurm,singularity"),
    (["docker", "podman"], {"container": "mine:1"}, "-profile docker and podman exclude each other"),
    (["slurm", "conda"], {"container": "docker://image"}, "-profile conda and --container exclude each other"),
    (["slurm"], {"conda_env": "x.yml"}, "--conda_env is read with -profile conda"),
    (["slurm"], {"container": "mine:1"}, "'mine:1' names an image: write docker://mine:1"),
    (["multinode"], {"num_nodes": 2}, "multinode needs slurm: -profile slurm,multinode"),
    (["slurm", "multinode"], {}, "multinode is for several nodes: give --num_nodes"),
    (["slurm"], {"num_nodes": 2}, "--num_nodes 2 needs -profile slurm,multinode"),
    (["slurm"], {"site_config": "x"}, "--site_config is read with -profile …,site"),
    (["slurm", "site"], {}, "-profile site needs --site_config FILE"),
    (["slurm"], {"baseline_images": "images"}, "--baseline_images goes with --container"),
    (["test"], {"job_arrays": True}, "--job_arrays needs -profile slurm"),
    (["slurm"], {"container": "nowhere/image.sif"}, "--container: there is no /.*/nowhere/image.sif$"),
    (["slurm"], {"container": "mine"}, "there is no .*registry is written docker://NAME"),
    (["slurm"], {"container": "text.sif"}, "text.sif is no Apptainer image"),
    (["slurm"], {"ckpt_dir": "/shared/a,b"}, "--ckpt_dir: '/shared/a,b' has one of"),
    (["slurm"], {"outdir": "it's"}, "--outdir: 'it's' has one of"),
]  # fmt: skip
WARNINGS = [
    ({"ckpt_dir": "/tmp/x"}, "^--ckpt_dir /tmp/x: often a node's own disk"),
    ({"work": "/var/tmp/w", "outdir": "/dev/shm/o"}, "^--outdir /dev/shm/o, -work-dir /var/tmp/w: often"),
    ({"bind": "/usr,/no/such:/data"}, "^--bind: there is no /no/such here"),
    ({"gpu_options": "--gres=gpu:a100:2"}, "^--gpu_options asks for 2 GPUs and --num_gpus is 1"),
    ({"gpu_options": "--gpus-per-node=4 --qos=x", "num_gpus": 2}, "^--gpu_options asks for 4 GPUs"),
    ({"gpu_options": "--gres=gpu:a100:1 --constraint=big80"}, None),
    ({"ckpt_dir": "/tmpfiles/x"}, None),
]
REMEDIES = [
    ("invalid partition specified: nope; Invalid partition name specified", False, False, "--cpu_queue"),
    ("invalid partition specified: nope; Invalid partition name specified", True, True, "--gpu_queue"),
    ("Invalid account or account/partition combination specified", True, True, "--slurm_account and --gpu_queue"),
    ("Requested time limit is invalid (missing or exceeds some limit)", True, True, "--train_time"),
    ("time limit 12h is above that of partition gpu, 4h", True, False, "--gpu_queue, or give process.resourceLimits"),
    ("Invalid generic resource (gres) specification", True, True, "--gpu_options"),
    ("Invalid qos specification", False, False, "--cpu_options"),
    ("unrecognized option '--foo'", False, False, "--cpu_options"),
    ("Requested node configuration is not available", True, True, "--gpu_options, --train_cpus, --train_memory"),
    ("Requested node configuration is not available", False, False, "--cpu_queue, or give process.resourceLimits"),
]  # fmt: skip
IMAGE = {"container": "lab/image:1", "ckpt_dir": "/it's/c", "outdir": "/o", "bind": "/data,/a:/b"}
CONTAINERS = [
    ("apptainer", IMAGE),
    ("slurm,singularity", IMAGE | {"container": "docker://lab/image:1"}),
    ("docker", IMAGE | {"device": "cpu"}),
    ("podman", IMAGE | {"gpu_container_options": "none"}),
    ("slurm,conda", {}),
    ("conda", {"conda_env": "/envs/mine"}),
    ("somewhere", {"custom_config_base": "institutions"}),
]
"""Profiles and parameters whose containers and environments are looked at."""

ENGINES = ("apptainer", "singularity", "docker", "podman", "conda")
AFTERWARDS = [
    (75, 20, "resumable", "retry"),
    (75, 21, "resumable", "ignore"),
    (75, 1, "process_low", "ignore"),  # only a training can go on
    (143, 20, "resumable", "retry"),  # preempted or cancelled
    (0, 3, "resumable", "retry"),  # no exit code: the node is lost
    (139, 3, "resumable", "ignore"),
    (139, 2, "resumable", "retry"),
    (2, 1, "resumable", "ignore"),
    (1, 1, "process_medium", "ignore"),
    (137, 2, "process_medium", "retry"),
    (137, 3, "process_medium", "ignore"),
    (0, 1, "process_medium", "retry"),
    (137, 1, "process_external", "retry"),
    (2, 1, "process_external", "ignore"),
]
TOOLS = [
    ({"names": [], "given": {"container": "docker://image"}}, []),
    ({"names": ["cpa", "state"], "given": {}, "root": "installed"},
     ["^state is not installed in installed: perturbdiff baseline install state$"]),
    ({"names": ["cpa"], "given": {"container": "docker://image"}}, ["^cpa: .*--baseline_images FOLDER"]),
    ({"names": ["cpa"], "given": {"container": "images/perturbdiff.sif"}}, []),  # beside the image of all others
    ({"names": ["cpa"], "given": {"container": "elsewhere/x.sif", "baseline_images": "images"}}, []),
    ({"names": ["cpa", "state"], "given": {"container": "elsewhere/x.sif"}},
     ["^cpa: there is no image (/.*/elsewhere/perturbdiff-cpa.sif): bin/build-image --baseline cpa \\1$",
      "^state: there"]),
    ({"names": ["squidiff"], "given": {"container": "images/x.sif"}},
     ["/images/perturbdiff-squidiff.sif is no Apptainer image"]),
]  # fmt: skip
LIMITS = [
    ("2h", "a", {"a": 3600}, "time limit 2h is above that of partition a, 1h"),
    ("2h", None, {"a": 60, "b*": 3600}, "partition b, 1h"),
    ("2h", "a,b", {"a": 3600, "b*": 7200}, None),
    ("2h", "a,b", {"a": 3600, "b*": None}, None),
    ("2h", "unknown", {"a": 3600}, None),
]


APPTAINER = """#!/usr/bin/env bash
[ "$*" = "inspect --json --labels $PWD/x.sif" ] || exit 1
cat <<END
{"data": {"attributes": {"labels": {"org.opencontainers.image.version": "9.9",
  "org.opencontainers.image.revision": "unknown", "org.perturbdiff.dirty": "false",
  "org.perturbdiff.lock.sha256": "abc"}}}}
END
"""


BUSY = """#!/usr/bin/env bash
echo "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""


def put_programs(folder: Path) -> None:
    """An image that another version made, an Apptainer that tells its labels, and a Slurm that is away."""
    (folder / "x.sif").write_bytes(b"image")
    (folder / "version.config").write_text("manifest.version = '0.1.0'\n")
    (folder / "bin").symlink_to(ROOT / "bin")
    (folder / "programs").mkdir()
    for name, text in {"apptainer": APPTAINER, "sbatch": BUSY}.items():
        (folder / "programs" / name).write_text(text)
        (folder / "programs" / name).chmod(0o755)


def put_tools(folder: Path) -> None:
    """CPA and an old STATE are installed, CPA and something else are images."""
    lock = ROOT / "perturbdiff" / "baselines" / "external" / "tools" / "cpa.lock"
    for name in (f"cpa-0.8.8-{hashlib.sha256(lock.read_bytes()).hexdigest()[:8]}", "state-0.10.0-01234567"):
        (folder / "installed" / name).mkdir(parents=True)
        (folder / "installed" / name / "installed.json").touch()
    (folder / "images").mkdir()
    (folder / "images" / "perturbdiff-cpa.sif").write_text("#!/usr/bin/env run-singularity\nSIF_MAGIC")
    (folder / "images" / "perturbdiff-squidiff.sif").write_text("text")


INSTITUTION = """
profiles {
    somewhere {
        params.config_profile_name = 'Somewhere'
        process.queue = 'long'
        singularity.enabled = true
    }
}
"""


def placed(folder: Path, given: dict[str, str]) -> dict[str, str]:
    """Return parameters with the folder of institutional profiles as a whole path."""
    base = given.get("custom_config_base")
    return given if base is None else given | {"custom_config_base": str(folder / base)}


@pytest.fixture(scope="module", params=["v2", "v1"])
def found(request, nextflow_in, tmp_path_factory):
    """What site.nf found, by one start of Nextflow with each parser."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "modules").symlink_to(ROOT / "modules")
    (folder / "perturbdiff").symlink_to(ROOT / "perturbdiff")
    (folder / "text.sif").write_text("no image")
    put_tools(folder)
    put_programs(folder)
    shutil.copy(Path(__file__).with_name("site.nf"), folder)
    (folder / "institutions").mkdir()
    (folder / "institutions" / "nfcore_custom.config").write_text(INSTITUTION)
    usual = {"ckpt_dir": "/shared/checkpoints", "outdir": "/shared/out", "num_nodes": 1, "num_gpus": 1}
    (folder / "params.json").write_text(json.dumps({"project": str(ROOT), **usual}))
    cases = {
        "profiles": list(PROFILES),
        "problems": [{"profiles": p, "given": g} for p, g, _ in PROBLEMS]
        + [{"profiles": p, "given": {}} for p in FITTING],
        "tools": [{"root": "nowhere"} | case for case, _ in TOOLS],
        "images": [
            None,
            "docker://some/where@sha256:0123",
            "docker://some/where",
            *(str(folder / name) for name in ("x.sif", "none.sif")),
        ],
        "warnings": [given for given, _ in WARNINGS],
        "containers": [{"profile": name, "given": placed(folder, given)} for name, given in CONTAINERS],
        "remedies": [case[:3] for case in REMEDIES],
        "afterwards": [case[:3] for case in AFTERWARDS],
        "seconds": ["10:00", "2-01:00:00", "infinite", "n/a"],
        "long": [case[:3] for case in LIMITS],
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    nextflow = nextflow_in(folder)
    nextflow.path.insert(0, folder / "programs")
    ran = nextflow(
        "-c", "version.config", "run", "site.nf", "-params-file", "params.json", parser=request.param
    )
    assert ran.code == 0, ran.output
    return json.loads((folder / "found.json").read_text()) | {"said": ran.output, "folder": folder}


def gpu_options(profile: str) -> str:
    """What the program of a profile's containers is told for a task on a GPU."""
    if "docker" in profile or "podman" in profile:
        return "--gpus all" if "docker" in profile else "--device nvidia.com/gpu=all"
    return "--nv" if any(name in profile for name in ("slurm", "apptainer", "singularity")) else ""


def test_what_tasks_get_survives_every_combination_of_profiles(found):
    for profile, expected in PROFILES.items():
        jobs = found["jobs"][profile]
        assert {"PREPROCESS", "TRAIN", "SAMPLE", "MERGE", "REPORT"} <= set(jobs)
        for name, job in jobs.items():
            here = f"{profile}: {name} {job}"
            (kind,) = [label for label in job["labels"] if label.startswith("process_")]
            if expected:
                cpus, hours, memory = expected[kind]
                plain = ([f"-c {cpus}"] if cpus > 1 else []) + [
                    f"-t {hours:02}:00:00",
                    f"--mem {memory * 1024}M",
                ]
                assert job["head"][: len(plain)] == plain, here
            options = " ".join(job["head"][-1:]) if "slurm" in profile else ""
            assert ("--gres=gpu:1" in options) == ("slurm" in profile and "gpu" in job["labels"]), here
            assert ("--nodes=1" in options) == ("multinode" in profile and "resumable" in job["labels"]), here
            assert job["gpu"] == (gpu_options(profile) if "gpu" in job["labels"] else ""), here
            assert job["told"] == ("gpu" in job["labels"] or name in ("PREPROCESS", "STATS", "VOCABULARY")), (
                here
            )
            # MERGE: under its two names; FETCH: into its own folder
            assert job["published"] == (name not in ("MERGE", "FETCH")), here


def test_containers_and_environments_of_the_profiles(found):
    told = dict(zip([f"{p} {len(g)}" for p, g in CONTAINERS], found["containers"], strict=True))
    on = {key: [name for name in ENGINES if one[name].get("enabled")] for key, one in told.items()}
    assert on == {
        "apptainer 4": ["apptainer"],
        "slurm,singularity 4": ["singularity"],
        "docker 5": ["docker"],
        "podman 5": ["podman"],
        "slurm,conda 0": ["conda"],
        "conda 1": ["conda"],
        "somewhere 1": ["singularity"],
    }
    assert [one["gpu"] for one in told.values()] == ["--nv", "--nv", "", "", "--nv", "", ""]
    assert told["docker 5"]["container"] == "lab/image:1"
    mounts = "-v '/it'\\''s/c:/it'\\''s/c' -v '/o/logs:/o/logs' -v '/data:/data' -v '/a:/b'"
    for name in ("docker", "podman"):
        assert told[f"{name} 5"][name]["runOptions"].endswith(mounts), told[f"{name} 5"]
    variables = {told[key][key.split()[0]]["envWhitelist"] for key in ("apptainer 4", "docker 5", "podman 5")}
    assert variables == {told["slurm,singularity 4"]["singularity"]["envWhitelist"]}, (
        "all programs let in the same"
    )
    (listed,) = variables
    assert {"HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "NO_PROXY"} <= set(listed.split(",")), (
        "FETCH needs these"
    )
    assert told["slurm,conda 0"]["environment"].endswith("conf/conda.yml")
    assert told["conda 1"]["environment"] == "/envs/mine"
    assert (told["somewhere 1"]["queue"], told["somewhere 1"]["institution"]) == ("long", "Somewhere")


def test_profiles_and_parameters_that_do_not_go_together(found):
    for (profiles, given, message), problems in zip(PROBLEMS, found["problems"], strict=False):
        assert len(problems) == 1, f"{profiles} {given}: {problems}"
        assert re.search(message, problems[0]), problems[0]
    assert found["problems"][len(PROBLEMS) :] == [[]] * len(FITTING)


def test_methods_of_others_that_are_missing_are_told(found):
    for (case, messages), problems in zip(TOOLS, found["tools"], strict=True):
        assert len(problems) == len(messages), f"{case}: {problems}"
        for message, problem in zip(messages, problems, strict=True):
            assert re.search(message, problem), problem


def test_what_is_only_likely_to_be_wrong_is_a_warning(found):
    for (given, message), warnings in zip(WARNINGS, found["warnings"], strict=True):
        assert len(warnings) == (message is not None), f"{given}: {warnings}"
        assert message is None or re.search(message, warnings[0]), warnings[0]


def test_slurms_words_lead_to_a_parameter(found):
    for case, remedy in zip(REMEDIES, found["remedies"], strict=True):
        assert remedy.startswith(case[3]), f"{case}: {remedy}"


def test_what_happens_after_each_exit_code(found):
    for case, strategy in zip(AFTERWARDS, found["afterwards"], strict=True):
        assert strategy == case[3], case


def test_a_time_above_the_partitions_limit_is_seen_where_slurm_takes_it(found):
    assert found["seconds"] == [600, 49 * 3600, None, None]
    for case, said in zip(LIMITS, found["long"], strict=True):
        assert (said is None) == (case[3] is None), f"{case}: {said}"
        assert case[3] is None or case[3] in said


def test_record_of_an_image(found):
    none, digest, tag, record, missing = found["images"]
    image = found["folder"] / "x.sif"
    assert none is None
    assert digest == {"path": "docker://some/where@sha256:0123", "id": "sha256:0123"}
    assert tag == {"path": "docker://some/where", "id": None}
    assert record == {
        "path": str(image),
        "id": f"sha256:{hashlib.sha256(b'image').hexdigest()}",
        "bytes": 5,
        "version": "9.9",
        "commit": None,
        "dirty": False,
        "lock_sha256": "abc",
    }
    assert "the image holds perturbdiff 9.9 and this is the workflow of 0.1.0" in found["said"]
    assert image.with_name("x.sif.sha256").is_file()
    assert missing == (
        f"--container: there is no image {image.with_name('none.sif')} (bin/build-image makes one)"
    )


def test_slurm_settings_reach_the_jobs(found):
    text = " ".join(found["config"].split())
    for setting in (
        "executor = 'slurm'",
        "queueSize = 100",
        "--gres=gpu:${params.num_gpus}",
        "task.exitStatus in [75,",
        "export PD_END_TIME=${task.time",
        "runOptions = '--no-home --bind",
        "CUDA_VISIBLE_DEVICES",
        "failOnIgnore = true",
    ):
        assert setting in text
    # one selector, one side: a profile's selector would throw away what the base says under the same name
    assert text.count("withLabel:gpu {") == text.count("withLabel:process_gpu {") == 1
    assert "cpus = { params.train_cpus as int }" in text


def test_a_slurm_that_is_busy_or_away_refuses_nothing(found):
    assert found["busy"] is None
    assert "Slurm could not be asked about the jobs of" in found["said"]


SBATCH = """#!/bin/bash
echo "$* $(grep -o 'SBATCH.*' | tr '\n' ' ')" >> "{calls}"
tail -n1 "{calls}" | grep -q -- "{pattern}" || exit 0
echo "sbatch: error: {words}" >&2
exit 1
"""


@pytest.fixture
def slurm(nextflow, tmp_path, monkeypatch):
    """Return a function: words with which sbatch refuses jobs that have a pattern → a start of the workflow."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "kang.h5ad").touch()
    (tmp_path / "sheet.csv").write_text("id,dataset,input,preset,mode\na,kang,kang.h5ad,tiny,train\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(
        nextflow,
        "environment",
        lambda parser: type(nextflow).environment(nextflow, parser) | {"PATH": os.environ["PATH"]},
    )

    def start(words, pattern, *arguments):
        for name, text in {
            "sbatch": SBATCH.format(calls=tmp_path / "calls", words=words, pattern=pattern),
            "sinfo": "#!/bin/bash\necho 'cpu*|infinite'\n",
        }.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
        fixed = ("run", str(ROOT / "main.nf"), "-preview", "-profile", "test,slurm", "--outdir", "out")
        return nextflow(*fixed, "--input", "sheet.csv", *arguments), (
            tmp_path / "calls"
        ).read_text().splitlines()

    return start


def test_what_slurm_refuses_is_told_in_one_message_before_any_job(slurm, tmp_path):
    options = (
        "--slurm_account",
        "lab",
        "--cpu_queue",
        "cpu",
        "--gpu_queue",
        "big",
        "--gpu_options=--gres=gpu:a100:1",
    )
    ran, calls = slurm("Invalid account or account/partition combination specified", "-p big", *options)
    assert ran.code != 0
    assert all(call.startswith("--test-only") for call in calls), "nothing is submitted"
    assert len(calls) == 3, "one question for each kind of job: on CPUs, training, sampling"
    wanted = "SBATCH -t 01:00:00 SBATCH --mem 3072M SBATCH -p big SBATCH --account=lab --gres=gpu:a100:1"
    assert any(wanted in call for call in calls)
    message = (
        r"TRAIN.*: Invalid account .*: change --slurm_account and --gpu_queue\n +sbatch -t 01:00:00 --mem"
    )
    assert re.search(message, ran.output), ran.output
    assert not re.search(r"PREPROCESS.*: Invalid", ran.output)
    assert "--check_slurm false" in ran.output
    assert not (tmp_path / "out" / "logs").exists()
    ran, _ = slurm("no", "-p big", *options, "--check_slurm", "false")
    assert ran.code == 0, ran.output
