"""Published data sets that tests use; they are not part of the repository."""

from pathlib import Path

import pytest

from perturbdiff import datasets
from perturbdiff.runtime.errors import UserError


def published(name: str) -> Path:
    """Return the file of a registered data set, or skip the test and say which file it needs."""
    try:
        return datasets.find(name)
    except UserError as error:
        pytest.skip(str(error))
