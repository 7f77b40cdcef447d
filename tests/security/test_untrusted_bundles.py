"""Bundles from anyone: as they were made, or refused in one line."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
from refusals import nothing_left, refused
from safetensors.torch import load_file, save_file

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.checkpoint.bundle_record import recipe_of
from perturbdiff.config import recipes
from perturbdiff.runtime.errors import UserError
from perturbdiff.training.training_stages import train

FILES = ("model.safetensors", "config.json", "genes.json", "vocabulary.json", "seen.parquet", "training.csv")


@pytest.fixture
def bundle(trained, tmp_path):
    shutil.copytree(trained / "bundle", folder := tmp_path / "bundle")
    return folder


def without_manifest(bundle):
    """As a bundle of an earlier version, or one whose maker wants us to believe that."""
    for name in ("manifest.json", "run.json"):
        (bundle / name).unlink()


def sample(run_cli, bundle, trained):
    folder = bundle.parent / "out"
    folder.mkdir()
    outcome = run_cli(
        "sample", bundle, trained / "store", "--split", trained / "split.parquet", "--out", folder / "p.h5ad"
    )
    assert outcome.code == 0 or not list(folder.iterdir())
    return outcome


@pytest.mark.parametrize("name", [*FILES, "manifest.json", "run.json"])
@pytest.mark.parametrize("place", [0.1, 0.5, 0.97])
def test_a_flipped_bit_is_seen(bundle, name, place):
    data = bytearray((bundle / name).read_bytes())
    data[int(place * len(data))] ^= 0x04
    (bundle / name).write_bytes(data)
    with pytest.raises(UserError, match=name.replace(".", r"\.")) as error:
        Bundle.load(bundle)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError):
        recipe_of(bundle)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(bundle, name):
    (bundle / name).unlink()
    with pytest.raises(UserError, match=name):
        Bundle.load(bundle)


def test_the_card_is_for_people_who_may_change_it(bundle):
    (bundle / "README.md").write_text("---\nlicense: mit\n---\nOurs.\n")
    Bundle.load(bundle)
    (bundle / "README.md").unlink()
    Bundle.load(bundle)


def test_a_changed_bundle_is_not_sampled_from(run_cli, trained, bundle):
    data = bytearray((bundle / "model.safetensors").read_bytes())
    data[-3] ^= 0x10
    (bundle / "model.safetensors").write_bytes(data)
    refused(sample(run_cli, bundle, trained), "model.safetensors", "was changed")


def test_a_changed_manifest_is_seen(bundle):
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["seed"] = 7
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json: was changed"):
        Bundle.load(bundle)


@pytest.mark.parametrize("listed", ["../../secret", "/etc/passwd"])
def test_no_file_outside_is_looked_at(bundle, listed):
    from perturbdiff.runtime.outputs import sealed

    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][listed] = {"size": 1, "sha256": "0"}
    manifest.pop("sha256")
    (bundle / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(UserError, match="is no name of a file"):
        Bundle.load(bundle)


def test_a_file_that_was_put_in_is_refused(bundle):
    (bundle / "embeddings").mkdir()
    np.savez(bundle / "embeddings" / "gene.npz", names=np.array(["a"]), vectors=np.ones((1, 2), np.float32))
    with pytest.raises(UserError, match="put into the bundle"):
        Bundle.load(bundle)


def test_an_earlier_version_s_bundle_is_taken_with_a_word(bundle, caplog):
    without_manifest(bundle)
    caplog.set_level("WARNING", "perturbdiff")
    Bundle.load(bundle)
    Bundle.load(bundle)
    assert caplog.text.count("cannot be told whether it was changed") == 1


def test_a_bundle_behind_a_link_is_checked_too(bundle, tmp_path):
    (tmp_path / "link").symlink_to(bundle)
    Bundle.load(tmp_path / "link")
    (bundle / "genes.json").write_text((bundle / "genes.json").read_text() + " ")
    with pytest.raises(UserError, match="genes.json: was changed"):
        Bundle.load(tmp_path / "link")


def test_a_kept_step_is_checked_by_its_bundle(trained, tmp_path):
    recipe = recipes.load("tiny", ["train.max_steps=2", "train.keep_every=1", "train.warmup_steps=0"])
    out = train(trained / "store", trained / "split.parquet", tmp_path / "b", recipe, device="cpu")
    step = out / "steps" / "0000001"
    Bundle.load(step)
    data = bytearray((step / "model.safetensors").read_bytes())
    data[-3] ^= 0x10
    (step / "model.safetensors").unlink()
    (step / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"0000001/model\.safetensors: was changed"):
        Bundle.load(step)


def change_config(**sections):
    def change(bundle):
        record = json.loads((bundle / "config.json").read_text())
        for section, values in sections.items():
            if isinstance(values, dict):
                record["config"][section] |= values
            else:
                record["config"][section] = values
        (bundle / "config.json").write_text(json.dumps(record))

    return change


def change_record(**values):
    def change(bundle):
        record = json.loads((bundle / "config.json").read_text()) | values
        (bundle / "config.json").write_text(json.dumps(record))

    return change


def change_weights(name, how):
    def change(bundle):
        weights = load_file(bundle / "model.safetensors")
        weights[name] = how(weights[name])
        save_file(weights, bundle / "model.safetensors")

    return change


def write(name, content):
    def change(bundle):
        (bundle / name).write_bytes(content)

    return change


def header(size, text):
    return size.to_bytes(8, "little") + text


HUGE = b'{"a":{"dtype":"F32","shape":[1000000000000000000],"data_offsets":[0,4000000000000000000]}}'
WRONG = {
    "depth 1e9": (change_config(model={"depth": 10**9}), "model.depth"),
    "depth 500": (change_config(model={"depth": 500}), "blocks, config.json asks for 500"),
    "width 1e18": (change_config(model={"width": 10**18}), "model.width"),
    "width": (change_config(model={"width": 16384}), "config.json asks for"),
    "ratio": (change_config(model={"mlp_ratio": 64}), "config.json asks for"),
    "heads": (change_config(model={"heads": 1}), "config.json asks for"),
    "covariate width": (change_config(model={"covariate_width": 16384}), "config.json asks for"),
    "steps 1e12": (change_config(schedule={"num_steps": 10**12}), "schedule.num_steps"),
    "set size 1e9": (change_config(train={"set_size": 10**9}), "train.set_size"),
    "seed": (change_config(seed=10**20), "seed"),
    "unknown key": (change_config(model={"dept": 3}), "model.dept"),
    "no number": (change_config(model={"width": None}), "model.width"),
    "deep": (write("config.json", b'{"a":' * 5000), "nested"),
    "list": (write("config.json", b"[]"), "cannot be read"),
    "target sum": (change_record(target_sum=-1), "target_sum"),
    "target sum text": (change_record(target_sum="x"), "target_sum"),
    "training": (change_record(training=3), "cannot be read"),
    "format": (change_record(format="x"), "cannot be read"),
    "not a number": (change_weights("output_layer.bias", lambda t: t * float("nan")), "not finite"),
    "infinite": (change_weights("output_layer.weight", lambda t: t + float("inf")), "not finite"),
    "double": (change_weights("output_layer.weight", lambda t: t.double()), "F64"),
    "complex": (change_weights("output_layer.bias", lambda t: t.to(torch.complex64)), "C64"),
    "integers": (change_weights("output_layer.bias", lambda t: t.to(torch.int32)), "I32"),
    "half": (change_weights("output_layer.bias", lambda t: t.half()), "F16"),
    "shape": (change_weights("output_layer.bias", lambda t: t[:-1].clone()), "do not fit together"),
    "unit": (change_weights("unit", lambda t: -t), "'unit' holds negative"),
    "unit zero": (change_weights("unit", lambda t: 0 * t), "'unit' is 0"),
    "maximum": (change_weights("maximum", lambda t: t * float("nan")), "not finite"),
    "header": (write("model.safetensors", header(1 << 60, b"{}")), "cannot be read"),
    "tensor size": (write("model.safetensors", header(len(HUGE), HUGE)), "cannot be read"),
    "empty": (write("model.safetensors", b""), "cannot be read"),
    "genes": (write("genes.json", b'{"a": 1}'), "genes.json"),
    "gene numbers": (write("genes.json", b"[1, 2]"), "genes.json"),
    "vocabulary": (write("vocabulary.json", b'{"format": 1}'), "vocabulary"),
    "labels": (write("vocabulary.json", b"[" * 5000), "nested"),
    "seen": (write("seen.parquet", b"PAR1 and nothing"), "seen.parquet"),
    "curve": (write("training.csv", b"\xff\xfe,a\n1"), "training.csv"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_refused_also_where_no_manifest_tells(bundle, kind):
    change, words = WRONG[kind]
    change(bundle)
    without_manifest(bundle)
    with pytest.raises(UserError) as error:
        Bundle.load(bundle)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["depth 1e9", "not a number", "header", "seen"])
def test_nothing_is_left_of_a_sampling_from_what_is_wrong(run_cli, trained, bundle, kind):
    change, words = WRONG[kind]
    change(bundle)
    without_manifest(bundle)
    refused(sample(run_cli, bundle, trained), words)
    nothing_left(bundle.parent, "bundle", "out")


def test_a_pipe_in_a_bundle_does_not_hang(run_cli, trained, bundle):
    (bundle / "genes.json").unlink()
    os.mkfifo(bundle / "genes.json")
    refused(sample(run_cli, bundle, trained), "genes.json")
