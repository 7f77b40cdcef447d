"""Tables in and out: labels stay what they are, no spreadsheet runs them, no page or log is changed by them."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet
from refusals import refused
from report_runs import make_bundle, make_run

from perturbdiff.io.label_tables import LabelTable
from perturbdiff.reporting.figures.seed_means import markdown_table
from perturbdiff.reporting.loading.failed_runs import read_expected
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.page.page import write_report
from perturbdiff.reporting.page.page_data import _escaped
from perturbdiff.runtime import outputs, parquet_bounds, tabular, untrusted
from perturbdiff.runtime.errors import UserError, listing
from perturbdiff.runtime.progress import set_up_logging

LABELS = [
    "=cmd|'/c calc'!A0", "+x", "-gene", "@x", "'=x", "''=x", "'x", "''x", "'", "\tx", "\rx", "\nx", "'\nx", "a\nb",
    "a\r\nb", 'a"b', "a,b", "-0.3", "+5", "'-5", "-1e-5", "", " =x", "x=", "\u202ex", "<b>", "é",
]  # fmt: skip
RUN = ("=", "+", "-", "@", "\t", "\r", "\n")


@pytest.mark.parametrize("kind", ["object", "category"])
def test_labels_come_back_and_none_is_a_formula(tmp_path, kind):
    table = pd.DataFrame({"=label": pd.Series(LABELS, dtype=kind), "value": np.linspace(-1, 1, len(LABELS))})
    tabular.write_csv(table, tmp_path / "t.csv")
    raw = pd.read_csv(tmp_path / "t.csv", dtype={0: str}, keep_default_na=False)
    for cell in [raw.columns[0], *raw.iloc[:, 0]]:
        assert not str(cell).startswith(RUN) or float(cell) is not None, cell
    found = tabular.read_csv(tmp_path / "t.csv", "again", dtype={0: str}, keep_default_na=False)
    assert found["=label"].tolist() == LABELS
    assert found["value"].to_numpy() == pytest.approx(table["value"].to_numpy())
    assert table["=label"].tolist() == LABELS  # what was given is as it was


def test_numbers_stay_numbers(tmp_path):
    table = pd.DataFrame({"x": [-0.3, np.nan, -np.inf], "n": [-1, 0, 1], "b": [True, False, True]})
    tabular.write_csv(table, tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == table.to_csv(index=False)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b'a,b\n"x', b"a,b\n1,2,3\n4,5,6,7,8\n", b"\x00" * 100, b"a\n" + b"\x80"]
)
def test_a_damaged_table_is_one_line(tmp_path, content):
    (tmp_path / "t.csv").write_bytes(content)
    said = message_of(lambda: tabular.read_csv(tmp_path / "t.csv", "make it again", dtype=str))
    assert said == "" or "t.csv: is not a table" in said


@pytest.mark.parametrize("name", ["t.csv.gz", "t.csv.bz2", "t.csv.xz"])
def test_a_packed_table_without_end_is_refused(tmp_path, monkeypatch, name):
    table = "cell,label\n" + "a,b\n" * 50_000
    unpack = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}[name[6:]]
    with unpack(tmp_path / name, "wt") as handle:
        handle.write(table)
    assert len(tabular.read_csv(tmp_path / name, "again")) == 50_000
    monkeypatch.setattr(untrusted, "UNPACKED_AT_LEAST", 1000)
    said = message_of(lambda: tabular.read_csv(tmp_path / name, "again"))
    assert f"{name}: unpacks to more than 100 times its size" in said
    assert name[6:] != "gz" or said == message_of(lambda: LabelTable(tmp_path / name))
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:60])
    assert "is not a table, or damaged" in message_of(lambda: tabular.read_csv(tmp_path / name, "again"))


def test_a_parquet_table_that_claims_more_than_it_can_hold_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    nested = pa.array([[[[[[[[[1]]]]]]]]])
    tables = {
        "1,000,000 values in": pa.table({"x": pa.array(np.zeros(1_000_000, np.int8)).dictionary_encode()}),
        "2 columns": pa.table({"x": [1], "y": [2]}),
        "of more than 16 levels": pa.table({"x": nested}),
        "a description of its columns": pa.table({"x": [1]}),
    }
    monkeypatch.setattr(parquet_bounds, "DECODED_AT_LEAST", 1 << 20)
    monkeypatch.setattr(parquet_bounds, "MOST_COLUMNS", 1)
    for claim, table in tables.items():
        if claim.startswith("a desc"):
            monkeypatch.setattr(parquet_bounds, "LARGEST_FOOTER", 10)
        parquet.write_table(table, path)
        said = message_of(lambda: tabular.read_parquet(path, "again"))
        assert f"t.parquet: claims {claim}" in said or (claim in said and "claims a column" in said), said


def message_of(action):
    """Return what is said of a mistake, in one line; empty if all went well."""
    try:
        action()
    except UserError as error:
        said = str(error)
    else:
        said = ""
    assert "\n" not in said
    return said


@pytest.mark.parametrize("place", [0, 8, 100, -30, -6])
def test_a_damaged_split_is_one_line(run_cli, trained, tmp_path, place):
    data = bytearray((trained / "split.parquet").read_bytes())
    data[place : place + 4 if place != -6 else None] = b"\xff\xff\xff\xff"
    (tmp_path / "split.parquet").write_bytes(data)
    outcome = run_cli(
        "train", trained / "store", "--split", tmp_path / "split.parquet", "--out", tmp_path / "b", "--config", "tiny",
        "--set", "train.max_steps=1", "--set", "train.warmup_steps=0", "--device", "cpu",
    )  # fmt: skip
    assert outcome.code == 0 or refused(outcome) is None
    assert "Traceback" not in outcome.err


@pytest.fixture
def run(tmp_path, without_pictures):
    folder = make_run(tmp_path / "run", "perturbdiff", perturbations=3)
    listed = outputs.entries(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    record = json.loads((folder / "run.json").read_text())
    manifest["files"] = {n: e for n, e in listed.items() if n not in ("manifest.json", "run.json")}
    (folder / "manifest.json").write_text(json.dumps(outputs.sealed(manifest)))
    (folder / "run.json").write_text(json.dumps(outputs.sealed(record)))
    return folder


def damaged(path, place):
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 0x80
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["metrics.parquet", "aggregate.csv", "summary.json", "manifest.json", "run.json"]
)
def test_a_changed_evaluation_makes_no_page(run_cli, run, tmp_path, name):
    damaged(run / name, 0.4)
    refused(run_cli("report", run, "--out", tmp_path / "page.html"), name)
    assert not list(tmp_path.glob("page*"))


@pytest.mark.parametrize(
    "name", ["metrics.parquet", "aggregate.csv", "summary.json", "de_real.parquet", "embedding.parquet"]
)
@pytest.mark.parametrize("place", [0, 0.5, 0.99])
def test_where_no_manifest_tells_damage_is_one_line_or_a_page(run, tmp_path, name, place):
    (run / "manifest.json").unlink()
    damaged(run / name, place)
    said = message_of(lambda: write_report([run], tmp_path / "page.html"))
    assert bool(said) != (tmp_path / "page.html").exists()
    assert bool(said) != bool(list(tmp_path.glob("page*")))


def test_a_foreign_byte_in_a_bundle_s_curve_is_one_line(run_cli, run, tmp_path):
    bundle = make_bundle(tmp_path / "bundle")
    (bundle / "training.csv").write_bytes(b"step,split\n\xff,train\n")
    refused(run_cli("report", run, "--bundle", bundle, "--out", tmp_path / "page.html"), "training.csv")


def test_labels_of_a_run_come_back(run, tmp_path):
    names = ("=cmd|' /C calc'!A0", "+x", "-gene", "@x", "'=x")
    shutil.rmtree(run)
    folder = make_run(run, "perturbdiff", names=names)
    aggregate = pd.read_csv(folder / "aggregate.csv", keep_default_na=False)
    aggregate.loc[aggregate.index[:5], "scope"] = names
    tabular.write_csv(aggregate, folder / "aggregate.csv")
    found = read_runs([folder])[0]
    assert found.aggregate["scope"].tolist()[:5] == list(names)
    assert set(found.pooled["perturbation"].astype(str)) == set(names)


def test_methods_names_change_nothing_around_them(tmp_path, without_pictures):
    names = (
        "=HYPERLINK(1)",
        "<img src=x onerror=alert(1)>",
        "a\u202egpj.exe",
        "x|y\nz",
        "'; DROP",
        "../../x",
    )
    runs = [
        make_run(tmp_path / str(number), method, perturbations=2)
        for number, method in enumerate((*names, "control"))
    ]
    page = write_report(runs, tmp_path / "page.html").read_text()
    assert "<img src=x" not in page
    assert "\u202e" not in page
    for path in tmp_path.glob("page_*/*"):
        if path.suffix == ".csv":
            table = pd.read_csv(path, dtype=str, keep_default_na=False)
            cells = [*table.columns, *table.to_numpy().ravel().tolist()]
            assert not [c for c in cells if c.startswith(("=", "@"))], path
        if path.suffix == ".json":
            assert "<img" not in path.read_text()
            assert "\u202e" not in path.read_text()
        if path.suffix in (".md", ".svg"):
            assert "<img" not in path.read_text()
            assert "\u202e" not in path.read_text()
        if path.suffix == ".md":
            assert all(
                line[0] in "|*#-" or line[0].isalnum() for line in path.read_text().splitlines() if line
            )


def test_texts_for_people_are_seen_as_they_are():
    assert _escaped({"<b>": ["a\u202e", 1.5]}) == {"&lt;b&gt;": ["a\\u202e", 1.5]}
    assert markdown_table(["a|b"], [["x\ny<script>"]]) == "| a\\|b |\n| --- |\n| x y&lt;script> |\n"
    assert listing(["a\nb", "c\u202ed"]) == "a\\nb, c\\u202ed"


def test_a_log_line_shows_what_would_hide(capfd):
    package = logging.getLogger("perturbdiff")
    before = package.handlers[:], package.level, package.propagate
    set_up_logging(0)
    package.info("label %s", "a\u202eb\x1b[2J")
    package.handlers[:], package.level, package.propagate = before
    assert "label a\\u202eb\\x1b[2J" in capfd.readouterr().err


def expected(folder, name):
    (folder / "expected.csv").write_text(f"dataset,method,kind,log\ntoy,cpa,tool,{name}\n")
    return folder / "expected.csv"


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../secret.log", "logs/secret.log", "..", "x.log;/etc/hostname"]
)
def test_no_log_outside_is_read(run_cli, run, tmp_path, name):
    (tmp_path / "secret.log").write_text("error: the secret\n")
    (tmp_path / "given").mkdir()
    table = expected(tmp_path / "given", name)
    refused(
        run_cli("report", run, "--out", tmp_path / "page.html", "--expected", table),
        "expected.csv",
        "no name",
    )
    assert not list(tmp_path.glob("page*"))


def test_no_link_out_of_the_logs_is_followed(run, tmp_path):
    (tmp_path / "secret.log").write_text("error: the secret\n")
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "x.log").symlink_to(tmp_path / "secret.log")
    assert read_expected(expected(tmp_path / "given", "x.log")).logs == {}
    (tmp_path / "given" / "y.log").write_text("error: ours\n")
    assert list(read_expected(expected(tmp_path / "given", "y.log")).logs) == ["y.log"]


def test_changed_predictions_are_not_scored(run_cli, trained, tmp_path):
    out = tmp_path / "p.h5ad"
    made = run_cli(
        "baseline", "control", trained / "store", "--split", trained / "split.parquet", "--out", out
    )
    assert made.code == 0, made.err
    data = bytearray(out.read_bytes())
    data[len(data) // 2] ^= 0x01
    out.write_bytes(data)
    refused(run_cli("evaluate", out, trained / "store", "--out", tmp_path / "e"), "p.h5ad: was changed")
    assert not (tmp_path / "e").exists()
