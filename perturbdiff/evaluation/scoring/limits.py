"""What limits what the scores say, in sentences: few cells, few perturbations, collapsed predictions and the like."""

from __future__ import annotations

from typing import Any

import pandas as pd

from perturbdiff.conditions.condition import FEW_CELLS
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.scoring.scopes import POOLED
from perturbdiff.runtime.errors import listing

FEW_PERTURBATIONS = 5
MISSING = 0.2  # share of the pairs of a perturbation and a place that are not scored
UNDEFINED = 0.2  # share of perturbations without a value
LIBRARY = 2.0  # factor between predicted and real library sizes
SAME_LIBRARY = 1.25  # the same where all real cells have one size
ZEROS = (0.8, 1.25)  # predicted over real non-zero values
SPREAD = 0.2  # predicted over real SD of a gene: less is hardly any
DISTINCT = 0.5  # share of predicted cells that differ from each other
_MANY_DE, _MORE_DE = 0.5, 2.0  # share of all genes, and factor over the real number


def limits(
    metrics: pd.DataFrame,
    conditions: pd.DataFrame,
    collapse: pd.DataFrame,
    config: EvaluateConfig,
    *,
    num_genes: int,
) -> list[dict[str, Any]]:
    """Return ``kind``, ``text`` and ``count`` of everything that limits what the numbers say.

    Parameters
    ----------
    metrics, conditions, collapse
        Tables of a whole evaluation as `perturbdiff.evaluation.score_tables` writes them.
    num_genes
        Genes that were compared.
    """
    pooled = pd.DataFrame(metrics[metrics["scope_kind"] == POOLED])
    sentences = [
        *_few_cells(conditions),
        *_few_perturbations(pooled),
        *_unbalanced(conditions),
        *_no_de(pooled, config),
        *_undefined(pooled),
        *_library(conditions),
        *_no_cells(conditions),
        *_zeros(conditions),
        *_too_many_de(pooled, num_genes),
        *_collapse(collapse),
    ]
    return [{"kind": kind, "text": text, "count": count} for kind, text, count in sentences]


def _few_cells(conditions: pd.DataFrame) -> list[tuple[str, str, int]]:
    sentences = []
    for column, what in (("n_cells", "real"), ("n_predicted", "predicted")):
        if few := int((conditions[column] < FEW_CELLS).sum()):
            text = (
                f"{few} of {len(conditions)} conditions have fewer than {FEW_CELLS} {what} cells, "
                "so their values are mostly noise"
            )
            sentences.append(("few_cells", text, few))
    return sentences


def _few_perturbations(pooled: pd.DataFrame) -> list[tuple[str, str, int]]:
    coupled = pooled[pooled["metric"].str.startswith("PDS") | (pooled["metric"] == "ES")]
    num = pooled.loc[pooled["perturbation"] != "*", "perturbation"].nunique()
    if coupled.empty or num >= FEW_PERTURBATIONS:
        return []
    noun = "1 perturbation" if num == 1 else f"{num} perturbations"
    text = f"only {noun} to tell apart, so discrimination scores (PDS) and ES mean little"
    return [("few_perturbations", text, num)]


def _unbalanced(conditions: pd.DataFrame) -> list[tuple[str, str, int]]:
    """Look for perturbations that lack cells where others have some: pooled, their changes hold other batches' too."""
    places = conditions["cell_type"] + "|" + conditions["batch"]
    every = conditions["perturbation"].nunique() * places.nunique()
    missing = every - len(conditions)
    if not every or missing <= MISSING * every:
        return []
    text = (
        f"{missing} of {every} pairs of a perturbation and a cell type and batch are not scored: pooled changes "
        "also hold what differs between batches and cell types, which predictions of any kind share. Look at contexts, "
        "and compare with methods that are scored on the same conditions"
    )
    return [("unbalanced", text, missing)]


def _no_de(pooled: pd.DataFrame, config: EvaluateConfig) -> list[tuple[str, str, int]]:
    counts = pooled.loc[pooled["metric"] == "n_DE_real", "value"]
    none, few = int((counts == 0).sum()), int((counts < config.min_de).sum())
    if not few:
        return []
    text = f"{few} of {len(counts)} perturbations have fewer than {config.min_de} real DE genes in the pool"
    if none:
        text += f", {none} of them none, which DEOver and DEPrec count as 0"
    return [("no_de", f"{text}. DEOver_10 and DEPrec_10 leave them out", few)]


def _undefined(pooled: pd.DataFrame) -> list[tuple[str, str, int]]:
    several = pooled[pooled["perturbation"] != "*"]
    shares = several.assign(missing=several["status"] == "undefined").groupby("metric", sort=False)["missing"]
    names = [str(name) for name, share in shares.mean().items() if share > UNDEFINED]
    if not names:
        return []
    text = (
        f"{listing(names)} {'is' if len(names) == 1 else 'are'} undefined for more than a fifth of the perturbations, "
        "and the means are over the others"
    )
    return [("undefined", text, len(names))]


