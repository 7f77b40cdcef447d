"""Makes and reads splits, which assign a part to each condition. A split is a parquet file with a row per condition."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perturbdiff.conditions.condition import FEW_CELLS, SORTED_BY
from perturbdiff.config.settings import Config
from perturbdiff.io.cell_labels import read_conditions
from perturbdiff.io.columns import as_text
from perturbdiff.io.recognise import confusion
from perturbdiff.io.tenx_folder import is_tenx_folder
from perturbdiff.io.token_parquet import is_token_parquet
from perturbdiff.runtime import files, provenance, tabular
from perturbdiff.runtime.errors import UserError, listing, nearest
from perturbdiff.runtime.seeds import generator
from perturbdiff.splits.split_rules import PARTS, by_rule, by_toml, read_toml
from perturbdiff.store.pseudobulk import group_means
from perturbdiff.store.store import Store

logger = logging.getLogger(__name__)

ENOUGH_CELLS = 100
"""Validation cells that can tell one step of training from another."""

_FEW = 11  # first word of the seed (see `perturbdiff.loading.cell_sets`)
_PATH = "path"  # attribute of a table with the file that it was read from
_ROUNDING = 1e-9  # because 0.07 · 100 is slightly more than 7 in floating point


def leave_out(
    conditions: pd.DataFrame, use: np.ndarray, fraction: float, seed: int, exclude: np.ndarray | None = None
) -> np.ndarray | None:
    """Return the rows of a store to leave out, so that a share of each perturbation's cells is kept.

    Of a perturbation's n usable cells, of all cell types and batches together, the first ⌈fraction · n⌉ in an order
    drawn from (seed, perturbation) are kept. This is at least one, so no perturbation is lost, and a larger share
    includes the cells of a smaller one. A cell type or batch with few of these cells can lose all of them. Controls
    and conditions that are not in ``use`` keep all cells.

    Parameters
    ----------
    conditions
        `Store.conditions`.
    use
        bool [n_conditions]: conditions that training uses.
    fraction
        Share of the cells to keep, above 0. With 1, nothing changes.
    seed
        Seed of the choice.
    exclude
        bool [n_cells]: rows that are already left out, or None.
    """
    if fraction >= 1:
        return exclude
    start, stop = (conditions[column].to_numpy(np.int64) for column in ("start", "stop"))
    out = np.zeros(int(stop.max(initial=0)), dtype=bool) if exclude is None else exclude.copy()
    number, _ = pd.factorize(conditions["perturbation"], sort=True)
    thinned = np.asarray(use, bool) & ~conditions["is_control"].to_numpy(bool)
    for perturbation in np.unique(number[thinned]):
        mine = np.flatnonzero(thinned & (number == perturbation))
        rows = np.concatenate([np.arange(start[one], stop[one]) for one in mine])
        usable = rows[~out[rows]]
        keep = int(np.ceil(fraction * len(usable) - _ROUNDING))
        out[generator(_FEW, seed, int(perturbation)).permutation(usable)[keep:]] = True
    return out


KEYS = list(SORTED_BY)


def make_split(
    source: Path,
    out: Path,
    config: Config,
    *,
    toml: Path | None = None,
    obs: Path | None = None,
    seed: int = 0,
    force: bool = False,
) -> Path:
    """Decide the part of every condition and write it.

    Parameters
    ----------
    source
        A store, or a raw h5ad, Zarr or 10x h5 file, of which only the labels are read.
    out
        Parquet file to write: ``cell_type, batch, perturbation, part`` ('train', 'valid', 'test' or 'unused') and
        ``n_cells``. The file ``<out>.counts.csv`` next to it gives the cells and conditions of each part.
    config
        Its section ``split`` is used, and for a raw file the column names in ``data``.
    toml
        STATE-style specification, which replaces the rules in ``config.split``.
    obs
        Table of cell labels, for a raw file that lacks them.
    seed
        Seed of the random choices.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UserError
        If a name has no cells, the context column is not constant within conditions, a held-out context has no
        controls, a condition would be in two parts, or no perturbed cells are left to train on.
    """
    source, out = Path(source), Path(out)
    inputs = {"source": files.existing(source, "input")} | ({"toml": Path(toml)} if toml else {})
    inputs |= {"obs": Path(obs)} if obs else {}
    recipe = {"split": config.split.model_dump(), "data": config.data.model_dump()}
    counts_at = {"counts": out.with_name(f"{out.name}.counts.csv")}
    with provenance.stage(
        "split", out, config=recipe, inputs=inputs, seed=seed, force=force, companions=counts_at
    ) as stage:
        if stage.skip:
            return out
        table, held_out = decide(source, config, toml=toml, obs=obs, seed=seed)
        check(table)
        counts = count(table)
        logger.info("split of %s:\n%s", source, counts.to_string(index=False))
        table[[*KEYS, "part", "n_cells"]].to_parquet(stage.path, index=False)
        tabular.write_csv(counts, stage.companions["counts"])
        stage.results |= {"held_out": held_out, "counts": counts.to_dict(orient="records")}
    return out


def decide(
    source: Path, config: Config, *, toml: Path | None, obs: Path | None = None, seed: int
) -> tuple[pd.DataFrame, list[str]]:
    """Return the conditions of ``source`` with their ``context`` and ``part``, and the held-out contexts."""
    raw = not source.is_dir() or (source / "obs").exists() or is_tenx_folder(source)
    raw = raw or is_token_parquet(source)
    store = None if raw else Store(source)
    if store is not None and obs is not None:
        raise UserError(f"{source}: is a store, which has its labels; leave out --obs")
    spec = read_toml(toml, [source.stem, source.name, config.name]) if toml else None
    column = (spec.context_column if spec else None) or config.split.context_column
    table = with_context(source, store, config, column, obs)
    if spec:
        table["part"] = by_toml(table, spec, config.split.missing)
        held_out = sorted(set(table["context"][table["part"].isin(["valid", "test"])]))
        return table, held_out

    def profiles(contexts: Sequence[str]) -> np.ndarray:
        if store is None:
            raise UserError(
                "split.choose=pca looks at expression: make the split from a store, not from raw data"
            )
        groups = pd.Index(contexts).get_indexer(table["context"])
        return group_means(store, groups, len(contexts), label="pseudobulk of contexts")[0]

    table["part"], held_out = by_rule(table, config.split, seed, profiles)
    return table, held_out


def with_context(
    source: Path, store: Store | None, config: Config, column: str, obs: Path | None = None
) -> pd.DataFrame:
    """Return the table of conditions with the column ``context``, the value of obs column ``column``.

    Raises
    ------
    UserError
        If the column does not exist, or has several values within one condition.
    """
    known = {"cell_type": "cell_type", "batch": "batch"}
    known |= {
        str(k): v
        for k, v in ((config.data.cell_type_key, "cell_type"), (config.data.batch_key, "batch"))
        if k
    }
    if store is None:
        extra = () if column in known else (column,)
        labels = config.data.model_copy(update={"extra_obs": extra})
        table = read_conditions([source], labels, [obs] if obs else [])
        table["is_control"] = table["perturbation"] == config.data.control
    else:
        table = pd.DataFrame(store.conditions[[*KEYS, "n_cells", "is_control"]])
    if column in known:
        table["context"] = table[known[column]].astype(str)
    elif store is None:
        table["context"] = table[column].astype(str)
    else:
        table = _join_column(store, table, column)
    several = table.duplicated(subset=KEYS).to_numpy()
    if several.any():
        where = _condition(table, several)
        raise UserError(
            f"{source}: obs column '{column}' has several values within one condition ({where}), so it cannot be "
            "held out; use a column that is constant in each cell type, batch and perturbation"
        )
    return table.reset_index(drop=True)


def _join_column(store: Store, table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the conditions with the values of a further obs column, a row for each pair that has cells."""
    start, counted = store.conditions["start"].to_numpy(np.int64), []
    try:
        for first, piece in store.obs_pieces([column]):
            condition = np.searchsorted(start, np.arange(first, first + len(piece)), side="right") - 1
            context = piece[column].astype(str).to_numpy(object)
            counted.append(
                pd.DataFrame({"condition": condition, "context": context}).value_counts(sort=False)
            )
    except UserError as error:
        raise UserError(
            f"{error}; to hold out by another column, add it to data.extra_obs and preprocess"
        ) from None
    sizes = pd.concat(counted).groupby(level=[0, 1], sort=False).sum()
    pairs = pd.DataFrame({"n_cells": sizes}).reset_index().sort_values(["condition", "context"])
    joined = pairs.join(table.drop(columns="n_cells"), on="condition")
    return pd.DataFrame(joined.drop(columns="condition"))


