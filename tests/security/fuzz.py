"""A fuzzer: damaged inputs may lead to a right result or to one line and exit code 2, to nothing else.

``PYTHONPATH=tests python -m security.fuzz`` prints a table of what came of each kind of input. ``unseen`` counts other
results that no program could help: other values in an input without checksums. A mutation is known by its kind, its
number and the seed: the same ones are the same damage, alone (``--only store:17``) or in a run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import forked
import h5py
import numpy as np
from security.fuzz_inputs import KINDS, Kind, make
from security.mutations import Mutation, mutate

LIMIT = 60.0
"""Seconds after which a command counts as hung; sound inputs take less than five."""

GOOD = ("right", "refused", "unseen")
"""Outcomes that are allowed."""

OUTCOMES = (
    *GOOD,
    *("another", "several lines", "traceback", "crash", "hang", "left behind", "input changed", "other code"),
)

_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) ")
_DIGEST = re.compile(r"\b[0-9a-f]{12,64}\b")


@dataclass(frozen=True)
class Verdict:
    """What came of one mutation."""

    kind: str
    number: int
    command: str
    file: str
    damage: str
    outcome: str
    said: str
    seconds: float


class Fuzzer:
    """Sound inputs, their results, and a place to work in.

    Parameters
    ----------
    folder
        Scratch folder, which is filled.
    good
        Folder of the sound inputs, which are made if it is not there.
    """

    def __init__(self, folder: Path, good: Path | None = None) -> None:
        self.folder, self.good = folder, good or folder / "good"
        self._right: dict[tuple[str, int], dict[str, str]] = {}

    def prepare(self, commands: set[tuple[str, int]], processes: int) -> None:
        """Make the inputs, and the right results of the commands (kind and number) that will be tried."""
        if not self.good.exists():
            make(self.good, self.folder / "making")
        wanted = sorted(commands)

        def result(n: int, place: Path) -> dict[str, str]:
            ended, content = self._run(*wanted[n], lambda _: None, place)
            if ended.code != 0 or ended.left:
                raise RuntimeError(f"{wanted[n]}: the sound input fails: {ended.err}")
            return content

        results = in_processes(result, len(wanted), processes, self.folder)
        self._right = {wanted[n]: content for n, content in results}

    def try_number(self, kind: str, number: int, seed: int, place: Path) -> Verdict:
        """Try mutation ``number`` of a kind."""
        command, rng = drawn(kind, number, seed)
        return self.attempt(kind, command, lambda targets: mutate(targets, rng), place, number)

    def attempt(
        self,
        kind: str,
        command: int,
        damage: Callable[[list[Path]], Mutation],
        place: Path,
        number: int = -1,
    ) -> Verdict:
        """Damage a copy of an input, run a command on it and judge what comes of it."""
        done: list[Mutation] = []
        ended, content = self._run(kind, command, lambda targets: done.append(damage(targets)), place)
        (mutation,) = done
        outcome = self._judge(kind, command, ended, content, mutation, place)
        bad = place / "bad"
        said = [line for line in ended.err.splitlines() if not _LOG_LINE.match(line)]
        last = said[-1] if said else ""
        return Verdict(
            kind,
            number,
            " ".join(KINDS[kind].commands[command][:2]),
            str(mutation.file.relative_to(bad)),
            f"{mutation.way}: {mutation.text}",
            outcome,
            last.replace(str(place), "…")[:300],
            round(ended.seconds, 2),
        )

    def _run(
        self, kind: str, command: int, damage: Callable[[list[Path]], Any], place: Path
    ) -> tuple[forked.Ended, dict[str, str]]:
        """Return how the command ended on a damaged copy, and what its output holds."""
        shutil.rmtree(place, ignore_errors=True)
        bad, out = place / "bad", place / "out"
        bad.mkdir(parents=True)
        out.mkdir()
        for name in KINDS[kind].targets:
            source = self.good / name
            shutil.copytree(source, bad / name) if source.is_dir() else shutil.copy2(source, bad / name)
        damage([bad / name for name in KINDS[kind].targets])
        before = _state(bad)
        names = {"bad": str(bad), "good": str(self.good), "out": str(out)}
        line = [word.format(**names) for word in KINDS[kind].commands[command]]
        ended = forked.command(line, folder=place / "run", limit=LIMIT)
        if _state(bad) != before:
            return ended, {"changed": "input"}
        if ended.code == 0 and not any(out.iterdir()):
            return ended, {"stdout": ended.out}
        return ended, contents(out) if ended.code == 0 else {}

    def _judge(
        self,
        kind: str,
        command: int,
        ended: forked.Ended,
        content: dict[str, str],
        mutation: Mutation,
        place: Path,
    ) -> str:
        if ended.hung:
            return "hang"
        if ended.signal:
            return "crash"
        if "Traceback" in ended.err or "this is a bug" in ended.err or ended.code == 1:
            return "traceback"
        if content == {"changed": "input"}:
            return "input changed"
        if ended.left or any((place / "run" / "tmp").iterdir()):
            return "left behind"
        if ended.code == 2:
            said = [line for line in ended.err.splitlines() if not _LOG_LINE.match(line)]
            if any((place / "out").iterdir()):
                return "left behind"
            return "refused" if len(said) == 1 and said[0].startswith("error: ") else "several lines"
        if ended.code != 0:
            return "other code"
        if any(path.name.startswith(".") for path in (place / "out").iterdir()):
            return "left behind"
        if content == self._right[kind, command]:
            return "right"
        return "unseen" if cannot_be_seen(KINDS[kind], mutation, self.good, place / "bad") else "another"


def drawn(kind: str, number: int, seed: int) -> tuple[int, random.Random]:
    """Return which command a mutation is for, and what draws its damage."""
    rng = random.Random(f"{seed}:{kind}:{number}")
    return rng.randrange(len(KINDS[kind].commands)), rng


def cannot_be_seen(kind: Kind, mutation: Mutation, good: Path, bad: Path) -> bool:
    """Return whether no program could tell: another value of an input without checksums is another valid input.

    That is so for tables and recipes of the user's, for values of a raw h5ad or Zarr that were changed where they are
    stored, and for values that were replaced by others of the same form, or by a link to others in the file. A chunk
    of Zarr that is not there stands for its fill value. An output may travel without its ``run.json``, a split without
    its manifest: the report then shows less.
    """
    file = mutation.file
    if kind.free:
        return True
    gone = mutation.text == "deleted"
    if kind.checked:
        return gone and file.name.endswith(("run.json", ".parquet.manifest.json"))
    if file.suffix in (".h5ad", ".h5"):
        if mutation.way == "format":
            return mutation.text.split(": ")[1].split(" ")[0] in ("fill", "type", "text", "link")
        return mutation.way == "bytes" and only_values_differ(good / file.relative_to(bad), file)
    return (
        (mutation.way == "bytes" or gone) and file.suffix != ".json" and file.name[0] != "."
    )  # a chunk of Zarr


def only_values_differ(one: Path, other: Path) -> bool:
    """Return whether two HDF5 files hold the same but for stored values or the letters of texts.

    Bytes between the contents of a file mean nothing: the files are compared once more with the values of the first.
    """
    first, second = (np.fromfile(path, np.uint8) for path in (one, other))
    if len(first) != len(second):
        return False
    stored, data = np.zeros(len(first), bool), first.tobytes()
    with h5py.File(one) as file:
        texts = [d for d in _datasets(file) if d.dtype.kind == "O"]
        for dataset in _datasets(file):
            for start, size in _stored(dataset):
                stored[start : start + size] = True
        for text in {bytes(t) for d in texts for t in np.atleast_1d(d[()])}:
            for found in re.finditer(re.escape(text), data) if text else ():
                stored[found.start() : found.end()] = True
    if not ((first != second) & ~stored).any():
        return True
    restored = other.with_name("restored.h5")
    np.where(stored, first, second).tofile(restored)
    try:
        return _h5_content(restored) == _h5_content(one)
    except (OSError, RuntimeError, ValueError, KeyError):
        return False
    finally:
        restored.unlink()


def _datasets(file: h5py.File) -> list[h5py.Dataset]:
    found: list[h5py.Dataset] = []
    file.visititems(lambda _, item: found.append(item) if isinstance(item, h5py.Dataset) else None)
    return found


def _stored(dataset: h5py.Dataset) -> Iterator[tuple[int, int]]:
    if dataset.dtype.kind == "O":  # addresses of texts
        return
    if dataset.chunks is None:
        if (start := dataset.id.get_offset()) is not None:
            yield start, dataset.id.get_storage_size()
        return
    for k in range(dataset.id.get_num_chunks()):
        chunk = dataset.id.get_chunk_info(k)
        yield chunk.byte_offset, chunk.size


def _state(folder: Path) -> dict[str, Any]:
    """Return what lies in a folder: names, kinds and contents."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)  # noqa: PTH115
        else:
            found[name] = path.read_bytes() if path.is_file() else path.stat().st_mode
    return found


