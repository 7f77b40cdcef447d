"""What was to be run and has no scores: found, explained by its logs, and shown wherever methods are."""

import json

import pytest
from report_runs import make_run

from perturbdiff.reporting.loading.failed_runs import read_expected, reason
from perturbdiff.reporting.loading.results import read_runs
from perturbdiff.reporting.page.page import headline, write_report
from perturbdiff.runtime.errors import UserError

BEGUN = "2026-01-02 03:04:05 ======== host node, process 7: perturbdiff baseline cpa store --out cpa.h5ad\n"


def log(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{BEGUN}2026-01-02 03:04:06 INFO cpa: 12/40 epochs, 3 epochs/s\n"
            "2026-01-02 03:05:05 exit code 2 after 60 s: error: cpa: the loss is NaN after 12 epochs\n",
            "cpa: the loss is NaN after 12 epochs",
        ),
        (
            f"{BEGUN}2026-01-02 03:05:05 exit code 2 after 1 s: error: old\n"
            f"{BEGUN}2026-01-02 03:05:05 exit code 2 after 1 s: error: new\n",
            "new",
        ),
        (
            f"{BEGUN}2026-01-02 03:04:06 INFO reading\n"
            "2026-01-02 03:04:07 INFO train: 120/400 steps, 9 steps/s, 31 s left\n",
            "killed or cut off, after: reading",
        ),
        (BEGUN, "killed or cut off"),
        (
            f"{BEGUN}2026-01-02 03:04:06 ERROR this is a bug\nTraceback (most recent call last):\n"
            '  File "x.py", line 3, in f\n    g()\nValueError: shapes differ\n'
            "2026-01-02 03:04:07 exit code 1 after 3 s\n",
            "ValueError: shapes differ (exit code 1)",
        ),
        (f"{BEGUN}2026-01-02 03:04:07 exit code 1 after 3 s\n", "exit code 1"),
        (f"{BEGUN}2026-01-02 03:04:07 exit code 0 after 3 s\n", ""),
        (
            "progress 3/10 epochs\n\x1b[31mRuntimeError: out of memory\x1b[0m\n\n-----\n",
            "RuntimeError: out of memory",
        ),
        ("loading\nerror: no such column 'dose'\ncleaning up\n", "no such column 'dose'"),
        ("10 %\r50 %\rnot enough disk space\n", "not enough disk space"),
        ("", ""),
    ],
)
def test_reason_in_one_line(tmp_path, text, expected):
    path = tmp_path / "x.log"
    path.write_text(text)
    assert reason([path]) == expected


def test_the_first_stage_that_did_not_end_well_tells(tmp_path):
    good = log(tmp_path / "train.log", BEGUN.strip(), "2026-01-02 03:04:07 exit code 0 after 3 s")
    bad = log(
        tmp_path / "sample.log", BEGUN.strip(), "2026-01-02 03:04:07 exit code 2 after 3 s: error: no room"
    )
    assert reason([good, tmp_path / "never_begun.log", bad]) == "no room"
    assert reason([good]) == ""


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    path = tmp_path / "long.log"
    path.write_text("error: early\n" + "x" * 200_000 + "\nMemoryError: late\n")
    assert reason([path]) == "MemoryError: late"
    path.write_bytes(b"\xff\xfe broken bytes\n")
    assert "broken bytes" in reason([path])


def expected_table(folder, *rows):
    path = folder / "expected.csv"
    path.write_text("dataset,method,kind,log\n" + "".join(f"{row}\n" for row in rows))
    return path


@pytest.fixture
def runs(tmp_path):
    made = [
        make_run(tmp_path / "runs" / m, m, shown=1, cells=4) for m in ("perturbdiff", "linear", "ceiling")
    ]
    for run in made:
        for name in ("embedding", "de_real", "de_pred"):
            (run / f"{name}.parquet").unlink()
    return made