def check(table: pd.DataFrame) -> None:
    """Check a split for leaks.

    Raises
    ------
    UserError
        If a perturbation of a context is in two parts, a control is held out, or the training part has no perturbed
        cells.
    """
    perturbed = pd.DataFrame(table[~table["is_control"]])
    once = set(zip(perturbed["context"], perturbed["perturbation"], perturbed["part"], strict=True))
    seen = Counter((context, perturbation) for context, perturbation, _ in once)
    twice = sorted(pair for pair, number in seen.items() if number > 1)
    if twice:
        context, perturbation = twice[0]
        raise UserError(f"split: perturbation '{perturbation}' of context '{context}' is in two parts")
    if (table["part"][table["is_control"]] != "train").any():
        raise UserError("split: control cells are held out; they are inputs and always belong to training")
    trained = set(perturbed["perturbation"][perturbed["part"] == "train"])
    if not trained:
        raise UserError("split: no perturbed cells are left for training; hold out less")
    if not set(perturbed["part"]) & {"valid", "test"}:
        logger.warning("nothing is held out: name contexts in split.held_out, or set split.num_held_out")
    part, n_cells = np.asarray(perturbed["part"], object), np.asarray(perturbed["n_cells"], np.int64)
    sizes = {name: n_cells[part == name] for name in ("valid", "test")}
    if why := weak_validation(sizes["valid"]):
        logger.warning("%s", why)
    if few := int((sizes["test"] < FEW_CELLS).sum()):
        logger.warning(
            "%d of %d test conditions have fewer than %d cells; their scores will be mostly noise",
            few, len(sizes["test"]), FEW_CELLS,
        )  # fmt: skip
    unseen = sorted(set(perturbed["perturbation"][perturbed["part"] == "test"]) - trained)
    if unseen:
        logger.warning(
            "%d test perturbations have no training cells in any context: %s", len(unseen), listing(unseen, 5)
        )


