"""What importing parts of the package must not pull in: a bundle samples without the libraries of training."""

import subprocess
import sys

import pytest


def imported(module, names):
    """Which of ``names`` a fresh Python has loaded after importing ``module``."""
    code = f"import sys, {module}; print(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "perturbdiff.sampling",
            ("tensorboard", "scanpy"),
        ),
        ("perturbdiff.embeddings", ("transformers", "huggingface_hub")),
        ("perturbdiff", ("torch", "numpy", "pandas", "anndata", "perturbdiff.api")),
        ("perturbdiff.api.data_functions", ("torch", "matplotlib")),
        ("perturbdiff.cli.main", ("torch", "numpy", "transformers")),
        ("perturbdiff.store.store_head", ("torch", "anndata", "zarr", "pandas", "dask", "scipy", "numba")),
        (
            "perturbdiff.training.training_stages",
            ("torch._dynamo", "triton", "anndata", "dask", "matplotlib"),
        ),
        (
            "perturbdiff.training.fit",
            ("torch._dynamo", "triton", "anndata", "dask", "matplotlib", "tensorboard"),
        ),
    ],
)
def test_imports_stay_light(module, names):
    assert imported(module, names) == []
