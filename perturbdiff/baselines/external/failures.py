"""Why a method of others failed, in a line for a person."""

from __future__ import annotations

import logging
import signal
from typing import NoReturn

from perturbdiff.baselines.external.adapter_process import Ended
from perturbdiff.baselines.external.output_log import OutputLog
from perturbdiff.runtime.errors import Killed, UserError

logger = logging.getLogger(__name__)

_REFUSED = 3
_OUT_OF_MEMORY = ("MemoryError", "Cannot allocate memory", "can't allocate memory", "std::bad_alloc")
_LAST_LINES = 15


def explain(name: str, ended: Ended, log: OutputLog) -> NoReturn:
    """Raise what a person has to know of a method that did not end well.

    Raises
    ------
    Killed
        If memory ran out, as far as can be told.
    UserError
        If it refused or failed.
    """
    place = f"its output is in {log.path}"
    if ended.code == _REFUSED:
        raise UserError(f"{name} refused: {log.refusal().removeprefix(f'{name}: ')}; {place}")
    last = log.last(_LAST_LINES)
    for line in () if log.shared else last:
        logger.warning("%s | %s", name, line)
    killed = ended.code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if killed or any(words in line for words in _OUT_OF_MEMORY for line in last):
        raise Killed(
            f"{name} was killed, probably out of memory (peak {ended.peak_memory_mib} MiB); give it more; {place}"
        )
    if ended.code < 0:
        hint = "; perhaps this CPU is too old for it" if ended.code == -signal.SIGILL else ""
        raise UserError(
            f"{name} was ended by {signal.Signals(-ended.code).name}{hint}: {log.error()}; {place}"
        )
    raise UserError(f"{name} failed with exit code {ended.code}: {log.error()}; {place}")
