"""The hidden truth of a simulated screen: genes, contexts, perturbations, their effects, and which cells it has."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from perturbdiff.config.settings import SimulateConfig

CONTROL = "control"
MAX_LOG_FOLD_CHANGE = 4.0
MAX_LATENT = 2.5  # in standard deviations: a well's response may vanish, but it does not change its sign
_KIND_STRENGTH = {"control": 0.0, "knockdown": 1.0, "drug": 1.25, "cytokine": 1.5}
_KIND_SIGN = {"knockdown": -1.0, "drug": 0.0, "cytokine": 1.0}  # 0: up or down
_HILL = 1.2
_SIGN_COHERENCE = 0.8  # share of a programme's genes that move the same way
_MARKER_SHARE = 0.3  # share of genes whose level tells cell types apart
_PRIVATE_SHARE_OF_GENES = 0.04
TINY = 5  # cells in the largest of the tiny conditions
MIN_CONTROLS = 10  # control cells that every (cell type, batch) has at least

MIN_DISPERSION, MAX_DISPERSION = 0.02, 20.0

Floats = NDArray[np.float32]


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the random stream ``name`` of ``seed``, independent of every other name's."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


@dataclass(frozen=True)
class Truth:
    """What the simulation knows and an experiment does not.

    Attributes
    ----------
    genes
        G gene names.
    cell_types, batches
        Their labels, C and B of them.
    perturbations
        One row per label, the control first: ``perturbation, agent, kind, dose`` (nan if none), and
        ``response`` (share of the agent's full effect at this dose), ``target`` (knocked-down gene's index or
        -1), ``agent_id``.
    base
        Log expression ``[C, G]`` float32 of each cell type, natural log, up to a constant.
    batch
        Batch shift of the log expression ``[C, B, G]`` float32.
    depth
        Median depth ``[C, B]`` of each context's cells, relative to the experiment's.
    dispersion
        Negative-binomial φ ``[G]`` (variance = μ + φμ²).
    programmes
        Response programmes ``[R, G]`` float32, RMS 1 over a programme's own genes.
    weights
        Programme weights ``[A, C, R]`` float32 of each agent (0 is the control) in each cell type, at full dose.
    private
        Effects ``[A, G]`` float32 of each agent outside the programmes.
    knocked_down
        log(1 - efficiency) ``[A]`` of the knock-downs on their own gene, 0 for others.
    direction
        Direction ``[G]`` float32 in which the latent factor moves every set.
    cell_programmes
        Loadings ``[K, G]`` float32 of the activities that differ from cell to cell.
    """

    genes: list[str]
    cell_types: list[str]
    batches: list[str]
    perturbations: pd.DataFrame
    base: Floats
    batch: Floats
    depth: NDArray[np.float64]
    dispersion: NDArray[np.float64]
    programmes: Floats
    weights: Floats
    private: Floats
    knocked_down: Floats
    direction: Floats
    cell_programmes: Floats

    def effect(self, perturbation: int, cell_type: int) -> Floats:
        """Return the shift of log rates ``[G]`` float32 that a perturbation makes in a cell type."""
        table = self.perturbations
        agent, target = int(table["agent_id"].iat[perturbation]), int(table["target"].iat[perturbation])
        shift = self.private[agent].copy()
        for weight, programme in zip(self.weights[agent, cell_type], self.programmes, strict=True):
            if weight:  # added one by one: a matrix product would depend on the linear algebra library
                shift += weight * programme
        if target >= 0:
            shift[target] = self.knocked_down[agent]
        shift *= np.float32(table["response"].iat[perturbation])
        return np.clip(shift, -MAX_LOG_FOLD_CHANGE, MAX_LOG_FOLD_CHANGE)

    def expected_counts(self, depth: float) -> NDArray[np.float64]:
        """Return the mean count ``[G]`` of each gene over control populations at ``depth`` counts per cell."""
        share = np.exp(self.base.astype(np.float64))
        share /= share.sum(1, keepdims=True)
        return depth * share.mean(0)

    def log_fold_change(self, perturbation: int, cell_type: int, *, escape: float) -> NDArray[np.float64]:
        """Return the true log fold change ``[G]`` of a gene's expected share of counts against control.

        The latent factor is at its median (0), batches at their mean; cells that escape a knock-down
        (``escape``, a share) are averaged in. Natural logarithm.
        """
        effect = self.effect(perturbation, cell_type).astype(np.float64)
        control = np.exp(self.base[cell_type].astype(np.float64))
        control /= control.sum()
        perturbed = control * np.exp(effect)
        perturbed /= perturbed.sum()
        escaped = escape if self.perturbations["kind"].iloc[perturbation] == "knockdown" else 0.0
        return np.log(((1 - escaped) * perturbed + escaped * control) / control)


def draw_truth(config: SimulateConfig, seed: int) -> Truth:
    """Draw the truth of a simulated experiment from ``seed``."""
    contexts = (config.cell_types, config.batches)
    genes = [f"GENE{j + 1:0{len(str(config.genes))}d}" for j in range(config.genes)]
    base = _base(config, seed)
    mean = base.mean(0)
    perturbations = _perturbations(config, genes, mean, seed)
    weights, private, knocked_down, programmes = _effects(config, perturbations, seed)
    rng = stream(seed, "direction")
    share = max(0.3, config.programme_share)
    cell_programmes = _loadings(config.cell_programmes, config.genes, share, stream(seed, "cell programmes"))
    decay = config.cell_spread / np.sqrt(np.arange(1, config.cell_programmes + 1))
    return Truth(
        genes=genes,
        cell_types=[f"cell_type_{k + 1}" for k in range(config.cell_types)],
        batches=[f"batch_{k + 1}" for k in range(config.batches)],
        perturbations=perturbations,
        base=base,
        batch=_batch(config, seed),
        depth=np.exp(config.context_depth_spread * stream(seed, "depth").normal(size=contexts)),
        dispersion=_dispersion(config, mean, seed),
        programmes=programmes,
        weights=weights,
        private=private,
        knocked_down=knocked_down,
        direction=_loadings(1, config.genes, share, rng)[0],
        cell_programmes=(cell_programmes * decay[:, None]).astype(np.float32),
    )


def _base(config: SimulateConfig, seed: int) -> Floats:
    rng = stream(seed, "expression")
    if config.mean_skew > 1e-3:
        shape = 4.0 / config.mean_skew**2  # Pearson III: a gamma brought to mean 0, deviation 1
        standard = (rng.gamma(shape, size=config.genes) - shape) / np.sqrt(shape)
    else:
        standard = rng.normal(size=config.genes)
    rng = stream(seed, "cell types")
    markers = rng.random((config.cell_types, config.genes)) < _MARKER_SHARE
    of_cell_type = rng.normal(size=markers.shape) * markers / np.sqrt(_MARKER_SHARE)
    return (config.mean_spread * standard + config.cell_type_spread * of_cell_type).astype(np.float32)


def _batch(config: SimulateConfig, seed: int) -> Floats:
    rng = stream(seed, "batches")
    common = rng.normal(size=(1, config.batches, config.genes))
    of_context = rng.normal(size=(config.cell_types, config.batches, config.genes))
    return (config.batch_spread * (common + 0.5 * of_context)).astype(np.float32)


def _dispersion(config: SimulateConfig, mean: Floats, seed: int) -> NDArray[np.float64]:
    share = np.exp(mean.astype(np.float64))
    counts = config.counts_per_gene * config.genes * share / share.sum()
    scatter = np.exp(config.dispersion_spread * stream(seed, "dispersion").normal(size=config.genes))
    trend = config.dispersion + config.dispersion_low / counts
    return np.clip(trend * scatter, MIN_DISPERSION, MAX_DISPERSION)


def _loadings(count: int, genes: int, share: float, rng: np.random.Generator) -> Floats:
    """Return sparse, heavy-tailed gene loadings ``[count, genes]``, mostly of one sign, RMS 1 over those not zero."""
    member = rng.random((count, genes)) < share
    size = rng.exponential(size=member.shape) / np.sqrt(2.0)
    sign = np.where(rng.random(member.shape) < _SIGN_COHERENCE, 1.0, -1.0)
    return (member * size * sign).astype(np.float32)


def _perturbations(config: SimulateConfig, genes: list[str], mean: Floats, seed: int) -> pd.DataFrame:
    """Return the table of perturbation labels; knock-downs hit genes of the upper half of expression."""
    rng = stream(seed, "perturbations")
    candidates = np.argsort(-mean, kind="stable")[: max(config.knockdowns, config.genes // 2)]
    targets = np.sort(rng.choice(candidates, config.knockdowns, replace=False))
    rows: list[tuple[str, str, str, float, float, int, int]] = [
        (CONTROL, CONTROL, "control", np.nan, 0.0, -1, 0)
    ]
    for agent, target in enumerate(targets, start=1):
        rows.append((genes[target], genes[target], "knockdown", np.nan, 1.0, int(target), agent))
    middle = np.log(config.doses).mean() if config.doses else 0.0
    for k in range(config.drugs):
        half = np.exp(middle + 0.5 * rng.normal())
        for dose in config.doses:
            response = dose**_HILL / (dose**_HILL + half**_HILL)
            name, agent = f"drug_{k + 1}", 1 + config.knockdowns + k
            rows.append((f"{name}@{dose:g}", name, "drug", float(dose), response, -1, agent))
    for k in range(config.cytokines):
        name = f"cytokine_{k + 1}"
        rows.append((name, name, "cytokine", np.nan, 1.0, -1, 1 + config.knockdowns + config.drugs + k))
    columns = pd.Index(["perturbation", "agent", "kind", "dose", "response", "target", "agent_id"])
    return pd.DataFrame(rows, columns=columns)


def _effects(
    config: SimulateConfig, perturbations: pd.DataFrame, seed: int
) -> tuple[Floats, Floats, Floats, Floats]:
    agents = perturbations.drop_duplicates("agent_id").sort_values("agent_id")
    kinds = agents["kind"].to_list()
    shape = (config.cell_types, config.programmes)
    weights = np.zeros((len(kinds), *shape))
    private = np.zeros((len(kinds), config.genes))
    knocked_down = np.zeros(len(kinds))
    rng = stream(seed, "effects")
    for agent, kind in enumerate(kinds):
        if kind == "control":
            continue
        strength = _KIND_STRENGTH[kind] * config.effect_size * np.exp(config.effect_spread * rng.normal())
        shared = _direction(config.programmes, _KIND_SIGN[kind], rng)
        specific = np.stack([_direction(config.programmes, 0.0, rng) for _ in range(config.cell_types)])
        mixed = np.sqrt(1 - config.specificity) * shared + np.sqrt(config.specificity) * specific
        weights[agent] = strength * np.sqrt(1 - config.private_share) * mixed
        hit = rng.random(config.genes) < _PRIVATE_SHARE_OF_GENES
        scale = np.sqrt(config.private_share * config.programme_share / _PRIVATE_SHARE_OF_GENES)
        private[agent] = strength * scale * hit * rng.normal(size=config.genes)
        efficiency = rng.uniform(0.6, 0.95)
        knocked_down[agent] = np.log1p(-efficiency) if kind == "knockdown" else 0.0
    programmes = _loadings(
        config.programmes, config.genes, config.programme_share, stream(seed, "response programmes")
    )
    return weights.astype(np.float32), private.astype(np.float32), knocked_down.astype(np.float32), programmes


def _direction(programmes: int, sign: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return a unit vector over programmes with at most three non-zero entries, all of ``sign`` (0: of either)."""
    active = rng.permutation(programmes) < min(3, programmes)
    vector = rng.normal(size=programmes) * active
    vector = sign * np.abs(vector) if sign else vector
    return vector / np.linalg.norm(vector)


