"""Pages on the settings of a recipe, on variants and on presets, made of the typed tree and of the files behind it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from perturbdiff.config import readings, recipes
from perturbdiff.config.settings import Config

_TITLES = {
    "data": "Data",
    "split": "Split",
    "model": "Model",
    "schedule": "Noise schedule",
    "loss": "Loss",
    "train": "Training",
    "sample": "Sampling",
    "evaluate": "Evaluation",
    "simulate": "Simulation",
    "baseline": "Baselines",
}
_VARIANTS = ("recommended", "paper", "released")
_OF_THE_RECIPE = ("name", "variant", "description")  # they say which recipe it is
_WORDS = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text"}
_SIGNS = ((annotated_types.Ge, "at least"), (annotated_types.Gt, "more than"))
_UPPER = ((annotated_types.Le, "at most"), (annotated_types.Lt, "less than"))


def pages() -> dict[str, tuple[str, str]]:
    """Return the title and the Markdown text of a page for each section, by its name, the overview first."""
    found = {"index": ("Overview", _overview())}
    for name, field in _sections().items():
        found[name] = (_TITLES.get(name, name.capitalize()), "\n".join(_section(name, field.annotation)))
    return found


def _sections() -> dict[str, FieldInfo]:
    return {name: f for name, f in Config.model_fields.items() if _is_section(f.annotation)}


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _overview() -> str:
    top = [name for name in Config.model_fields if name not in _sections()]
    lines = [
        "# Configuration",
        "",
        "A recipe is one tree of values. A setting is named by its section and its name, such as `train.max_steps`. "
        "Change one by `--set train.max_steps=500`, or write it into a YAML file:",
        "",
        "```yaml",
        "base: recommended",
        "train: {max_steps: 500}",
        "```",
        "",
        "`perturbdiff config show` prints a whole recipe and where each value comes from. These pages are made from "
        "the settings themselves. [Recipes](../../recipes.md) explains how the layers of a recipe fit together.",
        "",
        "| section | what it is about |",
        "|---|---|",
    ]
    for name, field in _sections().items():
        meaning = _sentence(str(field.annotation.__doc__).split("\n\n")[0])
        lines.append(f"| [`{name}`]({name}.md) | {meaning} |")
    lines += ["", "## Settings outside the sections", ""]
    for name in top:
        lines += _setting(name, Config.model_fields[name], level=3)
    return "\n".join(lines)


def _section(name: str, section: Any) -> Iterator[str]:
    yield from [f"# {_TITLES.get(name, name.capitalize())}: `{name}`", "", _sentence(section.__doc__), ""]
    for key, field in section.model_fields.items():
        yield from _setting(f"{name}.{key}", field, level=2)


def _setting(dotted: str, field: FieldInfo, level: int) -> Iterator[str]:
    """Yield what is known of a setting."""
    yield from [f"{'#' * level} `{dotted}` {{ #{dotted} }}", "", _sentence(field.description or ""), ""]
    yield f"- **Values:** {_type(field)}"
    if dotted not in _OF_THE_RECIPE:
        yield f"- **Default:** {_defaults(dotted)}"
    if role := _role(dotted):
        yield f"- **Variants:** {role}"
    yield ""


def _type(field: FieldInfo) -> str:
    bounds = []
    for group in (_SIGNS, _UPPER):
        for kind, word in group:
            bounds += [f"{word} {_number(_limit(m))}" for m in field.metadata if isinstance(m, kind)]
    return ", ".join(
        [_words(field.annotation), " and ".join(bounds)] if bounds else [_words(field.annotation)]
    )


def _limit(bound: Any) -> float:
    return next(getattr(bound, name) for name in ("ge", "gt", "le", "lt") if hasattr(bound, name))


def _number(value: float) -> str:
    return f"{value:,}"


def _words(annotation: Any) -> str:
    """Say in words which values a type allows."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(_value(choice) for choice in inner)
    if origin in (Union, types.UnionType):
        known = [_words(kind) for kind in inner if kind is not type(None)]
        return " or ".join([*known, "none (`null`)"] if type(None) in inner else known)
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return f"list of {_plural(inner[0])}"
        return f"list of {len(inner)} {_plural(inner[0])}"
    if origin is dict:
        return "names with their values"
    if hasattr(annotation, "__metadata__"):
        return _words(annotation.__origin__)
    return _WORDS[annotation]


def _plural(annotation: Any) -> str:
    words = _words(annotation)
    return {"whole number": "whole numbers", "number": "numbers", "text": "texts"}.get(
        words, f"these: {words}"
    )


