"""Published data sets: what the registry says, and the way from a name to a file."""

import hashlib
import json
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from file_server import serving

from perturbdiff import datasets
from perturbdiff.config.recipes import presets
from perturbdiff.datasets import fetching
from perturbdiff.datasets import registry as module
from perturbdiff.datasets.registry import web_address
from perturbdiff.runtime.errors import UserError

CONTENT = b"\x89HDF\r\n\x1a\n" + b"cells" * 100


@pytest.fixture
def known(tmp_path, monkeypatch):
    """A registry with one data set, of a few bytes, and no file of it anywhere."""
    monkeypatch.setenv("PERTURBDIFF_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    one = datasets.lookup("kang18-ifnb")
    digest = hashlib.sha256(CONTENT).hexdigest()
    return register(
        monkeypatch, replace(one, name="mine", file="mine.h5ad", sha256=digest, bytes=len(CONTENT), url=None)
    )


def register(monkeypatch, dataset):
    monkeypatch.setattr(module, "registered", lambda: {"mine": dataset})
    return dataset


@pytest.fixture
def served():
    with serving(CONTENT) as server:
        yield server


@pytest.mark.parametrize("dataset", datasets.registered().values(), ids=lambda one: one.name)
def test_every_entry_says_what_one_must_know(dataset):
    assert re.fullmatch(r"[a-z0-9-]+", dataset.name)
    assert all((dataset.title, dataset.source, dataset.licence, dataset.citation, dataset.columns))
    assert dataset.scale in ("counts", "log1p", "normalised", "no values")
    assert dataset.preset is None or dataset.preset in presets()
    assert dataset.sha256 is None or re.fullmatch("[0-9a-f]{64}", dataset.sha256)
    assert dataset.md5 is None or re.fullmatch("[0-9a-f]{32}", dataset.md5)
    assert dataset.bytes is None or dataset.gigabytes is None, "one of the two sizes"
    assert all(number is None or number > 0 for number in (dataset.size, dataset.cells, dataset.genes))
    names = [part.file for part in dataset.files]
    assert len(set(names)) == len(names)
    assert all(name.endswith((".h5ad", ".parquet")) for name in names)
    if dataset.parts:
        assert "{part" in dataset.file
        assert dataset.bytes is None, "the size of one file"
        assert {dataset.sha256, dataset.md5} == {None}, "the sum of one file"
    assert dataset.census is None or dataset.url is None
    if dataset.url is None and dataset.census is None:
        assert dataset.sha256, "a file that cannot be fetched is known by its sum"
    for part in dataset.files[:2]:
        assert part.url is None or web_address(part.url).startswith("https://")
    assert not dataset.requester_pays or str(dataset.url).startswith("gs://")


def test_the_registry_has_what_the_paper_and_the_field_use():
    wanted = "pbmc tahoe100m tahoe100m-parquet replogle cellxgene norman19 adamson16 vcc25-train papalexi21 kang18-ifnb"
    assert {*wanted.split(), "kang18-controls", "zhao21-glioblastoma"} <= set(datasets.registered())


def test_the_folder_comes_before_the_cache(known, tmp_path):
    for place in (datasets.cache_folder(), tmp_path / "data"):
        place.mkdir(parents=True)
        (place / known.file).write_bytes(CONTENT)
        assert datasets.find("mine") == place / known.file


def test_another_file_of_that_name_is_refused(known, tmp_path):
    (tmp_path / "data").mkdir()
    for content in (CONTENT[:-1], b"x" + CONTENT[1:]):
        (tmp_path / "data" / known.file).write_bytes(content)
        with pytest.raises(UserError, match="is not the file mine.h5ad of the registry"):
            datasets.find("mine")


def test_a_file_without_an_address_is_asked_for(known):
    with pytest.raises(UserError, match="put the file into a folder and name the folder in PERTURBDIFF_DATA"):
        datasets.find("mine")


def test_an_unknown_name_lists_the_known_ones(known):
    with pytest.raises(UserError, match="unknown data set 'mime', did you mean 'mine'\\?; known: mine"):
        datasets.find("mime")


def test_a_file_is_fetched_once_and_checked_and_then_needs_no_network(known, monkeypatch, served, tmp_path):
    register(monkeypatch, replace(known, url=served.address))
    (path,) = datasets.get("mine", tmp_path / "own")
    assert path.read_bytes() == CONTENT
    served.content = None
    assert datasets.get("mine", tmp_path / "own") == [path]
    assert len(served.asked) == 1


def test_the_first_sum_is_recorded_where_none_is_published(known, monkeypatch, served, tmp_path, caplog):
    register(monkeypatch, replace(known, url=served.address, sha256=None, bytes=None, gigabytes=1e-6))
    (path,) = datasets.get("mine")
    assert "nobody publishes its sum" in caplog.text
    record = json.loads(fetching.record_of(path).read_text())
    assert record["digest"] == hashlib.sha256(CONTENT).hexdigest()
    assert record["version"] == '"first"'
    assert not record["published"]
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(UserError, match="as recorded in mine.h5ad.sum.json"):
        datasets.get("mine")
    path.unlink()
    served.content = CONTENT[:-1] + b"?"  # the publisher has changed it
    with pytest.raises(UserError, match="as recorded in mine.h5ad.sum.json"):
        datasets.get("mine")
    assert not path.exists()


def test_a_folder_that_others_keep_is_only_read(known, monkeypatch, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / known.file).write_bytes(CONTENT)
    monkeypatch.setattr(fetching.os, "access", lambda *_: False)
    assert datasets.get("mine") == [tmp_path / "data" / known.file]
    assert [path.name for path in (tmp_path / "data").iterdir()] == [known.file]


def test_a_large_file_that_did_not_change_is_not_read_again(known, monkeypatch, served):
    register(monkeypatch, replace(known, url=served.address))
    datasets.get("mine")
    monkeypatch.setattr(fetching, "digest", None)
    assert datasets.find("mine").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gigabytes": 212.0}, "1 file, about 212 GB, 71 min at 50 MB/s from 127.0.0.1"),
        ({"gigabytes": None}, "1 file of unknown size"),
        ({"gigabytes": 1e-6, "requester_pays": True}, "the bucket bills the reader"),
    ],
)
def test_what_costs_is_said_first_and_must_be_accepted(known, monkeypatch, served, changes, said):
    dataset = replace(known, url=served.address, sha256=None, bytes=None, **changes)
    register(monkeypatch, dataset)
    with pytest.raises(UserError, match=f"{said}.*licence.*add --yes"):
        datasets.get("mine")
    assert not served.asked
    monkeypatch.setattr(fetching, "check_room", lambda *_: None)
    assert datasets.get("mine", yes=True)[0].read_bytes() == CONTENT


