"""bin/build-image and bin/image-digest, with a stand-in for Apptainer."""

import hashlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAKE = """#!/usr/bin/env bash
[ "$1" != --version ] || { echo "apptainer version ${FAKE_VERSION:-1.4.5-1}"; exit; }
printf '%s\\n' "$@" > "$FAKE_ARGUMENTS"
[ -z "${FAKE_ERROR:-}" ] || { echo "FATAL:   $FAKE_ERROR" >&2; echo half > "${@: -2:1}"; exit 255; }
echo image > "${@: -2:1}"
"""


@pytest.fixture
def build(tmp_path):
    """Run bin/build-image with a stand-in that writes down its arguments."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apptainer").write_text(FAKE)
    (tmp_path / "bin" / "apptainer").chmod(0o755)
    # the room of this machine does not matter
    (tmp_path / "bin" / "df").write_text('#!/bin/sh\necho Avail; echo "  ${FAKE_ROOM:-100}"\n')
    (tmp_path / "bin" / "df").chmod(0o755)
    arguments = tmp_path / "arguments"

    def run(*given, **environment):
        path = environment.pop("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        env = os.environ | {"PATH": path, "FAKE_ARGUMENTS": str(arguments)} | environment
        command = [ROOT / "bin" / "build-image", *map(str, given)]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        done.arguments = arguments.read_text().splitlines() if arguments.exists() else []
        return done

    return run


def test_builds_beside_the_image_and_renames(build, tmp_path):
    image = tmp_path / "some" / "x.sif"
    done = build(image, "--build-arg", "INDEX=there")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(image)
    assert image.read_text() == "image\n"
    assert sorted(p.name for p in image.parent.iterdir()) == ["x.sif", "x.sif.sha256"]
    *_, partial, recipe = done.arguments
    assert Path(partial).parent == image.parent
    assert recipe == "containers/perturbdiff.def"
    assert "-comp zstd -Xcompression-level 3" in done.arguments
    # what the caller adds comes last, so that it wins
    assert done.arguments.index("INDEX=there") > max(
        i for i, word in enumerate(done.arguments) if word.startswith(("COMMIT=", "DIRTY=", "SOURCE="))
    )
    digest = subprocess.run(
        [ROOT / "bin/image-digest", image], capture_output=True, text=True, check=True
    ).stdout
    assert digest == f"sha256:{hashlib.sha256(image.read_bytes()).hexdigest()}\n"


def test_gzip_leaves_the_compression_to_apptainer(build, tmp_path):
    done = build("--gzip", tmp_path / "x.sif")
    assert done.returncode == 0, done.stderr
    assert not [word for word in done.arguments if "zstd" in word]


def test_commit_of_the_checkout_is_given(build, tmp_path):
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    done = build(tmp_path / "x.sif")
    commit = asked.stdout.strip() if asked.returncode == 0 else "unknown"
    assert f"COMMIT={commit}" in done.arguments
    assert {"DIRTY=true", "DIRTY=false", "DIRTY=unknown"} & set(done.arguments)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("write /tmp/x: no space left on device", "set APPTAINER_TMPDIR"),
        ("user not in /etc/subuid", "does not allow --fakeroot"),
        ("could not use fakeroot: no mapping entry found in /etc/subuid for me", "does not allow --fakeroot"),
        (
            "User not listed in /etc/subuid, trying root-mapped\nFATAL: no such host",
            "is the registry reachable",
        ),
        ("while making image: pinging container registry: dial tcp", "is the registry reachable"),
        ("ERROR: Could not find a version that satisfies", "is the package index reachable"),
        ("something else", "the build failed; the reason is above"),
    ],
)
def test_what_went_wrong_is_said_and_nothing_half_made_stays(build, tmp_path, error, said):
    (tmp_path / "out").mkdir()
    image = tmp_path / "out" / "x.sif"
    image.write_text("the old one")
    done = build(image, FAKE_ERROR=error)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("build-image: ")
    assert said in last
    assert error in done.stderr
    assert [p.read_text() for p in image.parent.iterdir()] == ["the old one"]


def test_missing_or_old_apptainer(build, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "basename", "dirname", "readlink", "realpath"):
        (tools / name).symlink_to(
            subprocess.run(["which", name], capture_output=True, text=True).stdout.strip()
        )
    done = build(tmp_path / "x.sif", PATH=str(tools))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "apptainer is missing" in done.stderr
    done = build(tmp_path / "x.sif", FAKE_VERSION="1.1.9")
    assert (done.returncode, done.stderr) == (1, "build-image: Apptainer 1.2 or newer is needed, found 1.1\n")


def test_a_folder_that_is_not_there_or_an_unknown_option(build, tmp_path):
    done = build(tmp_path / "x.sif", APPTAINER_TMPDIR=str(tmp_path / "none"))
    assert (done.returncode, "set APPTAINER_TMPDIR" in done.stderr) == (1, True)
    done = build("--zip")
    assert (done.returncode, "unknown option --zip" in done.stderr) == (1, True)


def test_too_little_room_is_said_before_anything_is_built(build, tmp_path):
    done = build(tmp_path / "x.sif", FAKE_ROOM="9", APPTAINER_TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"build-image: {tmp_path} has 9 GB free, 10 are needed; set APPTAINER_TMPDIR"
    )
    assert done.arguments == []


def test_the_image_of_a_tool_starts_from_the_one_beside_it(build, tmp_path):
    image = tmp_path / "perturbdiff-cpa.sif"
    done = build("--baseline", "cpa", image)
    assert (done.returncode, done.arguments) == (1, [])
    said = f"build-image: there is no image {tmp_path / 'perturbdiff.sif'} to start from; make it with bin/build-image"
    assert done.stderr.startswith(said)
    (tmp_path / "perturbdiff.sif").write_text("base")
    done = build("--baseline", "cpa", image, "--build-arg", "PYTHON=/there")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(image)
    assert done.arguments[-1] == "containers/baseline.def"
    given = [word for word in done.arguments if "=" in word]
    assert given == ["TOOL=cpa", f"BASE={tmp_path / 'perturbdiff.sif'}", "PYTHON=/there"]


def test_the_image_of_a_tool_by_default_and_from_another(build, tmp_path):
    other = tmp_path / "other.sif"
    other.write_text("base")
    done = build("--gzip", "--baseline", "state", "--from", other)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "perturbdiff-state.sif")
    assert f"BASE={other}" in done.arguments
    assert not [word for word in done.arguments if "zstd" in word]


def test_an_unknown_tool_or_one_that_finds_no_python(build, tmp_path):
    done = build("--baseline", "cpaa", tmp_path / "x.sif")
    assert done.returncode == 1
    assert done.stderr == "build-image: no tool cpaa; tools: cellflow cpa squidiff state\n"
    (tmp_path / "perturbdiff.sif").write_text("base")
    error = "cpa needs Python 3.10, and none was found (running, PATH)"
    done = build("--baseline", "cpa", tmp_path / "x.sif", FAKE_ERROR=error)
    assert "--build-arg PYTHON=FOLDER with bin/python3.10 in it" in done.stderr.splitlines()[-1]
    done = build("--baseline", "cpa", tmp_path / "x.sif", FAKE_ROOM="17", APPTAINER_TMPDIR=str(tmp_path))
    assert f"{tmp_path} has 17 GB free, 18 are needed" in done.stderr


def digest(image, *options):
    return subprocess.run(
        [ROOT / "bin" / "image-digest", *options, image], capture_output=True, text=True, check=False
    )


def test_digest_is_kept_until_the_file_changes(tmp_path):
    image = tmp_path / "x.sif"
    image.write_bytes(b"one")
    assert digest(image, "--kept").returncode == 1
    first = digest(image).stdout
    assert first == f"sha256:{hashlib.sha256(b'one').hexdigest()}\n"
    assert digest(image, "--kept").stdout == first
    checked = subprocess.run(
        ["sha256sum", "--check", "x.sif.sha256"], cwd=tmp_path, capture_output=True, check=False
    )
    assert checked.returncode == 0
    # what is kept is believed: the file is not read again
    beside = tmp_path / "x.sif.sha256"
    beside.write_text(beside.read_text().replace(first[7:71], "0" * 64))
    assert digest(image).stdout == f"sha256:{'0' * 64}\n"
    # same size, other time
    image.write_bytes(b"two")
    os.utime(image, (1, 1))
    assert digest(image, "--kept").returncode == 1
    assert digest(image).stdout == f"sha256:{hashlib.sha256(b'two').hexdigest()}\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.sif", "x.sif.sha256"]


def test_digest_of_no_file(tmp_path):
    done = digest(tmp_path / "x.sif")
    assert (done.returncode, done.stderr) == (1, f"image-digest: there is no image {tmp_path / 'x.sif'}\n")


# Docker cannot be run where the tests run: its recipe is held against Apptainer's, which make test-hpc builds.
CONTAINERS = ROOT / "containers"
INSTRUCTIONS = ("ARG", "FROM", "COPY", "RUN", "ENV", "ENTRYPOINT", "LABEL")


def dockerfile():
    """The instructions of the Dockerfile, each with its words."""
    text = (CONTAINERS / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def sections():
    """The sections of Apptainer's recipe."""
    parts = re.split(r"^%(\w+)\n", (CONTAINERS / "perturbdiff.def").read_text(), flags=re.M)
    return {
        name: re.sub(r"^\s*#.*\n", "", text, flags=re.M)
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_both_recipes_take_the_same_files_and_run_the_same_steps():
    docker, apptainer = dockerfile(), sections()
    assert {word for word, _ in docker} <= set(INSTRUCTIONS)
    copied = [rest.split() for word, rest in docker if word == "COPY"]
    assert copied == [line.split() for line in apptainer["files"].splitlines() if line.strip()]
    assert all((ROOT / source).exists() for source, _ in copied)
    assert [rest for word, rest in docker if word == "RUN"] == [
        "sh /opt/src/install.sh", apptainer["test"].strip()
    ]  # fmt: skip
    assert apptainer["post"].rstrip().splitlines()[-1].strip() == "sh /opt/src/install.sh"
    assert apptainer["environment"].strip() == ". /opt/perturbdiff/environment.sh"
    assert ("ENV", "BASH_ENV=/opt/perturbdiff/environment.sh") in docker
    for name in ("install.sh", "environment.sh", "try.sh"):
        subprocess.run(["sh", "-n", CONTAINERS / name], check=True)


def test_both_recipes_have_the_same_arguments_and_labels():
    docker, apptainer = dockerfile(), sections()
    given = dict(rest.partition("=")[::2] for word, rest in docker if word == "ARG")
    theirs = dict(line.strip().partition("=")[::2] for line in apptainer["arguments"].split())
    assert theirs.pop("BOOTSTRAP") == "docker"
    assert given == theirs
    labels = [rest.split("=") for word, rest in docker if word == "LABEL"]
    assert [label for label in labels if "$" not in label[1]] == [
        line.split() for line in apptainer["labels"].splitlines() if line.strip()
    ]


def test_the_entry_of_the_docker_image_passes_arguments_on(tmp_path):
    entry = json.loads(next(rest for word, rest in dockerfile() if word == "ENTRYPOINT"))
    (tmp_path / "environment.sh").write_text(f"PATH={shlex.quote(str(tmp_path))}:$PATH\n")
    (tmp_path / "perturbdiff").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "perturbdiff").chmod(0o755)
    command = [word.replace("/opt/perturbdiff", str(tmp_path)) for word in entry]
    done = subprocess.run(
        [*command, "train", "two words", "$HOME"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "train|two words|$HOME|"


def test_the_environment_of_an_image_is_the_users_own(tmp_path):
    code = f". {CONTAINERS / 'environment.sh'}; echo $NUMBA_CACHE_DIR; echo $PATH"
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    done = subprocess.run(["sh", "-c", code], env=env, capture_output=True, text=True, check=True)
    numba, path = done.stdout.split()
    assert numba == f"{tmp_path}/perturbdiff-{os.getuid()}/numba"
    assert path.startswith("/opt/venv/bin:")
    assert (tmp_path / f"perturbdiff-{os.getuid()}").stat().st_mode & 0o077 == 0
