"""Sparse counts to dense log1p values, against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from perturbdiff.loading.batches import dense_log1p


@pytest.mark.parametrize("dtype", ["int16", "int32", "float32"])
def test_values_are_those_of_scipy(dtype):
    rng = np.random.default_rng(0)
    counts = sp.random(30, 50, 0.2, "csr", np.float32, rng)
    counts.data = np.ceil(counts.data * 60_000).astype(np.float32)  # most do not fit int16 with a sign
    counts.data[::7] = 65535
    counts = sp.vstack(
        [counts[:3], sp.csr_matrix((1, 50), dtype=np.float32), counts[3:]], "csr"
    )  # an empty cell
    depth = np.asarray(counts.sum(1)).ravel().astype(np.float32) + 5
    expected = np.log1p(counts.toarray() * (1e4 / depth)[:, None])
    values = counts.data.astype(np.uint16).view(np.int16) if dtype == "int16" else counts.data.astype(dtype)
    found = dense_log1p(
        torch.from_numpy(values), torch.from_numpy(counts.indices.astype(np.int16)),
        torch.from_numpy(counts.indptr), torch.from_numpy(1e4 / depth), genes=50,
    )  # fmt: skip
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_cells_without_counts_are_zero():
    nothing = torch.zeros(0, dtype=torch.int16)
    found = dense_log1p(nothing, nothing, torch.zeros(4, dtype=torch.int64), torch.ones(3), genes=5)
    assert torch.equal(found, torch.zeros(3, 5))
