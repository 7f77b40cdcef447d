"""`report`: runs of `evaluate` → one self-contained HTML page, its figures and their numbers beside it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from perturbdiff import __version__
from perturbdiff.reporting.experiments.arm_tables import text as text_arms
from perturbdiff.reporting.experiments.experiment import experiment
from perturbdiff.reporting.experiments.experiment_chapter import ExperimentRequest, ask
from perturbdiff.reporting.figures import page_tables, seed_means
from perturbdiff.reporting.figures.store_figures import pictures
from perturbdiff.reporting.figures.store_tables import data_tables, read_splits
from perturbdiff.reporting.figures.svg import Look, Plot, export, looks, page_color, slug
from perturbdiff.reporting.figures.trained_models import costs, curves, pretrained, record_files, trained
from perturbdiff.reporting.loading.comparison import families
from perturbdiff.reporting.loading.failed_runs import FailedRun, read_expected
from perturbdiff.reporting.loading.metric_columns import metric_columns
from perturbdiff.reporting.loading.results import Run, read_json, read_runs, unique_names
from perturbdiff.reporting.page.page_data import page_data, write_arms, write_multiqc, write_tables
from perturbdiff.reporting.sections.cell_sections import MOST_PICTURES
from perturbdiff.reporting.sections.chapter_data import subject
from perturbdiff.reporting.sections.chapters import chapter
from perturbdiff.reporting.sections.overview import verdict_of
from perturbdiff.runtime import files, outputs, provenance
from perturbdiff.runtime.errors import UserError, listing, visible

_MANIFEST_LIMIT = 20_000  # characters of one manifest shown on the page


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    title: str = "Perturbation predictions",
    bundles: Sequence[Path] = (),
    statistics: Sequence[Path] = (),
    splits: Sequence[Path] = (),
    records: Sequence[Path] = (),
    expected: Path | None = None,
    logs: Sequence[Path] = (),
    against: str | None = None,
    design: Path | None = None,
    shown: str = "",
    published: Path | None = None,
    force: bool = False,
) -> Path:
    """Write one HTML file that compares methods, and folders with its figures, tables and scores for MultiQC.

    Parameters
    ----------
    runs
        Folders written by `evaluate`, of several methods and data sets.
    out
        The page. Beside it ``<name>_figures/`` holds every figure as SVG and PNG with its numbers as CSV,
        ``<name>_tables/`` means over seeds, costs and failures as CSV and Markdown, and ``<name>_mqc/`` the scores
        as custom content for MultiQC.
    title
        Heading of the page.
    bundles, statistics, splits
        Trained bundles (configuration, training curves), folders written by `stats`, splits.
    records
        Folders with the records of predictions (``x.h5ad.run.json``): what training and predicting took.
    expected, logs
        Table of what was to be run, and where the logs that it names lie, see `read_expected`: what has no run is
        shown as failed.
    against
        Method to compare the first model with, condition by condition. Default: ``nearest-context`` if it was
        run, else the best other by PDCorr. With a design also an arm of it, that differences are to.
    design, shown
        Table of an experiment, see `read_design`, and the names of its figures with commas between them, see
        `experiment.chapter.FIGURES`: a chapter before those of the data sets.
    published
        Table of a paper's numbers, see `read_published`: set beside ours on data sets of the same name.
    force
        Write even if an equal page is there.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If an input is not what it should be, or ``against`` was run on no data set.
    """
    scored = read_runs(runs)
    for path in (*bundles, *statistics, *splits):
        provenance.verify(files.existing(Path(path), "input"))
    for path in record_files(records):
        outputs.check_record(path)
    asked = ask(scored, design, shown, published)
    _check(scored, against, asked.arms)
    absent = read_expected(expected, logs).missing(scored)
    figures, folder, multiqc = (out.with_name(f"{out.stem}_{what}") for what in ("figures", "tables", "mqc"))
    roles = {"run": runs, "bundle": bundles, "statistics": statistics, "split": splits}
    roles |= {"record": record_files(records), "expected": [expected] if expected else []}
    roles |= {"design": [design] if design else [], "published": [published] if published else []}
    roles |= {"log": list(dict.fromkeys(file for one in absent for file in one.files))}
    by_role = {role: [Path(p) for p in paths] for role, paths in roles.items()}
    inputs = _inputs(by_role)
    config = {"title": title, "against": against, "figures": asked.figures}
    companions = {"figures": figures, "tables": folder, "mqc": multiqc}
    with provenance.stage(
        "report", out, config=config, inputs=inputs, force=force, companions=companions
    ) as stage:
        if stage.skip:
            return out
        page, drawn = _page(scored, absent, config, by_role, asked)
        page["figures"] = figures.name
        stage.path.write_text(_render(page), encoding="utf-8")
        for path in stage.companions.values():
            path.mkdir()
        export(drawn, stage.companions["figures"])
        write_tables(stage.companions["tables"], scored, absent, page["trained"])
        if asked.entries:
            write_arms(stage.companions["tables"], page["experiment"].found.groups)
        write_multiqc([(c.about, c.overview) for c in page["chapters"]], stage.companions["mqc"], absent)
        stage.results.update(runs=len(scored), failed=len(absent), figures=len(drawn))
    return out


def headline(
    runs: Sequence[Path], expected: Path | None = None, logs: Sequence[Path] = (), design: Path | None = None
) -> str:
    """Return the main metrics as text: arms of a design, each data set with means over seeds, verdicts."""
    scored = read_runs(runs)
    absent = read_expected(expected, logs).missing(scored)
    entries = ask(scored, design, "", None).entries
    arms = [text_arms(experiment(entries).groups), ""] if entries else []
    verdicts, spreads = [], []
    for name in dict.fromkeys(r.dataset for r in scored):
        of_dataset = [r for r in scored if r.dataset == name]
        lines = seed_means.lines(of_dataset, lost := [one for one in absent if one.dataset == name])
        if seed_means.repeated(lines):
            spreads += [seed_means.text(lines, page_tables.terminal_columns(metric_columns(of_dataset))), ""]
        about = subject("d", of_dataset, _looks(scored), None, lost)
        verdict = verdict_of(about)
        verdicts.append(f"{name}: {about.focus.method}: {verdict.title}. {verdict.sentence}".rstrip())
    spreads = ["Mean ± standard deviation over seeds (n − 1)", "", *spreads] if spreads else []
    return "\n".join([*arms, page_tables.text_scores(scored, absent), "", *spreads, *verdicts])


def _check(runs: Sequence[Run], against: str | None, arms: Collection[str]) -> None:
    if against is None or against in arms:
        return
    methods = sorted({r.method for r in runs if r.kind != "ceiling"})
    if not any(against in r.names for r in runs if r.kind != "ceiling"):
        also = f"; arms: {listing(sorted(arms))}" if arms else ""
        raise UserError(f"no run of '{against}' to compare with; methods: {listing(methods)}{also}")


def _inputs(by_role: Mapping[str, Sequence[Path]]) -> dict[str, Path]:
    """Name every input. The run records count too, for the page shows times and memory."""
    inputs = {}
    for role, paths in by_role.items():
        for i, path in enumerate(paths, start=1):
            inputs[f"{role} {i}"] = files.existing(Path(path), f"input '{role}'")
            if (record := provenance.beside(Path(path), "run")).is_file():
                inputs[f"{role} {i} record"] = record
    return inputs


def _page(
    runs: list[Run],
    absent: list[FailedRun],
    config: Mapping[str, Any],
    by_role: Mapping[str, Sequence[Path]],
    asked: ExperimentRequest,
) -> tuple[dict[str, Any], list[Plot]]:
    look = _looks(runs)
    names = list(dict.fromkeys(r.dataset for r in runs))
    chapters = [
        chapter(
            i,
            [r for r in runs if r.dataset == n],
            look,
            asked.rival(config["against"], n),
            [one for one in absent if one.dataset == n],
        )
        for i, n in enumerate(names, 1)
    ]
    comparison = asked.chapter(runs, config["against"], by_role["record"], by_role["bundle"], chapters)
    called = dict(zip(unique_names(by_role["bundle"]), by_role["bundle"], strict=True))
    training = [(n, shown) for i, (n, path) in enumerate(called.items(), 1) if (shown := curves(i, n, path))]
    records = list(_records(runs, by_role))
    stores = pictures(by_role["statistics"])
    cost = costs(runs, by_role["record"], by_role["bundle"])
    shown = [
        *(comparison.plots if comparison else []),
        *(plot for one in chapters for plot in one.plots),
        *(plot for _, plots in training for plot in plots),
        *(plot for store in stores for plot in store.plots),
    ]
    arms = {} if comparison is None else comparison.found.look
    page = {
        "title": config["title"],
        "facts": _facts(runs, absent),
        "lost": [one for one in absent if one.dataset not in names],
        "experiment": comparison,
        "chapters": chapters,
        "glossary": list(dict.fromkeys(line for c in chapters for line in c.overview.glossary)),
        "training": training,
        "data": data_tables(by_role["statistics"], read_splits(by_role["split"])),
        "stores": stores,
        "ran": page_tables.ran(runs, look, absent),
        "trained": trained(runs, absent, cost, pretrained(by_role["bundle"], by_role["record"]), look),
        "configs": [(n, text) for n, path in called.items() if (text := _config(path))],
        "provenance": page_tables.provenance_rows(records),
        "manifests": [(f"{name} ({what})", _clipped(m)) for what, name, m, _ in records if m],
        "block": page_data(shown, {**arms, **look}, [c.listing for c in chapters if c.listing]),
        "version": __version__,
    }
    return page, shown


def _looks(runs: Sequence[Run]) -> dict[str, Look]:
    """Return how methods are drawn: ours first, then external methods, nearest-context, the other baselines."""
    ceilings = [r.method for r in runs if r.kind == "ceiling"]
    ranked = [r for r in runs if r.kind != "ceiling"]
    order = {"model": 0, "baseline": 1}
    ranked.sort(key=lambda r: (order[r.kind], not r.external, r.baseline != "nearest-context"))
    data_sets = dict.fromkeys(r.dataset for r in ranked)
    groups = [f for name in data_sets for f in families([r for r in ranked if r.dataset == name])]
    family: dict[str, str] = {}
    for group in groups:
        for run in group.runs:
            family.setdefault(run.method, group.name)
    return looks([r.method for r in ranked], ceilings, family)


def _facts(runs: Sequence[Run], absent: Sequence[FailedRun]) -> list[str]:
    methods = {r.method for r in runs if r.kind != "ceiling"}
    datasets = {r.dataset for r in runs}
    definitions = sorted({r.definition for r in runs})
    return [
        f"{len(methods)} method{'s' * (len(methods) != 1)}",
        *([f"{len(absent)} failed"] if absent else []),
        f"{len(datasets)} data set{'s' * (len(datasets) != 1)}",
        f"metrics as {', '.join(definitions)}",
        f"perturbdiff {__version__}",
    ]


def _config(bundle: Path) -> str:
    config = read_json(bundle / "config.json")
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else ""


def _records(
    runs: Sequence[Run], by_role: Mapping[str, Sequence[Path]]
) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
    for run in runs:
        yield "metrics", f"{run.method} on {run.dataset}", run.manifest, run.record
    for what in ("bundle", "statistics", "split"):
        paths = by_role[what]
        for name, path in zip(unique_names(paths), paths, strict=True):
            run_record = read_json(provenance.beside(path, "run"))
            yield what, name, provenance.read_manifest(path) or {}, run_record


def _clipped(manifest: Mapping[str, Any]) -> str:
    text = provenance.as_json(manifest)
    return (
        text
        if len(text) <= _MANIFEST_LIMIT
        else f"{text[:_MANIFEST_LIMIT]}\n… (the rest is in manifest.json)"
    )


def _render(page: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perturbdiff.reporting.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(page_color=page_color, slug=slug, plain=_plain, along=_along)
    return visible(
        environment.get_template("report.html.j2").render(page=page, most_pictures=MOST_PICTURES).lstrip()
    )


def _plain(value: float | str) -> str:
    """Return a value for sorting and downloading: a number with all that matters of it, NaN as nothing."""
    if isinstance(value, str):
        return value
    return "" if math.isnan(value) else f"{value:.10g}"


def _along(share: float) -> float:
    """Return where a share of the way from chance to ceiling lies on the page's scale of 160 units."""
    return round(12 + 136 * min(1.07, max(-0.07, share)), 1)
