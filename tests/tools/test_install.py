"""Every external method is installed for real: needs a package index and some GB each.

``PD_TEST_TOOLS=cpa,state`` restricts it to some. Python 3.10, for CPA, is looked for as a user's would be.
"""

import json
import os
import subprocess

import pytest

from perturbdiff.baselines.external import known_tools, tool_environments

pytestmark = pytest.mark.tools

ONES = [name for name in os.environ.get("PD_TEST_TOOLS", "").split(",") if name] or known_tools.names()


@pytest.mark.parametrize("name", ONES)
def test_installs_from_its_lock(monkeypatch, tmp_path, name):
    monkeypatch.setenv("PD_BASELINES", str(tmp_path))
    tool = known_tools.load(name)
    found = tool_environments.install(tool)
    try:
        record = json.loads((found.folder / "installed.json").read_text())
        print(json.dumps(record))
        assert record["version"] == tool.version
        assert tuple(map(int, record["python"].split(".")[:2])) in tool.pythons
        assert 0.8 * tool.size_gb < record["size_gb"] < 1.1 * tool.size_gb
        ours = tool_environments.clean_environment()
        asks = f"import importlib.metadata as m; print(m.version({tool.package!r}))"
        said = subprocess.run(
            [found.python, "-c", asks], env=ours, capture_output=True, check=True, text=True
        )
        assert said.stdout.strip() == tool.version
        check = ["uv", "pip", "check", "--python", found.python]
        done = subprocess.run(check, env=ours, capture_output=True, check=False, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        tool_environments.remove(tool)
