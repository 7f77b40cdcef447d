"""What a screen holds: its counts, and the columns with perturbation, cell type and batch, guessed and explained.

Nothing is asked. What the user said is taken, everything else is guessed by content and usual names, and what cannot
be guessed is collected, so that all of it can be told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from perturbdiff.conditions.condition import LABELS
from perturbdiff.runtime.errors import UserError, listing, nearest, one_line
from perturbdiff.screen import label_columns, values
from perturbdiff.screen.label_columns import Choice
from perturbdiff.screen.sources import Labels, Source, count_conditions, opened, read_labels
from perturbdiff.screen.values import plain

if TYPE_CHECKING:
    from anndata import AnnData

_OPTIONS = {
    "perturbation_key": ("--pert-col COLUMN", "perturbation=COLUMN"),
    "control": ("--control LABEL", "control=LABEL"),
    "cell_type_key": ("--cell-type-col COLUMN", "cell_type=COLUMN"),
    "batch_key": ("--batch-col COLUMN", "batch=COLUMN"),
    "layer": ("--set data.layer=layers/NAME", "layer='layers/NAME'"),
    "gene_key": ("--set data.gene_key=COLUMN", "gene_key=COLUMN"),
    "dose_key": ("--set data.dose_key=COLUMN", "dose_key=COLUMN"),
}
_WORDS = {
    "data.layer": "values",
    "data.input_scale": "scale",
    "data.gene_key": "names of genes",
    "data.perturbation_key": "perturbation",
    "data.control": "control",
    "data.cell_type_key": "cell type",
    "data.batch_key": "batch",
    "data.dose_key": "dose",
}
_NOTHING = dict.fromkeys(_WORDS, "none") | {"data.gene_key": "the index of var"}
_DOSES = ("dose", "dosage", "dosevalue", "concentration", "conc", "doseum", "dosenm")


@dataclass(frozen=True)
class Guess:
    """One decision: the dotted recipe key, its value, the reason in a sentence, and whether the user gave it."""

    key: str
    value: str | None
    why: str
    given: bool = False


@dataclass(frozen=True)
class Screen:
    """What one file or AnnData holds.

    Attributes
    ----------
    name
        Name of the data set.
    shown
        The source's name in messages.
    n_cells, n_genes
        Size of the source.
    guesses
        What was decided, one entry per recipe key.
    notes
        What else a user should know, in sentences.
    problems
        What has to be fixed before anything can run. Each is a sentence that ends with what to add.
    without_label
        Number of cells that lack a label and will be dropped.
    conditions
        Columns ``cell_type, batch, perturbation, n_cells, is_control``, a row for each condition; empty if there are
        problems.
    """

    name: str
    shown: str
    n_cells: int
    n_genes: int
    guesses: tuple[Guess, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    without_label: int = 0
    conditions: pd.DataFrame = field(default_factory=pd.DataFrame, compare=False)

    @property
    def data(self) -> dict[str, Any]:
        """Return the settings of the recipe's section ``data`` that follow."""
        found: dict[str, Any] = {guess.key.removeprefix("data."): guess.value for guess in self.guesses}
        return {**found, "missing_labels": "drop"}

    def check(self) -> None:
        """Raise one `UserError` that lists all problems, if there are any."""
        if len(self.problems) == 1:
            raise UserError(f"{self.shown}: {self.problems[0]}")
        if self.problems:
            raise UserError(f"{self.shown}: {len(self.problems)} things to fix", self.problems)

    def lines(self) -> list[str]:
        """Return what was found, one line per decision, for the log."""
        size = f"{self.shown}: {self.n_cells:,} cells, {self.n_genes:,} genes"
        decided = [
            f"{_WORDS[guess.key]}: {guess.value or _NOTHING[guess.key]} ({guess.why})"
            for guess in self.guesses
        ]
        return [one_line(line) for line in (size, *decided, *self.notes)]


def look_at(
    source: Path | str | AnnData, given: Mapping[str, str | None] | None = None, obs: Path | None = None
) -> Screen:
    """Find out what a screen holds.

    Parameters
    ----------
    source
        A file or folder that `perturbdiff.io` reads, or an AnnData in memory.
    given
        What the user said, by field of `DataConfig` (``perturbation_key``, ``control``, ``cell_type_key``,
        ``batch_key``, ``layer``, ``input_scale``, ``gene_key``, ``dose_key``). What is absent is guessed. None for a
        column of cell types or batches means that there is none. ``keep`` and ``duplicate_genes`` are taken as given.
    obs
        Table of cell labels by cell name, for a file that lacks them.

    Returns
    -------
    Screen
        Its ``problems`` say what could not be found.

    Raises
    ------
    UserError
        If the file cannot be opened.
    """
    place = Path(source) if isinstance(source, str) else source
    with opened(place, obs) as found:
        look = _Look(found, dict(given or {}), in_memory=not isinstance(place, Path))
        look.find_values()
        look.find_columns()
        look.count()
        name = place.name.removesuffix(".gz").partition(".")[0] if isinstance(place, Path) else "screen"
        return look.screen(name or "screen")


