"""Fills a network's expected changes: measured where there are training cells, else predicted from vectors."""

from __future__ import annotations

import numpy as np
import torch

from perturbdiff.embeddings.kernel_ridge import fit
from perturbdiff.model.expected_changes import PredictedChanges


@torch.no_grad()
def fill(expected: PredictedChanges, vectors: np.ndarray, means: np.ndarray, measured: np.ndarray) -> None:
    """Set the expected changes of all labels.

    Parameters
    ----------
    expected
        Of the network. Row i + 1 belongs to label i.
    vectors
        [labels, e].
    means
        Mean change of each label over its training contexts, log1p [labels, G]; zeros for the control.
    measured
        bool [labels]: which labels have a mean change. Others get the change that is predicted from their vectors,
        except the control.
    """
    ids = torch.from_numpy(np.flatnonzero(measured) + 1)
    regression = fit(vectors[measured], means[measured])
    for buffer, known in ((expected.changes, means[measured]), (expected.left_out, regression.left_out)):
        buffer[1:] = torch.from_numpy(regression(vectors)).to(buffer)
        buffer[ids] = torch.from_numpy(known).to(buffer)
    expected.measured.zero_()[ids] = 1.0
    expected.explained.fill_(regression.explained)


@torch.no_grad()
def extend(expected: PredictedChanges, known: np.ndarray, new: np.ndarray) -> None:
    """Add labels by their vectors ``new`` [n, e]; ``known`` [ids, e] are those of the labels so far."""
    measured = expected.measured.cpu().numpy() > 0
    regression = fit(known[measured], expected.changes.cpu().numpy()[measured].astype(np.float64))
    expected.add(torch.from_numpy(regression(new)))
