"""The page of risks names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_each_risk_has_a_test():
    rows = re.findall(r"^\| .*\|$", (ROOT / "lab" / "risks.md").read_text(), re.MULTILINE)[2:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", row)
        assert named, row
        for path, name in named:
            assert re.search(rf"^ *def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
