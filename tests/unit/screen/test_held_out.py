"""What is held out, so that it can be judged."""

import itertools

import pandas as pd

from perturbdiff.screen import hold_out


def conditions(cells):
    """Cells by (cell type, batch, perturbation)."""
    rows = [(*labels, n) for labels, n in cells.items() if n]
    table = pd.DataFrame(rows, columns=["cell_type", "batch", "perturbation", "n_cells"])
    return table.assign(is_control=table["perturbation"] == "control")


def grid(types=("all",), batches=("all",), perturbations=("p",), cells=100):
    every = itertools.product(types, batches, ("control", *perturbations))
    return dict.fromkeys(every, cells)


def test_a_cell_type_with_a_fifth_of_the_cells_is_held_out():
    cells = grid(types=("large", "fifth", "small"))
    cells |= {("large", "all", "p"): 780, ("fifth", "all", "p"): 200, ("small", "all", "p"): 20}
    held = hold_out(conditions(cells))
    assert held.settings["split.context_column"] == "cell_type"
    assert held.settings["split.held_out"] == ["fifth"]
    assert any("cannot be judged" in why for why in held.why)  # one perturbation


def test_a_context_without_controls_or_without_cells_elsewhere_is_not_held_out():
    cells = grid(types=("a", "b", "c"))
    cells[("a", "all", "control")] = 0
    cells[("b", "all", "p")] = 5
    assert hold_out(conditions(cells)).settings["split.held_out"] == ["c"]


def test_without_cell_types_a_batch_is_held_out_and_scored():
    held = hold_out(conditions(grid(batches=("r1", "r2", "r3"), perturbations=("p", "q"))))
    assert held.settings["split.context_column"] == "batch"
    assert held.settings["evaluate.context_column"] == "batch"


def test_perturbations_with_few_cells_train_instead():
    many = [f"p{k}" for k in range(12)]
    cells = grid(batches=("r1", "r2"), perturbations=many)
    cells[("all", "r1", "p3")] = cells[("all", "r2", "p3")] = 4
    held = hold_out(conditions(cells))
    assert set(many) - set(held.settings["split.perturbations"]) == {"p3"}
    assert held.settings["split.train_fraction"] > 0
    assert held.settings["split.valid_fraction"] == 0
    assert any("too few perturbations for validation" in why for why in held.why)
    assert any("fewer than 30 cells" in why for why in held.why)


def test_with_one_context_random_cells_are_held_out_and_the_limit_is_said():
    held = hold_out(conditions(grid(perturbations=("p", "q"))))
    assert held.settings["data.random_batches"] == 3
    assert held.settings["split.held_out"] == ["random_3"]
    assert any("cannot be judged" in why for why in held.why)


def test_a_recipe_may_choose_the_column():
    cells = grid(types=("a", "b"), batches=("r1", "r2"))
    assert hold_out(conditions(cells), columns=["batch"]).settings["split.context_column"] == "batch"


def test_with_many_perturbations_some_validate():
    held = hold_out(conditions(grid(batches=("r1", "r2"), perturbations=[f"p{k}" for k in range(60)])))
    assert held.settings["split.valid_fraction"] > 0
    assert not any("validation" in why for why in held.why)
