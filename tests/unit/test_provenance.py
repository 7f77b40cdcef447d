import json

import pytest

from perturbdiff import provenance
from perturbdiff.errors import UserError


def run(tmp_path, out="out.txt", *, folder=False, config=None, force=False):
    source = tmp_path / "in.txt"
    source.write_text("data")
    with provenance.stage(
        "demo",
        tmp_path / out,
        config=config or {"k": 1},
        inputs={"source": source},
        seed=3,
        folder=folder,
        force=force,
    ) as job:
        if job.skip:
            return False
        target = job.path / "x" if folder else job.path
        target.write_text("result")
        job.results["n"] = 5
        job.notes["rate"] = 7
    return True


@pytest.mark.parametrize("folder", [False, True])
def test_equal_run_is_skipped_and_force_repeats_it(tmp_path, folder):
    assert run(tmp_path, "o", folder=folder)
    assert not run(tmp_path, "o", folder=folder)
    assert run(tmp_path, "o", folder=folder, force=True)
    assert run(tmp_path, "o", folder=folder, config={"k": 2})


def test_manifest_determines_the_result_and_run_tells_the_circumstances(tmp_path):
    run(tmp_path, "a.txt")
    first = (tmp_path / "a.txt.manifest.json").read_bytes()
    run(tmp_path, "a.txt", force=True)
    assert (tmp_path / "a.txt.manifest.json").read_bytes() == first
    manifest, record = json.loads(first), json.loads((tmp_path / "a.txt.run.json").read_text())
    assert manifest["results"] == {"n": 5}
    assert manifest["inputs"]["source"]["name"] == "in.txt"
    assert str(tmp_path) not in first.decode()
    assert record["rate"] == 7
    assert record["peak_memory_mib"] > 0


def test_missing_input_is_named(tmp_path):
    with pytest.raises(UserError, match="input 'source' not found"):
        with provenance.stage("demo", tmp_path / "o", config={}, inputs={"source": tmp_path / "nothing"}):
            pass
    assert not (tmp_path / "o").exists()


def unfinished(out, seed):
    with (
        pytest.raises(RuntimeError),
        provenance.stage("make", out, config={}, inputs={}, seed=seed, folder=True, keep=True) as run,
    ):
        (run.path / "x").write_text("done so far")
        raise RuntimeError
    return run.path


def test_an_interrupted_stage_goes_on_only_if_it_is_the_same(tmp_path):
    out = tmp_path / "out"
    for seed, found in ((1, True), (2, False)):
        partial = unfinished(out, 1)
        assert (partial / "x").exists()
        with provenance.stage(
            "make", out, config={}, inputs={}, seed=seed, folder=True, keep=True, force=True
        ) as run:
            assert (run.path / "x").exists() == found
        assert not list(out.glob(".*"))
