"""Published data sets: what the registry says, and the way from a name to a file."""

import functools
import hashlib
import http.server
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from perturbdiff import datasets
from perturbdiff.datasets import registry as module
from perturbdiff.runtime.errors import UserError

CONTENT = b"cells" * 100


@pytest.fixture
def known(tmp_path, monkeypatch):
    """A registry with one data set, of a few bytes, and no file of it anywhere."""
    monkeypatch.setenv("PERTURBDIFF_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = next(iter(datasets.registered().values()))
    digest = hashlib.sha256(CONTENT).hexdigest()
    entry = replace(one, name="mine", file="mine.h5ad", sha256=digest, bytes=len(CONTENT), url=None)
    monkeypatch.setattr(module, "registered", lambda: {"mine": entry})
    return entry


def test_every_entry_says_what_one_must_know():
    for name, dataset in datasets.registered().items():
        assert dataset.name == name
        assert len(dataset.sha256) == 64
        assert dataset.bytes > 0
        assert dataset.file.endswith(".h5ad")
        assert all((dataset.title, dataset.source, dataset.licence, dataset.citation, dataset.columns))


def test_the_folder_comes_before_the_cache(known, tmp_path):
    for place in (datasets.cache_folder(), tmp_path / "data"):
        place.mkdir(parents=True)
        (place / known.file).write_bytes(CONTENT)
        assert datasets.find("mine") == place / known.file


def test_another_file_of_that_name_is_refused(known, tmp_path):
    (tmp_path / "data").mkdir()
    for content in (CONTENT[:-1], b"x" + CONTENT[1:]):
        (tmp_path / "data" / known.file).write_bytes(content)
        with pytest.raises(UserError, match="is not the file of data set 'mine'"):
            datasets.find("mine")


def test_a_file_without_an_address_is_asked_for(known):
    with pytest.raises(UserError, match="put the file into a folder and name the folder in PERTURBDIFF_DATA"):
        datasets.find("mine")


def test_an_unknown_name_lists_the_known_ones(known):
    with pytest.raises(UserError, match="unknown data set 'mime', did you mean 'mine'\\?; known: mine"):
        datasets.find("mime")


@pytest.mark.parametrize("sound", [True, False])
def test_a_file_is_fetched_once_and_checked(known, tmp_path, monkeypatch, sound):
    served = tmp_path / "served"
    served.mkdir()
    (served / known.file).write_bytes(CONTENT if sound else CONTENT[:-1])
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            asked.append(self.path)

    handler = functools.partial(Handler, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        entry = replace(known, url=f"http://127.0.0.1:{server.server_port}/{known.file}")
        monkeypatch.setattr(module, "registered", lambda: {"mine": entry})
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("pooch.downloaders.tqdm", None)  # which does not come with the package
        if sound:
            assert datasets.find("mine").read_bytes() == CONTENT
            assert datasets.find("mine").parent == datasets.cache_folder()
        else:
            with pytest.raises(UserError, match="cannot be fetched"):
                datasets.find("mine")
            assert not list(datasets.cache_folder().iterdir()), "half a file stays"
        server.shutdown()
    assert len(asked) == 1


def test_the_sheets_name_registered_data_sets():
    root = Path(__file__).parents[3]
    text = "\n".join(sheet.read_text() for sheet in (root / "assets" / "experiments").glob("*.csv"))
    named = {word.split(":")[1] for word in text.replace("|", ",").split(",") if word.startswith("dataset:")}
    assert named == set(datasets.registered())
