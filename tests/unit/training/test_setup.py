"""What a training may use of its stores."""

from __future__ import annotations

import numpy as np
import pytest

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config import recipes
from perturbdiff.runtime.errors import UserError
from perturbdiff.store.store import Store
from perturbdiff.training.distributed.processes import Processes
from perturbdiff.training.setup import from_scratch
from perturbdiff.training.training_stages import train

SHORT = ("split.held_out=[d2]", "split.valid_fraction=0.4", "train.max_steps=2", "train.warmup_steps=1")


def recipe(*changes):
    return recipes.load("tiny", [*SHORT, *changes])


@pytest.fixture
def few(trained):
    return from_scratch(
        trained / "store", trained / "split.parquet", recipe("train.cells_fraction=0.2", "model.unit=rms")
    )


def test_few_cells_are_all_that_training_sees(few):
    (source,) = few.sources
    allowed = set(source.rows().tolist())
    sampler = few.train_sampler(Processes())
    seen = {int(row) for k in range(40) for cells in sampler.step(k) for row in cells.target}
    perturbed = source.store.conditions[source.train & ~source.store.conditions["is_control"]]
    cells = perturbed.groupby("perturbation", observed=True)["n_cells"].sum()
    assert len(seen) == np.ceil(0.2 * cells - 1e-9).sum()
    assert seen < allowed
    controls = source.store.conditions[source.train & source.store.conditions["is_control"]]
    assert len(allowed) == len(seen) + controls["n_cells"].sum()


def test_units_of_few_cells_are_theirs(few):
    (source,) = few.sources
    values = source.store.expression(source.rows()).toarray()
    assert float(few.model.unit) == pytest.approx(np.sqrt((values**2).mean()), rel=1e-5)
    np.testing.assert_allclose(few.model.maximum.numpy(), values.max(0), rtol=1e-6)


def test_a_bundle_tells_how_few_cells_it_saw(trained, tmp_path, few):
    out = train(
        trained / "store", trained / "split.parquet", tmp_path / "few", recipe("train.cells_fraction=0.2"),
        device="cpu",
    )  # fmt: skip
    bundle = Bundle.load(out)
    seen = bundle.seen
    targets = seen[seen["role"] == "target"]
    assert (targets["n_cells"] > 0).all()
    perturbed = few.sources[0].store.conditions[few.sources[0].train].query("not is_control")
    cells = perturbed.groupby("perturbation", observed=True)["n_cells"].sum()
    assert targets.groupby("perturbation")["n_cells"].sum().to_dict() == np.ceil(0.2 * cells - 1e-9).to_dict()
    assert set(seen[seen["role"] == "input"]["n_cells"]) == {24}
    used, total = few.sources[0].rows(), bundle.training["training_cells"]
    assert total.startswith(f"{len(used)} of ")
    assert "train.cells_fraction 0.2" in (out / "README.md").read_text()


def mixture(trained, weights):
    from perturbdiff.training.setup import for_pretraining

    chosen = recipe(f"train.store_weights={weights}", "train.zero_control=true", "train.control_targets=true")
    return for_pretraining([trained / "store", trained / "store"], chosen, (), None)


@pytest.mark.parametrize(
    ("weights", "share"), [("cells", 0.5), ("equal", 0.5), ("[3, 1]", 0.75), ("[0.1, 0.3]", 0.25)]
)
def test_stores_are_drawn_from_by_their_weights(trained, weights, share):
    sampler = mixture(trained, weights).train_sampler(Processes())
    stores = [cells.store for k in range(256) for cells in sampler.step(k)]
    assert np.mean(np.array(stores) == 0) == share


@pytest.mark.parametrize("weights", ["[1]", "[1, 0]", "[]"])
def test_weights_that_do_not_fit_the_stores_are_refused(trained, weights):
    with pytest.raises(UserError, match="train.store_weights=.* for each of the 2 stores"):
        mixture(trained, weights).train_sampler(Processes())


@pytest.mark.parametrize(
    ("changes", "steps"),
    [((), 20), (("train.min_steps=7",), 20), (("train.min_steps=33",), 33), (("train.min_steps=90",), 40)],
)
def test_passes_steps_at_least_and_steps_at_most(trained, changes, steps):
    settings = recipe("train.max_steps=40", "train.max_epochs=2", *changes)
    material = from_scratch(trained / "store", trained / "split.parquet", settings)
    material.limit_steps(10)
    assert material.config.train.max_steps == steps


def test_the_learning_rate_falls_to_its_floor_by_the_last_step_that_the_passes_allow(trained, tmp_path):
    settings = recipe(
        "train.max_steps=1000", "train.max_epochs=1", "train.min_steps=12", "train.log_every=1",
        "train.warmup_steps=0", "train.final_rate=0.01", "train.learning_rate=0.002",
    )  # fmt: skip
    out = train(trained / "store", trained / "split.parquet", tmp_path / "bundle", settings, device="cpu")
    bundle = Bundle.load(out)
    rate = bundle.curve[bundle.curve["split"] == "train"].set_index("step")["learning_rate"]
    assert bundle.training["steps"] == len(rate) < 100
    middle = rate.loc[len(rate) // 2 + 1]
    assert 0.4 * rate.loc[1] < middle < 0.6 * rate.loc[1]
    assert rate.iloc[-1] == pytest.approx(0.01 * 0.002, rel=1)


def test_a_model_has_some_genes_of_its_store_and_those_that_are_scored(trained, tmp_path):
    inputs = (trained / "store", trained / "split.parquet", tmp_path / "some", recipe())
    genes = Store(trained / "store").genes
    (tmp_path / "genes.txt").write_text("\n".join(genes[3::-1]) + "\n")
    (tmp_path / "scored.txt").write_text("\n".join(genes[2:6]) + "\n")
    with pytest.raises(UserError, match=r"scored.txt: 2 of its genes are not among the model's 4"):
        train(*inputs, genes=tmp_path / "genes.txt", scored_on=tmp_path / "scored.txt", device="cpu")
    bundle = Bundle.load(train(*inputs, genes=tmp_path / "genes.txt", device="cpu"))
    assert bundle.genes == genes[3::-1]
    (tmp_path / "genes.txt").write_text("none\n")
    with pytest.raises(UserError, match=r"lacks 1 of the 1 genes of --genes: none"):
        train(*inputs[:2], tmp_path / "no", recipe(), genes=tmp_path / "genes.txt", device="cpu")
