"""The library: from matrices to metrics without files, and what importing it costs."""

from __future__ import annotations

import doctest
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as sp

import perturbdiff.evaluation as library
from perturbdiff.evaluation import DEFINITIONS, compare, tabulate

LABELS = np.repeat(["b", "control", "a", "c"], [9, 40, 12, 10])


def cells(seed, labels=LABELS, genes=15):
    rng = np.random.default_rng(seed)
    effect = {name: rng.lognormal(0, 0.8, genes) for name in sorted(set(labels))}
    rates = np.stack([effect[name] for name in labels])
    return np.log1p(rng.poisson(rates) / rng.lognormal(0, 0.2, (len(labels), 1))).astype(np.float32)


def test_the_example_of_the_package_is_true():
    results = doctest.testmod(library)
    assert results.attempted > 5
    assert not results.failed


def test_everything_promised_is_there():
    for name in library.__all__:
        assert getattr(library, name) is not None
        assert name in dir(library)
    with pytest.raises(AttributeError, match="nonsense"):
        library.nonsense  # noqa: B018


def test_importing_the_library_imports_nothing_heavy():
    code = "import sys, perturbdiff.evaluation; print([m for m in ('numpy', 'numba', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("convert", [sp.csr_matrix, sp.csc_matrix, sp.coo_array, np.asarray])
def test_layouts_and_threads_make_no_difference(convert):
    real, predicted = cells(1), cells(2)
    expected = tabulate(compare(real, predicted, LABELS, LABELS, control="control"))
    found = compare(convert(real), convert(predicted), list(LABELS), LABELS, control="control", threads=3)
    assert found.perturbations == ("a", "b", "c")
    assert tabulate(found).equals(expected)


def test_real_controls_stand_on_both_sides_unless_asked_otherwise():
    real, predicted = cells(1), cells(2)
    shifted = predicted.copy()
    shifted[LABELS == "control"] += 1.0
    plain = compare(real, predicted, LABELS, LABELS, control="control")
    assert tabulate(compare(real, shifted, LABELS, LABELS, control="control")).equals(tabulate(plain))
    without = LABELS != "control"
    alone = compare(real, predicted[without], LABELS, LABELS[without], control="control")
    assert tabulate(alone).equals(tabulate(plain))
    own = compare(real, shifted, LABELS, LABELS, control="control", own_controls=True)
    assert tabulate(own, ["MSE_delta"]).to_numpy().max() > tabulate(plain, ["MSE_delta"]).to_numpy().max()
    assert own.predicted.control.mean() > plain.predicted.control.mean()


def test_the_definition_is_followed():
    real, predicted = cells(1), cells(2)
    for name in DEFINITIONS:
        found = compare(
            real, predicted, LABELS, LABELS, control="control", definition=name, min_de=2, alpha=0.2
        )
        assert found.definition is DEFINITIONS[name]
        assert found.min_de == 2
        np.testing.assert_array_equal(found.real.significant, found.real.q < np.float32(0.2))
    assert list(tabulate(found, ["MSE", "energy_distance"]).columns) == ["MSE"]


def test_what_cannot_be_compared_is_refused():
    real, predicted = cells(1), cells(2)

    def refused(message, *, x=real, y=predicted, labels=LABELS, **options):
        with pytest.raises(ValueError, match=message):
            compare(x, y, LABELS, labels, **{"control": "control", **options})

    refused("labels for 71 predicted", labels=LABELS[1:])
    refused("genes", y=predicted[:, 1:])
    refused("no real cell is labelled 'none'", control="none")
    refused("'a' is on one side only", labels=np.where(LABELS == "a", "b", LABELS))
    refused("no predicted cell", labels=np.where(LABELS == "control", "a", LABELS), own_controls=True)
    refused("NaN", y=np.full_like(predicted, np.nan))
    refused("negative", y=-predicted)