@dataclass(frozen=True)
class Plan:
    """Which cells there are.

    Attributes
    ----------
    conditions
        One row per condition: ``cell_type, batch, perturbation`` as numbers, ``n_cells``.
    sets
        One row per set (a well of a condition): ``condition``, ``well``, ``latent`` (standard normal, cut),
        ``n_cells``.
    set_of_cell
        Set of each cell ``[n]`` int32, in the file's random order. The only thing held per cell.
    """

    conditions: pd.DataFrame
    sets: pd.DataFrame
    set_of_cell: NDArray[np.int32]

    def of_set(self, name: str) -> NDArray[np.int64]:
        """Return column ``name`` of the conditions for each set."""
        return self.conditions[name].to_numpy(np.int64)[self.sets["condition"].to_numpy()]


def draw_plan(config: SimulateConfig, truth: Truth, seed: int) -> Plan:
    """Draw the sizes of conditions and sets, each set's latent factor, and the order of the cells."""
    labels = len(truth.perturbations)
    shape = (config.cell_types, config.batches, labels)
    cell_type, batch, perturbation = (axis.ravel() for axis in np.indices(shape))
    rng = stream(seed, "sizes")
    # A perturbation is frequent or rare in all contexts, a context is large or small for all perturbations, and the
    # rest is chance.
    spread = config.size_spread
    log_size = 0.8 * spread * rng.normal(size=(1, 1, labels)) + 0.4 * spread * rng.normal(
        size=(config.cell_types, config.batches, 1)
    )
    weight = np.exp(log_size + 0.45 * spread * rng.normal(size=shape))
    n_cells = _sizes(config, weight, perturbation == 0, rng)
    conditions = pd.DataFrame(
        {"cell_type": cell_type, "batch": batch, "perturbation": perturbation, "n_cells": n_cells}
    )
    per_well = rng.multinomial(n_cells, np.full(config.wells, 1.0 / config.wells))
    condition, well = np.nonzero(per_well)
    latent = np.clip(stream(seed, "latent").normal(size=per_well.shape), -MAX_LATENT, MAX_LATENT)
    sets = pd.DataFrame(
        {
            "condition": condition,
            "well": well,
            "latent": latent[condition, well].astype(np.float32),
            "n_cells": per_well[condition, well],
        }
    )
    set_of_cell = np.repeat(np.arange(len(sets), dtype=np.int32), sets["n_cells"])
    stream(seed, "order").shuffle(set_of_cell)
    return Plan(conditions, sets, set_of_cell)


