"""The built-in baselines against numbers computed by hand, on stores small enough to be written down."""

import tracemalloc

import numpy as np
import pytest
from written_cells import Cells

from perturbdiff.baselines import NAMES, simple
from perturbdiff.baselines.baseline_stage import make_cells
from perturbdiff.baselines.simple import BASELINES
from perturbdiff.store.pseudobulk import ROWS_PER_READ


def learned(name, cells):
    """Return for each condition to predict its labels and its recipe."""
    task = cells.task()
    predict = BASELINES[name].learn(task)
    table = cells.conditions
    labels = [tuple(table.iloc[c][["cell_type", "batch", "perturbation"]]) for c in task.wanted]
    return {
        k: predict(int(c), int(table["n_cells"].iloc[c])) for k, c in zip(labels, task.wanted, strict=True)
    }


@pytest.fixture
def screen():
    """Two cell types, two batches; groups of unequal sizes, so that means of means would be wrong."""
    return Cells(
        [
            ("B", "x", "control", "train", [[0, 0, 0], [2, 0, 0]]),
            ("B", "x", "p", "train", [[4, 0, 0]]),
            ("B", "x", "q", "train", [[1, 3, 0], [1, 5, 0], [1, 7, 0]]),
            ("B", "y", "control", "train", [[1, 0, 2]]),
            ("B", "y", "p", "test", [[9, 9, 9], [9, 9, 9]]),
            ("B", "y", "r", "test", [[9, 9, 9]]),
            ("T", "x", "control", "train", [[0, 1, 0], [0, 1, 4]]),
            ("T", "x", "p", "train", [[0, 1, 8], [0, 3, 8]]),
            ("T", "y", "control", "train", [[0, 0, 6]]),
            ("T", "y", "q", "test", [[9, 9, 9]]),
            ("T", "y", "p", "valid", [[7, 7, 7]]),
        ]
    )


TOTAL = np.array([10, 21, 28]) / 12  # all 12 training cells, controls among them
MEANS = {
    "mean-perturbation": {"p": np.array([4, 4, 16]) / 3, "q": np.array([3, 15, 0]) / 3, "r": TOTAL},
    "mean-celltype": {"B": np.array([10, 15, 2]) / 7, "T": np.array([0, 6, 26]) / 5},
    "mean-batch": {"y": np.array([1, 0, 8]) / 2},
    "mean-overall": dict.fromkeys("BT", TOTAL),
}


@pytest.mark.parametrize(
    ("name", "place"),
    [("mean-perturbation", 2), ("mean-celltype", 0), ("mean-batch", 1), ("mean-overall", 0)],
)
def test_means_by_hand_with_controls_included(screen, name, place):
    found = learned(name, screen)
    assert len(found) == 3
    for labels, recipe in found.items():
        np.testing.assert_allclose(recipe.profile, MEANS[name][labels[place]], rtol=1e-12)
        assert recipe.rows is None


def test_nearest_context_by_hand(screen):
    """B/x: p +3, 0, 0 and q 0, +5, 0 against its controls 1, 0, 0; T/x: p 0, +1, +6 against 0, 1, 2."""
    found = learned("nearest-context", screen)
    np.testing.assert_allclose(found["B", "y", "p"].shift, [3, 0, 0])  # the same cell type
    np.testing.assert_allclose(
        found["T", "y", "q"].shift, [0, 5, 0]
    )  # another cell type, there is none of its own
    np.testing.assert_allclose(found["B", "y", "r"].shift, [1, 2, 2])  # unseen: the mean of the three changes


def test_contexts_count_once_whatever_their_number_of_cells():
    cells = Cells(
        [
            ("B", "x", "control", "train", [[0, 0, 0]]),
            ("B", "x", "p", "train", [[1, 0, 0]] * 9),
            ("B", "y", "control", "train", [[0, 0, 0]]),
            ("B", "y", "p", "train", [[3, 0, 0]]),
            ("B", "z", "control", "train", [[0, 0, 0]]),
            ("B", "z", "p", "test", [[9, 9, 9]]),
        ]
    )
    np.testing.assert_allclose(learned("nearest-context", cells)["B", "z", "p"].shift, [2, 0, 0])


def test_changes_are_against_matched_controls_where_a_context_has_none():
    cells = Cells(
        [
            ("B", "x", "control", "train", [[1, 0, 0]] * 3),
            ("B", "z", "control", "train", [[5, 0, 0]]),
            ("B", "y", "p", "train", [[4, 0, 0]]),  # no control of its own: those of B in x and z, mean 2
            ("B", "z", "p", "test", [[9, 9, 9]]),
        ]
    )
    np.testing.assert_allclose(learned("nearest-context", cells)["B", "z", "p"].shift, [2, 0, 0])


