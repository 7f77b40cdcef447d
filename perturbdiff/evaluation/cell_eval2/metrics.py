"""The metrics of `cell-eval2` (names, directions, scales, what counts where one is not defined), its rules and digest.

Numbers under different rules are not comparable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal

import numpy as np

Gate = Literal[
    "", "de", "two_classes", "fold", "fold_up", "fold_down", "counts", "direction", "tested", "change"
]
"""Which perturbations the real cells alone let a metric count.

``de``: enough real DE genes. ``two_classes``: and one gene that is none. ``fold``: enough real DE genes (that rise,
fall) whose fold changes differ. ``counts``: enough perturbations with DE genes, in differing number. ``direction``:
enough genes with a fold change. ``tested``: enough tested genes. ``change``: the real change differs between genes.
"""


@dataclass(frozen=True)
class CountMetric:
    """What a metric is.

    Attributes
    ----------
    name
        As cell-eval2 calls it.
    direction
        ``higher``, ``lower`` or ``none``.
    meaning
        One sentence.
    gate
        See `Gate`; a perturbation outside is left out, for every method alike.
    worst
        Value of a perturbation inside the gate whose prediction leaves the metric undefined. None: none can.
    scored
        Whether it is one of the six whose scaled scores are averaged.
    low, high
        Ends that its scaled score is cut to.
    floor
        The mean that is taken where a method's mean is not defined at all.
    """

    name: str
    direction: Literal["higher", "lower", "none"]
    meaning: str
    gate: Gate = ""
    worst: float | None = None
    scored: bool = False
    low: float = float("-inf")
    high: float = float("inf")
    floor: float | None = None


NORM = "expr_mse_unbiased_capped_norm"
"""A ratio of two sums over perturbations: it has no value for a single one."""
NORM_PARTS = ("expr_mse_unbiased_capped", "expr_distance_unbiased")
DE = "de_wilcoxon_"
FOLD_ERROR = f"{DE}lfc_nmae"


def _expression() -> list[CountMetric]:
    error = "mean over genes of the {} difference between predicted and real {}"
    pds = "share of real perturbations farther ({}) from the prediction than the right one, all targets left out"
    return [
        CountMetric("expr_mae", "lower", error.format("absolute", "profile")),
        CountMetric("expr_mse", "lower", error.format("squared", "profile")),
        CountMetric("delta_mae", "lower", error.format("absolute", "change")),
        CountMetric("delta_mse", "lower", error.format("squared", "change")),
        CountMetric(
            "delta_pearson", "higher", "correlation over genes of predicted and real change", "change", -1.0
        ),
        CountMetric("pds_l1", "higher", pds.format("L1")),
        CountMetric("pds_l2", "higher", pds.format("L2")),
        CountMetric("pds_cosine", "higher", pds.format("cosine"), scored=True, floor=0.0),
        CountMetric("expr_mse_unbiased", "none", "squared distance less the sampling noise of both sides"),
        CountMetric(
            NORM_PARTS[0],
            "none",
            "the same, the prediction's noise capped by the real one and by its own spread",
        ),
        CountMetric(
            NORM_PARTS[1],
            "none",
            "squared distance of the real cells from the controls less the noise of both",
        ),
        CountMetric("expr_real_mass_ratio", "none", "sum of the real profile before log1p over the depth"),
        CountMetric(
            NORM,
            "lower",
            "sum over perturbations of the capped squared distance over that of the real change; 1: no change",
            scored=True,
            low=0.0,
            high=1.0,
        ),
    ]


def _tests() -> list[CountMetric]:
    def higher(name: str, meaning: str, gate: Gate = "", worst: float | None = None) -> CountMetric:
        return CountMetric(DE + name, "higher", meaning, gate, worst)

    overlap = "share of the real DE genes{} that are among as many of the strongest predicted ones"
    precision = "share of the predicted DE genes{} that are among as many of the strongest real ones"
    sizes = ("", "_top50", "_top100", "_top200", "_top500")
    most = [f" (at most {size[4:]})" if size else "" for size in sizes]
    spearman = "rank correlation of fold changes over the real DE genes{}"
    return [
        *(higher(f"overlap{s}", overlap.format(m)) for s, m in zip(sizes, most, strict=True)),
        *(higher(f"precision{s}", precision.format(m)) for s, m in zip(sizes, most, strict=True)),
        CountMetric(f"{DE}nsig_counts_real", "none", "number of real DE genes"),
        CountMetric(f"{DE}nsig_counts_pred", "none", "number of predicted DE genes"),
        higher("nsig_spearman", "rank correlation of the numbers of DE genes", "counts", -1.0),
        higher("sig_recall", "share of the real DE genes that are predicted", "de"),
        higher("direction_match", "share of the real DE genes whose predicted sign is right", "de", 0.0),
        higher("model_direction_match", "share of the predicted DE genes whose sign is right", "tested", 0.0),
        higher("lfc_spearman", spearman.format(""), "fold", -1.0),
        higher("lfc_spearman_pos", spearman.format(" that rise"), "fold_up", -1.0),
        higher("lfc_spearman_neg", spearman.format(" that fall"), "fold_down", -1.0),
        CountMetric(
            FOLD_ERROR,
            "lower",
            "error of fold changes over the real DE genes, the target left out, over their mean size",
            scored=True,
            low=-6.0,
        ),
        higher("pr_auc", "area under precision and recall of the predicted q", "two_classes"),
        higher("roc_auc", "area under the ROC curve of the predicted q", "two_classes"),
        higher("overlap_adjusted", "correlation of real DE genes and as many predicted ones", "two_classes"),
        higher("precision_adjusted", "precision of the DE genes, corrected for chance (markedness)"),
        higher(
            "sig_recall_adjusted",
            "recall of the DE genes, corrected for chance (informedness)",
            "two_classes",
        ),
        higher("sig_mcc", "correlation of the real and the predicted DE set", "two_classes"),
        CountMetric(
            f"{DE}sig_jaccard",
            "higher",
            "shared over all DE genes of both sides, the target left out; 1 if there are none",
            scored=True,
            floor=0.0,
        ),
    ]


def _directions() -> list[CountMetric]:
    def higher(name: str, meaning: str, gate: Gate = "", worst: float | None = None) -> CountMetric:
        return CountMetric(f"{DE}direction_{name}", "higher", meaning, gate, worst)

    def scored(name: str, meaning: str) -> CountMetric:
        return CountMetric(f"{DE}direction_{name}", "higher", meaning, scored=True, floor=0.0)

    reach = (
        "share of the real DE genes in the longest start of the prediction's ranking whose signs are right {}"
    )
    pure, fair = "in at least 9 of 10", "more often than the majority sign would be"
    return [
        higher(
            "precision", "share of the predicted DE genes whose sign is committed and right", "direction", 0.0
        ),
        higher("sensitivity", reach.format("in 97.5 %"), "de"),
        higher("sensitivity_universe", f"{reach.format('in 97.5 %')}, all genes ranked", "de"),
        higher("fidelity", "share of right signs among predicted DE genes, corrected for the majority sign"),
        higher("fidelity_raw", "share of right signs among predicted DE genes"),
        higher("coverage", "number of predicted over that of real DE genes"),
        higher("yield", "right signs less those of the majority sign per real DE gene"),
        higher("yield_raw", "right signs of predicted DE genes per real DE gene"),
        higher("fidelity_yield", "fidelity times the coverage, at most 1"),
        scored(
            "fidelity_yield_raw", "right signs over the larger of the numbers of predicted and real DE genes"
        ),
        higher("reach", reach.format(fair)),
        scored("reach_raw", reach.format(pure)),
        higher("reach_unbounded", f"{reach.format(fair)}, all genes ranked"),
        higher("reach_unbounded_raw", f"{reach.format(pure)}, all genes ranked"),
    ]


METRICS: dict[str, CountMetric] = {m.name: m for m in (*_expression(), *_tests(), *_directions())}
SCORED = tuple(name for name, metric in METRICS.items() if metric.scored)
PROFILES: dict[str, tuple[str, ...]] = {
    "vcc2026": tuple(
        name
        for name in METRICS
        if METRICS[name].scored or name in (*NORM_PARTS, "expr_mse_unbiased", "expr_real_mass_ratio")
    ),
    "v2": tuple(METRICS),
}


DEFINITION = "cell-eval2"
RELEASE = "0.20.0"


@dataclass(frozen=True)
class Rules:
    """The parameters that numbers depend on; the values are those of cell-eval2 0.20.0.

    Attributes
    ----------
    profile
        Which metrics: ``vcc2026`` or ``v2``.
    bulk_depth
        Depth that the summed counts of a group are scaled to before log1p.
    cell_depth
        Depth that each cell is scaled to for tests and fold changes.
    min_cpm
        Genes are tested whose mean counts per million in the control cells exceed this; nothing else decides.
    alpha
        q below which a gene counts as DE; Benjamini–Hochberg within a perturbation.
    epsilon
        Added to both means of a fold change.
    purity
        Least share of right signs in the prefix of direction_reach_raw.
    min_genes
        Least number of real DE genes for a perturbation to count, where a metric has such a rule.
    max_total
        Largest sum of a cell's counts.
    splits, split_seed
        Number of halvings of the replicate, and the seed that their seeds derive from.
    baseline_seed
        Of the cells that the baseline draws from the controls.
    reference
        Whose control cells changes are measured from, on both sides.
    """

    profile: str = "vcc2026"
    bulk_depth: float = 5e4
    cell_depth: float = 1e6
    min_cpm: float = 5.0
    alpha: float = 0.05
    epsilon: float = 1e-9
    purity: float = 0.9
    min_genes: int = 10
    max_total: float = 1e6
    splits: int = 5
    split_seed: int = 0
    baseline_seed: int = 0
    reference: str = "the real control cells of the context"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics."""
        return PROFILES[self.profile]

    def split_seeds(self) -> list[int]:
        """Return the seed of each halving."""
        return [int(s) for s in np.random.SeedSequence(self.split_seed).generate_state(self.splits)]

    def digest(self, *, genes: Sequence[str], targets: Sequence[tuple[str, str, str]], controls: str) -> str:
        """Return 16 hexadecimal digits that change with any rule.

        Parameters
        ----------
        genes
            The gene axis.
        targets
            Context, perturbation and gene of each target that is left out.
        controls
            Digest of the reference control cells' values.
        """
        record = {
            "definition": DEFINITION,
            "release": RELEASE,
            **asdict(self),
            "metrics": [[m, METRICS[m].direction, METRICS[m].worst, METRICS[m].gate] for m in self.metrics],
            "genes": list(genes),
            "targets": sorted(targets),
            "controls": controls,
        }
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


RULES = {profile: Rules(profile) for profile in PROFILES}
PARAMETERS = tuple(field.name for field in fields(Rules))
