"""Bundles to and from a repository, against a stand-in for the Hugging Face Hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_server import serving
from refusals import refused

from perturbdiff.checkpoint.bundle import Bundle
from perturbdiff.runtime.outputs import verify

pytest.importorskip("huggingface_hub", reason="the extra 'hub' is not installed")

TOKENS = {"me": "hf_ThisIsMySecretToken", "somebody": "hf_AnotherSecretToken"}
REPO = "me/tiny-model"


@pytest.fixture(scope="module")
def hub():
    with serving(**TOKENS) as server:
        yield server


@pytest.fixture(autouse=True)
def account(hub, monkeypatch, tmp_path):
    """Be logged in as ``me``, with a library that neither waits before it tries again nor looks into our home."""
    from huggingface_hub import constants

    hub.repositories.clear()
    hub.breaks.clear()
    hub.sent.clear()
    hub.status = 0
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    monkeypatch.setenv("HF_TOKEN", TOKENS["me"])
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture
def bundle(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained / "bundle", tmp_path / "bundle"))


@pytest.fixture
def pushed(run_cli, bundle):
    """A bundle in the repository of ``me``."""
    assert run_cli("bundle", "push", bundle, REPO).code == 0
    return bundle


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def newest(hub) -> dict[str, bytes]:
    return hub.repositories[REPO].states[-1][1]


def test_there_and_back_by_the_commands(hub, trained, tmp_path):
    environment = os.environ | {
        "HF_ENDPOINT": hub.address,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        "PD_LOG": str(tmp_path / "log"),
    }

    def run(*arguments):
        command = [sys.executable, "-m", "perturbdiff", "bundle", *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    told = run("push", trained / "bundle", REPO)
    assert told.stdout.strip() == f"{hub.address}/{REPO}"
    assert hub.repositories[REPO].private
    assert f"{REPO} is private" in told.stderr
    again = run("pull", REPO, "--out", tmp_path / "pulled")
    assert again.stdout.strip() == str(tmp_path / "pulled")
    ours = files_of(trained / "bundle")
    assert files_of(tmp_path / "pulled") == {
        name: data for name, data in ours.items() if not name.startswith("logs/")
    }
    assert Bundle.load(tmp_path / "pulled").genes == Bundle.load(trained / "bundle").genes
    said = [told.stdout, told.stderr, again.stdout, again.stderr, (tmp_path / "log").read_text()]
    written = [data.decode(errors="replace") for data in files_of(tmp_path).values()]
    for text in (*said, *written, *(data.decode(errors="replace") for data in newest(hub).values())):
        assert TOKENS["me"] not in text
        assert "signature=" not in text


def test_the_card_has_what_the_hub_reads(hub, pushed):
    from huggingface_hub import ModelCard

    card = ModelCard(newest(hub)["README.md"].decode())
    assert card.data.library_name == "perturbdiff"
    assert card.data.license == "unknown"
    assert "single-cell" in card.data.tags
    assert card.text.lstrip().startswith("# perturbdiff model (tiny)")


def test_a_second_pull_has_nothing_to_do_and_another_folder_is_left_alone(run_cli, pushed, tmp_path):
    out = tmp_path / "pulled"
    assert run_cli("bundle", "pull", REPO, "--out", out).code == 0
    told = run_cli("bundle", "pull", REPO, "--out", out)
    assert (told.code, "holds this bundle already" in told.err) == (0, True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    refused(run_cli("bundle", "pull", REPO, "--out", tmp_path / "mine"), "holds something else")
    assert files_of(tmp_path / "mine") == {"notes.txt": b"mine"}
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_people_may_change_the_card(hub, run_cli, pushed, tmp_path):
    files = dict(newest(hub)) | {"README.md": b"---\nlicense: mit\n---\nOur model.\n"}
    hub.repositories[REPO].commit(files)
    assert run_cli("bundle", "pull", REPO, "--out", tmp_path / "pulled").code == 0
    assert (tmp_path / "pulled" / "README.md").read_text().endswith("Our model.\n")
    Bundle.load(tmp_path / "pulled")


def test_an_earlier_state_by_its_commit(hub, run_cli, pushed, tmp_path):
    first = hub.repositories[REPO].states[-1][0]
    hub.repositories[REPO].commit({"README.md": b"emptied"})
    refused(run_cli("bundle", "pull", REPO, "--out", tmp_path / "x"), "holds no bundle")
    assert run_cli("bundle", "pull", REPO, "--revision", first, "--out", tmp_path / "x").code == 0
    refused(run_cli("bundle", "pull", REPO, "--revision", "v9", "--out", tmp_path / "y"), "no revision 'v9'")


def test_only_files_of_a_bundle_are_taken(hub, run_cli, pushed, tmp_path):
    files = dict(newest(hub)) | {"pytorch_model.bin": b"\x80\x04.", "run.sh": b"rm -r ~"}
    hub.repositories[REPO].commit(files)
    assert run_cli("bundle", "pull", REPO, "--out", tmp_path / "pulled").code == 0
    assert not {"pytorch_model.bin", "run.sh"} & set(files_of(tmp_path / "pulled"))
    assert "pytorch_model.bin" not in hub.sent


@pytest.mark.parametrize("name", ["model.safetensors", "genes.json"])
def test_a_changed_file_is_refused(hub, run_cli, pushed, tmp_path, name):
    data = bytearray(newest(hub)[name])
    data[len(data) // 2] ^= 1
    hub.repositories[REPO].commit(dict(newest(hub)) | {name: bytes(data)})
    refused(run_cli("bundle", "pull", REPO, "--out", tmp_path / "x"), name, "was changed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle"]


def test_a_broken_connection_is_taken_up(hub, run_cli, pushed, tmp_path):
    hub.breaks["model.safetensors"] = 2
    assert run_cli("bundle", "pull", REPO, "--out", tmp_path / "x").code == 0
    assert hub.breaks["model.safetensors"] == 0
    verify(tmp_path / "x")


def test_an_interrupted_download_goes_on(hub, run_cli, pushed, tmp_path):
    hub.breaks["model.safetensors"] = 1000
    told = run_cli("bundle", "pull", REPO, "--out", tmp_path / "x")
    refused(told, "the Hub does not answer as it should", "run the same command again")
    assert not (tmp_path / "x").exists()
    assert hub.sent["genes.json"]
    hub.breaks.clear()
    hub.sent.clear()
    assert run_cli("bundle", "pull", REPO, "--out", tmp_path / "x").code == 0
    assert "model.safetensors" in hub.sent
    assert "genes.json" not in hub.sent, "what is complete is not fetched again"
    verify(tmp_path / "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "x"]


def test_files_of_an_earlier_bundle_go(hub, run_cli, pushed):
    hub.repositories[REPO].commit(dict(newest(hub)) | {"embeddings/gene.npz": b"old", "logs.txt": b""})
    refused(run_cli("bundle", "push", pushed, REPO), "holds something else (logs.txt)")
    files = dict(newest(hub))
    del files["logs.txt"]
    hub.repositories[REPO].commit(files)
    told = run_cli("bundle", "push", pushed, REPO)
    assert told.code == 0
    assert "its model card is replaced" in told.err
    assert "embeddings/gene.npz" not in newest(hub)


def test_what_is_no_whole_bundle_is_not_pushed(hub, run_cli, trained, bundle, tmp_path):
    refused(run_cli("bundle", "push", trained / "store", REPO), "not a model bundle")
    refused(run_cli("bundle", "push", tmp_path / "none", REPO), "bundle not found")
    (bundle / "genes.json").write_text("[]")
    refused(run_cli("bundle", "push", bundle, REPO), "genes.json", "was changed")
    shutil.copy(trained / "bundle" / "genes.json", bundle)
    (bundle / "manifest.json").unlink()
    refused(run_cli("bundle", "push", bundle, REPO), "no manifest.json that lists its files")
    assert not hub.repositories


def test_who_may_push(hub, run_cli, bundle, monkeypatch):
    told = run_cli("bundle", "push", bundle, "somebody/theirs")
    refused(told, "somebody/theirs", "your account may not write to it")
    refused(run_cli("bundle", "push", bundle, "a/b/c"), "write it as OWNER/NAME")
    monkeypatch.setenv("HF_TOKEN", "hf_NotAToken")
    refused(run_cli("bundle", "push", bundle, REPO), "HF_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    refused(run_cli("bundle", "push", bundle, REPO), "log in with 'hf auth login'")
    assert not hub.repositories


def test_a_public_repository_is_asked_for(hub, run_cli, bundle, monkeypatch):
    assert run_cli("bundle", "push", bundle, REPO, "--public").code == 0
    assert not hub.repositories[REPO].private
    refused(run_cli("bundle", "push", bundle, REPO), "everybody can see this repository", "--public")
    assert len(hub.repositories[REPO].states) == 2


def test_who_may_pull(hub, run_cli, pushed, tmp_path, monkeypatch):
    out = tmp_path / "x"
    refused(run_cli("bundle", "pull", "me/other", "--out", out), "the Hub has no such repository")
    monkeypatch.setenv("HF_TOKEN", TOKENS["somebody"])
    refused(run_cli("bundle", "pull", REPO, "--out", out), "does not show it to you")
    monkeypatch.delenv("HF_TOKEN")
    refused(run_cli("bundle", "pull", REPO, "--out", out), "does not show it to you")
    hub.status = 503
    refused(run_cli("bundle", "pull", REPO, "--out", out), "HTTP status 503")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused(run_cli("bundle", "pull", REPO, "--out", out), "does not answer as it should")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle"]


def test_a_manifest_cannot_name_other_places(hub, run_cli, pushed, tmp_path):
    import json

    from perturbdiff.runtime.outputs import sealed

    manifest = json.loads(newest(hub)["manifest.json"])
    manifest.pop("sha256")
    for name in ("../../outside", "weights.pkl"):
        manifest["files"] |= {name: {"size": 1, "sha256": "0"}}
        changed = json.dumps(sealed(manifest)).encode()
        hub.repositories[REPO].commit(dict(newest(hub)) | {"manifest.json": changed})
        refused(run_cli("bundle", "pull", REPO, "--out", tmp_path / "x"), "holds no bundle", name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle"]


def test_without_the_library_one_sentence_says_what_to_install(run_cli, bundle, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for arguments in (("push", bundle, REPO), ("pull", REPO, "--out", tmp_path / "x")):
        refused(run_cli("bundle", *arguments), "pip install 'perturbdiff[hub]'")


def test_info_tells_what_a_bundle_knows(run_cli, trained):
    told = run_cli("bundle", "info", trained / "bundle")
    assert told.code == 0
    for text in ("tiny", "64, log1p of counts", "p1, p2, p3", "train, seed", "perturbdiff", "split.parquet"):
        assert text in told.out, text
    refused(run_cli("bundle", "info", trained / "store"), "not a model bundle")
