"""What importing parts of the package must not pull in: a bundle samples without the libraries of training."""

import json
import subprocess
import sys

import pytest

LIGHT = {
    "perturbdiff": ("torch", "numpy", "pandas", "anndata", "perturbdiff.api"),
    "perturbdiff.cli.main": ("torch", "numpy", "transformers"),
    "perturbdiff.store.store_head": ("torch", "anndata", "zarr", "pandas", "dask", "scipy", "numba"),
    "perturbdiff.checkpoint.bundle_record": ("torch", "anndata", "zarr", "pandas", "huggingface_hub"),
    "perturbdiff.checkpoint.hub": ("torch", "anndata", "huggingface_hub"),
    "perturbdiff.training.training_stages": ("torch._dynamo", "triton", "anndata", "dask", "matplotlib"),
    "perturbdiff.training.fit": ("torch._dynamo", "triton", "anndata", "dask", "matplotlib", "tensorboard"),
    "perturbdiff.api.data_functions": ("torch", "matplotlib"),
    "perturbdiff.embeddings": ("transformers", "huggingface_hub"),
    "perturbdiff.sampling": ("tensorboard", "scanpy"),
}
CHAINS = (list(LIGHT)[:7], list(LIGHT)[7:])
"""Modules that one Python imports one after the other: none is allowed less than those before it."""
CODE = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    found[name] = list(sys.modules)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """What is loaded after the import of each module."""
    found = {}
    for chain in CHAINS:
        command = [sys.executable, "-c", CODE, *chain]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found |= json.loads(done.stdout)
    return found


@pytest.mark.parametrize("module", LIGHT)
def test_imports_stay_light(loaded, module):
    assert [name for name in LIGHT[module] if name in loaded[module]] == []
