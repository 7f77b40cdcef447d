"""The bundle: what it holds, what it refuses, what validation chose."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pandas as pd
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as to_bytes

from perturbdiff.checkpoint.bundle import Bundle, build_model, write_weights
from perturbdiff.config import recipes
from perturbdiff.model.expected_changes import TransferredChanges
from perturbdiff.runtime import files
from perturbdiff.runtime.errors import UserError
from perturbdiff.splits.splits import read_split
from perturbdiff.store.store import Store
from perturbdiff.training.training_stages import train

LABELS = ["cell_type", "batch", "perturbation"]


def test_holds_what_sampling_needs(trained):
    bundle, store = Bundle.load(trained / "bundle"), Store(trained / "store")
    assert bundle.genes == store.genes
    assert bundle.target_sum == store.target_sum
    assert float(bundle.model.unit) == store.scale
    assert not bundle.model.training
    assert set(bundle.curve["split"]) == {"train", "valid"}
    assert bundle.curve[bundle.curve["split"] == "train"]["step"].tolist() == [5, 10, 15, 20]
    names = {path.name for path in (trained / "bundle").iterdir()}
    assert not any(name.endswith((".ckpt", ".pkl", ".pt")) for name in names)
    assert "not for decisions about patients" in (trained / "bundle" / "README.md").read_text()


def test_a_changed_card_trains_nothing_anew(trained, tmp_path, caplog):
    caplog.set_level("INFO", "perturbdiff")
    shutil.copytree(trained / "bundle", out := tmp_path / "bundle")
    (out / "README.md").write_text("---\nlicense: mit\n---\nOurs.\n")
    recipe = recipes.load("tiny", ["split.held_out=[d2]", "split.valid_fraction=0.4"])
    train(trained / "store", trained / "split.parquet", out, recipe, device="cpu")
    assert "is up to date, nothing to do" in caplog.text
    assert (out / "README.md").read_text().endswith("Ours.\n")


def test_a_bundle_of_an_earlier_version_has_no_levels_of_zeros_and_keeps_spreads(trained, tmp_path):
    shutil.copytree(trained / "bundle", old := tmp_path / "old")
    weights = load_file(old / "model.safetensors")
    del weights["zero_level"], weights["size_spread"]
    save_file(weights, old / "model.safetensors")
    (old / "manifest.json").unlink()  # it would tell that the file was changed
    model = Bundle.load(old).model
    assert not model.zero_level.any()
    assert (model.size_spread == 1).all()


def test_units_look_at_training_cells_only(trained):
    bundle, store = Bundle.load(trained / "bundle"), Store(trained / "store")
    split = read_split(trained / "split.parquet")
    part = store.conditions[LABELS].merge(split, on=LABELS)["part"]
    rows = [
        range(a, b)
        for a, b, p in zip(store.conditions["start"], store.conditions["stop"], part, strict=True)
        if p == "train"
    ]
    cells = store.expression([i for r in rows for i in r])
    assert bundle.model.maximum.tolist() == pytest.approx(cells.max(axis=0).toarray().ravel().tolist())


def test_seen_are_the_training_conditions(trained):
    seen, split = Bundle.load(trained / "bundle").seen, read_split(trained / "split.parquet")
    merged = seen.merge(split, on=LABELS, how="left", suffixes=("", "_split"))
    assert (merged["part"] == "train").all()
    assert len(seen) == (split["part"] == "train").sum()
    assert set(seen.loc[seen["is_control"], "role"]) == {"input"}
    assert set(seen.loc[~seen["is_control"], "role"]) == {"target"}


def test_labels_without_training_cells_are_unknown(trained, tmp_path):
    split = read_split(trained / "split.parquet")
    split.loc[split["perturbation"] == "p3", "part"] = "test"
    split.to_parquet(tmp_path / "split.parquet")
    recipe = recipes.load("tiny", ["train.max_steps=1", "train.warmup_steps=0"])
    out = train(trained / "store", tmp_path / "split.parquet", tmp_path / "b", recipe, device="cpu")
    assert "p3" not in Bundle.load(out).vocabulary.perturbation


def test_the_best_step_is_chosen(trained, tmp_path):
    # a rate that wrecks the model after the first validations
    recipe = recipes.load(
        "tiny",
        ["train.max_steps=9", "train.valid_every=3", "train.learning_rate=0.3", "train.ema_decay=0",
         "train.warmup_steps=10", "train.valid_metric=loss"],
    )  # fmt: skip
    split = read_split(trained / "split.parquet")
    split.loc[(split["perturbation"] == "p2") & (split["batch"] == "d2"), "part"] = "valid"
    split.to_parquet(tmp_path / "split.parquet")
    bundle = Bundle.load(
        train(trained / "store", tmp_path / "split.parquet", tmp_path / "b", recipe, device="cpu")
    )
    valid = bundle.curve[bundle.curve["split"] == "valid"].set_index("step")["total"]
    assert bundle.training["chosen_step"] == valid.idxmin() != 9
    assert bundle.training["validation_loss"] == pytest.approx(valid.min(), rel=1e-4)


def test_without_validation_the_last_step_is_used(trained, tmp_path, caplog):
    caplog.set_level("INFO", "perturbdiff")
    split = read_split(trained / "split.parquet")
    split.assign(part=split["part"].replace("valid", "unused")).to_parquet(tmp_path / "split.parquet")
    recipe = recipes.load("tiny", ["train.max_steps=2"])
    out = train(trained / "store", tmp_path / "split.parquet", tmp_path / "b", recipe, device="cpu")
    assert Bundle.load(out).training == {"steps": 2, "chosen_step": 2, "effect_slope": None}
    assert caplog.text.count("no condition is for validation") == 1


def test_save_and_load_give_the_same(trained, tmp_path):
    bundle = Bundle.load(trained / "bundle")
    bundle.save(tmp_path)
    for name in (
        "model.safetensors",
        "config.json",
        "genes.json",
        "vocabulary.json",
        "training.csv",
        "README.md",
    ):
        assert (tmp_path / name).read_bytes() == (trained / "bundle" / name).read_bytes(), name
    again = Bundle.load(tmp_path)
    weights = zip(bundle.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    pd.testing.assert_frame_equal(again.seen, bundle.seen)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", lambda r: {**r, "format": 99}, "newer"),
        ("config.json", lambda r: {k: v for k, v in r.items() if k != "config"}, "cannot be read"),
        ("genes.json", lambda r: r[:-1], "do not fit together"),
    ],
)
def test_refuses_what_does_not_fit(trained, tmp_path, file, change, message):
    folder = tmp_path / "bundle"
    shutil.copytree(trained / "bundle", folder)
    (folder / file).write_text(json.dumps(change(json.loads((folder / file).read_text()))))
    (folder / "manifest.json").unlink()  # it would tell that the file was changed
    with pytest.raises(UserError, match=message):
        Bundle.load(folder)


def test_a_bundle_holds_the_changes_of_other_contexts(trained, tmp_path):
    old = Bundle.load(trained / "bundle")
    config = old.config.model_copy(
        update={"model": old.config.model.model_copy(update={"anchor": "transferred"})}
    )
    model = build_model(config, old.genes, old.vocabulary)
    assert isinstance(model.expected, TransferredChanges)
    model.expected.changes = torch.rand(3, len(old.genes))
    model.expected.rows[1, 1:3] = torch.tensor([1.0, 2.0])
    dataclasses.replace(old, model=model, config=config).save(tmp_path)
    kept = Bundle.load(tmp_path).model.expected
    assert torch.equal(kept.changes, model.expected.changes)
    assert torch.equal(kept.rows, model.expected.rows)
    weights = load_file(tmp_path / "model.safetensors")
    weights["expected.rows"][1, 1] = 3
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "manifest.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match="names changes that are not there"):
        Bundle.load(tmp_path)


def test_an_architecture_that_does_not_fit_is_refused(trained, tmp_path):
    recipe = recipes.load("tiny", ["model.heads=5"])
    with pytest.raises(UserError, match="section 'model'.*not a multiple of 5 heads"):
        train(trained / "store", trained / "split.parquet", tmp_path / "b", recipe, device="cpu")
    assert not (tmp_path / "b").exists()


def test_weights_are_readable_by_others_and_a_full_disk_is_said(trained, tmp_path, monkeypatch):
    model = Bundle.load(trained / "bundle").model
    write_weights(model, tmp_path / "a.safetensors")
    (tmp_path / "other").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert (tmp_path / "a.safetensors").read_bytes() == to_bytes(model.state_dict())

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("perturbdiff.checkpoint.bundle.save_file", full)
    with pytest.raises(UserError, match="disk full while writing"):
        with files.writing(tmp_path / "b.safetensors") as partial:
            write_weights(model, partial)
