"""What every mistake of a user must lead to."""

from perturbdiff.runtime.errors import EXIT_USER_ERROR


def refused(outcome, *words):
    """Assert a user error: its code, one line, each of ``words`` in it, no traceback."""
    assert outcome.code == EXIT_USER_ERROR, outcome.err
    said = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, outcome.err
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in said[0], said[0]


def nothing_left(folder, *expected):
    """Assert that ``folder`` holds only the ``expected`` names."""
    assert sorted(p.name for p in folder.iterdir()) == sorted(expected)
