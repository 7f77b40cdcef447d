"""What the package says from Python: visible by itself, silent once a program has its own logging."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import perturbdiff

SAY = "import logging; {before}; import perturbdiff.api.messages as m; m.show_messages(); m.show_messages(); {after}; "
SAY += "log = logging.getLogger('perturbdiff.store'); log.info('done'); log.warning('careful')"


def said(before="pass", after="pass") -> str:
    code = SAY.format(before=before, after=after)
    root = Path(perturbdiff.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=root, capture_output=True, text=True
    ).stderr


def test_without_any_logging_messages_are_visible_once():
    assert said() == "done\nwarning: careful\n"


def test_a_program_with_its_own_logging_gets_them_alone():
    assert said(before="logging.basicConfig(format='own %(message)s', level=20)") == "own done\nown careful\n"
    assert said(after="logging.basicConfig(format='own %(message)s')") == "own done\nown careful\n"


def test_the_root_logger_is_left_alone_and_the_level_is_the_users():
    assert said(before="logging.getLogger('perturbdiff').setLevel('WARNING')") == "warning: careful\n"
    assert said(after="assert not logging.getLogger().handlers").startswith("done")
    assert said(after="logging.getLogger('perturbdiff').setLevel('ERROR')") == ""
