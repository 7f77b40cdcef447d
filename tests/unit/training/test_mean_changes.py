"""Expected changes: measured in training cells, predicted for what is only in validation or new."""

import numpy as np
import pytest
from written_cells import Cells

from perturbdiff.checkpoint.change_regression import extend
from perturbdiff.checkpoint.pretrained_embeddings import Semantics, check_tables
from perturbdiff.conditions.vocabulary import Vocabulary
from perturbdiff.config.settings import ModelConfig
from perturbdiff.embeddings.kernel_ridge import fit
from perturbdiff.model import Denoiser
from perturbdiff.runtime.errors import UserError
from perturbdiff.training.known_changes import expect_changes
from perturbdiff.training.setup import Source

SEEN = ("p0", "p1", "p2", "p3", "p4")
VECTORS = {name: np.random.default_rng(i).normal(size=3) for i, name in enumerate((*SEEN, "v", "new"))}


def screen():
    rng = np.random.default_rng(0)
    rows = []
    for kind in "BT":
        rows.append((kind, "x", "control", "train", rng.random((4, 3))))
        rows += [(kind, "x", name, "train", 3 + rng.random((2, 3))) for name in SEEN]
        rows.append((kind, "x", "v", "valid", 3 + rng.random((2, 3))))
    return Cells(rows)


def change(cells, kind, name, keep=slice(None)):
    starts = {(r.cell_type, r.perturbation): (r.start, r.stop) for r in cells.conditions.itertuples()}
    (a, b), (c, d) = starts[kind, name], starts[kind, "control"]
    return cells.values[a:b][keep].mean(0) - cells.values[c:d].mean(0)


def filled(cells, exclude=None, seen=SEEN, anchor="predicted", types=2):
    words = Vocabulary.from_conditions([cells.conditions], control="control", datasets=["d"])
    config = ModelConfig(width=16, depth=1, heads=4, covariate_width=8, anchor=anchor)
    model = Denoiser(
        config,
        num_genes=3,
        num_perturbations=words.size("perturbation"),
        num_cell_types=types + 1,
        num_batches=2,
    )
    train = cells.conditions["perturbation"].isin([*seen, "control"]).to_numpy()
    vectors = np.array([VECTORS.get(name, np.zeros(3)) for name in words.perturbation])
    source = Source(cells, "d", train, np.zeros_like(train), exclude)
    # the model's genes stand in another order
    expect_changes(model, source, ["c", "a", "b"], words, Semantics({"perturbation": vectors}))
    ids = {name: int(words.encode("perturbation", [name])[0]) for name in words.perturbation}
    return model.expected, ids, vectors


def test_changes_are_measured_or_predicted_and_left_out_in_training():
    cells = screen()
    expected, ids, _ = filled(cells)
    means = np.array([(change(cells, "B", n) + change(cells, "T", n)) / 2 for n in SEEN])[:, [2, 0, 1]]
    regression = fit(np.array([VECTORS[n] for n in SEEN]), means)
    rows = [ids[n] for n in SEEN]
    np.testing.assert_allclose(expected.changes[rows], means, atol=1e-5)
    np.testing.assert_allclose(expected.left_out[rows], regression.left_out, atol=1e-5)
    for buffer in (expected.changes, expected.left_out):
        np.testing.assert_allclose(buffer[ids["v"]], regression(VECTORS["v"][None])[0], atol=1e-5)
        assert not buffer[[0, ids["control"]]].any()
    assert expected.explained == pytest.approx(regression.explained)
    assert expected.measured.nonzero().flatten().tolist() == sorted(rows)
    assert not np.isin(
        np.concatenate(cells.asked), [r.start for r in cells.conditions.itertuples() if r.part != "train"]
    ).any()


