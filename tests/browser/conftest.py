"""A headless Chromium, and a report with all its sections made from a small screen by the real stages."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from small_store import small_store

from perturbdiff.baselines.baseline_stage import predict
from perturbdiff.config.settings import EvaluateConfig
from perturbdiff.evaluation.ceiling_stage import ceiling
from perturbdiff.evaluation.evaluation_stage import evaluate
from perturbdiff.reporting.page.page import write_report
from perturbdiff.statistics.statistics_stage import write_statistics

METHODS = {"ours": "linear", "nearest-context": "nearest-context", "mean-perturbation": "mean-perturbation"}


@dataclass
class Opened:
    """A page in the browser with all that it said and asked for."""

    page: object
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def open_page(browser, report_file):
    """Return a function that opens the report, or another file, in a window of a given width."""
    contexts = []

    def opened(width=1280, *, height=844, path: Path = report_file, **settings) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": height}, **settings)
        context.set_default_timeout(20_000)
        contexts.append(context)
        found = Opened(context.new_page())
        found.page.on("console", lambda message: found.console.append(message.text))
        found.page.on("pageerror", lambda error: found.console.append(str(error)))
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.goto(path.as_uri())
        return found

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory) -> Path:
    """Folder of pictures of the pages that were tested: look at them. PD_SCREENSHOTS keeps them elsewhere."""
    folder = Path(os.environ.get("PD_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def keep_screenshot(screenshots):
    """Return a function that photographs a page, its first screen or the whole."""
    driver = pytest.importorskip("playwright.sync_api")

    def keep(page, name, full=False):
        try:
            page.screenshot(path=screenshots / f"{name}.png", full_page=full)
        except (
            driver.Error
        ) as error:  # Chromium sometimes has no memory for a long page; what is tested is not the picture
            print(f"no picture {name}: {error}")

    return keep


def screen(perturbations: int = 6, genes: int = 80) -> ad.AnnData:
    """Counts of 2 cell types × 2 batches × (control + perturbations), each of which raises genes of its own."""
    rng = np.random.default_rng(0)
    mean = rng.lognormal(0.0, 1.0, genes)
    counts, labels = [], []
    for cell_type in ("B", "T"):
        for batch in ("d1", "d2"):
            for p in range(perturbations + 1):
                raised = np.ones(genes)
                raised[p * 10 : p * 10 + 10] = 4.0 if p else 1.0
                raised[-5:] = 3.0 if cell_type == "B" else 1.0
                size = 40 if p == 0 else 16
                counts.append(rng.negative_binomial(3, 3 / (3 + mean * raised), (size, genes)))
                labels += [(cell_type, batch, f"p{p}" if p else "control")] * size
    obs = pd.DataFrame(labels, columns=["cell_type", "batch", "perturbation"], dtype="category")
    obs.index = [f"cell{i}" for i in range(len(obs))]
    var = pd.DataFrame(index=[f"g{i}" for i in range(genes)])
    return ad.AnnData(sp.csr_matrix(np.vstack(counts).astype(np.float32)), obs, var)


def bundle(folder: Path) -> Path:
    """What the page reads of a trained bundle."""
    folder.mkdir()
    steps = np.arange(0, 1000, 20)
    curve = pd.DataFrame({"step": steps, "split": "train", "total": 1 / (1 + steps / 200)})
    both = pd.concat([curve, curve.iloc[::10].assign(split="valid")])
    both.to_csv(folder / "training.csv", index=False)
    (folder / "config.json").write_text(json.dumps({"name": "tiny", "model": {"width": 64}}))
    (folder / "manifest.json").write_text(json.dumps({"stage": "train", "seed": 1}))
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory, without_pictures) -> Path:
    """A folder with store, split, statistics and evaluated methods."""
    folder = tmp_path_factory.mktemp("screen")
    made = small_store(folder, adata=screen())
    config = EvaluateConfig(bootstrap=200)
    for method, baseline in METHODS.items():
        predictions = predict(baseline, made.store, made.split, folder / f"{method}.h5ad")
        evaluate(predictions, made.store, folder / "runs" / method, config, method=method, dataset="screen")
    ceiling(made.store, folder / "runs" / "ceiling", config, split=made.split, dataset="screen")
    write_statistics(made.store, folder / "stats", split=made.split)
    bundle(folder / "bundle")
    return folder


@pytest.fixture(scope="session")
def report_file(runs) -> Path:
    """The page."""
    return write_report(
        [runs / "runs" / name for name in (*METHODS, "ceiling")],
        runs / "report.html",
        title="A small screen",
        bundles=[runs / "bundle"],
        statistics=[runs / "stats"],
        splits=[runs / "split.parquet"],
    )


@pytest.fixture(scope="session")
def figures(report_file) -> list[str]:
    """Names of the figures that were exported beside the page."""
    return sorted(p.stem for p in (report_file.parent / "report_figures").glob("*.svg"))
