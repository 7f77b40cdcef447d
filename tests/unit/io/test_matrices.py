"""Row ranges of any stored matrix: the same blocks whatever the storage, the range and the limit."""

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbdiff.io import derived_matrices, matrices
from perturbdiff.io.derived_matrices import CscMatrix
from perturbdiff.io.matrices import CsrMatrix, DenseMatrix


class Unnamed:
    """An array that reads like a dataset of HDF5 or Zarr and notes what it was asked for."""

    def __init__(self, values, chunks=None):
        self.values, self.chunks = values, chunks
        self.shape, self.dtype, self.asked = values.shape, values.dtype, []

    def __getitem__(self, key):
        self.asked.append(key)
        return self.values[key].copy()


def group(matrix, dtype=np.float32, index=np.int32, chunks=None):
    indices, indptr = matrix.indices.astype(index), matrix.indptr.astype(index)
    parts = {"data": matrix.data.astype(dtype), "indices": indices, "indptr": indptr}
    return {name: Unnamed(values, chunks and (chunks[0] * chunks[1],)) for name, values in parts.items()}


def opened(dense, storage, scratch, index=np.int32, chunks=None):
    if storage == "dense":
        return DenseMatrix(Unnamed(dense, chunks))
    plain = dense.astype(np.float64)
    if storage == "csr":
        return CsrMatrix(group(sp.csr_matrix(plain), dense.dtype, index, chunks), dense.shape)
    return CscMatrix(group(sp.csc_matrix(plain), dense.dtype, index, chunks), dense.shape, scratch)


def joined(matrix, start, stop, limit):
    """Read a range, check that its blocks follow each other, and return it dense."""
    rows, row = [np.empty((0, matrix.shape[1]))], start
    for block in matrix.blocks(start, stop, limit):
        assert block.start == row
        assert block.stop > row
        assert block.indptr.dtype == np.int64
        assert block.indices.dtype == np.int32
        assert block.data.dtype in (np.float32, np.float64)
        assert block.indptr[0] == 0
        shape = (block.stop - block.start, matrix.shape[1])
        rows.append(sp.csr_matrix((block.data, block.indices, block.indptr), shape).toarray())
        row = block.stop
    assert row == (matrix.shape[0] if stop is None else stop)
    return np.vstack(rows)


@st.composite
def cases(draw):
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from(["u1", "u2", "i4", "u4", "i8", "f2", "f4", "f8", ">f4", "?"]))
    largest = draw(st.sampled_from([1, 200])) if np.dtype(dtype).itemsize <= 2 else 100_000
    density = draw(st.sampled_from([0.0, 0.1, 1.0]))
    dense = (rng.integers(0, largest + 1, (rows, columns)) * (rng.random((rows, columns)) < density)).astype(
        dtype
    )
    dense[draw(st.integers(0, rows - 1))] = 0
    start = draw(st.integers(0, rows - 1))
    stop = draw(st.one_of(st.none(), st.integers(start + 1, rows)))
    return dense, start, stop, draw(st.integers(1, 200))


@settings(max_examples=80, deadline=None)
@given(
    cases(),
    st.sampled_from(["csr", "csc", "dense"]),
    st.sampled_from([np.int32, np.int64]),
    st.one_of(st.none(), st.tuples(st.integers(1, 50), st.integers(1, 40))),
)
def test_any_storage_and_range_reads_the_same(tmp_path_factory, case, storage, index, chunks):
    dense, start, stop, limit = case
    matrix = opened(dense, storage, tmp_path_factory.mktemp("scratch"), index, chunks)
    matrix.prepare()
    np.testing.assert_array_equal(joined(matrix, start, stop, limit), dense[start:stop].astype(np.float64))
    assert matrix.num_values == (dense.size if storage == "dense" else np.count_nonzero(dense))


def some(rows=50, columns=20):
    rng = np.random.default_rng(0)
    return rng.poisson(0.7, (rows, columns)).astype(np.float32)


def test_row_pointers_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr(matrices, "_POINTERS_PER_READ", 7)
    np.testing.assert_array_equal(joined(opened(some(), "csr", None), 3, 47, 100), some()[3:47])


