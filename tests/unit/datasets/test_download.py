"""One file over HTTP: what a broken transfer leaves, how it goes on, and what is never taken for the file."""

import errno
import hashlib
import ssl
import urllib.error
from dataclasses import replace
from types import SimpleNamespace

import pytest
from file_server import serving

from perturbdiff.datasets import download as module
from perturbdiff.datasets import fetching
from perturbdiff.datasets.registry import Part
from perturbdiff.runtime.errors import UserError

CONTENT = b"\x89HDF\r\n\x1a\n" + bytes(range(256)) * 400
HALF = f"bytes={len(CONTENT) // 2}-"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(module, "PAUSES", (0.0, 0.0))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(CONTENT) as served:
        yield served


@pytest.fixture
def fetch(server, tmp_path):
    """Fetch the file and return it; the checks are those of a published SHA-256."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    part = Part("file.h5ad", server.address, len(CONTENT), "sha256", digest)

    def run(**changes):
        wanted = replace(part, **changes)
        target = tmp_path / "data" / wanted.file
        module.download(
            wanted.url, target, lambda data: fetching.check(data, wanted, place=target), size=wanted.bytes
        )
        return target

    return run


def left(tmp_path):
    return sorted(path.name for path in (tmp_path / "data").iterdir())


def test_a_broken_transfer_goes_on_where_it_stopped(server, fetch, tmp_path):
    server.breaks = 1
    assert fetch().read_bytes() == CONTENT
    assert server.asked == ["", HALF]
    assert left(tmp_path) == ["file.h5ad"]


def test_the_next_command_goes_on_too(server, fetch, tmp_path):
    server.breaks = 1
    server.status = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAUSES", ())
        with pytest.raises(
            UserError, match="0 MB have come and are kept; compute nodes often have no network"
        ):
            fetch()
    assert not (tmp_path / "data" / "file.h5ad").exists(), "half a file has the name of the whole one"
    assert fetch().read_bytes() == CONTENT
    assert server.asked == ["", HALF]


@pytest.mark.parametrize("reason", ["another version", "no ranges", "no mark of a version", "a shorter file"])
def test_a_rest_is_never_put_behind_another_file(server, fetch, reason):
    server.breaks = 1
    server.etag = "" if reason == "no mark of a version" else server.etag
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAUSES", ())
        with pytest.raises(UserError, match="the connection ended early"):
            fetch(bytes=None, algorithm="", digest="")
    other = CONTENT[:8] + CONTENT[:7:-1]
    if reason == "another version":
        server.content, server.etag = other, '"second"'
    elif reason == "no ranges":
        server.ranges = False
    elif reason == "a shorter file":
        server.content = CONTENT[:1000]  # of the same mark
    assert fetch(bytes=None, algorithm="", digest="").read_bytes() == server.content


def test_a_server_that_is_busy_is_asked_again(server, fetch):
    server.status = [503, 429]
    assert fetch().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, "has no file .* any more"),
        (410, "any more"),
        (403, "refuses .*403.*with a browser"),
        (401, "refuses"),
    ],
)
def test_a_refusal_says_what_to_do_and_leaves_nothing(server, fetch, tmp_path, status, said):
    server.status = [status]
    with pytest.raises(UserError, match=said):
        fetch()
    assert len(server.asked) == 1
    assert not (tmp_path / "data" / "file.h5ad").exists()


def test_who_pays_is_told_how_to(server, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "web_address", lambda _: server.address)
    server.status = [400]
    with pytest.raises(
        UserError, match="gcloud storage cp --billing-project=YOUR_PROJECT gs://bucket/file.h5ad"
    ):
        module.download("gs://bucket/file.h5ad", tmp_path / "file.h5ad", lambda _: None)


def test_a_file_of_another_sum_is_not_kept(fetch, tmp_path):
    with pytest.raises(UserError, match="its SHA256 is .* instead of aaaa"):
        fetch(digest="a" * 64)
    assert left(tmp_path) == []


def test_a_file_of_another_size_is_not_even_fetched(server, fetch, tmp_path):
    with pytest.raises(UserError, match="has 102,408 bytes, but 7 are registered"):
        fetch(bytes=7)
    assert not (tmp_path / "data" / "file.h5ad").exists()


def test_a_page_instead_of_a_file_is_found_without_a_sum(server, fetch, tmp_path):
    server.content = b"<html>Prove that you are no robot</html>"
    with pytest.raises(UserError, match="may be a page of a website"):
        fetch(bytes=None, algorithm="", digest="")
    assert left(tmp_path) == []


def test_a_node_without_network_is_told_of_the_login_node(monkeypatch, tmp_path):
    monkeypatch.setattr(module.time, "sleep", None)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with pytest.raises(UserError, match=r"nowhere.invalid: cannot be reached from .* \(job 77\).*login node"):
        module.download("http://nowhere.invalid/file.h5ad", tmp_path / "file.h5ad", lambda _: None)


def test_a_certificate_that_is_not_trusted_is_no_matter_of_the_network(monkeypatch, tmp_path):
    def refused(*_, **__):
        raise urllib.error.URLError(ssl.SSLCertVerificationError(1, "self-signed certificate"))

    monkeypatch.setattr(module.urllib.request, "urlopen", refused)
    with pytest.raises(UserError, match="certificate is not trusted here .*SSL_CERT_FILE"):
        module.download("https://somewhere/file.h5ad", tmp_path / "file.h5ad", lambda _: None)


def test_a_disk_that_is_too_small_is_told_before(server, fetch, monkeypatch, tmp_path):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="0.000102 GB are needed and 1e-06 GB are free"):
        fetch()
    assert not (tmp_path / "data" / "file.h5ad").exists()


@pytest.mark.parametrize(
    ("stop", "raised", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), UserError, "disk full .*goes on where it stopped"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
    ids=["a full disk", "Ctrl-C"],
)
def test_what_stops_it_keeps_what_came(server, fetch, stop, raised, said):
    def stopped(answer, data, start, work):
        data.write_bytes(answer.read(1000))
        raise stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_write", stopped)
        with pytest.raises(raised, match=said):
            fetch()
    assert fetch().read_bytes() == CONTENT
    assert server.asked == ["", "bytes=1000-"]


def test_addresses_become_https(monkeypatch):
    url = "hf://datasets/lab/screen@0a1b2c/a folder/x.h5ad"
    assert (
        module.web_address(url)
        == "https://huggingface.co/datasets/lab/screen/resolve/0a1b2c/a%20folder/x.h5ad"
    )
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror/")
    assert module.web_address(url).startswith("http://mirror/datasets/lab/screen/resolve/0a1b2c/")
    assert module.web_address("gs://bucket/a/b") == "https://storage.googleapis.com/bucket/a/b"
    assert module.host("gs://bucket/a/b") == "storage.googleapis.com"
