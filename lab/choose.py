"""Which recipe? Orders the arms of workflow runs by their scores on validation conditions, and on nothing else.

    python lab/choose.py results/variants --reference recommended --top 3

Reads `pipeline_info/design.csv`, and of `metrics/` only the runs that it calls part `valid`; scores of test
conditions are not opened. Several output folders count as one, with the collections of each. The rule:

1. On each collection of data sets an arm has five targets: three set by the best baseline there, a lower energy
   distance (mean over conditions), no lower DEOver over perturbations with at least 10 true DE genes, PDCorr at most
   0.02 below; and that the share of non-zeros and the SD of genes are within 10 % of the real cells'. Fewer missed
   targets are better.
2. Among equals: the lower mean, over the collections, of the energy distance as a share of unchanged control cells'.

It was fixed before any score was seen but for two things. The second part took the place of a ratio that distances
around 0 decided alone. And the two targets of realism were a third part, which decided among equals only; they count
like the others since an arm with 12 % too many non-zeros came first by 0.0025 of PDCorr (lab/choices.md).

An arm at each of its levels counts as one. Arms that lack a collection of the reference are listed apart. Means are
over the data sets of a collection, then over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.runtime.errors import UserError, listing

METRICS = ("energy_distance", "PDCorr", "DEOver_10", "nonzero_ratio", "gene_sd_ratio")
SLACK = {"energy_distance": 0.0, "DEOver_10": 0.0, "PDCorr": 0.02}
REALISM = {"nonzero_ratio": 0.1, "gene_sd_ratio": 0.1}
KEYS = ["collection", "arm"]


def runs(outdir: Path) -> pd.DataFrame:
    """Return the design's validation runs with the folder of their scores and whether they are baselines.

    Raises
    ------
    UserError
        If there is no design, nothing in it is of part `valid`, or none of that has scores.
    """
    path = outdir / "pipeline_info" / "design.csv"
    if not path.is_file():
        raise UserError(f"{path}: no design; give the output folder of a workflow run")
    design = pd.read_csv(path, dtype=str, keep_default_na=False)
    chosen = design[design["part"] == "valid"]
    if chosen.empty:
        raise UserError(f"{path}: no run of part 'valid'; there is nothing that may be chosen by")
    names = {(row.dataset, row.method): row for row in chosen.itertuples()}
    found = []
    for summary in sorted((outdir / "metrics").glob("*/summary.json")):
        facts = json.loads(summary.read_text())
        row = names.get((facts["dataset"], facts["method"]))
        if row is not None and facts["method"] != "ceiling":
            told = {"folder": summary.parent, "baseline": bool(facts["made_by"].get("baseline"))}
            arm = f"{row.arm}, {row.level}" if row.level else row.arm
            found.append({**row._asdict(), **told, "arm": arm})
    if not found:
        raise UserError(
            f"{outdir / 'metrics'}: no validation run has scores yet; wait for the workflow's end"
        )
    return pd.DataFrame(found)


def gathered(outdirs: Sequence[Path]) -> pd.DataFrame:
    """Return the validation runs of several output folders; see `runs`.

    Raises
    ------
    UserError
        If a collection is in two of them: the rule counts each once.
    """
    found = {outdir: runs(outdir) for outdir in outdirs}
    seen: dict[str, Path] = {}
    for outdir, table in found.items():
        for collection in table["collection"].unique():
            if collection in seen:
                raise UserError(
                    f"collection '{collection}' is in {seen[collection]} and in {outdir}; give one of them"
                )
            seen[collection] = outdir
    return pd.concat(found.values(), ignore_index=True)


def scores(folder: Path) -> dict[str, float]:
    """Return a run's metrics: those of cells as means over conditions, the others pooled."""
    table = pd.read_csv(folder / "aggregate.csv")
    pooled = table[table["scope_kind"] == "pooled"].set_index("metric")["nanmean"]
    cells = pd.read_csv(folder / "conditions.csv")
    return {
        name: float(cells[name].mean() if name in cells else pooled.get(name, np.nan)) for name in METRICS
    }


def arms(found: pd.DataFrame) -> pd.DataFrame:
    """Return the mean scores of each arm on each collection: over its data sets, then over seeds."""
    values = pd.DataFrame([scores(folder) for folder in found["folder"]], index=found.index)
    table = pd.concat([found[[*KEYS, "seed", "baseline"]], values], axis=1)
    over_sets = table.groupby([*KEYS, "seed", "baseline"], as_index=False)[list(METRICS)].mean()
    return over_sets.groupby([*KEYS, "baseline"], as_index=False)[list(METRICS)].mean()


def missed(row: pd.Series, baselines: pd.DataFrame) -> list[str]:
    """Return the targets that an arm misses on a collection; what no baseline defines cannot be missed."""
    names = []
    for name, slack in SLACK.items():
        best = baselines[name].min() if name == "energy_distance" else baselines[name].max()
        short = row[name] - best if name == "energy_distance" else best - row[name]
        if not np.isnan(best) and not short <= slack:
            names.append(name)
    names += [name for name, off in REALISM.items() if abs(row[name] - 1) > off]
    return [f"{row['collection']}: {name}" for name in names]


def order(table: pd.DataFrame, reference: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the arms from the best on, with what they are ordered by, and those that lack a collection.

    Raises
    ------
    UserError
        If the reference is no arm, or unchanged control cells were not scored on one of its collections.
    """
    models = table[~table["baseline"]]
    if reference not in set(models["arm"]):
        raise UserError(f"no arm '{reference}'; arms are {listing(sorted(set(models['arm'])))}")
    collections = set(models.loc[models["arm"] == reference, "collection"])
    unchanged = table[table["baseline"] & (table["arm"] == "control")].set_index("collection")[
        "energy_distance"
    ]
    if lacking := sorted(collections - set(unchanged.index)):
        raise UserError(
            f"no scores of the baseline 'control' on {', '.join(lacking)}; run the workflow with --baselines control,…"
        )
    rows, partial = [], []
    for arm, own in models.groupby("arm"):
        if not collections <= set(own["collection"]):
            partial.append(str(arm))
            continue
        own = own[own["collection"].isin(collections)]
        misses = [
            name
            for _, row in own.iterrows()
            for name in missed(row, table[table["baseline"] & (table["collection"] == row["collection"])])
        ]
        share = own["energy_distance"].to_numpy() / unchanged[own["collection"]].to_numpy()
        rows.append(
            {
                "arm": arm,
                "missed": len(misses),
                "ED share": float(share.mean()),
                "which": "; ".join(misses),
            }
        )
    return pd.DataFrame(rows).sort_values(["missed", "ED share", "arm"], ignore_index=True), partial


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the arms in their order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("outdirs", nargs="+", type=Path, metavar="outdir")
    parser.add_argument("--reference", default="recommended", help="arm whose collections count")
    parser.add_argument("--collections", nargs="+", help="only these collections")
    parser.add_argument("--top", type=int, help="only so many arms")
    given = parser.parse_args(arguments)
    try:
        table = arms(gathered(given.outdirs))
        if given.collections:
            table = table[table["collection"].isin(given.collections)]
        ordered, partial = order(table, given.reference)
    except UserError as error:
        raise SystemExit(f"choose: {error}") from None
    print(table.round(4).to_string(index=False))
    print()
    print(
        ordered.head(given.top).round(3).to_string(index=False)
        if given.top
        else ordered.round(3).to_string(index=False)
    )
    if partial:
        print(f"not on all collections: {', '.join(partial)}")


if __name__ == "__main__":
    main()