class _Look:
    """Decisions about one source, in their order."""

    def __init__(self, source: Source, given: dict[str, str | None], *, in_memory: bool) -> None:
        self.source, self.given, self._python = source, given, in_memory
        self.guesses: list[Guess] = []
        self.notes: list[str] = []
        self.problems: list[str] = []
        self.without_label, self.n_genes = 0, 0
        self.conditions = pd.DataFrame()
        self._labels: dict[str, Labels] = {}

    def _add(self, key: str) -> str:
        """Return what to add to say a setting, as an option or as an argument in Python."""
        return f"add {_OPTIONS[key][self._python]}"

    def _decide(self, key: str, choice: Choice) -> str | None:
        """Take a choice, or note what is missing. Return the value."""
        if choice.problem:
            self.problems.append(f"{choice.problem}: {self._add(key)}")
        else:
            self.guesses.append(Guess(f"data.{key}", choice.name, choice.why))
        return choice.name

    def _take(self, key: str) -> str | None:
        value = self.given[key]
        self.guesses.append(Guess(f"data.{key}", value, "as given", given=True))
        return value

    def find_values(self) -> None:
        """Find the counts and the names of genes."""
        places = values.look_at_places(self.source)
        chosen = values.best_place(places)
        if "layer" in self.given:
            named = next((place for place in places if place.name == self.given["layer"]), None)
            if named is None:
                self.problems.append(
                    f"{values.unknown_place(str(self.given['layer']), places)}: {self._add('layer')}"
                )
                return
            usable = ("counts", "zeros and ones", "log1p", self.given.get("input_scale"))
            chosen = named if named.kind in usable else None
            places = [named] if chosen is None else places
        if chosen is None:
            self.problems.append(f"{values.no_place(places, 'the screen')}: {self._add('layer')}")
            chosen = places[0] if places else None
        elif "layer" in self.given:
            self._take("layer")
        else:
            self.guesses.append(Guess("data.layer", chosen.name, values.why_place(chosen, places)))
        if chosen is None:
            return
        if "input_scale" in self.given:
            self._take("input_scale")
        else:
            scale = "log1p" if chosen.kind == "log1p" else "counts"
            why = (
                "fractions that small are logarithms"
                if chosen.kind == "log1p"
                else "whole numbers are counts"
            )
            self.guesses.append(Guess("data.input_scale", scale, why))
        self._find_genes(chosen.name)

    def _find_genes(self, place: str) -> None:
        self.n_genes = len(self.source.gene_names(place, None))
        if "gene_key" in self.given:
            self._take("gene_key")
            return
        key, why, problem = values.gene_key(self.source, place)
        if problem and self.given.get("duplicate_genes", "error") == "error":
            remedy = (
                "make them so with adata.var_names_make_unique(), or give var a column of unique names and"
            )
            self.problems.append(
                f"{problem}: add --set data.duplicate_genes=sum, {remedy} {self._add('gene_key')}"
            )
        elif not problem:
            self.guesses.append(Guess("data.gene_key", key, why))

    def find_columns(self) -> None:
        """Find the columns of labels."""
        columns = self.source.columns()
        if not columns:
            more = "" if self._python else "; add a table of labels by cell name: --obs TABLE.csv"
            self.problems.append(f"the cells have no labels{more}")
            return
        self._labels = {
            name: found for name in columns if (found := read_labels(self.source, name)) is not None
        }
        lost = False
        for key in ("perturbation_key", "cell_type_key", "batch_key", "dose_key"):
            name = self.given.get(key)
            if name is None or name in columns:
                continue
            if key == "perturbation_key" and self._is_label(name):
                continue
            hint = nearest(name, columns) or f"; columns: {listing(columns)}"
            self.problems.append(f"there is no obs column '{name}'{hint}: {self._add(key)}")
            self.given[key] = None
            lost |= key == "perturbation_key"
        if lost:
            return
        perturbation = self._perturbation()
        if perturbation is None:
            return
        control = self._control(perturbation)
        if control is None:
            return
        taken = {
            perturbation,
            *(str(v) for k, v in self.given.items() if k.endswith("_key") and v is not None),
        }
        for kind in ("cell_type", "batch"):
            if f"{kind}_key" in self.given:
                self._take(f"{kind}_key")
                continue
            choice = label_columns.choose_context(
                self.source, self._labels, perturbation, control, kind=kind, taken=taken
            )
            advice = f", {self._add(f'{kind}_key')} if there is one" if choice.name is None else ""
            self.guesses.append(Guess(f"data.{kind}_key", choice.name, f"{choice.why}{advice}"))
            taken.add(str(choice.name))
        self._dose(taken)

    def _is_label(self, name: str) -> bool:
        """Return whether this is a label of a column, which is then taken as the column of perturbations."""
        control = self.given.get("control")
        homes = {
            column: found
            for column, found in self._labels.items()
            if name in found.names and (control is None or control in found.names)
        }
        if not homes:
            return False
        column = label_columns.choose_perturbation(homes, control).name or next(iter(homes))
        self.given["perturbation_key"] = column
        self.notes.append(f"'{name}' is a label of obs column '{column}', which is taken as the perturbation")
        return True

    def _perturbation(self) -> str | None:
        if self.given.get("perturbation_key") is None:
            choice = label_columns.choose_perturbation(self._labels, self.given.get("control"))
            return self._decide("perturbation_key", choice)
        name = str(self._take("perturbation_key"))
        if name not in self._labels:
            self.problems.append(
                f"obs column '{name}' has another value in nearly every cell, so it holds no perturbations: "
                f"{self._add('perturbation_key')}"
            )
            return None
        return name

    def _control(self, perturbation: str) -> str | None:
        labels = self._labels[perturbation]
        if "control" not in self.given:
            return self._decide("control", label_columns.choose_control(labels))
        control = str(self.given["control"])
        if control not in labels.names:
            hint = nearest(control, labels.names) or ";"
            self.problems.append(
                f"'{control}' is not a label of obs column '{perturbation}'{hint} its labels are {labels.shown()}: "
                f"{self._add('control')}"
            )
            return None
        self._take("control")
        return control

    def _dose(self, taken: set[str]) -> None:
        if "dose_key" in self.given:
            self._take("dose_key")
            return
        doses = next((n for n in self.source.columns() if plain(n) in _DOSES and n not in taken), None)
        if doses is not None:
            self.notes.append(
                f"obs column '{doses}' looks like a dose and is not used; {self._add('dose_key')} to tell doses apart"
            )

    def count(self) -> None:
        """Count the cells of each condition."""
        if self.problems:
            return
        found = {guess.key.removeprefix("data."): guess.value for guess in self.guesses}
        keys = {label: found.get(f"{label}_key") for label in LABELS}
        counted = count_conditions(self.source, keys, str(found["control"]), self.given.get("keep"))
        self.conditions, self.without_label, left_out = counted
        if left_out:
            self.notes.append(f"{left_out} of {self.source.n_cells} cells are left out (data.keep)")
        self._note_labels(keys)
        if not (self.conditions["n_cells"][~self.conditions["is_control"]]).sum():
            self.problems.append("every cell with all labels is a control, so there is nothing to learn")
        elif not (self.conditions["n_cells"][self.conditions["is_control"]]).sum():
            self.problems.append("no control cell has all labels, so there is nothing to start from")

    def _note_labels(self, keys: Mapping[str, str | None]) -> None:
        if self.without_label:
            missing = {key: self._labels[key].missing for key in keys.values() if key in self._labels}
            shown = ", ".join(f"{count} in '{key}'" for key, count in missing.items() if count)
            self.notes.append(
                f"{self.without_label} of {self.source.n_cells} cells lack a label ({shown}) and are dropped"
            )
        control = self.conditions["is_control"].to_numpy(bool)
        perturbations = len(set(self.conditions["perturbation"].to_numpy()[~control]))
        controls = int(self.conditions["n_cells"].to_numpy()[control].sum())
        self.notes.append(
            f"{perturbations} perturbation{'s' * (perturbations != 1)}, {controls} control cells"
        )

    def screen(self, name: str) -> Screen:
        """Return what was found."""
        return Screen(
            name=name,
            shown=self.source.shown,
            n_cells=self.source.n_cells,
            n_genes=self.n_genes,
            guesses=tuple(self.guesses),
            notes=tuple(self.notes),
            problems=tuple(self.problems),
            without_label=self.without_label,
            conditions=self.conditions if not self.problems else pd.DataFrame(),
        )
