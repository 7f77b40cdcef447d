"""The rules of the definition `cell-eval2` and their digest: numbers under different rules are not comparable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from perturbdiff.evaluation.cell_eval2.metrics import METRICS, PROFILES

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