def test_csc_is_converted_once_in_pieces_and_then_read_by_others(tmp_path, monkeypatch):
    monkeypatch.setattr(derived_matrices, "_SORTED_AT_ONCE", 100)
    first = opened(some(), "csc", tmp_path)
    with pytest.raises(RuntimeError, match="prepare"):
        next(first.blocks())
    first.prepare()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["by-row", "data.npy", "indices.npy", "indptr.npy"]
    first.group = None
    first.prepare()
    other = opened(some() * 0, "csc", tmp_path)
    np.testing.assert_array_equal(joined(other, 5, 31, 40), some()[5:31])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("indices", -1, "outside its shape"),
        ("indices", 50, "outside its shape"),
        ("indptr", 10_000, "do not ascend"),
    ],
)
def test_a_damaged_csc_matrix_leaves_nothing(tmp_path, name, value, message):
    parts = group(sp.csc_matrix(some()))
    parts[name].values[5] = value
    matrix = CscMatrix(parts, (50, 20), tmp_path / "s")
    with pytest.raises(ValueError, match=message):
        matrix.prepare()
    assert list((tmp_path / "s").iterdir()) == []


def test_values_beyond_the_pointers_are_not_read(tmp_path):
    parts = group(sp.csc_matrix(some()))
    for name in ("data", "indices"):
        parts[name] = Unnamed(np.append(parts[name].values, parts[name].values[:9]))
    matrix = CscMatrix(parts, (50, 20), tmp_path)
    matrix.prepare()
    np.testing.assert_array_equal(joined(matrix, 0, None, 64), some())


def test_an_interrupted_conversion_starts_over(tmp_path, monkeypatch):
    monkeypatch.setattr(derived_matrices, "_SORTED_AT_ONCE", 100)
    matrix = opened(some(), "csc", tmp_path)
    (tmp_path / ".by-row.partial").mkdir()
    (tmp_path / ".by-row.partial" / "rows-0000.bin").write_bytes(b"left by a killed run")
    matrix.prepare()
    np.testing.assert_array_equal(joined(matrix, 0, None, 64), some())


def test_integers_are_float32_where_that_is_exact():
    small, large = some().astype(np.int32), some().astype(np.int64)
    large[4, 4] = (1 << 24) + 1
    assert next(opened(small, "csr", None).blocks()).data.dtype == np.float32
    block = next(opened(large, "dense", None).blocks())
    assert block.data.dtype == np.float64
    assert block.data.max() == (1 << 24) + 1


def test_high_narrow_chunks_are_decoded_once():
    dense = some(400, 60)
    stored = Unnamed(dense, (200, 7))
    np.testing.assert_array_equal(joined(DenseMatrix(stored), 0, None, 1000), dense)
    assert all(rows.stop - rows.start == 200 and columns.start % 7 == 0 for rows, columns in stored.asked)
    assert all(columns.stop - columns.start == 7 for _, columns in stored.asked)
    assert len(stored.asked) == 2 * 9


def test_large_chunks_of_a_sparse_matrix_are_decoded_once():
    dense = some(300, 30)
    parts = group(sp.csr_matrix(dense), chunks=(10, 50))
    np.testing.assert_array_equal(joined(CsrMatrix(parts, dense.shape), 20, 280, 300), dense[20:280])
    spans = parts["data"].asked
    assert all(span.stop % 500 == 0 for span in spans)
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("indices", -1, "outside its shape"),
        ("indices", 20, "outside its shape"),
        ("indptr", 10_000, "descending row pointers"),
    ],
)
def test_a_damaged_matrix_is_noticed(name, value, message):
    parts = group(sp.csr_matrix(some()))
    parts[name].values[5] = value
    with pytest.raises(ValueError, match=message):
        list(CsrMatrix(parts, (50, 20)).blocks())


def test_values_that_are_no_numbers():
    parts = group(sp.csr_matrix(some()))
    parts["data"].values = parts["data"].values.astype("S3")
    with pytest.raises(ValueError, match="not numbers"):
        list(CsrMatrix(parts, (50, 20)).blocks())