def _middle(conditions: pd.DataFrame, metric: str) -> float:
    """Return the median of a metric over conditions, NaN if it was not scored or is nowhere defined."""
    return float(conditions[metric].median()) if metric in conditions and len(conditions) else float("nan")


def _library(conditions: pd.DataFrame) -> list[tuple[str, str, int]]:
    """Look for totals that real cells do not have. If all real ones have the same, others are impossible."""
    middle = _middle(conditions, "library_ratio")
    same = "library_sd_ratio" in conditions and bool(conditions["library_sd_ratio"].isna().all())
    most = SAME_LIBRARY if same and (conditions["n_cells"] > 1).any() else LIBRARY
    if pd.isna(middle) or 1 / most <= middle <= most:
        return []
    ratios = conditions["library_ratio"].dropna()
    far = int(((ratios < 1 / most) | (ratios > most)).sum())
    although = ", although all real cells hold the same" if most == SAME_LIBRARY else ""
    text = (
        f"predicted cells hold {middle:.2g} times the normalised counts of real cells (median over conditions)"
        f"{although}. Are both sides normalised alike?"
    )
    return [("scale", text, far)]


def _no_cells(conditions: pd.DataFrame) -> list[tuple[str, str, int]]:
    """Look for profiles and copies that were handed in as cells."""
    several = pd.DataFrame(conditions[conditions["n_predicted"] > 1])
    if several.empty:
        return []
    spread = _middle(several, "gene_sd_ratio")
    if spread < SPREAD:
        few = int((several["gene_sd_ratio"] < SPREAD).sum())
        text = (
            f"predicted cells of a condition hardly differ: their genes vary {spread:.2g} times as much as in real "
            f"cells (median over conditions), below {SPREAD:g} in {few} of {len(several)}. A mean profile is no cell, "
            "and scores of averages do not notice"
        )
        return [("no_spread", text, few)]
    shares = several["n_distinct"] / several["n_predicted"]
    if (share := float(shares.median())) < DISTINCT:
        few = int((shares < DISTINCT).sum())
        text = (
            f"the same predicted cells come again and again: {share:.0%} of a condition's cells are different ones "
            f"(median over conditions), fewer than half in {few} of {len(several)}. Tests take copies for new cells, "
            "and find too many DE genes"
        )
        return [("repeated", text, few)]
    return []


def _zeros(conditions: pd.DataFrame) -> list[tuple[str, str, int]]:
    middle = _middle(conditions, "nonzero_ratio")
    if pd.isna(middle) or ZEROS[0] <= middle <= ZEROS[1]:
        return []
    ratios = conditions["nonzero_ratio"].dropna()
    text = (
        f"predicted cells have {'fewer' if middle > 1 else 'more'} zeros than real ones: {middle:.2g} times as many "
        "non-zero values (median over conditions). Rank tests see that, averages do not"
    )
    return [("zeros", text, int(((ratios < ZEROS[0]) | (ratios > ZEROS[1])).sum()))]


def _too_many_de(pooled: pd.DataFrame, num_genes: int) -> list[tuple[str, str, int]]:
    counts = {
        side: pooled.loc[pooled["metric"] == f"n_DE_{side}"].set_index("perturbation")["value"]
        for side in ("real", "pred")
    }
    if counts["real"].empty or counts["pred"].empty:
        return []
    real, predicted = (float(counts[side].median()) for side in ("real", "pred"))
    if predicted < _MANY_DE * num_genes or predicted < _MORE_DE * real:
        return []
    text = (
        f"{predicted:.0f} of {num_genes} genes of predicted cells differ from the controls, {real:.0f} of real cells "
        "(medians over perturbations). Where nearly all are called, none is missed"
    )
    return [("too_many_de", text, int((counts["pred"] >= _MANY_DE * num_genes).sum()))]


def _collapse(collapse: pd.DataFrame) -> list[tuple[str, str, int]]:
    if collapse.empty:
        return []
    bad = collapse[~collapse["verdict"].isin(["as different as the truth", "less alike than the truth"])]
    pooled = pd.DataFrame(bad[bad["scope_kind"] == POOLED])
    sentences = []
    for row in pooled.to_dict("records"):
        text = (
            f"predictions of different perturbations: {row['verdict']} (median correlation of changes "
            f"{row['predicted']:.2f}, real {row['real']:.2f}, size of changes {row['ratio']:.2f} of the real ones)"
        )
        sentences.append(("collapse", text, 1))
    if labels := sorted(set(bad["scope"]) - set(pooled["scope"])):
        text = f"in {len(labels)} contexts predictions are collapsed or too alike: {listing(labels)}"
        sentences.append(("collapse", text, len(labels)))
    return sentences