def test_a_disk_without_room_for_all_parts_is_told_before_the_first(known, monkeypatch, served):
    register(monkeypatch, replace(known, url=served.address, sha256=None, bytes=None, gigabytes=1e9))
    with pytest.raises(UserError, match="1e\\+09 GB are needed"):
        datasets.get("mine", yes=True)
    assert not served.asked


def test_parts_that_are_complete_are_not_fetched_again(known, monkeypatch, served, tmp_path):
    changes = {"file": "mine-{part}.h5ad", "parts": (1, 3), "sha256": None, "bytes": None, "gigabytes": 1e-6}
    register(monkeypatch, replace(known, url=served.address + "?part={part}", **changes))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine-2.h5ad").write_bytes(CONTENT)
    assert [path.name for path in datasets.get("mine")] == ["mine-1.h5ad", "mine-2.h5ad", "mine-3.h5ad"]
    assert len(served.asked) == 2
    with pytest.raises(UserError, match="has 3 files; fetch them with perturbdiff data get mine"):
        datasets.find("mine")


def test_a_query_of_the_census_says_which_package_it_needs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cellxgene_census", None)
    with pytest.raises(UserError, match="pip install cellxgene-census"):
        datasets.get("cellxgene-blood", tmp_path, yes=True)


def test_files_of_the_census_are_written_once_and_whole(monkeypatch, tmp_path):
    """A stand-in for the Census's package: as much of it as is used."""
    asked = []

    def get_anndata(census, organism, *, obs_column_names, obs_value_filter):
        asked.append(obs_value_filter)
        if len(asked) == 2:
            raise OSError("the network is gone")
        obs = pd.DataFrame({"soma_joinid": [7, 8], "cell_type": ["T", "B"]}, index=["0", "1"])
        return ad.AnnData(
            np.ones((2, 3), np.float32), obs, pd.DataFrame({"feature_id": list("xyz")}, index=list("012"))
        )

    table = pd.DataFrame({"dataset_id": ["a", "b", "c"], "dataset_total_cell_count": [5, 9, 3]})
    reader = SimpleNamespace(read=lambda: reader, concat=lambda: reader, to_pandas=lambda: table)
    census = {"census_info": {"datasets": reader}}
    stand_in = SimpleNamespace(open_soma=lambda census_version: nullcontext(census), get_anndata=get_anndata)
    monkeypatch.setitem(sys.modules, "cellxgene_census", stand_in)
    blood = replace(datasets.lookup("cellxgene-blood"), name="mine", parts=(1, 2))
    register(monkeypatch, blood)
    with pytest.raises(UserError, match="the Census cannot be read .*the network is gone.*keeps the files"):
        datasets.get("mine", tmp_path, yes=True)
    assert [path.name for path in tmp_path.iterdir()] == ["cellxgene-blood-01.h5ad"]
    first, second = datasets.get("mine", tmp_path, yes=True)
    assert asked[2] == asked[1] == f"{blood.census.filter} and dataset_id in ['a', 'c']"
    assert list(ad.read_h5ad(second, backed="r").obs_names) == ["census7", "census8"]
    assert fetching.record_of(first).is_file()


def test_data_sets_of_the_census_are_spread_over_the_files_by_size():
    sizes = [("b", 5), ("a", 5), ("c", 3), ("d", 9)]
    assert fetching.spread(sizes, 2) == [["d", "c"], ["a", "b"]]


def test_the_sheets_name_registered_data_sets():
    root = Path(__file__).parents[3]
    text = "\n".join(sheet.read_text() for sheet in (root / "assets" / "experiments").glob("*.csv"))
    named = {word.split(":")[1] for word in text.replace("|", ",").split(",") if word.startswith("dataset:")}
    assert named <= set(datasets.registered())


def test_the_list_says_what_is_known_and_what_is_not(run_cli):
    listed = run_cli("data", "list").out
    assert set(re.findall(r"^[\w-]+", listed, re.M)) - {"name"} == set(datasets.registered())
    one = run_cli("data", "list", "replogle").out
    assert re.search(r"sum +not known", one)
    assert "22.3 GB" in one
    (facts,) = json.loads(run_cli("data", "list", "kang18-ifnb", "--json").out)
    assert facts["sha256"] == datasets.lookup("kang18-ifnb").sha256
    refused = run_cli("data", "list", "replogel")
    assert refused.code == 2
    assert "did you mean 'replogle'" in refused.err
