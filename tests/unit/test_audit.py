"""bin/audit: locked versions against advisories from a file."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

AUDIT = Path(__file__).parents[2] / "bin" / "audit"
LOCK = "# a lock\nTiny_Lib[extra]==1.2.0 ; python_version < '4' \\\n    --hash=sha256:00\nother==3.0\n"


def advisory(number, name, *, versions=(), events=None, **more):
    ranges = [] if events is None else [{"type": "ECOSYSTEM", "events": events}]
    affected = [
        {"package": {"ecosystem": "PyPI", "name": name}, "versions": list(versions), "ranges": ranges}
    ]
    return {"id": f"PYSEC-{number}", "summary": "runs code", "affected": affected, **more}


@pytest.fixture
def audit(tmp_path):
    def run(*records, zipped=False):
        (tmp_path / "a.lock").write_text(LOCK)
        source = tmp_path / ("all.zip" if zipped else "advisories")
        if zipped:
            with zipfile.ZipFile(source, "w") as archive:
                for record in records:
                    archive.writestr(f"{record['id']}.json", json.dumps(record))
        else:
            source.mkdir()
            for record in records:
                (source / f"{record['id']}.json").write_text(json.dumps(record))
        return subprocess.run(
            [sys.executable, AUDIT, source, tmp_path / "a.lock"], capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize("zipped", [False, True])
def test_a_weak_version_is_named(audit, zipped):
    done = audit(advisory(1, "tiny-lib", versions=["1.1.0", "1.2.0"]), zipped=zipped)
    assert done.returncode == 1
    assert "tiny-lib 1.2.0: PYSEC-1 runs code" in done.stdout


@pytest.mark.parametrize(
    ("events", "weak"),
    [
        ([{"introduced": "0"}, {"fixed": "1.10"}], True),
        ([{"introduced": "0"}, {"fixed": "1.2.0"}], False),
        ([{"introduced": "1.3"}], False),
        ([{"introduced": "1.0"}, {"last_affected": "1.2.0"}], True),
        ([{"introduced": "0"}, {"fixed": "1.0"}, {"introduced": "1.1"}], True),
    ],
)
def test_ranges_are_of_versions_not_of_texts(audit, events, weak):
    assert audit(advisory(2, "tiny_lib", events=events)).returncode == int(weak)


def test_what_is_withdrawn_or_of_another_package_does_not_count(audit):
    done = audit(
        advisory(3, "tiny-lib", versions=["1.2.0"], withdrawn="2026-01-01T00:00:00Z"),
        advisory(4, "another", versions=["3.0"]),
    )
    assert done.returncode == 0
    assert "2 advisories, 0 of them about locked versions" in done.stdout


def test_nothing_to_compare_with_is_an_error(audit):
    done = audit()
    assert done.returncode == 2
    assert "no advisories" in done.stderr