def contents(out: Path) -> dict[str, str]:
    """Return what an output says, by file: all but times and machines, and what names the inputs' bytes."""
    found = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        name = str(path.relative_to(out))
        if path.name.endswith("run.json") or "/logs/" in f"/{name}":
            continue
        if path.name.endswith("manifest.json") or path.name in ("checksums.json", "SHA256SUMS"):
            record = json.loads(path.read_text()) if path.suffix == ".json" else {}
            found[name] = _masked(
                json.dumps({k: v for k, v in record.items() if k not in ("inputs", "files")})
            )
        elif path.suffix == ".h5ad":
            found[name] = _h5_content(path)
        elif path.suffix in (".html", ".json", ".txt", ".csv", ".md"):
            found[name] = _masked(path.read_text())
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _masked(text: str) -> str:
    return hashlib.sha256(_DIGEST.sub("#", text).encode()).hexdigest()


def _h5_content(path: Path) -> str:
    """Return a digest of everything in an HDF5 file but hashes of inputs."""
    digest = hashlib.sha256()

    def add(name: str, item: Any) -> None:
        values = item[()] if isinstance(item, h5py.Dataset) else ""
        told = values.tolist() if isinstance(values, np.ndarray) else values
        attributes = {k: str(v) for k, v in sorted(item.attrs.items())}
        digest.update(_DIGEST.sub("#", f"{name} {attributes} {getattr(item, 'dtype', '')} {told}").encode())

    with h5py.File(path) as file:
        file.visititems(add)
    return digest.hexdigest()


