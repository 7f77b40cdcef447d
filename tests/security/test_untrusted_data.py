"""Data files of others: none leads out of itself, runs code, is believed in its sizes, or reads as zeros."""

import json
import os
import shutil
import zipfile
import zlib

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from refusals import nothing_left, refused
from tiny_data import TINY, tiny_counts

SPLIT = ("--set", "split.held_out=[d2]", "--set", "split.valid_fraction=0.4")
SECRET = b"correct-horse-battery-staple"


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    """What a command leaves in TMPDIR is seen."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def secret(tmp_path):
    """An HDF5 file that another user may read, with texts that nobody else should see, and the same as bytes."""
    path = tmp_path / "secret.h5"
    with h5py.File(path, "w") as file:
        file["text"] = np.array([SECRET] * tiny_counts().n_obs, "S28")
        file["counts"] = np.ones((tiny_counts().n_obs, tiny_counts().n_vars), np.float32)
    return path


def refused_and_nothing_left(run_cli, folder, path, *words):
    """Assert that ``preprocess`` and ``evaluate`` refuse a file, and show and leave nothing of it."""
    (folder / "out").mkdir(exist_ok=True)
    commands = (
        ("preprocess", path, *TINY, "--out", folder / "out" / "store"),
        ("evaluate", path, path, "--out", folder / "out" / "metrics"),
    )
    for command in commands:
        outcome = run_cli(*command)
        refused(outcome, *words)
        assert SECRET.decode() not in outcome.out + outcome.err
        nothing_left(folder / "out")
        nothing_left(folder / "tmp")


def _external_link(path, secret):
    with h5py.File(path, "r+") as file:
        del file["obs/perturbation"]
        file["obs/perturbation"] = h5py.ExternalLink(str(secret), "text")


def _external_link_of_a_group(path, secret):
    with h5py.File(path, "r+") as file:
        file["uns/more"] = h5py.ExternalLink(str(secret), "/")


def _soft_link_through_an_external_one(path, secret):
    with h5py.File(path, "r+") as file:
        file["layers/out"] = h5py.ExternalLink(str(secret), "/")
        del file["obs/perturbation"]
        file["obs/perturbation"] = h5py.SoftLink("/layers/out/text")


def _external_storage(path, secret):
    with h5py.File(path, "r+") as file:
        del file["obs/perturbation"]
        size = secret.stat().st_size
        file.create_dataset("obs/perturbation", (size // 8,), "S8", external=[(str(secret), 0, size)])


def _virtual(path, secret):
    with h5py.File(path, "r+") as file:
        del file["X"]
        shape = (tiny_counts().n_obs, tiny_counts().n_vars)
        layout = h5py.VirtualLayout(shape, np.float32)
        layout[:] = h5py.VirtualSource(str(secret), "counts", shape)
        file.create_virtual_dataset("X", layout)


@pytest.mark.parametrize(
    ("harm", "place"),
    [
        (_external_link, "'obs/perturbation' is a link to another file"),
        (_external_link_of_a_group, "'uns/more' is a link to another file"),
        (_soft_link_through_an_external_one, "'layers/out' is a link to another file"),
        (_external_storage, "'obs/perturbation' takes its values from other files"),
        (_virtual, "'X' takes its values from other files"),
    ],
)
def test_hdf5_that_reads_other_files(tmp_path, counts_file, secret, run_cli, harm, place):
    harm(counts_file, secret)
    refused_and_nothing_left(run_cli, tmp_path, counts_file, str(counts_file), place)


def test_links_within_a_file_are_followed_and_loose_ones_are_told(tmp_path, counts_file, run_cli):
    with h5py.File(counts_file, "r+") as file:
        file.move("obs/perturbation", "uns/elsewhere")
        file["obs/perturbation"] = h5py.SoftLink("/uns/elsewhere")
    assert run_cli("preprocess", counts_file, *TINY, "--out", tmp_path / "store").code == 0
    with h5py.File(counts_file, "r+") as file:
        del file["uns/elsewhere"]
    refused_and_nothing_left(run_cli, tmp_path, counts_file, str(counts_file))


@pytest.mark.parametrize("kind", ["pipe", "device", "folder with a pipe"])
def test_what_is_neither_a_file_nor_a_folder(tmp_path, run_cli, kind):
    path = tmp_path / "counts.h5ad"
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = tmp_path / "counts.zarr"
        tiny_counts().write_zarr(path)
        os.mkfifo(path / "obs" / "fifo")
    refused_and_nothing_left(run_cli, tmp_path, path, "neither a file nor a folder")


# --- Zarr


@pytest.fixture(params=[2, 3])
def counts_folder(request, tmp_path):
    path = tmp_path / "counts.zarr"
    with ad.settings.override(zarr_write_format=request.param):
        tiny_counts().write_zarr(path)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", ["chunk", "folder", "metadata"])
def test_linked_pieces_of_a_zarr_folder(tmp_path, counts_folder, run_cli, which):
    places = {
        "chunk": next(
            p for p in sorted((counts_folder / "X/data").rglob("*")) if p.is_file() and p.name[0] != "z"
        ),
        "folder": counts_folder / "obs/perturbation",
        "metadata": next(p for p in (counts_folder / "zarr.json", counts_folder / ".zgroup") if p.exists()),
    }
    moved = tmp_path / "moved"
    places[which].rename(moved)
    places[which].symlink_to(moved)
    refused_and_nothing_left(run_cli, tmp_path, counts_folder, "is a link", str(places[which]))


def _changed(path, **entries):
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("codec", ["pickle", "json2", "msgpack2", "python-object", "bz2"])
def test_codecs_that_are_not_known(tmp_path, run_cli, codec):
    path = tmp_path / "counts.zarr"
    with ad.settings.override(zarr_write_format=2):
        tiny_counts().write_zarr(path)
    array = path / "obs" / "_index" / ".zarray"
    if codec == "bz2":
        _changed(array, compressor={"id": codec, "level": 1})
    else:
        _changed(array, filters=[{"id": codec}])
    refused_and_nothing_left(run_cli, tmp_path, path, str(array), f"'{codec}'")


@pytest.mark.filterwarnings("ignore")
def test_a_pickle_in_a_text_array_does_not_run(tmp_path, run_cli):
    path, mark = tmp_path / "counts.zarr", tmp_path / "it-ran"
    with ad.settings.override(zarr_write_format=2):
        tiny_counts().write_zarr(path)
    array = path / "obs" / "_index"
    _changed(
        array / ".zarray", filters=[{"id": "vlen-utf8"}, {"id": "pickle", "protocol": 4}], compressor=None
    )
    (array / "0").write_bytes(b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    refused_and_nothing_left(run_cli, tmp_path, path, "'pickle'")
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("codec", ["numcodecs.pickle", "numcodecs.json2", "unheard-of"])
def test_codecs_of_version_3_inside_a_shard(tmp_path, run_cli, codec):
    path = tmp_path / "counts.zarr"
    with ad.settings.override(zarr_write_format=3):
        tiny_counts().write_zarr(path)
    array = path / "X" / "data" / "zarr.json"
    inner = {"chunk_shape": [8], "codecs": [{"name": codec}], "index_codecs": [{"name": "bytes"}]}
    _changed(array, codecs=[{"name": "sharding_indexed", "configuration": inner}])
    refused_and_nothing_left(run_cli, tmp_path, path, str(array), "is decoded by")


@pytest.mark.filterwarnings("ignore")
def test_a_second_copy_of_the_metadata_is_not_believed(tmp_path, run_cli):
    path = tmp_path / "counts.zarr"
    with ad.settings.override(zarr_write_format=3):
        tiny_counts().write_zarr(path)
    run_cli("preprocess", path, *TINY, "--out", tmp_path / "right")
    document = json.loads((path / "zarr.json").read_text())
    copies = document.setdefault(
        "consolidated_metadata", {"kind": "inline", "must_understand": False, "metadata": {}}
    )
    copies["metadata"]["obs/_index"] = json.loads((path / "obs/_index/zarr.json").read_text()) | {
        "shape": [10**12]
    }
    (path / "zarr.json").write_text(json.dumps(document))
    assert run_cli("preprocess", path, *TINY, "--out", tmp_path / "store").code == 0
    assert (tmp_path / "store/checksums.sha256").read_text() == (
        tmp_path / "right/checksums.sha256"
    ).read_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["obs/_index", "X/data"])
def test_a_missing_piece_of_a_zarr_folder(tmp_path, counts_folder, run_cli, name):
    for piece in [p for p in (counts_folder / name).rglob("*") if p.is_file() and p.name.isdigit()]:
        piece.unlink()
    refused_and_nothing_left(run_cli, tmp_path, counts_folder, "files are missing", name)


# --- sizes that are declared and not there


def _rows_by_declaration(path, shape, chunk, **how):
    with h5py.File(path, "r+") as file:
        old = file["obs/_index"]
        attributes = dict(old.attrs)
        del file["obs/_index"]
        made = file.create_dataset("obs/_index", shape, "S4", chunks=chunk, **how)
        made.attrs.update(attributes)


@pytest.mark.parametrize(
    ("shape", "chunk"), [((10**12,), (10**6,)), ((10**9,), (16,)), ((10**9,), None), ((200,), (16,))]
)
def test_rows_that_are_only_declared(tmp_path, counts_file, run_cli, shape, chunk):
    _rows_by_declaration(counts_file, shape, chunk)
    refused_and_nothing_left(run_cli, tmp_path, counts_file, str(counts_file), "'obs/_index'")


def test_three_thousand_million_zipped_zeros(tmp_path, counts_file, run_cli):
    chunk = 1 << 26
    zipped = zlib.compress(bytes(chunk), 9)
    with h5py.File(counts_file, "r+") as file:
        del file["obs/_index"]
        made = file.create_dataset("obs/_index", (45 * chunk,), "S1", chunks=(chunk,), compression="gzip")
        for k in range(45):
            made.id.write_direct_chunk((k * chunk,), zipped)
    refused_and_nothing_left(run_cli, tmp_path, counts_file, "more than the file has bytes")


@pytest.mark.filterwarnings("ignore")
def test_rows_that_a_zarr_folder_only_declares(tmp_path, counts_folder, run_cli):
    array = next(
        p
        for p in (counts_folder / "obs/_index/zarr.json", counts_folder / "obs/_index/.zarray")
        if p.exists()
    )
    _changed(array, shape=[10**12])
    refused_and_nothing_left(run_cli, tmp_path, counts_folder, "more than the folder has bytes")


@pytest.mark.parametrize("name", ["data", "indices", "indptr"])
def test_sparse_arrays_that_do_not_fit_together(tmp_path, counts_file, run_cli, name):
    with h5py.File(counts_file, "r+") as file:
        values = file[f"X/{name}"][:]
        del file[f"X/{name}"]
        file[f"X/{name}"] = values[:-3]
    refused_and_nothing_left(run_cli, tmp_path, counts_file, str(counts_file))


def _npz(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


def _header(shape, descr="<f4"):
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("vectors", "said"),
    [
        (_header((10**12, 2)) + bytes(64), "declares more values"),
        (_header((2, 10**7)) + bytes(8 * 10**7), "times its size"),
        (_header((2,), "|O") + b"cos\nsystem\n(S'false'\ntR.", "pickled"),
    ],
)
def test_vectors_in_an_npz(tmp_path, vectors, said):
    from perturbdiff.embeddings.embedding_tables import EmbeddingTable
    from perturbdiff.runtime.errors import UserError

    names = _header((2,), "<U2") + np.array(["p1", "p2"]).tobytes()
    _npz(tmp_path / "v.npz", names=names, vectors=vectors)
    with pytest.raises(UserError, match=said) as error:
        EmbeddingTable.read(tmp_path / "v.npz")
    assert "\n" not in str(error.value)


# --- numbers that would be wrong without a word


def _chunked(path):
    with h5py.File(path, "r+") as file:
        for name in ("data", "indices"):
            values = file[f"X/{name}"][:]
            del file[f"X/{name}"]
            file.create_dataset(f"X/{name}", data=values, chunks=(128,), compression="gzip")


@pytest.mark.parametrize("name", ["data", "indices"])
def test_a_bit_of_the_place_of_a_chunk(tmp_path, counts_file, run_cli, name):
    """The library does not find the chunk at its place, and reads zeros there."""
    _chunked(counts_file)
    with h5py.File(counts_file) as file:
        address = file[f"X/{name}"].id.get_chunk_info(2).byte_offset
    content = bytearray(counts_file.read_bytes())
    entry = address.to_bytes(8, "little")
    assert content.count(entry) == 1
    place = content.index(entry)
    content[place - 16] ^= 0x80  # of the key before it: where in the array the chunk begins
    counts_file.write_bytes(content)
    refused_and_nothing_left(run_cli, tmp_path, counts_file, f"'X/{name}' lacks some of its values")


def test_a_chunk_that_was_never_written(tmp_path, counts_file, run_cli):
    with h5py.File(counts_file, "r+") as file:
        values = file["X/data"][:]
        del file["X/data"]
        made = file.create_dataset("X/data", values.shape, values.dtype, chunks=(128,))
        made[:128], made[256:] = values[:128], values[256:]
    refused_and_nothing_left(run_cli, tmp_path, counts_file, "'X/data' lacks some of its values")


def test_a_cell_whose_values_are_all_zero(tmp_path, run_cli):
    adata = tiny_counts()
    adata.X.data[adata.X.indptr[7] : adata.X.indptr[8]] = 0
    adata.write_h5ad(tmp_path / "counts.h5ad")
    outcome = run_cli("preprocess", tmp_path / "counts.h5ad", *TINY, "--out", tmp_path / "store")
    refused(outcome, f"cell '{adata.obs_names[7]}'", "all zero", "eliminate_zeros")


def test_cells_without_counts_are_told(tmp_path, run_cli):
    adata = tiny_counts()
    dense = adata.X.toarray()
    dense[[3, 5, 9]] = 0
    adata.X = sp.csr_matrix(dense)
    adata.write_h5ad(tmp_path / "counts.h5ad")
    outcome = run_cli("preprocess", tmp_path / "counts.h5ad", *TINY, "--out", tmp_path / "store")
    assert outcome.code == 0
    assert f"3 of {adata.n_obs} cells have no counts at all" in outcome.err
    assert pd.read_csv(tmp_path / "store/qc.csv")["without_counts"].sum() == 3


def test_a_heap_on_which_the_library_runs_without_end(tmp_path, counts_file, run_cli, monkeypatch):
    monkeypatch.setattr("perturbdiff.io.opening._SECONDS", 1)
    content = bytearray(counts_file.read_bytes())
    start = content.index(b"GCOL")
    size = int.from_bytes(content[start + 8 : start + 16], "little")
    content[start + 64 : start + size] = bytes(size - 64)
    counts_file.write_bytes(content)
    refused_and_nothing_left(run_cli, tmp_path, counts_file, "damaged or incomplete")


def test_a_crash_of_the_library(tmp_path, counts_file, run_cli, monkeypatch):
    def crash(_self):
        os.kill(os.getpid(), 11)

    monkeypatch.setattr("perturbdiff.io.opening._Walk.fault", crash)
    refused_and_nothing_left(run_cli, tmp_path, counts_file, "the HDF5 library crashes on it")


# --- names and labels

LABELS = [
    "$(touch ran)", "`touch ran`", "a;touch ran", "<script>alert(1)</script>", "=1+1", "@SUM(A1)", 'a "quoted" b',
    "it's", "line\nbreak", "comma,semicolon;", "\u202egnp.exe", "../../../etc/passwd", "/dev/null", "ü×Δ", "-rf",
]  # fmt: skip


def test_labels_arrive_unchanged(tmp_path, run_cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adata = tiny_counts()
    rng = np.random.default_rng(0)
    labels = adata.obs["perturbation"].astype(object).to_numpy()
    treated = np.flatnonzero(labels != "control")
    labels[treated] = np.array(LABELS, object)[np.arange(len(treated)) % len(LABELS)]
    adata.obs["perturbation"] = pd.Categorical(labels)
    adata.obs["note"] = pd.Categorical(rng.choice(np.array(LABELS, object), adata.n_obs))
    adata.write_h5ad("counts.h5ad")
    settings = ("--set", "data.extra_obs=[note]")
    assert run_cli("preprocess", "counts.h5ad", *TINY, "--out", "store", *settings).code == 0
    made = run_cli("split", "store", *TINY, "--out", "split.parquet", *SPLIT)
    assert made.code == 0, made.err
    assert run_cli("store", "info", "store").code == 0
    from perturbdiff.store.store import Store

    obs = (
        Store(tmp_path / "store").obs(["cell", "perturbation", "note"]).set_index("cell").loc[adata.obs_names]
    )
    assert list(obs["perturbation"]) == list(labels)
    assert list(obs["note"]) == list(adata.obs["note"])
    assert set(pd.read_parquet("split.parquet")["perturbation"]) == set(labels)
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("name", ["../../../../escaped", "a/b", "..", "x" * 201, "/abs"])
def test_columns_that_name_a_place(tmp_path, run_cli, name):
    adata = tiny_counts()
    if "/" not in name:
        adata.obs[name] = "x"
    adata.write_h5ad(tmp_path / "counts.h5ad")
    if "/" in name:
        with h5py.File(tmp_path / "counts.h5ad", "r+") as file:
            order = [*file["obs"].attrs["column-order"], name]
            file["obs"].attrs["column-order"] = np.array(order, h5py.string_dtype())
    (tmp_path / "out").mkdir()
    arguments = ("--out", tmp_path / "out" / "store", "--set", f'data.extra_obs=["{name}"]')
    refused(run_cli("preprocess", tmp_path / "counts.h5ad", *TINY, *arguments), "data.extra_obs", "rename it")
    nothing_left(tmp_path / "out")


# --- stores


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    from small_store import small_store

    return small_store(tmp_path_factory.mktemp("sound")).store


def _commands(store, folder):
    yield ("store", "info", store)
    yield ("store", "check", store)
    yield ("store", "export", store, "--out", folder / "out" / "x.h5ad")
    yield ("split", store, *TINY, "--out", folder / "out" / "split.parquet", *SPLIT)
    yield ("stats", store, "--out", folder / "out" / "stats")


@pytest.mark.parametrize("harm", ["truncated", "empty", "gone", "list", "linked", "pickle"])
@pytest.mark.parametrize("name", ["X/zarr.json", "X/data/zarr.json", "obs/zarr.json", "var/zarr.json"])
def test_damaged_metadata_of_a_store(sound, tmp_path, run_cli, name, harm):
    store = tmp_path / "store"
    shutil.copytree(sound, store)
    (tmp_path / "out").mkdir()
    document = store / "part-0000.zarr" / name
    if harm == "truncated":
        document.write_bytes(document.read_bytes()[:-20])
    elif harm == "empty":
        document.write_bytes(b"")
    elif harm == "gone":
        document.unlink()
    elif harm == "list":
        document.write_text("[]")
    elif harm == "pickle":
        _changed(document, codecs=[{"name": "numcodecs.pickle"}])
    else:
        document.rename(tmp_path / "moved.json")
        document.symlink_to(tmp_path / "moved.json")
    for command in _commands(store, tmp_path):
        outcome = run_cli(*command)
        assert outcome.code == 2, (command, outcome.err)
        assert "Traceback" not in outcome.err
        assert outcome.err.count("error: ") == 1, outcome.err
        nothing_left(tmp_path / "out")


def test_damaged_statistics_of_genes_in_a_store(sound, tmp_path, run_cli):
    store = tmp_path / "store"
    shutil.copytree(sound, store)
    for chunk in [
        p for p in (store / "part-0000.zarr" / "var").rglob("*") if p.is_file() and p.name.isdigit()
    ]:
        content = bytearray(chunk.read_bytes())
        for k in range(len(content)):
            content[k] ^= 0xFF
        chunk.write_bytes(content)
    outcome = run_cli("store", "check", store)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err


def _manifest(store, change):
    path = store / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest["results"]["store"])
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.update(n_cells=10**12),
        lambda facts: facts["parts"][0].update(n_cells=10**12),
        lambda facts: facts["parts"][0].update(name="../elsewhere"),
        lambda facts: facts["parts"][0].update(name=""),
        lambda facts: facts["parts"][0].pop("name"),
        lambda facts: facts.update(dtype="object of desire"),
        lambda facts: facts.update(n_genes="many"),
    ],
)
def test_a_manifest_that_says_otherwise(sound, tmp_path, run_cli, change):
    store = tmp_path / "store"
    shutil.copytree(sound, store)
    _manifest(store, change)
    outcome = run_cli("store", "info", store)
    refused(outcome, str(store))


def test_links_in_a_store(sound, tmp_path, run_cli):
    store = tmp_path / "store"
    shutil.copytree(sound, store)
    table = store / "conditions.parquet"
    table.rename(tmp_path / "conditions.parquet")
    table.symlink_to(tmp_path / "conditions.parquet")
    refused(run_cli("store", "info", store), str(table), "is a link")


def test_stores_of_zarr_as_the_library_writes_them_are_read(tmp_path, run_cli):
    """Texts, categories, booleans, numbers and a nested group: no ordinary codec is refused."""
    adata = tiny_counts()
    adata.obs["flag"] = True
    adata.uns["nested"] = {"a": np.arange(3), "b": "text", "c": np.array(["x", "y"])}
    adata.obsm["pca"] = np.zeros((adata.n_obs, 2))
    for version in (2, 3):
        path = tmp_path / f"v{version}.zarr"
        with ad.settings.override(zarr_write_format=version):
            adata.write_zarr(path)
        assert isinstance(zarr.open_group(path, mode="r"), zarr.Group)
        assert run_cli("preprocess", path, *TINY, "--out", tmp_path / f"store{version}").code == 0
