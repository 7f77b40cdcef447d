"""Safe reading of YAML, TOML, JSON and packed text from untrusted sources.

A small text can cost much: nesting that exhausts the stack, an alias that stands for a billion values, a key of fifty
thousand parts, a packed file that unpacks without end. The size is therefore checked before or while the file is read,
aliases are refused and nesting is limited. A key that is given twice is an error instead of a silent choice.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from perturbdiff.runtime.errors import UserError, one_line

Form = Literal["YAML", "TOML", "JSON"]

LARGEST: dict[Form, int] = {"YAML": 1 << 20, "TOML": 1 << 22, "JSON": 1 << 28}
"""Maximum bytes of a text: recipes are short, splits name many perturbations, vocabularies hold every label."""
DEEPEST = 32
"""Maximum depth of nested sections, lists or key parts."""
_SHOWN = 160  # characters of a parser's message

_TOML_TEXT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL
)
_LABEL = re.compile(r"0[0-9_]+|.*:.*")
_TOML_KEY = re.compile(rf"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++){{{DEEPEST},}}")


def read_text(path: Path, form: Form, what: str = "") -> str:
    """Return the text of a file; see `read`."""
    origin = f"{what} {path}".strip()
    try:
        if path.stat().st_size > LARGEST[form]:
            raise UserError(f"{origin}: is larger than {LARGEST[form] >> 20} MiB, which no such file is")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{origin}: is not a text file in UTF-8") from None
    except OSError as error:
        raise UserError(f"{origin}: cannot be read ({error.strerror or type(error).__name__})") from None


def read(path: Path, form: Form, what: str = "") -> Any:
    """Return the content of a file.

    Parameters
    ----------
    path
        The file.
    form
        Format of the file.
    what
        Description in messages, put before the file name.

    Raises
    ------
    UserError
        If the file is missing, too large or not UTF-8 text, or as in `parse`. The message is one line.
    """
    return parse(read_text(path, form, what), form, f"{what} {path}".strip())


class Loader(yaml.SafeLoader):
    """Reads YAML without aliases, duplicate keys or deep nesting. A subclass may add tags."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases and deep nesting before anything is built from them."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise ComposerError(
                None, None, f"the alias '*{event.anchor}'; write the value out instead", event.start_mark
            )
        self._depth += 1
        if self._depth > DEEPEST:
            raise RecursionError
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Refuse a key that is given twice."""
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ConstructorError(
                        None, None, f"the key '{key.value}' is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number_or_label(self, node: Any) -> Any:
        """Return a whole number; leave 01 and 12:30 as they are, which YAML would read in base 8 and 60."""
        text = self.construct_scalar(node)
        return text if _LABEL.fullmatch(text) else self.construct_yaml_int(node)


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_number_or_label)


def parse(text: str, form: Form, origin: str, *, loader: type[Loader] = Loader) -> Any:
    """Return the content of a text.

    Parameters
    ----------
    text, form
        The text and its format.
    origin
        Name of the text in messages.
    loader
        Loader for YAML with its own tags.

    Raises
    ------
    UserError
        If the text is too long, malformed, has a duplicate key or is nested too deeply. The message is one line.
    """
    if len(text) > LARGEST[form]:
        raise UserError(f"{origin}: is longer than {LARGEST[form] >> 20} MiB, which no such text is")
    try:
        if form == "YAML":
            content = _yaml(text, loader)
        else:
            content = _toml(text) if form == "TOML" else json.loads(text, object_pairs_hook=_once)
        _check_depth(content)
    except RecursionError:
        raise UserError(
            f"{origin}: is nested more than {DEEPEST} levels deep, which no such file is"
        ) from None
    except ValueError as error:  # JSON, TOML and overlong numbers all raise ValueErrors
        raise UserError(f"{origin} is not valid {form}: {one_line(str(error))[:_SHOWN]}") from None
    return content


def _yaml(text: str, loader: type[Loader]) -> Any:
    try:
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{error.problem or error.context}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
    ) as error:  # raised by the library for some values
        raise ValueError(f"a value cannot be read ({type(error).__name__})") from None


def _toml(text: str) -> Any:
    bare = _TOML_TEXT.sub("s", text)  # so that brackets in texts and comments are not counted
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", bare):
        depth += 1 if bracket in "[{" else -1
        if depth > DEEPEST:
            raise RecursionError
    if _TOML_KEY.search(bare):
        raise RecursionError
    return tomllib.loads(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is given twice")
    return mapping


def _check_depth(content: Any) -> None:
    """Refuse deep nesting, without recursion."""
    level = [content]
    for _ in range(DEEPEST):
        containers = [value for value in level if isinstance(value, dict | list)]
        if not containers:
            return
        level = [v for c in containers for v in (c.values() if isinstance(c, dict) else c)]
    raise RecursionError


UNPACKED_AT_LEAST, UNPACKED_TIMES = 64 << 20, 100
"""A packed file may hold this many bytes, or this many times its own size. Tables are packed to a twentieth or so."""

_PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading, unpacked if its name ends with .gz, .bz2 or .xz.

    Raises
    ------
    UserError
        While it is read: if it unpacks to far more than it has bytes.
    """
    unpack = _PACKED.get(path.suffix.lower())
    if unpack is None:
        return path.open("rb")
    most = max(UNPACKED_AT_LEAST, UNPACKED_TIMES * path.stat().st_size)
    return io.BufferedReader(_Bounded(path, unpack(path, "rb"), most))  # type: ignore[return-value]


class _Bounded(io.RawIOBase):
    """The first ``most`` bytes of a stream; more are an error."""

    def __init__(self, path: Path, stream: IO[bytes], most: int) -> None:
        self._path, self._stream, self._left = path, stream, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise UserError(
                f"{self._path}: unpacks to more than {UNPACKED_TIMES} times its size, which no such table does; "
                "unpack it yourself and look at it"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()
