"""Arrays that are appended to against the same arrays written by zarr, byte for byte, and parts made of them."""

import hashlib
import tracemalloc
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from perturbdiff.store.store_writer import PartWriter, ShardWriter, TextWriter

CHUNK, SHARD = 10, 40
TEXTS = ["", "a", "é", "cell-1", "a longer name of a cell\n", "细胞"]


def by_zarr(path, values, shard=SHARD):
    """Write an array as `ShardWriter` does, with zarr alone."""
    text = values.dtype.kind not in "biuf"
    codec = ZstdCodec(level=2) if text else BloscCodec(cname="zstd", clevel=2, shuffle="shuffle")
    array = zarr.create_array(
        path,
        shape=values.shape,
        dtype=str if text else values.dtype,
        chunks=(CHUNK,),
        shards=(shard,),
        compressors=[codec, Crc32cCodec()],
        fill_value="" if text else 0,
        config={"write_empty_chunks": True},
    )
    array[:] = values


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def written(writer, values, pieces):
    for piece in np.split(values, pieces):
        writer.append(piece)
    writer.close()
    return writer


@pytest.mark.parametrize(
    "dtype", ["uint8", "bool", "uint16", "int16", "uint32", "int64", "float32", "float64"]
)
@pytest.mark.parametrize("length", [233, 240, 199, 41, 40, 3])
def test_bytes_equal_zarr(tmp_path, dtype, length):
    values = np.random.default_rng(0).integers(0, 100, length).astype(dtype)
    values[10:35] = 0
    writer = written(ShardWriter(tmp_path / "a", length, values.dtype, CHUNK, SHARD), values, (1, 7, 7, 39))
    by_zarr(tmp_path / "b", values, min(SHARD, -(-length // CHUNK) * CHUNK))
    ours = contents(tmp_path / "a")
    assert ours == contents(tmp_path / "b")
    assert writer.checksums == {n: hashlib.sha256(b).hexdigest() for n, b in ours.items() if n != "zarr.json"}


@pytest.mark.parametrize(("name", "level", "shuffle"), [("lz4hc", 4, True), ("zstd", 2, False)])
def test_other_codecs_equal_zarr(tmp_path, name, level, shuffle):
    values = np.sort(np.random.default_rng(0).integers(0, 2000, 233)).astype(np.int16)
    writer = ShardWriter(tmp_path / "a", 233, values.dtype, CHUNK, SHARD, codec=name, shuffle=shuffle)
    written(writer, values, (50,))
    codec = BloscCodec(cname=name, clevel=level, shuffle="shuffle" if shuffle else "noshuffle")
    array = zarr.create_array(
        tmp_path / "b",
        shape=(233,),
        dtype=values.dtype,
        chunks=(CHUNK,),
        shards=(SHARD,),
        compressors=[codec, Crc32cCodec()],
        fill_value=0,
    )
    array[:] = values
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@given(st.lists(st.integers(0, 90), max_size=8), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_pieces_of_any_size(tmp_path_factory, sizes, chunk, chunks):
    folder = tmp_path_factory.mktemp("x")
    values = np.arange(sum(sizes), dtype=np.int32)
    writer = ShardWriter(folder / "a", len(values), values.dtype, chunk, chunk * chunks)
    written(writer, values, np.cumsum(sizes[:-1]) if sizes else [])
    np.testing.assert_array_equal(zarr.open_array(folder / "a", mode="r")[:], values)


@pytest.mark.parametrize("length", [73, 70, 4, 0])
def test_texts_equal_zarr(tmp_path, length):
    values = np.random.default_rng(0).choice(np.array(TEXTS, object), length)
    writer = TextWriter(tmp_path / "a", length, CHUNK)
    for piece in np.split(values, (3, 3, 30)):
        writer.append(pd.Index(piece, dtype=object))
    writer.close()
    assert list(zarr.open_array(tmp_path / "a", mode="r")[:]) == list(values)
    if length:
        by_zarr(tmp_path / "b", values, -(-length // CHUNK) * CHUNK)
        mine, theirs = contents(tmp_path / "a"), contents(tmp_path / "b")
        assert mine["c/0"] == theirs["c/0"]
        assert list(mine) == ["zarr.json", "c/0"] or sorted(mine) == ["c/0", "zarr.json"]
        assert writer.checksums == {"c/0": hashlib.sha256(mine["c/0"]).hexdigest()}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), "pandas", "sliced", "chunked"])
def test_texts_of_any_source(tmp_path, kind):
    writer = TextWriter(tmp_path / "a", len(TEXTS), 4)
    if kind == "pandas":
        writer.append(pd.Index(TEXTS, dtype="string[pyarrow]"))
    elif kind == "sliced":
        writer.append(pa.array(["x", *TEXTS, "y"], pa.large_string()).slice(1, len(TEXTS)))
    elif kind == "chunked":
        writer.append(pa.chunked_array([TEXTS[:2], TEXTS[2:]], pa.large_string()))
    else:
        writer.append(pa.array(TEXTS, kind))
    writer.close()
    assert list(zarr.open_array(tmp_path / "a", mode="r")[:]) == TEXTS


def test_announced_length_and_type_are_checked(tmp_path):
    writer = ShardWriter(tmp_path / "x", 20, np.dtype(np.uint16), CHUNK, SHARD)
    writer.append(np.arange(19, dtype=np.uint16))
    with pytest.raises(TypeError):
        writer.append(np.array([70_000]))
    with pytest.raises(RuntimeError, match="19 values written where 20"):
        writer.close()
    texts = TextWriter(tmp_path / "t", 2, CHUNK)
    texts.append(["a", "b", "c"])
    with pytest.raises(RuntimeError, match="3 values written where 2"):
        texts.close()


def test_a_flipped_bit_is_noticed_by_zarr(tmp_path):
    values = np.random.default_rng(0).integers(0, 9, 4000).astype(np.uint16)
    written(ShardWriter(tmp_path / "a", 4000, values.dtype, 1000, 4000), values, ())
    file = tmp_path / "a" / "c" / "0"
    content = bytearray(file.read_bytes())
    content[200] ^= 4
    file.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_array(tmp_path / "a", mode="r")[:]


def frames(rng, sizes):
    """Yield obs and CSR rows of blocks."""
    start = 0
    for size in sizes:
        obs = pd.DataFrame(
            {
                "batch": pd.Categorical.from_codes(rng.integers(-1, 2, size), ["d1", "d2"]),
                "stage": pd.Categorical.from_codes(rng.integers(0, 200, size), list(range(200))),
                "n_counts": rng.random(size).astype(np.float32),
                "source_row": np.arange(start, start + size),
                "doublet": rng.random(size) < 0.5,
                "age": pd.array([None, *range(size - 1)], "Int32")[:size],
                "note": pd.array([f"n{i}" for i in range(size)], object),
            },
            index=pd.Index([f"cell{i}" for i in range(start, start + size)], dtype=object),
        )
        start += size
        yield obs, sparse.random(size, 30, 0.2, "csr", np.float32, rng, lambda n: rng.integers(1, 9, n))


def test_part_is_the_anndata_that_was_appended(tmp_path, monkeypatch):
    monkeypatch.setattr("perturbdiff.store.store_writer._OBS_CHUNK", 16)
    blocks = list(frames(np.random.default_rng(0), (30, 1, 50)))
    values = sum(x.nnz for _, x in blocks)
    part = PartWriter(
        tmp_path / "p.zarr",
        num_cells=81,
        num_values=values,
        num_genes=30,
        mean_values=values / 81,
        rows_per_shard=64,
        dtype=np.dtype(np.uint16),
        index_dtype=np.dtype(np.int16),
    )
    for obs, x in blocks:
        part.append(obs, x.indptr, x.indices.astype(np.int16), x.data.astype(np.uint16))
    part.close(pd.DataFrame({"mean": np.arange(30.0)}, index=[f"g{j}" for j in range(30)]), {"a": {"b": 1}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ad.read_zarr(tmp_path / "p.zarr")
    expected = pd.concat([obs for obs, _ in blocks])
    expected["age"] = expected["age"].astype(float)
    texts = {"note": object}
    pd.testing.assert_frame_equal(found.obs.astype(texts), expected.astype(texts), check_index_type=False)
    assert (sparse.vstack([x for _, x in blocks]) != found.X).nnz == 0
    assert found.uns["a"]["b"] == 1
    assert list(found.var["mean"]) == list(range(30))
    files = contents(tmp_path / "p.zarr")
    assert part.checksums == {n: hashlib.sha256(b).hexdigest() for n, b in files.items()}
    assert all((n.split("/c/")[-1] == "0" or n.startswith("X/")) for n in files if "/c/" in n)


@pytest.mark.parametrize(
    ("values", "files"), [(0, 0), (3, 1), (200, 1), (290, 1), (310, 2), (801, 4), (890, 4)]
)
def test_files_of_a_part_are_even(tmp_path, values, files):
    part = PartWriter(
        tmp_path / "p.zarr",
        num_cells=1,
        num_values=values,
        num_genes=values,
        mean_values=1.0,
        rows_per_shard=200,
        rows_per_chunk=10,
        dtype=np.dtype(np.uint16),
        index_dtype=np.dtype(np.int16),
    )
    obs = pd.DataFrame(index=pd.Index(["a"], dtype=object))
    part.append(obs, np.array([0, values]), np.arange(values, dtype="i2"), np.ones(values, "u2"))
    part.close(pd.DataFrame(index=[f"g{j}" for j in range(values)]), {})
    sizes = [p.stat().st_size for p in (tmp_path / "p.zarr" / "X" / "data" / "c").glob("*")]
    assert len(sizes) == files
    assert not files or max(sizes) < 1.3 * min(sizes)
    assert ad.read_zarr(tmp_path / "p.zarr").X.sum() == values


def test_blocks_of_another_kind_are_refused(tmp_path):
    (first, x), (second, _) = frames(np.random.default_rng(0), (5, 5))
    part = PartWriter(
        tmp_path / "p.zarr",
        num_cells=10,
        num_values=9,
        num_genes=30,
        mean_values=1.0,
        rows_per_shard=64,
        dtype=np.dtype(np.float32),
        index_dtype=np.dtype(np.int32),
    )
    part.append(first, x.indptr, x.indices, x.data)
    with pytest.raises(ValueError, match="columns"):
        part.append(second.drop(columns="age"), x.indptr, x.indices, x.data)
    second["batch"] = second["batch"].cat.rename_categories({"d1": "d3"})
    with pytest.raises(ValueError, match="categories of obs column 'batch' change"):
        part.append(second, x.indptr, x.indices, x.data)
    part.release()


def test_memory_is_a_chunk_not_a_shard(tmp_path):
    block = np.random.default_rng(0).integers(0, 60_000, 200_000).astype(np.uint16)
    names = [f"cell{i}" for i in range(20_000)]
    tracemalloc.start()
    numbers = ShardWriter(tmp_path / "a", 20 * len(block), block.dtype, 10_000, 1 << 30)
    texts = TextWriter(tmp_path / "t", 20 * len(names), 30_000)
    for _ in range(20):
        numbers.append(block)
        texts.append(names)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    numbers.close()
    texts.close()
    assert (tmp_path / "a/c/0").stat().st_size > 7_000_000
    assert peak < 4_000_000
