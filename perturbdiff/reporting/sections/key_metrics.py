"""The metrics of the first screen: what each asks, and what it is called in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perturbdiff.reporting.loading.metric_columns import ENERGY, PDCORR, Column, named

CORE = (ENERGY, PDCORR)
"""Whole populations and mean changes: a verdict rests on both."""


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
    KeyMetric((ENERGY,), "Are the cells one population?", "whole populations"),
    KeyMetric((PDCORR,), "Is the mean change right?", "mean changes"),
    KeyMetric(("PDS_cos", "PDS_L1"), "Is it the right perturbation?", "telling perturbations apart"),
    KeyMetric(("DEOver_10", "DEOver"), "Are the most changed genes found?", "finding the most changed genes"),
    KeyMetric(("AUPRC",), "Do the changed genes come first?", "ranking the changed genes first"),
    KeyMetric(("DirAgr",), "Is the direction right?", "directions of change"),
    KeyMetric(("nonzero_ratio",), "Are there as many zeros?", "numbers of zeros"),
)


def key_metrics(columns: Sequence[Column]) -> list[Column]:
    """Return the metrics of the first screen that were scored."""
    scored = (next((c for n in key.names if (c := named(columns, n))), None) for key in KEY)
    return [metric for metric in scored if metric is not None]


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
