"""The bar on a terminal and in a notebook, and what is seen where there is neither."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
from terminal import CTRL_C, on_terminal

from perturbdiff.baselines.external.adapter_process import OutputLog, Steps
from perturbdiff.runtime import progress
from perturbdiff.runtime.live_bar import TerminalBar

WORK = """
import logging, sys, time
from perturbdiff.runtime.progress import set_up_logging, track
set_up_logging(int(sys.argv[1]))
with track("simulate", 60) as work:
    for block in range(6):
        time.sleep(0.11)
        work.advance(10)
        if block == 2:
            logging.getLogger("perturbdiff").warning("in between")
        if block == 3 and sys.argv[2:]:
            raise SystemExit(3)
"""
BAR = re.compile(r"([━#]*)(?:\x1b\[0m)?([─.]*) simulate (\d+)/60 cells · (\d+) s left · (\d+) cells/s")


def work(*arguments, verbosity=0, columns=120, **environment):
    command = [sys.executable, "-c", WORK, str(verbosity), *arguments]
    return on_terminal(command, columns=columns, environment=environment)


def test_a_line_that_is_written_over_and_gone_at_the_end():
    done = work()
    drawn = BAR.findall(done.text)
    assert [int(count) for *_, count, _, _ in drawn] == [10, 20, 30, 40, 50, 60, 60]
    assert [len(full) for full, *_ in drawn[:6]] == [6, 13, 20, 26, 33, 40]
    assert "\x1b[?25l" not in done.text, "the cursor is never hidden"
    first, last, end = done.screen
    assert first.rstrip().endswith("in between")
    assert re.search(r"simulate: 60/60 cells, \d+ cells/s, 0 s left$", last.rstrip())
    assert (end, done.code, done.unchanged) == ("", 0, True)


def test_work_that_fails_leaves_its_last_state():
    done = work("fail")
    assert done.code == 3
    assert done.screen[-2].endswith("cells/s")
    assert "simulate 40/60" in done.screen[-2]
    assert done.screen[-1] == ""


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_a_narrow_terminal_gets_what_fits(columns):
    lines = re.findall(r"\r\x1b\[2K([^\r\n]+)", work(columns=columns, NO_COLOR="1").text)
    shown = [line for line in lines if "simulate" in line and "WARN" not in line and "INFO" not in line]
    assert len(shown) == 7
    assert all(len(line) < columns for line in shown)


def test_colours_only_where_they_are_wanted():
    assert "\x1b[32m" in work().text
    plain = work(NO_COLOR="1")
    assert not re.search(r"\x1b\[([0-9;]*;)?[34][0-7]m", plain.text)  # bold and dim are no colours
    assert BAR.search(plain.text)


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"JPY_PARENT_PID": "7"}])
def test_a_terminal_that_cannot_write_over_a_line_gets_plain_lines(environment):
    done = work(**environment)
    assert "\x1b" not in done.text
    assert [line[20:] for line in done.screen[:1]] == ["WARNING in between"]
    assert re.fullmatch(r"[\d: -]{19} INFO simulate: 60/60 cells, \d+ cells/s, 0 s left", done.screen[1])


def test_quiet_shows_nothing():
    done = work(verbosity=-1)
    assert "simulate" not in done.text
    assert "in between" in done.text


def test_of_several_processes_only_the_first_shows_it():
    assert not BAR.search(work(RANK="1").text)
    assert BAR.search(work(RANK="0").text)


def test_without_a_command_line_a_script_on_a_terminal_shows_it():
    code = WORK.replace("set_up_logging(int(sys.argv[1]))", "")
    assert BAR.search(on_terminal([sys.executable, "-c", code, "0"]).text)


def test_the_inner_of_two_is_drawn(monkeypatch, capsys):
    monkeypatch.setattr(progress, "bar", TerminalBar)
    monkeypatch.setattr(TerminalBar, "every", 0.0)
    with progress.track("outer", 2) as outer:
        outer.advance()
        with progress.track("inner", 2) as inner:
            inner.advance()
            outer.advance()
            inner.advance()
    drawn = re.findall(r"(outer|inner) (\d)/2", capsys.readouterr().err)
    assert drawn == [("outer", "1"), ("inner", "1"), ("inner", "2"), ("inner", "2"), ("outer", "2")]


def test_the_steps_of_a_method_of_others_are_shown(monkeypatch):
    drawn = []

    class Recorded(TerminalBar):
        every = 0.0

        def draw(self, share, parts):
            drawn.append((parts[0], round(share, 2)))

    monkeypatch.setattr(progress, "bar", Recorded)
    with progress.track("cpa", 0, "", details=tuple, lines=False) as work:
        steps = Steps("cpa", OutputLog(Path("out"), "cpa"), work)
        for line in ("progress 1/4 epochs", "progress 2/4 epochs", "progress 3/9 cells predicted"):
            assert steps.take(line)
        assert not steps.take("something else")
    assert drawn[:3] == [
        ("cpa: epochs 1/4", 0.25),
        ("cpa: epochs 2/4", 0.5),
        ("cpa: cells predicted 3/9", 0.33),
    ]


def test_a_terminal_that_is_gone_ends_no_work(monkeypatch):
    class Gone:
        encoding = "utf-8"

        def write(self, text):
            raise OSError(5, "Input/output error")

        def fileno(self):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(progress, "bar", TerminalBar)
    monkeypatch.setattr("sys.stderr", Gone())
    with progress.track("writing", 2) as writing:
        writing.advance(2)


def test_it_is_drawn_at_most_ten_times_a_second(monkeypatch):
    drawn = []

    class Counted(TerminalBar):
        def draw(self, share, parts):
            drawn.append(time.monotonic())

    monkeypatch.setattr(progress, "bar", Counted)
    end = time.monotonic() + 0.55
    with progress.track("writing", 10) as writing:
        while time.monotonic() < end:
            writing.advance(0)
    assert 5 <= len(drawn) <= 7


def train(trained, out, *changes):
    command = [sys.executable, "-m", "perturbdiff", "train", trained / "store"]
    command += ["--split", trained / "split.parquet", "--out", out, "--config", "tiny", "--device", "cpu"]
    for change in ("train.loggers=[]", *changes):
        command += ["--set", change]
    return list(map(str, command))


def test_a_training_shows_loss_validation_and_time_left(trained, tmp_path):
    log = tmp_path / "log"
    command = train(trained, tmp_path / "b", "train.max_steps=60")
    done = on_terminal(command, columns=140, environment={"PD_LOG": str(log)})
    assert done.code == 0, done.text
    shape = (
        r"training (\d+)/60 steps · \d+ s left · loss [\d.e+-]+ · "
        r"validation [\d.e+-]+ \(best [\d.e+-]+\) · \d+ cells/s"
    )
    steps = [int(step) for step in re.findall(shape, done.text)]
    assert steps
    assert steps == sorted(steps)
    assert not [line for line in done.screen if re.search(r"step \d+/60|training \d+/60", line)]
    assert [line for line in done.screen if "validation at step 60" in line]
    assert re.search(r"INFO step 60/60: loss ", log.read_text()), (
        "the log has the lines that the bar replaces"
    )
    assert done.screen[-2:] == [str(tmp_path / "b"), ""]
    assert done.unchanged


def test_ctrl_c_leaves_a_clean_terminal(trained, tmp_path):
    def press(text):
        return CTRL_C if re.search(r"training \d+/99999 steps · .* validation", text) else None

    command = train(trained, tmp_path / "b", "train.max_steps=99999", "train.valid_every=3")
    done = on_terminal(command, columns=140, respond=press)
    assert done.code == 75, done.text
    assert done.screen[-2].startswith("stopped early: stopped at step ")
    assert done.screen[-2].endswith("signal SIGINT; run the same command again to continue")
    assert done.screen[-1] == ""
    assert done.unchanged
    assert "\x1b[?25l" not in done.text
    assert not re.search(r"\x1b\[[0-9;]*$", done.text)


def test_in_a_pipe_there_are_plain_lines(trained, tmp_path, run_cli):
    done = run_cli(*train(trained, tmp_path / "b")[3:])
    assert done.code == 0
    assert re.search(r"INFO step 20/20: loss ", done.err)
    assert "\r" not in done.err
    assert "\x1b" not in done.err


def test_a_notebook_shows_a_bar(trained, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs the development tools")
    nbformat = pytest.importorskip("nbformat", reason="needs the development tools")
    pytest.importorskip("ipykernel", reason="needs the development tools")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    code = f"""
from pathlib import Path
from perturbdiff.config import recipes
from perturbdiff.training.training_stages import train
folder = Path({str(trained)!r})
recipe = recipes.load("tiny", ["train.loggers=[]"])
train(folder / "store", folder / "split.parquet", Path({str(tmp_path / "b")!r}), recipe, device="cpu")
"""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    kernel = {"display_name": "here", "language": "python", "name": "here"}
    specs = tmp_path / "share" / "kernels" / "here"
    specs.mkdir(parents=True)
    arguments = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (specs / "kernel.json").write_text(json.dumps({**kernel, "argv": arguments}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    nbclient.NotebookClient(book, timeout=120, kernel_name="here").execute()
    outputs = book.cells[0].outputs
    bars = [o for o in outputs if o.output_type == "display_data" and "<progress" in o.data["text/html"]]
    assert bars
    training = bars[-1].data
    assert re.match(r"training 20/20 steps · 0 s left · loss [\d.e+-]+ · validation ", training["text/plain"])
    assert 'value="1.0000"' in training["text/html"]
    assert "\x1b" not in json.dumps(book) + "".join(map(str, outputs))
    assert "\r" not in "".join(o.get("text", "") for o in outputs)