def weak_validation(n_cells: np.ndarray) -> str:
    """Return why validation on conditions of these numbers of cells cannot choose a step; empty if it can.

    Parameters
    ----------
    n_cells
        int [conditions]: cells of each validation condition. Without any, nothing is to be said.
    """
    usable = int(n_cells[n_cells >= FEW_CELLS].sum())
    if not len(n_cells) or usable >= ENOUGH_CELLS:
        return ""
    return (
        f"validation cannot choose well: of its {len(n_cells)} conditions, those with at least {FEW_CELLS} cells have "
        f"{usable} cells together, and {ENOUGH_CELLS} are needed; hold out more (split.valid_fraction, "
        "split.num_held_out), or keep the last step (train.choose=last)"
    )


def count(table: pd.DataFrame) -> pd.DataFrame:
    """Return ``part, cells, conditions, perturbations, contexts``: a row per part, and a last row for the controls."""
    perturbed = table[~table["is_control"]]
    groups = [(part, perturbed[perturbed["part"] == part]) for part in PARTS]
    groups.append(("control", table[table["is_control"]]))
    return pd.DataFrame(
        [
            {
                "part": name,
                "cells": int(rows["n_cells"].sum()),
                "conditions": len(rows),
                "perturbations": len(set(rows["perturbation"])),
                "contexts": len(set(rows["context"])),
            }
            for name, rows in groups
        ]
    )


def read_split(path: Path) -> pd.DataFrame:
    """Read a split; one that ``perturbdiff split`` wrote must be as it was written.

    Returns
    -------
    pd.DataFrame
        ``cell_type, batch, perturbation, part`` (str) and ``n_cells``, with a row for each condition.

    Raises
    ------
    UserError
        If the file is not a split, contains a condition twice, or was changed while its manifest stayed.
    """
    path = files.existing(Path(path), "split")
    if other := confusion(path, "a split", "a parquet table"):
        raise UserError(f"{path}: {other}; make a split with perturbdiff split")
    table = tabular.read_parquet(path, "make a split with 'perturbdiff split'")
    missing = [c for c in (*KEYS, "part") if c not in table]
    if missing:
        raise UserError(
            f"{path}: a split needs the columns {listing([*KEYS, 'part'])}; missing {listing(missing)}"
        )
    table = table.assign(**{key: table[key].map(as_text) for key in KEYS}).astype({"part": str})
    wrong = sorted(set(table["part"]) - set(PARTS))
    if wrong:
        raise UserError(
            f"{path}: unknown part '{wrong[0]}'{nearest(wrong[0], PARTS)}; parts are {listing(PARTS)}"
        )
    twice = table.duplicated(subset=KEYS).to_numpy()
    if twice.any():
        where = _condition(table, twice)
        raise UserError(f"{path}: condition {where} occurs twice, so it can be in two parts; keep one row")
    try:  # last, since what is wrong in the file says more than that it was changed
        provenance.verify(path)
    except UserError as error:
        raise UserError(f"{error}, and give a split of your own another name") from None
    table.attrs[_PATH] = str(path)
    return table


def parts(conditions: pd.DataFrame, split: pd.DataFrame, data: Path | None = None) -> np.ndarray:
    """Return the part of each condition of a store, object [n_conditions].

    Parameters
    ----------
    conditions
        The store's conditions.
    split
        What `read_split` returned.
    data
        The store, for messages.

    Raises
    ------
    UserError
        If a condition is not in the split.
    """
    what, name = data or "the store", split.attrs.get(_PATH, "split")
    if split.empty:
        raise UserError(f"{name}: has no rows; make a split of {what} with perturbdiff split")
    rows = _index(split).get_indexer(_index(conditions))
    lacking = rows < 0
    if lacking.any():
        if lacking.all():
            raise UserError(
                f"{name}: none of the conditions of {what} is in it ({what}: {_condition(conditions, lacking)}; split: "
                f"{_condition(split, np.ones(len(split), bool))}): it was made from other data; make a split of "
                f"{what} with perturbdiff split"
            )
        raise UserError(
            f"{name}: {lacking.sum()} of {len(lacking)} conditions of {what} are not in it (first: "
            f"{_condition(conditions, lacking)}); make the split from the same data with perturbdiff split"
        )
    return split["part"].to_numpy(object)[rows]


def _index(table: pd.DataFrame) -> pd.MultiIndex:
    return pd.MultiIndex.from_arrays([table[key].astype(str) for key in KEYS], names=KEYS)


def _condition(table: pd.DataFrame, which: np.ndarray) -> str:
    """Return the labels of the first condition in a mask, for messages."""
    first = int(np.flatnonzero(which)[0])
    return " / ".join(str(table[key].to_numpy()[first]) for key in KEYS)