def _sizes(
    config: SimulateConfig,
    weight: NDArray[np.float64],
    is_control: NDArray[np.bool_],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Return the cells of each condition; they sum to ``config.cells``."""
    weight, treated = weight.ravel(), np.flatnonzero(~is_control)
    size = np.zeros(len(weight), np.int64)
    tiny = rng.permutation(treated)[: math.ceil(config.tiny_fraction * len(treated))]
    size[tiny] = rng.integers(1, TINY + 1, len(tiny))
    others = np.setdiff1d(treated, tiny)
    controls = max(round(config.control_fraction * config.cells), MIN_CONTROLS * int(is_control.sum()))
    rest = config.cells - int(size.sum())
    controls = min(controls, rest - (TINY + 1) * len(others)) if len(others) else rest
    size[is_control] = _share(controls, weight[is_control], MIN_CONTROLS)
    size[others] = _share(config.cells - int(size.sum()), weight[others], TINY + 1)
    return size


def _share(total: int, weight: NDArray[np.float64], least: int) -> NDArray[np.int64]:
    """Return integers of sum ``total``, each at least ``least``, the rest in proportion to ``weight``."""
    if len(weight) == 0:
        return np.zeros(0, np.int64)
    exact = (total - least * len(weight)) * weight / weight.sum()
    size = np.floor(exact).astype(np.int64)
    short = total - least * len(weight) - int(size.sum())
    size[np.argsort(size - exact, kind="stable")[:short]] += 1
    return size + least


def condition_table(truth: Truth, plan: Plan) -> pd.DataFrame:
    """Return the conditions by name: cell_type, batch, perturbation, agent, kind, dose, n_cells, n_sets."""
    plan_rows = plan.conditions
    facts = truth.perturbations.iloc[plan_rows["perturbation"]].reset_index(drop=True)
    table = facts[["perturbation", "agent", "kind", "dose"]].copy()
    table.insert(0, "cell_type", np.asarray(truth.cell_types)[plan_rows["cell_type"]])
    table.insert(1, "batch", np.asarray(truth.batches)[plan_rows["batch"]])
    table["n_cells"] = plan_rows["n_cells"].to_numpy()
    table["n_sets"] = np.bincount(plan.sets["condition"], minlength=len(table))
    return table
