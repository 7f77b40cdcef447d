"""What the workflow knows of an image before its first task."""

import hashlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAIN = """
include { imageRecord } from './modules/plan/image'
workflow {
    println "record: ${groovy.json.JsonOutput.toJson([imageRecord(null), imageRecord('docker://some/where@sha256:0123'),
        imageRecord('docker://some/where'), imageRecord(params.container)])}"
}
"""

APPTAINER = """#!/usr/bin/env bash
[ "$*" = "inspect --json --labels $PWD/x.sif" ] || exit 1
cat <<END
{"data": {"attributes": {"labels": {"org.opencontainers.image.version": "9.9",
  "org.opencontainers.image.revision": "unknown", "org.perturbdiff.dirty": "false",
  "org.perturbdiff.lock.sha256": "abc"}}}}
END
"""


@pytest.fixture
def project(tmp_path):
    """A pipeline that only tells its image."""
    for name in ("bin", "modules"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "main.nf").write_text(MAIN)
    (tmp_path / "nextflow.config").write_text("manifest.version = '0.1.0'\nparams.container = null\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "apptainer").write_text(APPTAINER)
    (tmp_path / "tools" / "apptainer").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("parser", ["v1", "v2"])
def test_record_of_an_image(project, nextflow, monkeypatch, parser):
    image = project / "x.sif"
    image.write_bytes(b"image")
    with_tools = nextflow.environment
    monkeypatch.setattr(
        nextflow,
        "environment",
        lambda which: (given := with_tools(which)) | {"PATH": f"{project / 'tools'}:{given['PATH']}"},
    )
    ran = nextflow("run", "main.nf", "--container", str(image), parser=parser)
    assert ran.code == 0, ran.output
    none, digest, tag, record = json.loads(ran.output.split("record: ")[1].splitlines()[0])
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
    assert "the image holds perturbdiff 9.9 and this is the workflow of 0.1.0" in ran.output
    assert (project / "x.sif.sha256").is_file()


def test_an_image_that_is_not_there(project, nextflow):
    ran = nextflow("run", "main.nf", "--container", str(project / "none.sif"))
    assert ran.code == 1
    assert f"--container: there is no image {project / 'none.sif'} (bin/build-image makes one)" in ran.output
