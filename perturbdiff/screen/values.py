"""Where the counts of a screen are, and how its genes are named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from perturbdiff.runtime.errors import listing, nearest
from perturbdiff.screen.sources import Source

Kind = Literal["counts", "zeros and ones", "log1p", "normalised", "scaled", "broken", "empty"]

LARGEST_LOG1P = 20.0
_COUNT_NAMES = ("counts", "rawcounts", "raw", "count", "umi", "umis", "umicounts", "rawdata")
_PARTIAL = ("spliced", "unspliced", "ambiguous", "matrix")
_SYMBOL_NAMES = (
    "symbol", "symbols", "genesymbol", "genesymbols", "genename", "genenames", "featurename", "geneshortname",
    "hgncsymbol", "name",
)  # fmt: skip
_ENSEMBL = re.compile(r"ENS[A-Z]{0,4}G\d{6,}", re.IGNORECASE)
_WORDS = {
    "counts": "holds whole numbers up to {0:g}",
    "zeros and ones": "holds zeros and ones only",
    "log1p": "holds fractions up to {0:.3g}, as logarithms do",
    "normalised": "holds fractions up to {0:.4g}, too large for logarithms",
    "scaled": "holds negative values, so it was scaled or centred",
    "broken": "holds missing or infinite values",
    "empty": "holds nothing but zeros",
}


@dataclass(frozen=True)
class Place:
    """A place of values, what kind they are and the largest one that was seen."""

    name: str
    kind: Kind
    largest: float

    @property
    def words(self) -> str:
        """Return what it holds, after 'it'."""
        return _WORDS[self.kind].format(self.largest)

    def __str__(self) -> str:
        return f"{self.name} {self.words}"


def plain(text: str) -> str:
    """Return the letters and digits of a text in lower case, to compare names that are written in several ways."""
    return "".join(c for c in text.casefold() if c.isalnum())


def kind_of(values: np.ndarray) -> tuple[Kind, float]:
    """Return the kind of some stored values, and the largest of them."""
    if not np.isfinite(values).all():
        return "broken", float("nan")
    if not len(values) or not values.any():
        return "empty", 0.0
    largest = float(values.max())
    if values.min() < 0:
        return "scaled", largest
    if (values == np.floor(values)).all():
        return ("zeros and ones" if largest == 1 else "counts"), largest
    return ("log1p" if largest <= LARGEST_LOG1P else "normalised"), largest


def look_at_places(source: Source) -> list[Place]:
    """Return every place of values with what it holds."""
    return [Place(name, *kind_of(source.some_values(name))) for name in source.places()]


def best_place(places: list[Place]) -> Place | None:
    """Return the place to read: counts if there are any (X before others), else logarithms, else None."""

    def rank(place: Place) -> tuple[int, int, int]:
        name = plain(place.name.removeprefix("layers/"))
        usual = 0 if place.name == "X" else 1 if name in _COUNT_NAMES else 3 if name in _PARTIAL else 2
        # raw has all genes, X often only the variable ones
        log = 0 if place.name == "raw" else 1
        kinds = {"counts": 0, "zeros and ones": 1, "log1p": 2}
        return kinds[place.kind], log if place.kind == "log1p" else usual, places.index(place)

    usable = [place for place in places if place.kind in ("counts", "zeros and ones", "log1p")]
    return min(usable, key=rank) if usable else None


def why_place(chosen: Place, places: list[Place]) -> str:
    """Say in a sentence why a place was chosen."""
    others = [str(place) for place in places if place is not chosen]
    said = f"it {chosen.words}"
    if chosen.kind == "log1p":
        said += "; no place holds counts, so these are taken as log1p values"
    return f"{said}; {'; '.join(others[:3])}" if others else said


def no_place(places: list[Place], shown: str) -> str:
    """Say that a screen has no values that can be used, and what to do."""
    found = "; ".join(map(str, places)) or "there is no matrix"
    advice = {
        "normalised": "run sc.pp.log1p on values that were only normalised; estimated counts can be rounded",
        "scaled": "the counts are needed that were there before scaling",
        "broken": "mend or drop the cells or genes with missing values",
        "empty": "write the counts into the file",
    }
    kinds = dict.fromkeys(place.kind for place in places)
    said = "; ".join(advice[kind] for kind in kinds if kind in advice)
    return (
        f"{shown} has no counts and no log1p values: {found}. Put raw counts into X or a layer"
        f"{f' ({said})' if said else ''}, and name the layer if there are several"
    )


def gene_key(source: Source, place: str) -> tuple[str | None, str, str]:
    """Choose how genes are named.

    Returns
    -------
    key
        var column, or None for the index of var.
    why
        The reason in a sentence.
    problem
        What is wrong if no names are unique; empty if nothing is.
    """
    names = pd.Index(source.gene_names(place, None))
    keys = source.unique_keys(place)
    symbols = next((key for key in keys if plain(key) in _SYMBOL_NAMES), None)
    ids = _share_of_ids(names)
    kind = "Ensembl ids" if ids else "names"
    if not names.is_unique:
        repeated = listing(names[names.duplicated()].unique(), 3)
        if keys:
            key = symbols or keys[0]
            return (
                key,
                f"the index of var repeats names ({repeated}), while var column '{key}' has unique ones",
                "",
            )
        return None, "", f"the genes' names are not unique ({repeated}), and no var column has unique names"
    if ids and symbols is not None and not _share_of_ids(pd.Index(source.gene_names(place, symbols))):
        return (
            symbols,
            f"the index of var holds Ensembl ids, and var column '{symbols}' has a symbol for each",
            "",
        )
    more = "; no var column has a different symbol for each gene" if ids else ""
    return None, f"its {kind} are unique: {listing(names[:2])}{more}", ""


def _share_of_ids(names: pd.Index) -> bool:
    """Return whether most of the first names are Ensembl ids."""
    some = names[:2000]
    return len(some) > 0 and sum(_ENSEMBL.match(str(name)) is not None for name in some) > len(some) // 2


def unknown_place(name: str, places: list[Place]) -> str:
    """Say that a place of values does not exist."""
    have = [place.name for place in places]
    return f"there is no '{name}'{nearest(name, have) or ';'} values are in {listing(have) or 'no place'}"
