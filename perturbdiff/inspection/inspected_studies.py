"""What is looked at: the files of one data set with its recipe and split. A sheet of an experiment names several."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perturbdiff.config import recipes
from perturbdiff.config.settings import Config
from perturbdiff.datasets import Dataset, lookup, registered
from perturbdiff.datasets.registry import folders, here
from perturbdiff.runtime.errors import UserError, nearest

SHEETS = Path(__file__).parents[2] / "assets" / "experiments"
"""The sheets that come with a checkout. An installed package has none."""

_MADE = ("vocabulary", "embed", "import")
"""Modes of rows that make something for other rows, and read no cells with a recipe."""


@dataclass(frozen=True)
class Study:
    """A data set, and what is planned with it.

    Attributes
    ----------
    name
        Name in messages.
    files
        Its files, or one store.
    config
        The recipe.
    toml
        Split in the format of STATE, or None for the rules of the recipe.
    obs
        Tables of cell labels: none, one for all files, or one each.
    genes
        List of genes to keep, or None.
    prior
        A bundle, or a list of genes, of the model that is finetuned; None if none is.
    dataset
        What the registry knows of it, or None.
    """

    name: str
    files: tuple[Path, ...]
    config: Config
    toml: Path | None = None
    obs: tuple[Path, ...] = ()
    genes: Path | None = None
    prior: Path | None = None
    dataset: Dataset | None = None


def files_of(target: str) -> tuple[tuple[Path, ...], Dataset | None]:
    """Return the files that a path or the name of a data set stands for, and what the registry knows of it.

    Raises
    ------
    UserError
        If it is a name, and a file of the data set is nowhere.
    """
    path = Path(target)
    if path.exists() or target not in registered():
        return (path,), None
    dataset = lookup(target)
    places = [(part, here(part)) for part in dataset.files]
    if lost := [part.file for part, place in places if place is None]:
        raise UserError(
            f"data set '{target}': {len(lost)} of {len(places)} files are not here (first: {lost[0]}); fetch them with "
            f"perturbdiff data get {target}, or name their folder in PERTURBDIFF_DATA"
        )
    return tuple(place for _, place in places if place is not None), dataset


def study_of(
    targets: Sequence[str],
    recipe: str | None,
    overrides: Sequence[str] = (),
    *,
    toml: Path | None = None,
    obs: Sequence[Path] = (),
    genes: Path | None = None,
    prior: Path | None = None,
) -> Study:
    """Return the study of some files, or of a data set by its name, whose preset is the recipe if none is given."""
    files, known = files_of(targets[0]) if len(targets) == 1 else (tuple(map(Path, targets)), None)
    config = recipes.load(recipe or (known and known.preset), overrides)
    known = known or _of_preset(config.name) or registered().get(config.name)
    return Study(Path(targets[0]).name, files, config, toml, tuple(obs), genes, prior, known)


def _of_preset(name: str) -> Dataset | None:
    """Return the data set of the paper that a preset is for."""
    return next((one for one in registered().values() if one.paper and one.preset == name and one.url), None)


def studies_of_sheet(sheet: str) -> list[Study]:
    """Return the studies of an experiment: the name of one that comes along, or the path of a sheet.

    Rows that look at the same files with the same settings are one study.

    Raises
    ------
    UserError
        If there is no such sheet, or a recipe in it is wrong.
    """
    path = Path(sheet)
    if not path.is_file():
        path = SHEETS / f"{sheet}.csv"
    if not path.is_file():
        known = sorted(one.stem for one in SHEETS.glob("*.csv"))
        raise UserError(
            f"no experiment '{sheet}'{nearest(sheet, known)}; give a name, or the path of a samplesheet"
        )
    with path.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    by_id = {row["id"]: row for row in rows}
    found: dict[tuple[object, ...], Study] = {}
    for row in rows:
        for study in _studies_of_row(_inherited(row, by_id), by_id, path.parent):
            key = (
                study.name,
                study.files,
                study.config.data,
                study.config.split,
                study.toml,
                study.genes,
                study.prior,
            )
            found.setdefault(key, study)
    return list(found.values())


def _inherited(row: dict[str, str], by_id: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return a row with what the workflow gives it: a model is sampled on the data of the row that fitted it."""
    source = by_id.get(row.get("init") or "", {})
    if row.get("mode") != "sample" or source.get("mode") not in ("train", "finetune"):
        return row
    overrides = filter(None, (source.get("overrides"), row.get("overrides")))
    taken = {name: source.get(name, "") for name in ("preset", "split", "genes", "obs")}
    return row | taken | {"overrides": ";".join(overrides)}


def _studies_of_row(row: dict[str, str], by_id: dict[str, dict[str, str]], folder: Path) -> Iterator[Study]:
    """Yield the study of each data set of a row that reads files. What another row makes is not there yet."""
    if row.get("mode") in _MADE:
        return
    names, groups = row["dataset"].split("|"), (row.get("input") or "").split("|")

    def given(name: str, source: dict[str, str] = row) -> Path | None:
        text = (source.get(name) or "").strip()
        if not text or text in by_id:
            return None
        return folder / text if (folder / text).exists() else Path(text)

    prior = None
    if row["mode"] == "finetune" and row.get("transfer") != "new-genes":
        made = by_id.get(row.get("init") or "")
        prior = given("genes", made) if made else given("init")
    for name, group in zip(names, groups, strict=False):
        files = [part.strip() for part in group.split(";") if part.strip()]
        if not files or any(part.startswith("simulate:") for part in files):
            continue
        preset = row.get("preset") or ("recommended-pretrain" if row["mode"] == "pretrain" else None)
        located = tuple(place for part in files for place in _located(part, folder))
        yield Study(
            name,
            located,
            recipes.load(preset, _overrides(row.get("overrides") or "", name)),
            given("split"),
            tuple(one for one in [given("obs")] if one),
            given("genes"),
            prior,
            registered().get(name),
        )


def _overrides(text: str, dataset: str) -> list[str]:
    """Return the overrides of a row that speak to a data set: those with its name before them, and those of all."""
    chosen = []
    for part in text.split(";"):
        key = part.partition("=")[0]
        owner, colon, _ = key.partition(":")
        if part.strip() and (not colon or owner.strip() == dataset):
            chosen.append(part.strip().removeprefix(f"{dataset}:"))
    return chosen


def _located(text: str, folder: Path) -> tuple[Path, ...]:
    """Return the files that a cell of a sheet names, as the workflow finds them."""
    if text.startswith("dataset:"):
        parts = lookup(text.removeprefix("dataset:")).files
        return tuple(here(part) or next(folders()) / part.file for part in parts)
    return (folder / text if (folder / text).exists() else Path(text),)
