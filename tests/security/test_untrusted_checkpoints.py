"""Checkpoints and gene lists of others, which are pickles: read without running, hanging or crashing, or refused."""

from __future__ import annotations

import json
import pickle
import zipfile

import numpy as np
import pytest
import torch
from refusals import nothing_left, refused
from released_layout import ReleasedLayout

from perturbdiff.released.pickles import plain, read_pickle, read_torch
from perturbdiff.runtime.errors import UserError

LAYOUT = ReleasedLayout()


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def tuples(times):
    return b")" + b"\x85" * times  # (((...),),)


def doubled(times):
    """A tuple of the one before twice, so that 2^times values hang on it."""
    return b")" + b"".join(b"\x94h%c\x86" % i for i in range(times))


PICKLES = {
    "nested tuple as a key": opcodes(b"}", tuples(3_000_000), b"K\x01s"),
    "nested tuple": opcodes(tuples(3_000_000)),
    "nested list": opcodes(b"]" * 100_000, b"a" * 99_999),
    "nested marks": opcodes(b"(" * 1_000_000, b"t" * 1_000_000),
    "doubled tuple as a key": opcodes(b"}", doubled(60), b"K\x01s"),
    "frozen sets": opcodes(b"(" * 10_000, b"\x91" * 10_000),
    "memory number": opcodes(b"]r\xff\xff\xff\xff"),
    "memory number in text": opcodes(b"]p4000000000\n"),
    "memory that is not there": opcodes(b"j\xff\xff\xff\x7f"),
    "bytes of 1e18": opcodes(b"\x8e" + (10**18).to_bytes(8, "little")),
    "text of 1e18": opcodes(b"\x8d" + (10**18).to_bytes(8, "little")),
    "array of 1e18": opcodes(b"\x96" + (10**18).to_bytes(8, "little")),
    "digits": opcodes(b"I" + b"9" * 100_000 + b"\n"),
    "nothing to take": opcodes(b"\x85"),
    "no mark": opcodes(b"]e"),
    "list in itself": opcodes(b"]\x94h\x00a"),
    "extension": opcodes(b"\x84\x01\x00\x00\x00"),
    "persistent": opcodes(b"K\x01Q"),
    "cut off": b"\x80\x04}(X",
    "empty": b"",
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_list_of_genes_is_refused_in_one_line(run_cli, tmp_path, kind):
    (tmp_path / "genes.pkl").write_bytes(PICKLES[kind])
    checkpoint = LAYOUT.write(tmp_path / "model.ckpt")
    outcome = run_cli(
        "import-checkpoint", checkpoint, "--out", tmp_path / "bundle", "--genes", tmp_path / "genes.pkl"
    )
    refused(outcome)
    nothing_left(tmp_path, "genes.pkl", "model.ckpt")


@pytest.mark.parametrize("kind", PICKLES)
def test_a_checkpoint_is_refused_in_one_line(tmp_path, kind):
    path = LAYOUT.write(tmp_path / "model.ckpt")
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, PICKLES[kind] if name.endswith("data.pkl") else content)
    with pytest.raises(UserError, match=r"model\.ckpt: ") as error:
        read_torch(path)
    assert "\n" not in str(error.value)


def archive_with(path, *names):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, pickle.dumps({"state_dict": {}}))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a/data.pkl", "a/data.pkl"), "two entries of one name"),
        (("a/data.pkl", "../../out"), "outside the archive"),
        (("/etc/data.pkl",), "outside the archive"),
        (("a/data.pkl", "a\\..\\b"), "outside the archive"),
    ],
)
def test_an_archive_that_lies_is_refused(tmp_path, names, words):
    archive_with(tmp_path / "a.ckpt", *names)
    with pytest.raises(UserError, match=words):
        read_torch(tmp_path / "a.ckpt")


def test_entries_that_overlap_are_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"x": "y" * 100_000}))
        first = archive.infolist()[0]
        for number in range(20):
            again = zipfile.ZipInfo(f"a/data/{number}")
            for field in ("compress_size", "file_size", "CRC", "header_offset"):
                setattr(again, field, getattr(first, field))
            archive.filelist.append(again)
            archive.NameToInfo[again.filename] = again
    with pytest.raises(UserError, match="larger than the file"):
        read_torch(path)


