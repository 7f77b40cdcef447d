"""Cell labels from a table: joined by name, for inputs that have none."""

import gzip

import numpy as np
import pandas as pd
import pytest
from tiny_data import tiny_counts

from perturbdiff.config.settings import Config, DataConfig
from perturbdiff.io.cell_labels import extra_column, read_conditions, read_labels
from perturbdiff.io.counts import Inputs
from perturbdiff.runtime.errors import UserError
from perturbdiff.splits.splits import make_split

CONFIG = DataConfig()


def labels_of(adata):
    """Return the labels in another order, with a cell that the data do not have."""
    table = adata.obs.astype(str).sample(frac=1, random_state=0)
    table.loc["another"] = "x"
    return table


def bare(tmp_path, name="bare.h5ad", part=slice(None)):
    adata = tiny_counts()[part].copy()
    full = adata.copy()
    adata.obs = adata.obs[[]]
    adata.write_h5ad(tmp_path / name)
    return tmp_path / name, full


def as_csv(table, path):
    table.to_csv(path)


def as_named_column(table, path):
    table = table.rename_axis("barcode").reset_index()
    table[["batch", "barcode", "perturbation", "cell_type"]].to_csv(path, sep="\t", index=False)


def as_parquet(table, path):
    table.to_parquet(path)


def as_parquet_column(table, path):
    table.rename_axis("cell").reset_index().to_parquet(path, index=False)


def as_r_writes_it(table, path):
    text = table.to_csv(sep="\t")
    path.write_bytes(gzip.compress(text.split("\t", 1)[1].encode()))


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (as_csv, "o.csv"),
        (as_csv, "o.csv.gz"),
        (as_named_column, "o.tsv"),
        (as_named_column, "o.txt.gz"),
        (as_parquet, "o.parquet"),
        (as_parquet_column, "o.parquet"),
        (as_r_writes_it, "o.tsv.gz"),
    ],
)
def test_labels_come_from_a_table_by_name(tmp_path, write, name):
    path, full = bare(tmp_path)
    full.write_h5ad(tmp_path / "full.h5ad")
    write(labels_of(full), tmp_path / name)
    found = read_conditions([path], CONFIG, [tmp_path / name])
    pd.testing.assert_frame_equal(found, read_conditions([tmp_path / "full.h5ad"], CONFIG))
    with Inputs([path], CONFIG, tmp_path, [tmp_path / name]) as inputs:
        labels = read_labels(inputs)
    own = labels.conditions.loc[labels.codes, "perturbation"].tolist()
    assert own == full.obs["perturbation"].astype(str).tolist()


def test_one_table_for_all_and_one_for_each(tmp_path):
    a, full_a = bare(tmp_path, "a.h5ad", slice(0, 80))
    b, full_b = bare(tmp_path, "b.h5ad", slice(80, None))
    labels_of(full_a).to_csv(tmp_path / "a.csv")
    labels_of(full_b).to_csv(tmp_path / "b.csv")
    pd.concat([full_a.obs, full_b.obs]).to_csv(tmp_path / "all.csv")
    each = read_conditions([a, b], CONFIG, [tmp_path / "a.csv", tmp_path / "b.csv"])
    pd.testing.assert_frame_equal(each, read_conditions([a, b], CONFIG, [tmp_path / "all.csv"]))
    with pytest.raises(UserError, match=r"a.csv: has no row for \d+ of the \d+ cells of .*b.h5ad \(cell"):
        read_conditions([a, b], CONFIG, [tmp_path / "a.csv"])
    with pytest.raises(UserError, match="2 tables of cell labels for 1 inputs; give --obs once"):
        read_conditions([a], CONFIG, [tmp_path / "a.csv", tmp_path / "b.csv"])


def test_a_table_adds_to_obs_and_goes_before_it(tmp_path):
    adata = tiny_counts()
    adata.write_h5ad(tmp_path / "x.h5ad")
    age = np.arange(adata.n_obs) % 7 + 30
    table = pd.DataFrame(
        {"batch": "one", "age": age, "score": age / 4, "well": [f"0{a}" for a in age]}, adata.obs_names
    )
    table.loc[adata.obs_names[3], "score"] = np.nan
    table.to_csv(tmp_path / "t.csv", na_rep="NA")
    with Inputs([tmp_path / "x.h5ad"], CONFIG, tmp_path, [tmp_path / "t.csv"]) as inputs:
        assert set(inputs.files[0].columns) == {"cell_type", "batch", "perturbation", "age", "score", "well"}
        assert set(read_labels(inputs).conditions["batch"]) == {"one"}
        ages, scores, wells = (extra_column(inputs, name) for name in ("age", "score", "well"))
    assert ages.dtype.kind in "iu"
    np.testing.assert_array_equal(ages, age)
    np.testing.assert_array_equal(scores, table["score"])
    assert wells.tolist() == table["well"].tolist()


def write(text):
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (lambda path: None, "t.csv", "not found"),
        (write("a,b\n"), "t.xlsx", r"is \.csv, \.tsv"),
        (write(""), "t.csv", "cannot be read as a table"),
        (write("no parquet"), "t.parquet", "is not a table"),
        (write("no gzip"), "t.csv.gz", "cannot be read as a table"),
        (write("cell\ncell0\n"), "t.csv", "no column beside the names"),
        (write("cell,batch\ncell0,a\ncell0,b\n"), "t.csv", r"several rows for 1 cells \(cell0\)"),
        (write("cell,batch\n,a\ncell0,b\n"), "t.csv", "1 rows have no name"),
        (write("cell,batch\ncell0-1,a\n"), "t.csv", r"no row for \d+ of the \d+ cells.*look like 'cell0-1'"),
    ],
)
def test_tables_that_do_not_serve(tmp_path, make, name, message):
    path, _ = bare(tmp_path)
    make(tmp_path / name)
    with pytest.raises(UserError, match=message) as error:
        read_conditions([path], CONFIG, [tmp_path / name])
    assert "\n" not in str(error.value)
    assert name in str(error.value)


def test_a_missing_label_in_a_table(tmp_path):
    path, full = bare(tmp_path)
    table = labels_of(full)
    table.loc["cell5", "cell_type"] = np.nan
    table.to_csv(tmp_path / "t.csv")
    with pytest.raises(UserError, match="'cell_type' has 1 missing values.*first: cell 'cell5'"):
        read_conditions([path], CONFIG, [tmp_path / "t.csv"])


def test_a_split_of_a_raw_file_with_a_table(tmp_path):
    path, full = bare(tmp_path)
    full.write_h5ad(tmp_path / "full.h5ad")
    labels_of(full).to_csv(tmp_path / "t.csv")
    config = Config.model_validate({"split": {"held_out": ["d2"]}})
    made = make_split(path, tmp_path / "a.parquet", config, obs=tmp_path / "t.csv")
    other = make_split(tmp_path / "full.h5ad", tmp_path / "b.parquet", config)
    pd.testing.assert_frame_equal(pd.read_parquet(made), pd.read_parquet(other))
    assert set(pd.read_parquet(made)["part"]) == {"train", "valid", "test"}
