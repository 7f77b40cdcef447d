"""A study of the paper scaled down: its experiment as it comes, in a copy of the checkout, with tiny files to fetch.

In the copy, the rows learn and sample for a few steps, finetuned ones from vectors of their perturbations, and the
registry's addresses are those of a server on this machine, which has files of the public layout (`public_schemas`).
Methods of others, which take an environment each, are left out.
"""

import csv
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import public_schemas as layouts

from perturbdiff.baselines.external import known_tools
from perturbdiff.conditions.condition import agents
from perturbdiff.embeddings.embedding_tables import EmbeddingTable

SMALL = (
    "model.width=16;model.depth=1;model.heads=2;train.max_steps=4;train.valid_every=2;train.valid_sets=2;"
    "train.keep_every=2;train.set_size=8;train.sets_per_step=2;train.warmup_steps=1;sample.num_steps=2;model.clip=true"
)
"""Changes of the rows that train."""
GENES = "data.num_hvgs=12"
"""Changes of the rows that choose genes."""
CELLS, LABELS = 8, 5
"""Cells of a condition, and held-out labels of each part."""
ADDRESSES = {
    "replogle": ["datasets/arcinstitute/Replogle-Nadig-Preprint/resolve/main/replogle.h5ad"],  # the Hub's own
    "pbmc": ["pbmc.h5ad"],
    "tahoe100m": ["plate1.h5ad", "plate2.h5ad"],
    "cellxgene": ["cells1.h5ad", "cells2.h5ad"],
}
"""Below the server's address: the files of each data set."""


def scale_down(site: Path, experiment: str, address: str, *, left_out: Sequence[str] = ()) -> None:
    """Change an experiment's sheet and the registry in a copy of the checkout; rows of some modes are left out."""
    sheet = site / "assets" / "experiments" / f"{experiment}.csv"
    without = {*left_out, *known_tools.names()}
    with sheet.open() as handle:
        rows = [row for row in csv.DictReader(handle) if row["mode"] not in without]
    for row in rows:
        row["options"] = (row.get("options") or "").replace("composites=23", "composites=2")
        if row["mode"] == "finetune":
            row["embeddings"] = _vectors(sheet.parent, row["dataset"])
        learns = row["mode"] in ("train", "pretrain", "finetune")
        changes = SMALL if learns else GENES if row["mode"] == "vocabulary" else ""
        row["overrides"] = ";".join(filter(None, [row.get("overrides"), changes]))
    with sheet.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, [*rows[0], "embeddings"], restval="")
        writer.writeheader()
        writer.writerows(rows)
    for split in (site / "assets" / "splits").glob("*.toml"):
        split.write_text(_shorter(split.stem))
    registry = site / "perturbdiff" / "datasets" / "registry.yaml"
    registry.write_text(
        re.sub(r"(?ms)^(\w+):\n.*?(?=^\S|\Z)", partial(_nearer, address), registry.read_text())
    )


def _vectors(folder: Path, name: str) -> str:
    """Write vectors of a screen's perturbations; what the column `embeddings` says of them."""
    trained = {"pbmc": "IL-2", "tahoe100m": "[('Trained on', 0.5, 'uM')]", "replogle": "AARS"}[name]
    labels = [trained, *layouts.labels_of(name, LABELS)]
    names = sorted({agent for label in labels for agent, _ in agents(label)})
    path = folder / f"{name}-vectors.parquet"
    EmbeddingTable(tuple(names), np.random.default_rng(0).normal(size=(len(names), 6))).write(path)
    return f"perturbation={path.name}"


def _shorter(name: str) -> str:
    """Return a published split with the first labels of its lists alone."""
    context = "batch" if name == "pbmc" else "cell_type"
    lines = [f'context_column = "{context}"', "[datasets]", f'{name} = ""', "[training]", f'{name} = "train"']
    for held, parts in layouts.held_out(name, LABELS).items():
        lines.append(f"[fewshot.{json.dumps(f'{name}.{held}')}]")
        lines += [f"{part.removesuffix('id')} = {json.dumps(found)}" for part, found in parts.items()]
    return "\n".join(lines) + "\n"


def _nearer(address: str, entry: re.Match[str]) -> str:
    """Return an entry of the registry as this machine has the data set."""
    name, text = entry[1], entry[0]
    if name not in ADDRESSES:
        return text
    text = re.sub(
        r"(?m)^  gigabytes: .*\n|^  md5: .*\n|^  requester_pays: .*\n|^  census:\n(    .*\n)+", "", text
    )
    if name == "replogle":  # HF_ENDPOINT names the server
        return text + "  gigabytes: 0.001\n"
    text = re.sub(r"(?m)^  (url|parts): .*\n", "", text)
    path = ADDRESSES[name][0].replace("1", "{part}")
    parts = "  parts: [1, 2]\n" if len(ADDRESSES[name]) > 1 else ""
    return f"{text.rstrip()}\n  gigabytes: 0.001\n{parts}  url: {address}/{path}\n\n"


def write_public_files(folder: Path, names: list[str]) -> None:
    """Write the files of data sets to where the server has them."""
    for name in names:
        paths = [folder / path for path in ADDRESSES[name]]
        for number, path in enumerate(paths, 1):
            path.parent.mkdir(parents=True, exist_ok=True)
            match name:
                case "replogle":
                    layouts.state_replogle(path, cells=CELLS, labels=LABELS)
                case "pbmc":
                    layouts.parse_pbmc(path, cells=CELLS, labels=LABELS)
                case "tahoe100m":
                    layouts.tahoe_plate(path, plate=number, cells=CELLS // 2, labels=LABELS)
                case "cellxgene":
                    layouts.census_part(path, part=number)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder while the block runs; its address."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    handler = partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02}).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