def test_a_list_in_itself_ends():
    endless: list = []
    endless.append(endless)
    with pytest.raises(UserError, match="nested"):
        plain(endless)


def test_what_people_write_is_read(tmp_path):
    genes = [f"g{i}" for i in range(30_000)]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "genes.pkl").write_bytes(pickle.dumps(genes, protocol))
        assert read_pickle(tmp_path / "genes.pkl") == genes
    shared = {"a": genes, "b": [genes] * 5, "c": ({"d": (1, 2.5, None, True)},)}
    (tmp_path / "genes.pkl").write_bytes(pickle.dumps(shared))
    assert read_pickle(tmp_path / "genes.pkl")["b"][4][-1] == genes[-1]


def change_weights(name, how):
    def change(content):
        content["state_dict"][name] = how(content["state_dict"][name])

    return change


def change_settings(section, **values):
    def change(content):
        content["hyper_parameters"][section] |= values

    return change


BIAS = "model.final_layer.linear.bias"
WRONG = {
    "NaN": (change_weights(BIAS, lambda t: t * float("nan")), "not finite real"),
    "complex": (change_weights(BIAS, lambda t: t.to(torch.complex64)), "not finite real"),
    "no values": (change_weights("model.final_layer.linear.weight", lambda t: t[:0]), "holds no values"),
    "endless view": (change_weights(BIAS, lambda t: t[:1].expand(10**12)), "ValueError"),
    "steps NaN": (change_settings("model_cfg", steps=float("nan")), "steps"),
    "steps negative": (change_settings("model_cfg", steps=-3), "schedule.num_steps"),
    "steps 1e12": (change_settings("model_cfg", steps=10**12), "schedule.num_steps"),
    "dropout 5": (change_settings("model_cfg", p_drop_control=5), "p_drop_control"),
    "drop of conditions 5": (change_settings("model_cfg", p_drop_cond=5), "train.drop_covariates"),
    "infinite rate": (change_settings("optimizer_cfg", optimizer={"lr": float("inf")}), "lr"),
    "infinite cutoff": (change_settings("model_cfg", cutoff=float("inf")), "cutoff"),
    "codes": (change_settings("cov_encoding_cfg", pert_dict={"PBS": "0", "a": 1}), "pert_dict"),
    "code lists": (change_settings("cov_encoding_cfg", cell_type_dict={"a": [0]}), "cell_type_dict"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_checkpoint_with_wrong_numbers_leaves_nothing(run_cli, tmp_path, kind):
    path = LAYOUT.write(tmp_path / "model.ckpt")
    content = torch.load(path, weights_only=True)
    change, words = WRONG[kind]
    change(content)
    torch.save(content, path)
    (tmp_path / "genes.json").write_text(json.dumps([f"g{i}" for i in range(LAYOUT.genes)]))
    outcome = run_cli(
        "import-checkpoint", path, "--out", tmp_path / "bundle", "--genes", tmp_path / "genes.json"
    )
    refused(outcome, words)
    nothing_left(tmp_path, "genes.json", "model.ckpt")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("genes.json", b"[" * 100_000),
        ("genes.json", b"\xff"),
        ("genes.txt", b"\xff\xfe"),
        ("genes.txt", b"a\n" * 1_000_000),
        ("genes.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '<U8', 'fortran_order': False, 'shape': (1000000000000,)}"),
    ],
)  # fmt: skip
def test_a_damaged_list_of_genes_is_refused(run_cli, tmp_path, name, content):
    path = LAYOUT.write(tmp_path / "model.ckpt")
    (tmp_path / name).write_bytes(content)
    outcome = run_cli("import-checkpoint", path, "--out", tmp_path / "bundle", "--genes", tmp_path / name)
    refused(outcome, name)
    nothing_left(tmp_path, name, "model.ckpt")


def test_pickled_arrays_are_no_list_of_genes(run_cli, tmp_path):
    path = LAYOUT.write(tmp_path / "model.ckpt")
    np.save(tmp_path / "genes.npy", np.array(["a", "b"], dtype=object), allow_pickle=True)
    outcome = run_cli(
        "import-checkpoint", path, "--out", tmp_path / "bundle", "--genes", tmp_path / "genes.npy"
    )
    refused(outcome, "genes.npy")
