"""One tiny pretraining in the workflow, undisturbed once for a session, and the means to disturb others like it."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc.bed import SITE, Bed, Head, Job, Ran, Workflow, locked, wait_until

ROW = "base,screen,simulate:tiny,tiny,pretrain,"
SCREEN = "simulate.cells=900;simulate.genes=120"
STEPS = 400  # some seconds on an idle core: a checkpoint is seen long before the last one
RECIPE = f"{SCREEN};train.max_steps={STEPS};train.checkpoint_every=10;train.log_every=50"
FIXED = ("--baselines", "none", "--ceiling", "false", "--device", "cpu", "-resume")
PATIENCE = 600  # seconds: a minute on two idle cores, and others may want them
RESULT = ("model.safetensors", "training.csv")


def sheet(workflow: Workflow, *rows: str) -> Path:
    return workflow.write("sheet.csv", "\n".join(["id,dataset,input,preset,mode,overrides", *rows]) + "\n")


def undisturbed(bed: Bed) -> Workflow:
    """Where the training ran to its end without any fault; the first test of a session that asks runs it."""
    with locked(bed.folder / "undisturbed.lock"):
        folder = bed.folder / "undisturbed"
        if folder.exists():
            return Workflow(bed, folder.resolve())
        workflow = bed.workflow("training_undisturbed")
        try:
            ran = workflow.run("--input", sheet(workflow, ROW + RECIPE), *FIXED, timeout=PATIENCE)
        finally:
            workflow.close()
        assert ran.code == 0, ran.output
        folder.symlink_to(workflow.folder)
        return workflow


@dataclass
class Case:
    """The same training with folders of its own for checkpoints and work; what comes before it is cached."""

    workflow: Workflow
    reference: Path  # models of the undisturbed run

    @classmethod
    def of(cls, workflow: Workflow) -> "Case":
        before = undisturbed(workflow.bed).folder
        shutil.copytree(before / ".nextflow", workflow.folder / ".nextflow", dirs_exist_ok=True)
        workflow.bed.account.give(workflow.folder / ".nextflow")
        return cls(workflow, before / "out" / "models")

    @property
    def checkpoints(self) -> Path:
        return self.workflow.folder / "checkpoints"

    def attempts_get(self, first: int = 1, **settings: tuple[str, str]) -> None:
        """Give the first attempts of the training other settings than the rest: name=(for them, for the rest)."""
        lines = [
            f"{name} = {{ task.attempt <= {first} ? {early} : {late} }}"
            for name, (early, late) in settings.items()
        ]
        site = "\n".join([SITE, "process { withName: PRETRAIN {", *lines, "} }\n"])
        self.workflow.write("site.config", site)

    def start(self, *arguments: object, recipe: str = "", outdir: str = "out") -> Head:
        """Start the workflow; ``recipe`` are further overrides."""
        rows = sheet(self.workflow, ROW + ";".join(filter(None, [RECIPE, recipe])))
        if not any(str(word).startswith("--gpu_options") for word in arguments):
            arguments += ("--gpu_options=--ntasks=1",)  # no GPU: there are few of them, and none is used
        return self.workflow.start("--input", rows, *FIXED, *arguments, outdir=outdir)

    def checkpoint(self, since: int = 0, timeout: float = PATIENCE) -> Path:
        """Wait for a checkpoint that is newer than a time in ns; fail if the newest head ends before."""
        head = self.workflow.heads[-1]

        def look() -> list[Path]:
            found = [p for p in self.checkpoints.glob("*/last.ckpt") if p.stat().st_mtime_ns > since]
            assert found or head.running(), f"Nextflow ended, no checkpoint\n{head.output()[-4000:]}"
            return found

        return wait_until(look, timeout, lambda: f"no checkpoint\n{head.output()[-4000:]}", every=0.1)[0]

    def user(self, *command: object) -> None:
        """Let the user run a command."""
        done = self.workflow.bed.account.run(*command)
        assert done.returncode == 0, done.stderr

    def next_job(self, *former: str, state: str = "") -> Job:
        """Wait for a job of the training with another number."""
        head = self.workflow.heads[-1]

        def look() -> list[Job]:
            jobs = [job for job in self.workflow.queue() if "PRETRAIN" in job.name and job.id not in former]
            return [job for job in jobs if state in ("", job.state)]

        return wait_until(
            look, PATIENCE, lambda: f"the training is not submitted again\n{head.output()[-4000:]}"
        )[0]

    def wait_for_end(self, number: str) -> None:
        """Wait until a job has left the queue."""
        wait_until(
            lambda: number not in {job.id for job in self.workflow.queue()},
            PATIENCE,
            f"job {number} does not end",
        )

    def wait_for_waiting(self, holder: Job) -> Job:
        """Wait for another training to say that it waits for the one in a job; returns its job."""
        head = self.workflow.heads[-1]

        def look() -> list[Job]:
            others = [job for job in self.workflow.queue() if "PRETRAIN" in job.name and job.id != holder.id]
            logs = [(job, job.folder / ".command.err") for job in others]
            told = f"waiting for another training .* Slurm job {holder.id}"
            return [job for job, log in logs if log.exists() and re.search(told, log.read_text())]

        return wait_until(look, PATIENCE, lambda: f"none waits for job {holder.id}\n{head.output()[-4000:]}")[
            0
        ]

    def attempts(self, ran: Ran) -> list[dict[str, str]]:
        return ran.attempts("PRETRAIN (base)")

    def check_equal(self, ran: Ran) -> None:
        """The run ended well, with the very bytes of the undisturbed one."""
        assert ran.code == 0, ran.output
        for name in RESULT:
            ours, theirs = (models / "base" / name for models in (ran.outdir / "models", self.reference))
            assert ours.read_bytes() == theirs.read_bytes(), f"{ours} differs from {theirs}"


def continued_at(ran: Ran, task: dict[str, str]) -> int:
    """The step at which a training went on; 0 if it began at the start."""
    found = re.search(r"continuing at step (\d+) of \d+ ", ran.said(task))
    return int(found[1]) if found else 0


def _processes(job: Job) -> Iterator[tuple[int, list[bytes]]]:
    """Numbers and words of the processes of a job on this machine, its container's included."""
    mark = f"SLURM_JOB_ID={job.id}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name), words


def processes(job: Job) -> list[int]:
    """Perturbdiff's processes in a job."""
    return [
        number
        for number, words in _processes(job)
        if b"python" in words[0] and any(word.endswith(b"/perturbdiff") for word in words)
    ]


def cut_power(job: Job) -> None:
    """End all processes of a job, Slurm's own first: nothing is left to write an exit code."""
    asked = subprocess.run(
        ["pgrep", "-f", rf"slurmstepd: \[{job.id}\."], capture_output=True, text=True, check=True
    )
    for number in [*map(int, asked.stdout.split()), *[number for number, _ in _processes(job)]]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def send(job: Job, number: signal.Signals) -> None:
    """Send a signal to perturbdiff in a job; wait until there is one."""
    for pid in wait_until(lambda: processes(job), 120, f"job {job.id} runs no perturbdiff", every=0.02):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def frozen(job: Job) -> Iterator[None]:
    """Stop perturbdiff in a job, as storage that hangs does; at the end it goes on if it is still there."""
    send(job, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes(job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
