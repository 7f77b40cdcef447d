"""What limits what the scores say, in sentences: few cells, few perturbations, collapsed predictions and the like."""

from __future__ import annotations

from typing import Any

import pandas as pd

from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.scoring.scopes import POOLED
from perturbdiff.runtime.errors import listing
from perturbdiff.splits.splits import FEW_CELLS

FEW_PERTURBATIONS = 5
UNDEFINED = 0.2  # share of perturbations without a value
LIBRARY = 2.0  # factor between predicted and real library sizes


def limits(
    metrics: pd.DataFrame, conditions: pd.DataFrame, collapse: pd.DataFrame, config: EvaluateConfig
) -> list[dict[str, Any]]:
    """Return ``kind``, ``text`` and ``count`` of everything that limits what the numbers say.

    Parameters
    ----------
    metrics, conditions, collapse
        Tables of a whole evaluation as `perturbdiff.evaluation.score_tables` writes them.
    """
    pooled = pd.DataFrame(metrics[metrics["scope_kind"] == POOLED])
    sentences = [
        *_few_cells(conditions),
        *_few_perturbations(pooled),
        *_no_de(pooled, config),
        *_undefined(pooled),
        *_library(conditions),
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


def _library(conditions: pd.DataFrame) -> list[tuple[str, str, int]]:
    ratios = conditions["library_ratio"].dropna() if "library_ratio" in conditions else pd.Series(dtype=float)
    if ratios.empty or 1 / LIBRARY <= (middle := float(ratios.median())) <= LIBRARY:
        return []
    far = int(((ratios < 1 / LIBRARY) | (ratios > LIBRARY)).sum())
    text = (
        f"predicted cells hold {middle:.2g} times the normalised counts of real cells (median over conditions). "
        "Are both sides normalised alike?"
    )
    return [("scale", text, far)]


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
