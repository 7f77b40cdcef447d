"""Which weights a training keeps and chooses, and that interruptions do not change them."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from perturbdiff import sampling
from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.config import recipes
from perturbdiff.runtime.errors import UserError
from perturbdiff.training.callbacks.checkpointing import hand_over, kept_steps
from perturbdiff.training.run_folder import CheckpointFolder
from perturbdiff.training.training_stages import train

CHANGES = (
    "split.held_out=[d2]", "split.valid_fraction=0.4", "train.max_steps=8", "train.valid_every=4",
    "train.checkpoint_every=3", "train.ema_every=1", "train.ema_decay=0.5",
)  # fmt: skip


def run(trained, out, *changes, **options):
    recipe = recipes.load("tiny", [*CHANGES, *changes])
    return train(trained / "store", trained / "split.parquet", out, recipe, device="cpu", **options)


def contents(folder):
    """Every file of a bundle but the record of the run and the loggers' files, which hold times."""
    found = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {n: data for n, data in found.items() if n.name != "run.json" and n.parts[0] != "logs"}


@pytest.fixture(scope="module")
def kept(trained, tmp_path_factory):
    """A bundle with the weights of the first epoch and a bundle for every second step."""
    out = tmp_path_factory.mktemp("kept") / "bundle"
    return run(trained, out, "train.choose=first-epoch", "train.keep_every=2")


def test_every_kept_step_is_a_bundle(kept, trained, tmp_path):
    folders = sorted((kept / "steps").iterdir())
    assert [f.name for f in folders] == ["0000002", "0000004", "0000006", "0000008"]
    assert len({(f / "model.safetensors").read_bytes() for f in folders}) == 4
    for step, folder in zip((2, 4, 6, 8), folders, strict=True):
        bundle = Bundle.load(folder)
        assert bundle.training["chosen_step"] == step
        assert (bundle.curve["step"] <= step).all()
        assert len(bundle.seen) == len(Bundle.load(kept).seen)
    found = sampling.sample(
        folders[1], trained / "store", tmp_path / "p.h5ad", split=trained / "split.parquet", device="cpu"
    )
    assert found.is_file()


def test_the_end_of_the_first_epoch_is_chosen(kept, trained, tmp_path):
    bundle = Bundle.load(kept)
    seen = bundle.seen[bundle.seen["role"] == "target"]
    epoch = -(-int((-(-seen["n_cells"] // 16)).sum()) // 4)  # sets of 16 cells, 4 sets in a step
    told = bundle.training
    assert (told["steps"], told["chosen_step"]) == (8, epoch)
    assert epoch < 8
    own = load_file(kept / "model.safetensors")
    out = run(trained, tmp_path / "b", f"train.keep_every={epoch}", "train.choose=last")
    for place, equal in ((out / "steps" / f"{epoch:07d}", True), (out, False)):
        other = load_file(place / "model.safetensors")
        assert all(bool((own[name] == other[name]).all()) for name in own) == equal
    assert Bundle.load(out).training["chosen_step"] == 8


def test_interruptions_keep_the_same_bytes(kept, trained, tmp_path, monkeypatch):
    save, died = CheckpointFolder.save, set()

    def crash(self, state):
        if state["global_step"] in (3, 6) and state["global_step"] not in died:
            died.add(state["global_step"])
            if (
                state["global_step"] == 6
            ):  # the checkpoint of step 3 is the last: steps 4 and 6 are kept twice
                raise RuntimeError("power cut")
            save(self, state)
            raise RuntimeError("power cut")
        save(self, state)

    monkeypatch.setattr(CheckpointFolder, "save", crash)
    changes = ("train.choose=first-epoch", "train.keep_every=2")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="power cut"):
            run(trained, tmp_path / "bundle", *changes)
    assert len(list((tmp_path / "bundle.checkpoints" / "steps").iterdir())) == 3
    out = run(trained, tmp_path / "bundle", *changes)
    assert contents(out) == contents(kept)
    assert not (tmp_path / "bundle.checkpoints").exists()


def test_an_epoch_longer_than_the_training_gives_the_last_step(trained, tmp_path, caplog):
    caplog.set_level("INFO", "perturbdiff")
    out = run(trained, tmp_path / "b", "train.choose=first-epoch", "train.max_steps=1", "train.keep_every=1")
    assert Bundle.load(out).training["chosen_step"] == 1
    assert "the first epoch would end at step" in caplog.text
    same = out / "steps" / "0000001" / "model.safetensors"
    assert same.read_bytes() == (out / "model.safetensors").read_bytes()


def test_only_what_this_training_kept_is_handed_over(tmp_path):
    assert kept_steps(None, 10) == []
    assert kept_steps(4, 10) == ["0000004", "0000008"]
    for name in ("0000004", "0000005"):
        (tmp_path / "checkpoints" / "steps" / name).mkdir(parents=True)
    folder = CheckpointFolder(tmp_path / "checkpoints", {})
    hand_over(folder, tmp_path / "bundle", ["0000004"])
    assert [p.name for p in (tmp_path / "bundle" / "steps").iterdir()] == ["0000004"]
    with pytest.raises(UserError, match="kept bundle"):
        hand_over(folder, tmp_path / "other", ["0000004", "0000008"])


def test_the_command_line_keeps_steps(trained, tmp_path, run_cli):
    given = ("--config", "tiny", "--set", "train.max_steps=2", "--keep-every", 1, "--device", "cpu")
    outcome = run_cli(
        "train", trained / "store", "--split", trained / "split.parquet", "--out", tmp_path / "b", *given
    )
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip() == str(tmp_path / "b")
    assert [p.name for p in sorted((tmp_path / "b" / "steps").iterdir())] == ["0000001", "0000002"]
