"""An external tool that is a wheel of one line, in a registry of its own."""

import hashlib
import zipfile

from perturbdiff.baselines.external import known_tools

DESCRIPTION = """
title: Fake
package: Fake_Tool
python: ">=3.11,<3.15"
platforms: [linux-x86_64, linux-aarch64, darwin-arm64]
licence: MIT
url: https://example.org/fake
citation: "Nobody 2025"
probe: import fake_tool
size_gb: 0.001
determinism: same seed, same predictions
settings:
  epochs: [400, 30, passes over the training cells]
  lr: [1.0e-3, 1.0e-2, learning rate]
  norm: [true, false, normalise]
  loss: [nb, gauss, likelihood]
"""


def make_wheel(folder, code="VALUE = 1\n"):
    """Write fake_tool-1.0; return the SHA-256 of the wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fake_tool-1.0-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: fake-tool\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content = {"fake_tool.py": code} | {f"fake_tool-1.0.dist-info/{k}": v for k, v in about.items()}
    record = "".join(f"{name},,\n" for name in [*content, "fake_tool-1.0.dist-info/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in (content | {"fake_tool-1.0.dist-info/RECORD": record}).items():
            wheel.writestr(zipfile.ZipInfo(name), text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_registry(folder, description=DESCRIPTION, digest="0" * 64, name="fake"):
    """Write a registry with one tool and stand-ins of the adapters' side; return its folder of descriptions."""
    (folder / "tools").mkdir(parents=True, exist_ok=True)
    (folder / "adapters").mkdir(exist_ok=True)
    (folder / "adapters" / "perturbdiff_adapter.py").write_text("")
    (folder / "tools" / f"{name}.yaml").write_text(description)
    (folder / "tools" / f"{name}.lock").write_text(f"fake-tool==1.0 \\\n    --hash=sha256:{digest}\n")
    return folder / "tools"


def load(monkeypatch, folder, name="fake"):
    """Load a tool from a registry made above."""
    monkeypatch.setattr(known_tools, "FOLDER", folder)
    known_tools._load.cache_clear()
    return known_tools.load(name)


def serve(monkeypatch, folder):
    """Load the tool. It can be installed from a folder alone, and no Python is downloaded."""
    digest = make_wheel(folder / "wheels")
    given = {"UV_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "wheels"), "UV_PYTHON_DOWNLOADS": "never"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return load(monkeypatch, make_registry(folder / "registry", digest=digest))
