"""What limits an evaluation is printed, and printed again when there is nothing to do."""

import json

from evaluation_pair import QUICK, pair_side


def test_findings_are_printed_and_repeated(tmp_path, run_cli):
    pair_side(1, cells=4).write_h5ad(tmp_path / "pred.h5ad")
    pair_side(0, cells=4).write_h5ad(tmp_path / "real.h5ad")
    line = ("evaluate", tmp_path / "pred.h5ad", tmp_path / "real.h5ad", "--out", tmp_path / "out", *QUICK)
    first = run_cli(*line)
    assert first.code == 0, first.err
    assert first.out == f"{tmp_path / 'out'}\n"
    again = run_cli(*line)
    findings = json.loads((tmp_path / "out" / "summary.json").read_text())["findings"]
    assert {"few_cells", "few_perturbations"} <= {finding["kind"] for finding in findings}
    for finding in findings:
        assert finding["text"] in first.err
        assert finding["text"] in again.err
