"""The metrics of the first screen: what each asks, and what it is called in a sentence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from perturbdiff.evaluation.calibration.verdicts import QUESTIONS
from perturbdiff.reporting.loading.metric_columns import Column, named

CORE = (*QUESTIONS["populations"], *QUESTIONS["changes"])
"""Whole populations and mean changes: a verdict rests on one metric of each."""


@dataclass(frozen=True)
class KeyMetric:
    """One line of the first screen.

    Attributes
    ----------
    names
        Metrics in order of preference: the first that was scored stands there.
    question
        What it asks of the predictions.
    skill
        What a method that scores well is good at, after "at".
    """

    names: tuple[str, ...]
    question: str
    skill: str


KEY = (
    KeyMetric(QUESTIONS["populations"], "Are the cells one population?", "whole populations"),
    KeyMetric(QUESTIONS["changes"], "Is the mean change right?", "mean changes"),
    KeyMetric(QUESTIONS["discrimination"], "Is it the right perturbation?", "telling perturbations apart"),
    KeyMetric(QUESTIONS["de_genes"], "Are the most changed genes found?", "finding the most changed genes"),
    KeyMetric(QUESTIONS["de_ranking"], "Do the changed genes come first?", "ranking the changed genes first"),
    KeyMetric(QUESTIONS["direction"], "Is the direction right?", "directions of change"),
    KeyMetric(("nonzero_ratio",), "Are there as many zeros?", "numbers of zeros"),
)


def key_metrics(columns: Sequence[Column], kept: Collection[str] = ()) -> list[Column]:
    """Return the metrics of the first screen: for each question the first that is kept, else the first that was scored.

    Parameters
    ----------
    columns
        All metrics that were scored.
    kept
        Those that mean something on this data set.
    """
    chosen = []
    for key in KEY:
        scored = [column for name in key.names if (column := named(columns, name)) is not None]
        chosen += [*(c for c in scored if c.name in kept), *scored][:1]
    return chosen


def question(metric: Column) -> str:
    """Return what a key metric asks. Empty for other metrics."""
    return next((key.question for key in KEY if metric.name in key.names), "")


def skill(metric: Column) -> str:
    """Return what a method that scores well is good at. For other metrics their name."""
    return next((key.skill for key in KEY if metric.name in key.names), metric.label)


def caption(metric: Column) -> str:
    """Return what a key metric asks, and where better is, to stand below a figure of it."""
    where = {"higher": "Higher is better.", "lower": "Lower is better.", "one": "1 is best."}
    return f"{question(metric) or metric.label + '.'} {where.get(metric.direction, '')}".strip()