def test_what_has_no_run_is_missing(runs, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    log(logs / "cpa.log", "error: out of patience")
    table = expected_table(
        tmp_path,
        "toy,perturbdiff,model,",
        "toy,linear,baseline,x.log",
        "toy,cpa,tool,cpa.log",
        "toy,cpa,tool,cpa.log",
        "toy,state,tool,one.log;two.log",
        "other,linear,baseline,",
    )
    found = read_expected(table, [logs]).missing(read_runs(runs))
    assert [(one.dataset, one.method, one.kind) for one in found] == [
        ("toy", "cpa", "tool"),
        ("toy", "state", "tool"),
        ("other", "linear", "baseline"),
    ]
    assert found[0].why == "out of patience"
    assert found[0].files == (logs / "cpa.log",)
    assert found[1].why == "no reason known, see one.log, two.log"
    assert found[2].why == "no reason known, and no log"
    assert read_expected(None).missing(read_runs(runs)) == []


def test_a_table_that_is_none_is_explained(tmp_path):
    with pytest.raises(UserError, match="expected methods not found"):
        read_expected(tmp_path / "no.csv")
    (tmp_path / "e.csv").write_text("dataset,method\na,b\n")
    with pytest.raises(UserError, match="no column kind, log"):
        read_expected(tmp_path / "e.csv")
    (tmp_path / "e.csv").write_text("")
    with pytest.raises(UserError, match="is not a table"):
        read_expected(tmp_path / "e.csv")


def test_failed_methods_are_shown_everywhere_and_take_no_rank(runs, tmp_path):
    log(tmp_path / "cpa.log", "error: the loss is <b>NaN</b>")
    table = expected_table(tmp_path, "toy,cpa,tool,cpa.log", "second,linear,baseline,lost.log")
    whole = write_report(runs, tmp_path / "whole.html").read_text()
    out = write_report(runs, tmp_path / "r.html", expected=table)
    text = out.read_text()
    assert ">failed<" not in whole
    assert "<b>Failed.</b>" not in whole
    scores = text[text.index('id="d1-scores"') : text.index('id="runs"')]
    rows = [row for row in scores.split("<tr")[1:] if ">cpa<" in row]
    assert len(rows) == text.count('data-name="scores-')  # one in every table of scores
    for row in rows:
        assert ">failed<" in row
        assert "the loss is &lt;b&gt;NaN&lt;/b&gt;" in row
        assert "best" not in row
        assert "second" not in row
    assert scores.count('class="num best"') == whole.count('class="num best"')
    assert "<b>Failed.</b> cpa: the loss is" in text
    assert "1 failed" in text[: text.index("Key metrics")]
    ran = text[text.index('id="runs"') :]
    assert ">cpa<" in ran
    assert "no reason known, see lost.log" in ran
    assert "<b>second, linear.</b> no reason known, see lost.log" in text
    mqc = json.loads((tmp_path / "r_mqc" / "perturbdiff_scores_mqc.json").read_text())
    assert mqc["data"]["toy | cpa"] == mqc["data"]["second | linear"] == {"status": "failed"}
    assert "toy: cpa failed: the loss" in mqc["description"]
    assert "status" in mqc["headers"]
    assert (
        "status"
        not in json.loads((tmp_path / "whole_mqc" / "perturbdiff_scores_mqc.json").read_text())["headers"]
    )
    failed = (tmp_path / "r_tables" / "failed.csv").read_text().splitlines()
    assert failed[1] == "toy,cpa,tool,the loss is <b>NaN</b>,cpa.log"
    before = out.stat().st_mtime_ns
    assert write_report(runs, out, expected=table).stat().st_mtime_ns == before
    log(tmp_path / "cpa.log", "error: another reason")
    assert write_report(runs, out, expected=table).stat().st_mtime_ns != before


def test_failed_methods_stand_in_the_text(runs, tmp_path):
    table = expected_table(tmp_path, "toy,cpa,tool,cpa.log", "second,linear,baseline,")
    few = headline(runs[:1], table).splitlines()
    assert few[0].split() == ["toy", "perturbdiff", "cpa"]
    assert few[2].split()[-1] == "failed"
    assert "cpa failed: no reason known, see cpa.log" in few
    assert few[few.index("second") + 1] == "linear failed: no reason known, and no log"
    many = headline(runs, table).splitlines()
    row = next(line for line in many if line.startswith("cpa "))
    assert row.split()[1:3] == ["failed", "–"]
