"""Puts the tables of experiments into a document, between its marks.

    python benchmarks/tables.py lab/results.md --results results

A mark is a line before a table, and another ends it:

    <!-- table EXPERIMENT collection=kang part=test metrics=energy_distance,PDCorr arms=a|b difference=yes -->
    | … |
    <!-- end -->

The table is made anew from `RESULTS/EXPERIMENT/report_tables/arms.csv`, which the experiment's one command writes
(`nextflow run main.nf --experiment EXPERIMENT --outdir RESULTS/EXPERIMENT`). Tables whose experiment is not there stay
as they are and are named. `--check` changes nothing and fails if a table differs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError, listing

MARK = re.compile(r"^<!-- table (?P<experiment>[\w-]+)(?P<settings>(?: [a-z]+=.+?)*) -->$")
END = "<!-- end -->"
HEADINGS = {
    "energy_distance": "energy distance ↓",
    "R2": "R² ↑",
    "R2_weighted": "weighted R² ↑",
    "PDCorr_perturbed": "PDCorr from others ↑",
    "DEOver": "DE overlap ↑",
    "DEOver_10": "DE overlap, ≥ 10 DE genes ↑",
    "nonzero_ratio": "non-zeros / real",
    "gene_sd_ratio": "gene SD / real",
    "cell_sd_ratio": "SD of cell means / real",
    "library_sd_ratio": "SD of library size / real",
    "correlation_agreement": "gene correlations ↑",
    "n_DE_pred": "DE genes called",
}
UPWARDS = ("PDCorr", "AUPRC", "AUROC", "DEPrec", "DirAgr", "PDS_L1", "PDS_L2", "PDS_cos")


@dataclass(frozen=True)
class Mark:
    """What a mark asks for."""

    experiment: str
    collection: str
    part: str
    metrics: tuple[str, ...]
    arms: tuple[str, ...]
    difference: bool

    @classmethod
    def read(cls, line: str) -> Mark | None:
        """Return what a line asks for, or None if it is no mark.

        Raises
        ------
        UserError
            If a setting is missing or unknown.
        """
        if not line.startswith("<!-- table"):
            return None
        found = MARK.match(line)
        if not found:
            raise UserError(f"not a mark of a table: {line}")
        given = dict(re.findall(r" ([a-z]+)=(.+?)(?= [a-z]+=|$)", found["settings"]))
        unknown = sorted(set(given) - {"collection", "part", "metrics", "arms", "difference"})
        lacking = sorted({"collection", "metrics"} - set(given))
        if unknown or lacking:
            raise UserError(
                f"{line}: {'unknown ' + listing(unknown) if unknown else 'without ' + listing(lacking)}"
            )
        arms = tuple(given.get("arms", "").split("|")) if "arms" in given else ()
        return cls(
            found["experiment"], given["collection"], given.get("part", "test"),
            tuple(given["metrics"].split(",")), arms, given.get("difference") == "yes",
        )  # fmt: skip


def rows_of(mark: Mark, arms: pd.DataFrame) -> list[str]:
    """Return the table's lines.

    Raises
    ------
    UserError
        If the experiment has no such collection, part, arm or metric.

    Notes
    -----
    A row is an arm, or an arm at one of its levels; ``arms`` names either.
    """
    own = arms[(arms["collection"] == mark.collection) & (arms["part"] == mark.part)]
    if own.empty:
        known = sorted({f"{c} ({p})" for c, p in zip(arms["collection"], arms["part"], strict=True)})
        raise UserError(f"{mark.experiment}: no {mark.collection} ({mark.part}); there are {listing(known)}")
    own = own.assign(row=[_row_name(arm, level) for arm, level in zip(own["arm"], own["level"], strict=True)])
    if absent := [arm for arm in mark.arms if arm not in {*own["arm"], *own["row"]}]:
        raise UserError(
            f"{mark.experiment}: no arm {listing(absent)}; there are {listing(sorted(set(own['row'])))}"
        )
    if absent := [metric for metric in mark.metrics if metric not in set(own["metric"])]:
        known = sorted(set(own["metric"]))
        raise UserError(f"{mark.experiment}: no metric {listing(absent)}; there are {listing(known)}")
    chosen = own[own["arm"].isin(mark.arms) | own["row"].isin(mark.arms)] if mark.arms else own
    cells = own.set_index(["row", "metric"])
    lines = [["", *(_heading(name) for name in mark.metrics)], ["---"] * (len(mark.metrics) + 1)]
    names = dict.fromkeys(chosen["row"])
    lines += [[name, *(_cell(cells.loc[(name, metric)], mark) for metric in mark.metrics)] for name in names]
    return [f"| {' | '.join(line)} |" for line in lines]


def _row_name(arm: str, level: float) -> str:
    return arm if np.isnan(level) else f"{arm}, {level:g}"


def _heading(metric: str) -> str:
    return HEADINGS.get(metric, f"{metric} ↑" if metric in UPWARDS else metric)


def _number(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 20 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}".replace("-", "−")


def _cell(row: pd.Series, mark: Mark) -> str:
    """Return mean ± SD over seeds and the interval, or the difference from the reference with its interval."""
    if mark.difference:
        mean, low, high = (row[name] for name in ("difference", "difference_low", "difference_high"))
    else:
        mean, low, high = (row[name] for name in ("mean", "low", "high"))
    if np.isnan(mean):
        return "n/a"
    spread = f" ± {_number(row['sd'])}" if not mark.difference and not np.isnan(row["sd"]) else ""
    interval = f" [{_number(low)}, {_number(high)}]" if not np.isnan(low + high) else ""
    return f"{_number(mean)}{spread}{interval}"


def rewrite(text: str, results: Path) -> tuple[str, list[str]]:
    """Return the document with its tables made anew, and the experiments that are not there.

    Raises
    ------
    UserError
        If a mark cannot be read or has no end.
    """
    lines, out, missing = text.splitlines(), [], []
    place = 0
    while place < len(lines):
        out.append(lines[place])
        mark = Mark.read(lines[place])
        place += 1
        if mark is None:
            continue
        if END not in lines[place:]:
            raise UserError(f"'{lines[place - 1]}' has no {END}")
        end = lines.index(END, place)
        path = results / mark.experiment / "report_tables" / "arms.csv"
        if path.is_file():
            out += ["", *rows_of(mark, pd.read_csv(path, keep_default_na=True)), ""]
        else:
            missing.append(mark.experiment)
            out += lines[place:end]
        out.append(END)
        place = end + 1
    return "\n".join(out) + "\n", sorted(set(missing))


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("document", type=Path)
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="holds a folder for each experiment"
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table differs")
    given = parser.parse_args(arguments)
    try:
        text = files.existing(given.document, "document").read_text()
        made, missing = rewrite(text, given.results)
    except UserError as error:
        raise SystemExit(f"tables: {error}") from None
    if missing:
        print(f"not in {given.results}, their tables stay: {', '.join(missing)}")
    if given.check and made != text:
        raise SystemExit(f"{given.document}: tables differ from {given.results}")
    if not given.check:
        given.document.write_text(made)


if __name__ == "__main__":
    main()
