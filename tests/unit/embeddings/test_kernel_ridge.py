"""Kernel ridge regression against a direct solution, and what it does with good and with useless vectors."""

import numpy as np
import pytest

from perturbdiff.embeddings.kernel_ridge import fit


def direct(kernel, values, ridge):
    """Weights and intercept of min ||y - K a - b||² + ridge aᵀ K a by one linear system."""
    n = len(kernel)
    system = np.block([[kernel + ridge * np.eye(n), np.ones((n, 1))], [np.ones((1, n)), np.zeros((1, 1))]])
    found = np.linalg.solve(system, np.vstack([values, np.zeros((1, values.shape[1]))]))
    return found[:-1], found[-1]


def screen(noise, perturbations=40, seed=0):
    """Vectors [n, 5] and changes [n, 30] that follow from them, and the same for 20 further perturbations."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(perturbations + 20, 5))
    changes = vectors @ rng.normal(size=(5, 30)) + rng.normal(size=30)
    told = vectors if noise is None else rng.normal(size=vectors.shape)
    changes = changes + (noise or 0.1) * rng.normal(size=changes.shape)
    return told[:-20], changes[:-20], told[-20:], changes[-20:]


def test_fit_and_predictions_without_one_are_those_of_the_linear_system():
    vectors, changes, new, _ = screen(None, perturbations=12)
    order = np.argsort(vectors[:, 0])  # that of the weights
    vectors, changes = vectors[order], changes[order]
    found = fit(vectors, changes)

    def kernel(one, other):
        return np.exp(-((one[:, None] - other) ** 2).sum(-1) / (2 * found.distance**2))

    ridge = np.median(
        (changes - found(vectors)) / found.weights
    )  # the stationary point: residual = ridge · weight
    weights, intercept = direct(kernel(vectors, vectors), changes, ridge)
    np.testing.assert_allclose(found(new), kernel(new, vectors) @ weights + intercept, atol=1e-6)
    for one in range(len(vectors)):
        rest = np.arange(len(vectors)) != one
        weights, intercept = direct(kernel(vectors[rest], vectors[rest]), changes[rest], ridge)
        alone = kernel(vectors[one : one + 1], vectors[rest]) @ weights + intercept
        np.testing.assert_allclose(found.left_out[one], alone[0], atol=1e-5)


def test_vectors_that_say_all_are_used_and_useless_ones_are_not():
    vectors, changes, new, truth = screen(None)
    spread = np.mean((truth - changes.mean(0)) ** 2)
    found = fit(vectors, changes)
    assert np.mean((truth - found(new)) ** 2) < 0.1 * spread
    alone = [np.delete(changes, i, 0).mean(0) for i in range(len(changes))]
    left = np.sum((changes - found.left_out) ** 2) / np.sum((changes - alone) ** 2)
    assert found.explained == pytest.approx(1 - left)
    assert found.explained > 0.8
    vectors, changes, new, truth = screen(0.1)
    found = fit(vectors, changes)
    assert np.mean((truth - found(new)) ** 2) < 1.05 * spread
    assert 0 <= found.explained < 0.1


@pytest.mark.parametrize("vectors", [np.zeros((6, 2)), np.eye(2)])
def test_too_few_different_vectors_give_the_mean_change(vectors):
    changes = np.random.default_rng(0).normal(size=(len(vectors), 3))
    np.testing.assert_allclose(fit(vectors, changes)(vectors[:1])[0], changes.mean(0))


def test_without_its_own_change_the_mean_is_that_of_the_others():
    found = fit(np.eye(2), np.array([[1.0], [4.0]]))
    np.testing.assert_allclose(found.left_out, [[4.0], [1.0]])


def test_equal_vectors_count_once_and_are_left_out_together():
    vectors, changes, new, _ = screen(None, perturbations=12)
    twice, copies = np.repeat(vectors, 2, axis=0), np.repeat(changes, 2, axis=0)
    copies[::2] += 1
    copies[1::2] -= 1
    one, two = fit(vectors, changes), fit(twice, copies)
    np.testing.assert_allclose(two(new), one(new), atol=1e-8)
    np.testing.assert_allclose(two.left_out, np.repeat(one.left_out, 2, axis=0), atol=1e-8)