def plan(runs: int, only: set[str] | None = None) -> list[tuple[str, int]]:
    """Return kind and number of so many mutations, shared out by the kinds' shares."""
    kinds = {name: kind.share for name, kind in KINDS.items() if only is None or name in only}
    total = sum(kinds.values())
    counts = {name: max(1, round(runs * share / total)) for name, share in kinds.items()}
    jobs = [(name, number) for name, count in counts.items() for number in range(count)]
    random.Random(0).shuffle(jobs)  # so that the processes end together
    return jobs


def in_processes(
    work: Callable[[int, Path], dict[str, Any]], number: int, processes: int, folder: Path
) -> list[tuple[int, dict[str, Any]]]:
    """Return n and ``work`` of n for 0 to ``number`` - 1, in no order.

    It is done by forked processes, each with a place of its own: this one must have no threads that hold a lock.
    """
    children = []
    for k in range(processes):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with (folder / f"done-{k}").open("w") as handle:
                    for n in range(k, number, processes):
                        handle.write(json.dumps([n, work(n, folder / f"at-{k}")]) + "\n")
                        handle.flush()
                code = 0
            except Exception:  # noqa: BLE001 - the parent fails too
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    if any(ends):
        raise RuntimeError("a process of the fuzzer ended early")
    lines = [line for k in range(processes) for line in (folder / f"done-{k}").read_text().splitlines()]
    return [(n, value) for n, value in map(json.loads, lines)]


def table(verdicts: list[Verdict]) -> str:
    """Return counts of outcomes by kind."""
    shown = [o for o in OUTCOMES if o in GOOD or any(v.outcome == o for v in verdicts)]
    lines = [["kind", "tried", *shown, "seconds"]]
    for name in [*KINDS, "all"]:
        mine = [v for v in verdicts if name in ("all", v.kind)]
        counts = Counter(v.outcome for v in mine)
        if mine:
            seconds = f"{sum(v.seconds for v in mine):.0f}"
            lines.append([name, str(len(mine)), *(str(counts[o] or "·") for o in shown), seconds])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{word:>{width}}" for word, width in zip(line, widths, strict=True)) for line in lines
    )


def main() -> None:
    """Try mutations, print what came of them, and end with 1 if any outcome is not allowed."""
    parser = argparse.ArgumentParser(description="Damage inputs and look at what commands do about it.")
    parser.add_argument("--runs", type=int, default=1000, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of input, commas between")
    parser.add_argument("--only", metavar="KIND:N", help="one mutation; its files and texts are kept")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--good", type=Path, help="folder of the sound inputs, made if it is not there")
    parser.add_argument("--json", type=Path, help="file for every verdict")
    parser.add_argument("--kept", action="store_true", help="also the damage that once led to something else")
    given = parser.parse_args()
    from security.kept import KEPT

    began = time.monotonic()
    forked.import_all()
    kinds = {k for k in given.kinds.split(",") if k}
    jobs = plan(given.runs, kinds)
    if given.only:
        kind, number = given.only.split(":")
        jobs = [(kind, int(number))]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    fuzzer = Fuzzer(folder, given.good)
    tried = {(kind, drawn(kind, number, given.seed)[0]) for kind, number in jobs}
    fuzzer.prepare(tried | ({(k.kind, k.command) for k in KEPT} if given.kept else set()), given.processes)

    def work(n: int, place: Path) -> dict[str, Any]:
        if n < len(jobs):
            return asdict(fuzzer.try_number(*jobs[n], given.seed, place))
        case = KEPT[n - len(jobs)]
        return asdict(fuzzer.attempt(case.kind, case.command, case.damage, place))

    prepared = time.monotonic() - began
    number = len(jobs) + (len(KEPT) if given.kept else 0)
    done = in_processes(work, number, 1 if given.only else given.processes, folder)
    verdicts = [Verdict(**value) for _, value in sorted(done, key=lambda d: d[0])]
    for v in sorted(verdicts, key=lambda v: (v.outcome, v.kind, v.number)):
        if v.outcome not in GOOD or given.only:
            print(f"{v.outcome}: {v.kind}:{v.number} {v.command}: {v.file}: {v.damage}: {v.said}")
    print(table(verdicts))
    spent = time.monotonic() - began
    print(
        f"seed {given.seed}; {prepared:.0f} s to prepare, {spent - prepared:.0f} s for {len(verdicts)} mutations"
    )
    if given.json:
        given.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    if given.only:
        print(f"kept in {folder}: at-0/bad is the damaged input, at-0/run/err what was said")
    else:
        shutil.rmtree(folder)
    sys.exit(any(v.outcome not in GOOD for v in verdicts))


if __name__ == "__main__":
    main()