def test_a_change_is_added_to_matched_controls_and_clipped_at_zero(screen):
    recipe = learned("nearest-context", screen)["B", "y", "p"]
    np.testing.assert_array_equal(recipe.rows, [6, 6])  # the one control of B/y, twice
    recipe = type(recipe)(rows=recipe.rows, shift=np.array([3.0, -1.0, -5.0]))
    made = make_cells(screen, recipe, 0, 2).toarray()
    np.testing.assert_array_equal(made, [[4, 0, 0], [4, 0, 0]])


def test_control_copies_the_matched_controls(screen):
    found = learned("control", screen)
    assert found["B", "y", "p"].rows.tolist() == [6, 6]
    assert found["T", "y", "q"].rows.tolist() == [14]
    assert found["B", "y", "p"].shift is None


def test_resample_copies_training_cells_of_the_perturbation(screen):
    found = learned("resample", screen)
    assert set(found["B", "y", "p"].rows) <= {2, 12, 13}
    assert found["T", "y", "q"].rows[0] in {3, 4, 5}
    assert found["B", "y", "r"].rows.tolist() == [6]  # unseen: a matched control


def direct(cells, embed, ridge=simple.RIDGE):
    """W and b of the published closed form, with a column of Y for each training condition, nothing summed."""
    table = cells.conditions
    train = table["part"] == "train"
    keys = list(dict.fromkeys(zip(table["cell_type"][train], table["perturbation"][train], strict=True)))
    cell = table.loc[np.repeat(table.index, table["n_cells"]), ["cell_type", "perturbation", "part"]]

    def mean(cell_type, perturbation):
        use = (
            (cell["cell_type"] == cell_type)
            & (cell["perturbation"] == perturbation)
            & (cell["part"] == "train")
        )
        return cells.values[use.to_numpy()].mean(axis=0)

    profiles = np.stack([mean(*key) for key in keys], axis=1)  # genes × pseudobulks, controls among them
    left, values, _ = np.linalg.svd(profiles - profiles.mean(axis=0), full_matrices=False)
    keep = min(simple.NUM_COMPONENTS, len(keys) - 1, len(profiles) - 1)
    g = left[:, :keep] * values[:keep]
    perturbed = [k for k in keys if k[1] != "control"]
    y = np.stack([mean(*k) - mean(k[0], "control") for k in perturbed], axis=1)
    p = np.stack([embed(k[1], g) for k in perturbed], axis=1)
    b = y.mean(axis=1, keepdims=True)
    inverse = np.linalg.inv
    w = (
        inverse(g.T @ g + ridge * np.eye(g.shape[1]))
        @ g.T
        @ (y - b)
        @ p.T
        @ inverse(p @ p.T + ridge * np.eye(len(p)))
    )
    return g, w, b[:, 0]


def random_screen(perturbations, genes):
    """Random cells; the last perturbation is not in training."""
    rng = np.random.default_rng(3)
    rows = []
    for t in ("B", "T"):
        for batch in ("x", "y"):
            for k, p in enumerate(("control", *perturbations)):
                test = k > 0 and ((t, batch) == ("T", "y") or p == perturbations[-1])
                values = rng.gamma(1.0, 1.0, (3 + k, len(genes))).astype(np.float32)  # as a store has them
                rows.append((t, batch, p, "test" if test else "train", values))
    return Cells(rows, genes)


def test_linear_is_the_closed_form_of_drugs():
    cells = random_screen(("drug 1", "drug 2", "drug 3", "drug 4"), [f"g{i}" for i in range(8)])
    seen = ["drug 1", "drug 2", "drug 3"]
    g, w, b = direct(cells, lambda label, _: np.eye(3)[seen.index(label)])
    for (_, _, label), recipe in learned("linear", cells).items():
        expected = b + g @ w[:, seen.index(label)] if label in seen else b  # unseen: the mean change
        np.testing.assert_allclose(recipe.shift, expected, atol=1e-9)


def test_linear_is_the_closed_form_of_genes_and_reaches_unseen_ones():
    genes = [f"g{i}" for i in range(8)]
    cells = random_screen(("g1", "g4", "g6", "g7"), genes)
    g, w, b = direct(cells, lambda label, g: g[genes.index(label)])
    found = learned("linear", cells)
    for (_, _, label), recipe in found.items():
        np.testing.assert_allclose(recipe.shift, b + g @ w @ g[genes.index(label)], atol=1e-9)
    assert not np.allclose(
        found["B", "x", "g7"].shift, b
    )  # g7 was never perturbed in training, but is measured