@cache
def _recipe(name: str) -> Config:
    return recipes.load(name)


def _defaults(dotted: str) -> str:
    """Say what a setting is in the recipe that is used without `--config`, and where it differs in the other two."""
    found: dict[str, list[str]] = {}
    for name in _VARIANTS:
        found.setdefault(_value(_of(_recipe(name), dotted)), []).append(f"`{name}`")
    found.setdefault(_value(_of(Config(), dotted)), []).append("a recipe without a base")
    (first, _), *others = found.items()
    return "; ".join([first, *(f"{value} in {', '.join(names)}" for value, names in others)])


def _of(config: object, dotted: str) -> object:
    for name in dotted.split("."):
        config = getattr(config, name)
    return config


def _value(value: object) -> str:
    if value in ("", (), {}):
        return "empty"
    if value is None:
        return "none"
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return f"`{text}`"


def _role(dotted: str) -> str:
    """Say what a variant has to do with a setting."""
    if dotted in readings.switches("paper"):
        return "each variant fixes this value. A recipe with another value is its `own` variant"
    if dotted in _variant("paper"):
        return "each variant suggests a value. You can change it and keep the variant's name"
    return ""


@cache
def _variant(name: str) -> dict[str, str]:
    """Return the values that a variant stands for, by dotted key."""
    values, sources = readings.untag(readings.expand({"variant": name}, f"variant {name}"))
    return {key: _value(_plain(values, key)) for key in sources}


def variants_page() -> str:
    """Return the page that compares the variants."""
    fixed = readings.switches("paper")
    lines = [
        "# Variants",
        "",
        "A variant is one reading of the method. `recommended` is ours and the default. `paper` is the method as the "
        "text states it. `released` is what the authors' code computes. Choose one by `--set variant=paper`.",
        "",
        "## What a variant fixes",
        "",
        "A recipe with another value for one of these settings is its `own` variant.",
        "",
        *_comparison([key for key in _variant("paper") if key in fixed]),
        "",
        "## What a variant suggests",
        "",
        "You can change these values and keep the variant's name.",
        "",
        *_comparison([key for key in _variant("paper") if key not in fixed]),
        "",
    ]
    return "\n".join(lines)


def _comparison(keys: list[str]) -> Iterator[str]:
    yield f"| setting | {' | '.join(f'`{name}`' for name in _VARIANTS)} |"
    yield f"|---|{'---|' * len(_VARIANTS)}"
    for key in keys:
        values = [_variant(name).get(key, "–") for name in _VARIANTS]
        yield f"| [`{key}`](configuration/{key.split('.')[0]}.md#{key}) | {' | '.join(values)} |"


def presets_page() -> str:
    """Return the page that lists the presets and what each of them sets."""
    lines = [
        "# Presets",
        "",
        "A preset is a recipe that comes with the package. Use one by its name (`--config kang18`), or build on it in "
        "a file of your own (`base: kang18`). `perturbdiff config show NAME` prints all of its values.",
        "",
        "| preset | what it is for | builds on |",
        "|---|---|---|",
    ]
    own = {}
    for name in recipes.presets():
        tree = readings.read(_text(name), name)
        base = tree.pop("base", None)
        about = _sentence(str(readings.untag(tree.pop("description", ""))[0]))
        tree.pop("name", None)
        own[name] = tree
        lines.append(f"| [`{name}`](#{name}) | {about} | {f'`{base}`' if base else '–'} |")
    lines += ["", "The rest of this page shows what each preset sets beyond the recipe that it builds on."]
    for name, tree in own.items():
        plain, sources = readings.untag(tree)
        lines += ["", f"## `{name}` {{ #{name} }}", "", "| setting | value | source |", "|---|---|---|"]
        for key, source in sources.items():
            lines.append(
                f"| `{key}` | {_value(_plain(plain, key))} | {source if source != 'given' else '–'} |"
            )
    return "\n".join([*lines, ""])


def _plain(tree: dict[str, Any], dotted: str) -> Any:
    for name in dotted.split("."):
        tree = tree[name]
    return tuple(tree) if isinstance(tree, list) else tree


def _text(name: str) -> str:
    return (resources.files("perturbdiff.config") / "presets" / f"{name}.yaml").read_text()


def _sentence(text: str) -> str:
    """Return a text with a capital letter at its beginning and a full stop at its end."""
    text = " ".join(text.split())
    if not text:
        return ""
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith(('.', '?')) else '.'}"
