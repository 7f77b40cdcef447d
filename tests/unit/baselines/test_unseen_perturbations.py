"""The baseline `kernel-ridge`: what it predicts for seen, combined and unseen perturbations."""

from dataclasses import replace

import numpy as np
import pytest
from written_cells import Cells

from perturbdiff.baselines import predict
from perturbdiff.baselines.training_changes import (
    fit_changes,
    kernel_ridge,
    nearest_context,
    training_changes,
)
from perturbdiff.embeddings.embedding_tables import EmbeddingTable
from perturbdiff.runtime.errors import UserError

GENES = [f"g{i}" for i in range(12)]


def screen(own=0.0, seen=8):
    """Changes that are linear in the vectors, in T different from B by ``own``; u, v and a combination are unseen."""
    rng = np.random.default_rng(1)
    names = [f"p{i}" for i in range(seen)] + ["u", "v"]
    vectors, effects, other = (
        rng.normal(size=(seen + 2, 2)),
        rng.normal(size=(2, 12)),
        rng.normal(size=(2, 12)),
    )
    rows = []
    for kind in "BT":
        base = 20 + rng.normal(size=12)
        rows.append((kind, "x", "control", "train", [base]))
        for name, vector in zip(names, vectors, strict=True):
            test = name in "uv" or (kind == "T" and name == "p0")
            change = vector @ (effects + own * (kind == "T") * other)
            rows.append((kind, "x", name, "test" if test else "train", [base + change]))
        rows.append((kind, "x", "p1+u", "test", [base]))
    return Cells(rows, GENES), EmbeddingTable(tuple(names[:-1]), vectors[:-1])


def shifts(cells, table):
    task = replace(cells.task(), vectors=table)
    learned, labels = kernel_ridge(task), cells.conditions
    return {
        (labels["cell_type"].iloc[c], labels["perturbation"].iloc[c]): learned(int(c), 1).shift
        for c in task.wanted
    }, task


def truth(cells, kind, name):
    table = cells.conditions
    start = {(r.cell_type, r.perturbation): r.start for r in table.itertuples()}
    return cells.values[start[kind, name]] - cells.values[start[kind, "control"]]


def test_an_unseen_perturbation_is_predicted_from_its_vector(caplog):
    cells, table = screen()
    found, _ = shifts(cells, table)
    np.testing.assert_allclose(found["B", "u"], truth(cells, "B", "u"), atol=0.1)
    combined = truth(cells, "B", "p1") + found["B", "u"]
    np.testing.assert_allclose(found["B", "p1+u"], combined, atol=1e-4)
    assert "1 of the predicted perturbations are unseen in training (v)" in caplog.text


def test_what_was_seen_elsewhere_or_has_no_vector_is_as_nearest_context():
    cells, table = screen()
    found, task = shifts(cells, table)
    nearest, labels = nearest_context(task), cells.conditions
    for c in task.wanted:
        place = (labels["cell_type"].iloc[c], labels["perturbation"].iloc[c])
        if place[1] in ("p0", "v"):
            np.testing.assert_allclose(found[place], nearest(int(c), 1).shift, atol=1e-12)


def test_a_cell_type_of_its_own_is_believed_as_far_as_it_predicts():
    cells, table = screen(own=2.0)
    task = replace(cells.task(), vectors=table)
    vectors = {name: table.vectors[i] for i, name in enumerate(table.names) if name != "u"}
    fitted = fit_changes(training_changes(task), vectors)
    assert all(share > 0.9 for _, share in fitted.own.values())
    u = table.vectors[table.row("u")]
    np.testing.assert_allclose(fitted("T", u), truth(cells, "T", "u"), atol=0.4)
    np.testing.assert_array_equal(fitted("unknown", u), fitted.overall(u[None])[0])


def test_doses_with_one_vector_count_as_one():
    cells, table = screen()
    changes = training_changes(cells.task())
    twice = {name: table.vectors[i // 2] for i, name in enumerate(table.names) if name != "u"}
    assert len(fit_changes(changes, twice).overall.vectors) == 4


def test_cells_that_are_held_out_are_never_asked_for():
    cells, table = screen()
    shifts(cells, table)
    held = cells.conditions[cells.conditions["part"] != "train"]
    assert not np.isin(np.concatenate(cells.asked), held["start"].to_numpy()).any()


def test_a_table_that_does_not_fit_is_refused(tmp_path):
    cells, table = screen()
    with pytest.raises(UserError, match="the table has 1 of the 8 training perturbations"):
        shifts(cells, EmbeddingTable(("p0", "zz"), table.vectors[:2]))
    missing = (tmp_path / "store", tmp_path / "split", tmp_path / "o.h5ad")
    with pytest.raises(UserError, match="baseline kernel-ridge: needs vectors"):
        predict("kernel-ridge", *missing)
    with pytest.raises(UserError, match="baseline linear: has no --embedding"):
        predict("linear", *missing, embedding=tmp_path / "t.npz")
