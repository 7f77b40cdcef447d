"""Every public name has a docstring with an example, and the examples run as one story."""

from __future__ import annotations

import doctest

import perturbdiff

STORY = (
    "simulate",
    "preprocess",
    "split",
    "read_store",
    "train",
    "sample",
    "evaluate",
    "report",
    "PerturbDiff",
)
METHODS = ("fit", "predict", "evaluate", "save", "load")


def test_the_examples_of_all_public_names_run(tmp_path):
    shared = {"perturbdiff": perturbdiff, "folder": tmp_path}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    objects = {name: getattr(perturbdiff, name) for name in STORY}
    objects |= {f"PerturbDiff.{name}": getattr(perturbdiff.PerturbDiff, name) for name in METHODS}
    scores = perturbdiff.Scores
    objects |= {"Scores": scores, "Scores.read": scores.read, "Scores.plot": scores.plot}
    for name, thing in objects.items():
        (found,) = finder.find(thing, name, globs={})
        assert found.examples, f"{name} has no example"
        found.globs = shared
        runner.run(found, clear_globs=False)
    assert runner.failures == 0


def test_public_functions_say_what_they_take_give_and_raise():
    for name in STORY:
        text = getattr(perturbdiff, name).__doc__
        assert "Parameters\n" in text, name
        assert "Raises\n" in text, name
        assert name == "PerturbDiff" or "Returns\n" in text, name
