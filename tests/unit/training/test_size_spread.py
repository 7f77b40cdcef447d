"""How much perturbations change the spread of cells' sizes, measured on training cells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from perturbdiff.conditions.vocabulary import Vocabulary
from perturbdiff.training.size_spread import CellSizes, size_spread

GENES = 40


def screen(spreads, controls=(0.3, 0.3, 0.3), seed=0, *, times=False) -> tuple[Any, CellSizes, np.ndarray]:
    """Return a source, the sizes of its cells and their values.

    ``spreads`` are, by perturbation, the number of cells and the SD of log totals, or what it is ``times`` that of the
    controls; ``controls`` are their SDs in three cell types.
    """
    rng = np.random.default_rng(seed)
    blocks, rows, start = [], [], 0
    for cell_type, own in zip(("t1", "t2", "t3"), controls, strict=True):
        control = len(rows)
        for name, (number, spread) in {"control": (400, own), **spreads}.items():
            spread = spread * own if times and name != "control" else spread
            total = np.exp(8 + spread * rng.standard_normal(number))
            shares = rng.dirichlet(np.full(GENES, 5.0), number)
            blocks.append(np.log1p(total[:, None] * shares))
            rows.append({"cell_type": cell_type, "batch": "b", "perturbation": name,
                         "is_control": name == "control", "control": control,
                         "start": start, "stop": start + number, "n_cells": number})  # fmt: skip
            start += number
    table = pd.DataFrame(rows)
    values = np.concatenate(blocks)
    values[rng.random(values.shape) < rng.uniform(0.1, 0.3, (len(values), 1))] = 0.0
    sizes = CellSizes(table)
    for first in range(0, len(values), 1000):
        taken = np.arange(first, min(first + 1000, len(values)))
        sizes.add(taken, sparse.csr_matrix(values[taken]))
    source = SimpleNamespace(
        store=SimpleNamespace(conditions=table), train=np.ones(len(table), bool), exclude=None
    )
    return source, sizes, values


def expected(found, control):
    """Return the SD of log totals under each perturbation where that of the controls is given."""
    return found[:, 0, 0] * control ** found[:, 0, 1]


def words(*names):
    return Vocabulary(("control", *names), ("t1", "t2", "t3"), ("b",))


def test_sizes_are_those_of_the_cells():
    source, sizes, values = screen({"A": (50, 0.1)})
    spread, number = sizes.spreads([np.array([1, 2]), np.array([3])])
    table = source.store.conditions
    cells = np.concatenate([values[table.start[c] : table.stop[c]] for c in (1, 2)])
    assert number.tolist() == [len(cells), 50] == [450, 50]
    totals, detected = np.log1p(np.expm1(cells).sum(1)), (cells > 0).sum(1)
    wanted = [np.subtract(*np.quantile(each, [0.9, 0.1])) / 2.563 for each in (totals, detected)]
    assert spread[0].tolist() == pytest.approx(wanted, rel=1e-5)
    assert wanted == pytest.approx([totals.std(), detected.std()], rel=0.15)


def test_a_few_odd_cells_do_not_make_the_spread():
    source, sizes, values = screen({"A": (50, 0.1)})
    odd = CellSizes(source.store.conditions)
    table = source.store.conditions
    changed = values.copy()
    changed[table.start[1] : table.start[1] + 2] *= 0.1  # two of fifty cells
    odd.add(np.arange(len(values)), sparse.csr_matrix(changed))
    pools = [np.array([1])]
    assert odd.spreads(pools)[0][0, 0] == pytest.approx(sizes.spreads(pools)[0][0, 0], rel=0.2)


def test_a_perturbation_that_narrows_totals_is_seen_and_few_cells_say_little():
    source, sizes, _ = screen({"narrow": (400, 0.1), "same": (400, 0.3), "few": (12, 0.3)})
    vocabulary = words("narrow", "same", "few", "unseen")
    found = size_spread(sizes, source, vocabulary)
    totals = dict(zip(("all", *vocabulary.perturbation), expected(found, 0.3), strict=True))
    assert totals["narrow"] == pytest.approx(0.14, abs=0.03), "values that are left out widen it a little"
    assert totals["same"] == pytest.approx(0.3, abs=0.04)
    assert totals["narrow"] < totals["all"] == totals["unseen"] < totals["same"]
    assert totals["few"] < 0.28
    assert (found[vocabulary.encode("perturbation", ["control"])[0]] == 1).all()


def test_controls_that_tell_nothing_of_the_spread_are_not_followed():
    told, sizes, _ = screen({"A": (400, 0.1), "B": (400, 0.1)}, controls=(0.1, 0.4, 1.6))
    found = size_spread(sizes, told, words("A", "B"))
    assert found[2, 0, 1] < 0.3
    assert expected(found, 0.1)[2] == pytest.approx(expected(found, 1.6)[2], rel=1.0)
    told, sizes, _ = screen({"A": (400, 0.5), "B": (400, 1.0)}, controls=(0.1, 0.4, 1.6), times=True)
    found = size_spread(sizes, told, words("A", "B"))
    assert found[2, 0, 1] > 0.8


def test_held_out_cells_tell_nothing_and_where_nothing_is_known_nothing_changes():
    source, sizes, _ = screen({"narrow": (300, 0.1)})
    held = source.store.conditions["perturbation"] == "narrow"
    source.train = ~held.to_numpy(bool)
    assert (size_spread(sizes, source, words("narrow")) == 1).all()