def test_a_new_perturbation_is_predicted_from_what_the_bundle_holds():
    expected, ids, vectors = filled(screen())
    known = np.concatenate([np.zeros((1, 3)), vectors])
    v = expected.changes[ids["v"]].clone()
    extend(expected, known, np.array([VECTORS["v"], VECTORS["new"]]))
    np.testing.assert_allclose(expected.changes[-2], v, atol=1e-4)
    assert not np.allclose(expected.changes[-1], v, atol=1e-4)
    assert len(expected.changes) == len(expected.measured) == len(expected.left_out) == len(vectors) + 3
    assert expected.measured[-2:].tolist() == [0, 0]


def test_cells_that_training_must_not_use_do_not_count():
    cells = screen()
    exclude = np.zeros(len(cells.values), bool)
    starts = {(r.cell_type, r.perturbation): r.start for r in cells.conditions.itertuples()}
    exclude[[starts["B", "p0"], starts["T", "p0"], starts["T", "p0"] + 1]] = True
    expected, ids, _ = filled(cells, exclude)
    one = change(cells, "B", "p0", slice(1, None))[[2, 0, 1]]
    np.testing.assert_allclose(expected.changes[ids["p0"]], one, atol=1e-5)


def test_the_changes_of_contexts_are_measured():
    cells = screen()
    expected, ids, _ = filled(cells, anchor="transferred")
    order = [2, 0, 1]
    for name in SEEN:
        for context, kind in ((1, "B"), (2, "T")):
            row = int(expected.rows[ids[name], context])
            np.testing.assert_allclose(expected.changes[row], change(cells, kind, name)[order], atol=1e-5)
    starts = cells.conditions.query("perturbation == 'control'").set_index("cell_type")["start"]
    for context, kind in ((1, "B"), (2, "T")):
        mean = cells.values[starts[kind] : starts[kind] + 4].mean(0)
        np.testing.assert_allclose(expected.levels[context], mean[order], atol=1e-5)
    for unseen in (ids["v"], ids["control"], 0):
        assert not expected.rows[unseen].any()


def four_types(answers):
    """Return cells of four types, two and two alike, and how strongly each of them answers."""
    rows, rng = [], np.random.default_rng(0)
    for kind, level, answer in zip("ABCD", (1.0, 1.1, 4.0, 4.1), answers, strict=True):
        profile = np.array([level, 1.0, 5 - level])
        rows.append((kind, "x", "control", "train", profile + 0.01 * rng.random((4, 3))))
        rows.append((kind, "x", "p0", "train", profile + answer + 0.01 * rng.random((4, 3))))
    return Cells(rows)


def test_near_contexts_count_more_where_that_foretells_the_training_conditions():
    alike, _, _ = filled(four_types((1.0, 1.0, 3.0, 3.0)), anchor="transferred", types=4)
    nearness = alike.nearness.numpy()
    assert nearness[1, 2] > nearness[1, 3] + 5  # A is told by B, and hardly by C
    assert nearness[4, 3] > nearness[4, 1] + 5
    assert not nearness[0].any()
    mixed, _, _ = filled(four_types((1.0, 3.0, 1.0, 3.0)), anchor="transferred", types=4)
    assert not mixed.nearness.any()  # the plain mean


def test_a_perturbation_in_one_context_only_moves_nothing():
    cells = screen()
    one = cells.conditions.query("not (cell_type == 'B' and perturbation == 'p0')")
    cells.conditions = one.reset_index(drop=True)
    expected, ids, _ = filled(cells, anchor="transferred")
    assert not expected.rows[ids["p0"]].any()
    assert expected.rows[ids["p1"]].any()
    cells.conditions = one.query("cell_type == 'B'").reset_index(drop=True)
    expected, _, _ = filled(cells, anchor="transferred")
    assert not expected.rows.any()


def test_too_few_perturbations_and_no_table_are_refused():
    with pytest.raises(UserError, match="2 training perturbations, and 3 are the least"):
        filled(screen(), seen=SEEN[:2])
    with pytest.raises(UserError, match="give vectors of the perturbations with --embedding"):
        check_tables(ModelConfig(anchor="predicted"), {})
