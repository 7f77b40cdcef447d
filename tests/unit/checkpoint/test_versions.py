"""Bundles of other versions of ours: earlier ones give the same cells, later ones say which version reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from refusals import refused

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.checkpoint.bundle_record import recipe_of
from perturbdiff.preprocessing.preprocessing_stage import preprocess
from perturbdiff.runtime import files
from perturbdiff.runtime.outputs import sealed

# A bundle of simulated cells, the counts it was trained on, a table of conditions, and the mean profiles that the
# version of the folder's name sampled for them (perturbdiff sample … --conditions wanted.csv).
EARLIER = sorted((Path(__file__).parents[2] / "data" / "bundles").iterdir())


@pytest.mark.parametrize("folder", EARLIER, ids=lambda folder: folder.name)
def test_a_bundle_of_an_earlier_version_samples_the_same(run_cli, tmp_path, folder):
    bundle = folder / "bundle"
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["versions"]["perturbdiff"] == folder.name
    preprocess([folder / "counts.h5ad"], tmp_path / "store", recipe_of(bundle).data)
    wanted = ("--conditions", folder / "wanted.csv", "--device", "cpu", "--out", tmp_path / "p.h5ad")
    done = run_cli("sample", bundle, tmp_path / "store", *wanted)
    assert done.code == 0, done.err
    cells = ad.read_h5ad(tmp_path / "p.h5ad")
    profiles = pd.DataFrame(np.asarray(cells.to_df()), columns=cells.var_names)
    labels = [cells.obs[name].astype(str).to_numpy() for name in ("cell_type", "perturbation")]
    expected = pd.read_csv(folder / "expected.csv", index_col=[0, 1])
    found = profiles.groupby(labels).mean()
    assert found.index.tolist() == expected.index.tolist()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert f"train, seed {manifest['seed']}" in run_cli("bundle", "info", bundle).out


@pytest.fixture
def later(trained, tmp_path):
    """Change a bundle as a later version might; returns its folder."""

    def make(change) -> Path:
        folder = Path(shutil.copytree(trained / "bundle", tmp_path / "later"))
        record = json.loads((folder / "config.json").read_text())
        change(record)
        (folder / "config.json").write_text(json.dumps(record))
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["versions"]["perturbdiff"] = "9.9.0"
        size, digest = (folder / "config.json").stat().st_size, files.sha256(folder / "config.json")
        manifest["files"]["config.json"] = {"size": size, "sha256": digest}
        manifest.pop("sha256")
        (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
        return folder

    return make


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(format=2),
        lambda record: record["config"]["model"].update(attention="hyperbolic"),
        lambda record: record["config"]["model"].update(anchor="genome"),
    ],
    ids=["format", "setting", "choice"],
)
def test_a_bundle_of_a_later_version_says_which_version_reads_it(run_cli, trained, later, tmp_path, change):
    folder = later(change)
    wanted = ("--split", trained / "split.parquet", "--out", tmp_path / "p.h5ad")
    for done in (run_cli("sample", folder, trained / "store", *wanted), run_cli("bundle", "info", folder)):
        refused(done, "perturbdiff 9.9.0 made it and this is ", "install 9.9.0 or newer")


def test_a_bundle_of_a_later_version_is_read_where_nothing_is_new(later):
    Bundle.load(later(lambda record: None))
