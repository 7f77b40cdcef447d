"""The picture of the manual's first page: predicted, real and control cells of a held-out cell type.

    perturbdiff preprocess "$PERTURBDIFF_DATA/kang18_ifnb_muscat.h5ad" --out store --config kang18
    perturbdiff split store --out split.parquet --config kang18
    perturbdiff train store --split split.parquet --out bundle --config kang18
    perturbdiff sample bundle store --split split.parquet --out predictions.h5ad
    perturbdiff evaluate predictions.h5ad store --out metrics
    python lab/front_picture.py metrics/embedding.parquet --out docs/images/kang.svg

The axes are the first two principal components of the real cells, as in the report.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

KINDS = {"control": "#9aa3ad", "real": "#e07a1f", "predicted": "#00a08f"}
INK = "#7b8794"
"""Readable on a light and on a dark page."""


def draw(cells: pd.DataFrame, out: Path) -> None:
    """Draw the cells of one condition (columns source, x, y) as a transparent SVG."""
    plt.rcParams.update(
        {"svg.hashsalt": "front", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11}
    )
    figure, axes = plt.subplots(figsize=(5.2, 3.3))
    for source, colour in KINDS.items():
        some = cells[cells["source"] == source]
        axes.scatter(
            some["x"], some["y"], s=30, color=colour, alpha=0.8, linewidths=0, label=f"{source} cells"
        )
    axes.set(xticks=[], yticks=[])
    axes.set_xlabel("first axis of variation", color=INK)
    axes.set_ylabel("second axis", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.legend(
        frameon=False,
        labelcolor=INK,
        loc="upper center",
        bbox_to_anchor=(0.5, 1.13),
        ncols=3,
        handletextpad=0,
    )
    figure.savefig(out, transparent=True, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Draw the condition with the most cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("embedding", type=Path, help="embedding.parquet of perturbdiff evaluate")
    parser.add_argument("--condition", help="default: the one with the most cells")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    cells = pd.read_parquet(given.embedding)
    condition = given.condition or cells["condition"].value_counts().index[0]
    print(f"{condition}, one of {', '.join(cells['condition'].unique())}")
    draw(cells[cells["condition"] == condition], given.out)


if __name__ == "__main__":
    main()
