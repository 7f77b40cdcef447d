"""The direct reader against zarr's own, and what it says of damaged files."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zarr

from perturbdiff.runtime.errors import UserError
from perturbdiff.store.store_writer import ShardWriter
from perturbdiff.store.zarr_shards import ShardedReader

CHUNK, SHARD = 10, 40


def written(folder, values, pieces=(7, 90)):
    array = ShardWriter(folder / "x", len(values), values.dtype, CHUNK, SHARD)
    for piece in np.split(values, pieces):
        array.append(piece)
    array.close()
    return folder / "x"


@pytest.fixture(params=[np.uint16, np.int16, np.uint32, np.float32, np.int64])
def values(request):
    values = np.random.default_rng(0).integers(0, 100, 233).astype(request.param)
    values[80:120] = 0  # a shard, and chunks of another, that zarr would leave out by default
    values[150:165] = 0
    return values


def test_slices_equal_zarr(tmp_path, values):
    path = written(tmp_path, values)
    reader, array = ShardedReader(path), zarr.open_array(path, mode="r")
    np.testing.assert_array_equal(array[:], values)
    rng = np.random.default_rng(1)
    for start, stop in [
        (0, 233),
        (0, 1),
        (232, 233),
        (40, 80),
        (5, 5),
        *np.sort(rng.integers(0, 234, (60, 2))),
    ]:
        out = np.full(stop - start, 7, values.dtype)
        reader.read(int(start), int(stop), out)
        np.testing.assert_array_equal(out, values[start:stop])


def test_many_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("perturbdiff.store.zarr_shards._OPEN_FILES", 2)
    values = np.arange(5000, dtype=np.uint16)
    reader = ShardedReader(written(tmp_path, values))

    def read(start):
        out = np.empty(100, np.uint16)
        reader.read(start, start + 100, out)
        return (out == values[start : start + 100]).all()

    starts = np.random.default_rng(0).integers(0, 4900, 400)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, starts.tolist()))


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_other_layouts_are_left_to_zarr(tmp_path, compressors):
    values = np.arange(100, dtype=np.uint16)
    array = zarr.create_array(
        tmp_path / "y", shape=(100,), dtype="uint16", chunks=(10,), compressors=compressors
    )
    array[:] = values
    out = np.empty(33, np.uint16)
    ShardedReader(tmp_path / "y").read(20, 53, out)
    np.testing.assert_array_equal(out, values[20:53])


@pytest.mark.parametrize("harm", ["gone", "short", "cut", "garbage"])
def test_damage_is_a_user_error(tmp_path, harm):
    values = np.random.default_rng(0).integers(0, 60_000, 233).astype(np.uint16)
    path = written(tmp_path, values)
    shard = path / "c" / "1"
    content = shard.read_bytes()
    if harm == "gone":
        shard.unlink()
    else:
        changed = {"short": content[:20], "cut": content[30:], "garbage": b"\xee" * 60 + content[60:]}
        shard.write_bytes(changed[harm])
    with pytest.raises(
        UserError, match=r"x: cannot be read, it is damaged or incomplete .*run preprocess again"
    ):
        ShardedReader(path).read(30, 90, np.empty(60, np.uint16))
