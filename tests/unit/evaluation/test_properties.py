"""What must not matter: the other metrics asked for, the order of anything, the other perturbations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbdiff.evaluation import DEFINITIONS, METRICS, Comparison, Differential, compare, score, tabulate
from perturbdiff.evaluation.metrics.catalogue import chosen

TABLE = [name for name in chosen() if METRICS[name].compute is not None]
COUPLED = ["WMSE", "R2_weighted", "PDCorr_perturbed", "centroid_accuracy"]
GENES = [f"g{i:02d}" for i in range(24)]
both = pytest.mark.parametrize("definition", DEFINITIONS)


def study(
    seed: int, sizes: tuple[int, ...] = (30, 9, 14, 1, 12, 8)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return real and predicted cells with their labels; a perturbation is named after a gene, values repeat."""
    rng = np.random.default_rng(seed)
    names = ["control", "p1", "g03", "p2", "p0", "p3"][: len(sizes)]
    labels = np.repeat(names, sizes)
    rates = rng.lognormal(-0.5, 1.0, len(GENES))
    effects = {n: rng.lognormal(0, 1.2, len(GENES)) if n != "control" else 1.0 for n in names}
    sides = []
    for _ in range(2):
        expected = np.stack([rates * effects[n] for n in labels]) * rng.lognormal(0, 0.3, len(GENES))
        sides.append(np.log1p(rng.poisson(expected)).round(2).astype(np.float32))
    return sides[0], sides[1], labels


def compared(real, predicted, labels, definition, genes=GENES) -> Comparison:
    return compare(
        real,
        predicted,
        labels,
        labels,
        control="control",
        genes=genes,
        definition=definition,
        min_de=3,
        alpha=0.2,
    )


@both
def test_each_metric_alone_equals_its_value_in_the_full_run(definition):
    found = compared(*study(0), definition)
    together = score(found)
    assert list(together) == TABLE
    for name in TABLE:
        fresh = dataclasses.replace(found)  # nothing that another metric has left behind
        np.testing.assert_array_equal(score(fresh, [name])[name], together[name], err_msg=name)


@both
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_order_of_cells_makes_no_difference(definition, seed):
    real, predicted, labels = study(seed)
    expected = tabulate(compared(real, predicted, labels, definition))
    rng = np.random.default_rng(seed)
    one, two = rng.permutation(len(labels)), rng.permutation(len(labels))
    found = compare(
        real[one],
        predicted[two],
        labels[one],
        labels[two],
        control="control",
        genes=GENES,
        definition=definition,
        min_de=3,
        alpha=0.2,
    )
    assert tabulate(found).equals(expected)


@both
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_order_of_genes_makes_no_difference(definition, seed):
    real, predicted, labels = study(seed)
    expected = tabulate(compared(real, predicted, labels, definition))
    order = np.random.default_rng(seed).permutation(len(GENES))
    genes = [GENES[i] for i in order]
    found = tabulate(compared(real[:, order], predicted[:, order], labels, definition, genes))
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@both
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_order_of_perturbations_makes_no_difference(definition, seed):
    found = compared(*study(seed), definition)
    order = np.random.default_rng(seed).permutation(len(found.perturbations))
    turned = dataclasses.replace(
        found,
        perturbations=tuple(found.perturbations[i] for i in order),
        real=reordered(found.real, order),
        predicted=reordered(found.predicted, order),
        spread=found.spread.paired(order, order),
    )
    expected = tabulate(found)
    np.testing.assert_allclose(tabulate(turned).loc[expected.index], expected, rtol=1e-12)


def reordered(table: Differential, order: np.ndarray) -> Differential:
    fields = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
    return Differential(**{n: v if n == "control" else v[order] for n, v in fields.items()})


@both
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_another_perturbation_changes_only_what_the_definition_couples(definition, seed):
    real, predicted, labels = study(seed)
    without = labels != "p1"
    expected = tabulate(compared(real[without], predicted[without], labels[without], definition))
    found = tabulate(compared(real, predicted, labels, definition)).drop(index="p1")
    free = [name for name in TABLE if not METRICS[name].is_coupled(DEFINITIONS[definition])]
    assert found[free].equals(expected[free])


def test_what_is_coupled_is_known():
    always = [n for n in TABLE if METRICS[n].is_coupled(DEFINITIONS["cell-eval-0.8.2"])]
    assert always == ["PDS_L1", "PDS_L2", "PDS_cos", "ES", *COUPLED]
    free = [n for n in TABLE if not METRICS[n].is_coupled(DEFINITIONS["cell-eval-0.6.6"])]
    assert free == ["R2", "PDCorr", "MSE", "MAE", "MSE_delta", "MAE_delta", "MSE_unbiased"]
    seen = set()
    for seed in range(5):  # and they do change: the list is no longer than it must be
        real, predicted, labels = study(seed)
        without = labels != "p1"
        expected = tabulate(compared(real[without], predicted[without], labels[without], "cell-eval-0.6.6"))
        found = tabulate(compared(real, predicted, labels, "cell-eval-0.6.6")).drop(index="p1")
        seen |= {name for name in TABLE if not found[name].equals(expected[name])}
    assert {"PDS_L1", "PDS_L2", "PDS_cos", "ES", "DEOver", "n_DE_real", "AUROC", *COUPLED} <= seen