def test_linear_finds_a_truth_of_low_rank():
    rng = np.random.default_rng(0)
    counts = np.array([3, 2, 4, 5])
    g, truth, shared = rng.normal(size=(40, 5)), rng.normal(size=(5, 3)), rng.normal(size=40)
    e = rng.normal(size=(4, 3))
    e -= counts @ e / counts.sum()  # else a part of the truth is in the mean change
    changes = counts[:, None] * (e @ truth.T @ g.T + shared)
    weights, mean = simple.solve(changes, counts, g, e, ridge=1e-9)
    np.testing.assert_allclose(weights, truth, atol=1e-6)
    np.testing.assert_allclose(mean, shared, atol=1e-9)


def test_an_unseen_combination_gets_the_sum_of_its_agents_changes():
    cells = Cells(
        [
            ("B", "x", "control", "train", [[1, 1, 1]]),
            ("B", "x", "p", "train", [[3, 1, 1]]),
            ("B", "x", "q+control", "train", [[1, 4, 1]]),
            ("B", "x", "p+q", "test", [[9, 9, 9]]),
            ("B", "x", "p+r", "test", [[9, 9, 9]]),
            ("T", "x", "control", "train", [[2, 2, 2]]),
            ("T", "x", "p", "train", [[2, 2, 7]]),
            ("T", "x", "p+q", "test", [[9, 9, 9]]),
        ]
    )
    found = learned("nearest-context", cells)
    np.testing.assert_allclose(found["B", "x", "p+q"].shift, [2, 3, 0])
    np.testing.assert_allclose(found["T", "x", "p+q"].shift, [0, 3, 5])  # q was seen in B only
    every = np.array([[2, 0, 0], [0, 3, 0], [0, 0, 5]]).mean(axis=0)
    np.testing.assert_allclose(found["B", "x", "p+r"].shift, every)  # r was never seen


def test_ridge_shrinks_one_hot_effects_by_what_the_formula_says():
    """G = I, P one-hot, n conditions each: W = (change - b) · n / (n + λ) / (1 + λ)."""
    changes, counts = np.array([[6.0, 0.0], [0.0, 3.0]]), np.array([3, 3])
    weights, mean = simple.solve(changes, counts, np.eye(2), np.eye(2), ridge=0.5)
    np.testing.assert_allclose(mean, [1.0, 0.5])
    np.testing.assert_allclose(weights.T, np.array([[1.0, -0.5], [-1.0, 0.5]]) * 3 / 3.5 / 1.5)


@pytest.mark.parametrize("name", NAMES)
def test_cells_of_held_out_conditions_are_never_asked_for(screen, name):
    """Neither of the test nor of the validation part, while learning and while predicting."""
    held = screen.conditions[screen.conditions["part"] != "train"]
    hidden = np.concatenate([np.arange(a, b) for a, b in zip(held["start"], held["stop"], strict=True)])
    for recipe in learned(name, screen).values():
        size = 1 if recipe.rows is None else len(recipe.rows)
        assert make_cells(screen, recipe, 0, size).shape == (size, 3)
    asked = np.concatenate([np.empty(0, np.int64), *screen.asked])
    assert not np.isin(asked, hidden).any()


class Endless(Cells):
    """Conditions of any number of cells, whose values are made when they are asked for."""

    @staticmethod
    def size(values):
        return values

    def dense(self, rows):
        rows = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else np.asarray(rows)
        self.asked.append(np.array([len(rows)]))
        return (rows[:, None] % 7 == np.arange(self.n_genes)).astype(np.float32)


def peak_of_learning(name, size):
    """Return the peak memory of learning (bytes) and the most rows of one read, with ``size`` cells a condition."""
    rows = [
        (t, b, p, "test" if (t, b, p) == ("T", "y", "p") else "train", size)
        for t in ("B", "T")
        for b in ("x", "y")
        for p in ("control", "p", "q")
    ]
    cells = Endless(rows, [f"g{i}" for i in range(20)])
    task = cells.task()
    tracemalloc.start()
    BASELINES[name].learn(task)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, max((int(a[0]) for a in cells.asked), default=0)


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_learning_does_not_grow_with_cells(name):
    peak_of_learning(name, 10)  # what is imported and cached at first use
    few, many = (peak_of_learning(name, size) for size in (5_000, 50_000))
    assert max(few[1], many[1]) <= ROWS_PER_READ
    assert many[0] < 1.2 * few[0] + 100_000
