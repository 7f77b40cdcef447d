"""Seconds and memory of importing full-size checkpoints in the layout of the authors' released code.

    python benchmarks/import_checkpoint.py [--folder DIR] [--only NAME]

Files with random weights are made as Lightning leaves them: averaged and raw weights and the optimiser's two
moments, four tensors for each that is imported. Each is then imported in a process of its own:

load     `load_released`: the network, in memory
import   `import-checkpoint`: hash of the file, network, bundle on disk
peak     largest resident memory of the process, pages of the file that were looked at included; `base` is that
         of a process that has loaded the same libraries and done nothing
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from released_layout import BY_NAME, ReleasedLayout

LABELS = (91, 18, 12)
FULL = {"width": 512, "depth": 8, "heads": 8, "labels": LABELS}
LAYOUTS = {
    "scratch": ReleasedLayout(genes=2000, **FULL),
    "pretrained": ReleasedLayout(genes=12626, datasets=BY_NAME, **FULL),
    "replaced": ReleasedLayout(genes=2000, inner=12626, datasets=BY_NAME, **FULL),
}
WORK = {
    "base": "",
    "load": "size = sum(p.numel() for p in load_released(file).parameters())",
    "import": "import_checkpoint(file, out, genes=genes)",
}
PROCESS = """
import json, sys, time
from pathlib import Path
from perturbdiff.released import load_released
from perturbdiff.released.checkpoint_import import import_checkpoint
file, genes, out = map(Path, sys.argv[1:])
size, start, used = None, time.perf_counter(), time.process_time()
{work}
seconds, cpu = time.perf_counter() - start, time.process_time() - used
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
found = {{"seconds": seconds, "cpu": cpu, "peak": int(status["VmHWM"].split()[0]) / 2**20, "parameters": size}}
print(json.dumps(found))
"""


def parameters(layout: ReleasedLayout) -> int:
    """Return the number of values in the layout's tensors."""
    total = 0
    for shape in layout.shapes().values():
        size = 1
        for length in shape:
            size *= length
        total += size
    return total


def measure(work: str, *arguments: Path) -> dict:
    """Run one piece of work in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", PROCESS.format(work=WORK[work]), *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the files are made; default: a temporary one")
    parser.add_argument("--only", choices=LAYOUTS, action="append")
    options = parser.parse_args()
    print("layout       values   file GiB   ours     work     seconds     CPU s   peak GiB")
    for name in options.only or LAYOUTS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            layout, root = LAYOUTS[name], Path(folder)
            file = layout.write(root / f"{name}.ckpt", raw=True, optimiser=True)
            genes = root / "genes.json"
            genes.write_text(json.dumps([f"gene{i}" for i in range(layout.genes)]))
            size = f"{parameters(layout) / 1e6:7.2f} M {file.stat().st_size / 2**30:8.2f}"
            ours = ""
            for work in WORK:
                found = measure(work, file, genes, root / "bundle")
                if found["parameters"]:
                    ours = f"{found['parameters'] / 1e6:.2f} M"
                line = f"{ours:10} {work:8} {found['seconds']:7.1f} {found['cpu']:9.1f} {found['peak']:10.2f}"
                print(f"{name:10} {size}   {line}", flush=True)


if __name__ == "__main__":
    main()
