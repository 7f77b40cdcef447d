"""The cluster as an ordinary user has it: who runs things, Slurm's queue, Nextflow, and waiting for something."""

import contextlib
import csv
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("PD_TEST_SHARED", "/var/tmp/perturbdiff-hpc"))  # a folder that all nodes see
PACKAGE = "/opt/venv/lib/python3.11/site-packages/perturbdiff"  # where the image has the package

# a site's configuration: looks often, and tasks small enough that several run at once
SITE = """\
executor {
    pollInterval      = '1 sec'
    queueStatInterval = '2 sec'
    dumpInterval      = '1 min'
    exitReadTimeout   = '20 sec'
    submitRateLimit   = '20/1sec'
}
process.resourceLimits = [cpus: 1, memory: 3.GB]
"""


def wait_until(asked: Callable[[], object], timeout: float, why: str | Callable[[], str], every: float = 0.5):
    """Return the first truthy answer; after `timeout` seconds fail and say `why` (text, or a function)."""
    deadline = time.monotonic() + timeout
    while not (answer := asked()):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout:.0f} s: {why() if callable(why) else why}")
        time.sleep(every)
    return answer


@contextlib.contextmanager
def locked(path: Path, *, alone: bool = True, wait: bool = True) -> Iterator[None]:
    """Hold a file's lock: by one process, or by several that do not ask for it alone.

    BlockingIOError if another holds it and one does not wait.
    """
    with contextlib.suppress(
        FileExistsError
    ):  # in a sticky folder O_CREAT alone fails on another user's file
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644))
    with path.open() as handle:
        fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
        yield


@dataclass(frozen=True)
class Account:
    """The ordinary user: oneself, or whom root stands in for."""

    name: str
    uid: int
    gid: int
    home: Path

    @classmethod
    def find(cls) -> "Account":
        """Oneself; as root PD_TEST_USER, by default ``hpc``. KeyError if there is no such user."""
        name = (
            os.environ.get("PD_TEST_USER", "hpc") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        )
        entry = pwd.getpwnam(name)
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid, Path(entry.pw_dir))

    def environment(self, **more: str) -> dict[str, str]:
        """What a fresh login has, not what the tests happen to run under."""
        kept = {name: os.environ[name] for name in ("JAVA_HOME", "LANG") if name in os.environ}
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        names = {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name, "PATH": path}
        return kept | names | more

    def start(
        self, *command: object, cwd: Path, env: dict[str, str] | None = None, **more
    ) -> subprocess.Popen:
        """Popen as this user: no process stands between, so that a signal reaches the command itself."""
        if os.geteuid() == 0:
            more |= {
                "user": self.uid,
                "group": self.gid,
                "extra_groups": os.getgrouplist(self.name, self.gid),
            }
        words = [str(word) for word in command]
        return subprocess.Popen(
            words, cwd=cwd, env=self.environment(**env or {}), umask=0o022, start_new_session=True, **more
        )

    def run(
        self,
        *command: object,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 60,
    ):
        """Run a command as this user; returns subprocess.CompletedProcess with texts."""
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        with self.start(*command, cwd=cwd or Path("/"), env=env, **pipes) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
                raise AssertionError(f"{command[0]} took over {timeout:.0f} s\n{out}\n{err}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def give(self, path: Path) -> Path:
        """Make this user the owner of a file or folder and all in it."""
        if os.geteuid() == 0:
            subprocess.run(["chown", "-R", "-h", f"{self.uid}:{self.gid}", path], check=True)
        return path

    def can_read(self, path: Path) -> bool:
        return self.run("test", "-r", path).returncode == 0


@dataclass(frozen=True)
class Job:
    """A line of squeue."""

    id: str
    name: str
    state: str
    partition: str
    folder: Path
    node: str
    reason: str


@dataclass
class Ran:
    """One finished Nextflow command."""

    code: int
    output: str
    folder: Path
    outdir: Path

    def tasks(self) -> list[dict[str, str]]:
        """Rows of the newest trace: one for each attempt of a task that this command started or found cached."""
        newest = max((self.outdir / "pipeline_info").glob("trace_*.tsv"), key=lambda p: p.stat().st_mtime)
        with newest.open() as handle:
            rows = list(csv.DictReader(handle, delimiter="\t"))
        return [row | {"name": row["name"].split(":")[-1]} for row in rows]

    def ran(self) -> list[str]:
        """Names of the tasks that ran and ended well, without workflow names."""
        return sorted(task["name"] for task in self.tasks() if task["status"] == "COMPLETED")

    def processes(self) -> dict[str, int]:
        """How many tasks of each process ran and ended well."""
        names = [name.split(" ")[0] for name in self.ran()]
        return {name: names.count(name) for name in sorted(set(names))}

    def attempts(self, name: str) -> list[dict[str, str]]:
        """Trace rows of the task called e.g. ``TRAIN (model)``, first attempt first."""
        return sorted((t for t in self.tasks() if t["name"] == name), key=lambda t: int(t["attempt"]))

    def said(self, task: dict[str, str], name: str = ".command.err") -> str:
        """A file of the task's work folder: .command.err, .command.out, .command.run, .command.sh."""
        return (Path(task["workdir"]) / name).read_text(errors="replace")


class Head:
    """A Nextflow that runs in the background; what it says goes to a file."""

    def __init__(self, process: subprocess.Popen, log: Path, folder: Path, outdir: Path) -> None:
        self.process, self.log, self.folder, self.outdir = process, log, folder, outdir

    def output(self) -> str:
        """What it has said so far, without a noise that 25.04 makes about valid selectors."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "Unrecognized config option" not in line)

    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL: it can neither cancel its jobs nor write anything."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def terminate(self, timeout: float = 120) -> None:
        """SIGTERM, as Ctrl-C: it cancels its jobs and ends."""
        self.process.terminate()
        self.process.wait(timeout)

    def wait(self, timeout: float = 900) -> Ran:
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"Nextflow took over {timeout:.0f} s\n{self.output()[-6000:]}") from None
        return Ran(code, self.output(), self.folder, self.outdir)


@dataclass
class Bed:
    """Everything a test needs to run the workflow on the cluster; one for each session and worker."""

    account: Account
    folder: Path  # of this session; all nodes see it
    program: Path  # Nextflow
    image: Path
    site: Path = field(init=False)  # copy of the project's working tree

    def __post_init__(self) -> None:
        self.site = self.folder / "perturbdiff"

    def queue(self, folder: Path | None = None) -> list[Job]:
        """Jobs of the user whose folder is `folder` or lies in it."""
        asked = self.account.run("squeue", "-h", "-u", self.account.name, "-o", "%i|%j|%T|%P|%Z|%N|%r")
        assert asked.returncode == 0, asked.stderr
        fields = [line.split("|") for line in asked.stdout.splitlines()]
        jobs = [Job(*words[:4], Path(words[4]), *words[5:7]) for words in fields]
        return [job for job in jobs if folder is None or folder == job.folder or folder in job.folder.parents]

    def sbatch(self, script: str, folder: Path, *options: str) -> str:
        """Submit a job that runs `script` in `folder`; returns its number."""
        asked = self.account.run("sbatch", "--parsable", *options, "--wrap", script, cwd=folder)
        assert asked.returncode == 0, asked.stderr
        return asked.stdout.strip()

    def cancel(self, folder: Path, timeout: float = 60) -> None:
        """End the jobs of a folder and wait until they are gone."""
        if jobs := self.queue(folder):
            self.account.run("scancel", *(job.id for job in jobs))
            wait_until(lambda: not self.queue(folder), timeout, f"jobs in {folder} do not end after scancel")

    def workflow(self, name: str) -> "Workflow":
        """A fresh folder in which the workflow can be run; close it in the end."""
        runs = self.folder / "runs"
        number = 0
        while True:
            folder = runs / (f"{name}-{number}" if number else name)
            try:
                folder.mkdir()
                break
            except FileExistsError:
                number += 1
        (folder / "site.config").write_text(SITE)
        return Workflow(self, self.account.give(folder))


@dataclass
class Workflow:
    """The workflow in a folder of its own; what it started it ends when it is closed."""

    bed: Bed
    folder: Path
    heads: list[Head] = field(default_factory=list)
    own_site: Path | None = None

    def copy_site(self) -> Path:
        """Give this workflow a copy of the working tree of its own, to be changed; the image has its package too."""
        self.own_site = self.folder / "site"
        copy_tree(self.bed.account, self.own_site)
        return self.own_site

    def write(self, name: str, content: str | bytes) -> Path:
        """A file of the user's, e.g. a samplesheet."""
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return self.bed.account.give(path)

    def environment(self, parser: str) -> dict[str, str]:
        """Nextflow keeps its own files in the session's folder, not in the user's home."""
        home = {"NXF_HOME": str(self.bed.folder / "nextflow-home")}
        return home | {"NXF_SYNTAX_PARSER": parser, "NXF_ANSI_LOG": "false", "NXF_OFFLINE": "true"}

    def start(
        self,
        *arguments: object,
        profile: str = "slurm,site",
        parser: str = "v2",
        outdir: str = "out",
        env: dict[str, str] | None = None,
    ) -> Head:
        """Start ``nextflow run main.nf`` in the image in the background.

        The profile ``site`` reads ``site.config`` in the folder, which a test may write anew; plain ``slurm`` is
        what users start.
        """
        given = ["-profile", profile, "--outdir", outdir, "--container", self.bed.image]
        if "site" in profile.split(","):
            given += ["--site_config", "site.config"]
        site = self.own_site or self.bed.site
        if self.own_site or os.environ.get("PD_TEST_SOURCE"):  # its package in place of the image's
            given += ["--bind", f"{site / 'perturbdiff'}:{PACKAGE}"]
        log = self.folder / f"head-{len(self.heads) + 1}.log"
        command = [
            self.bed.program,
            "-log",
            log.with_suffix(".nextflow.log"),
            "run",
            site / "main.nf",
        ]
        with log.open("w") as out:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            process = self.bed.account.start(
                *command,
                *given,
                *arguments,
                cwd=self.folder,
                env=self.environment(parser) | (env or {}),
                **pipes,
            )
        self.heads.append(Head(process, log, self.folder, self.folder / outdir))
        return self.heads[-1]

    def run(self, *arguments: object, timeout: float = 900, **how: Any) -> Ran:
        """The same, and wait for its end."""
        return self.start(*arguments, **how).wait(timeout)

    def queue(self) -> list[Job]:
        """This workflow's jobs."""
        return self.bed.queue(self.folder)

    def job(self, process: str, state: str = "RUNNING", timeout: float = 300) -> Job:
        """Wait for a job of a process (e.g. ``TRAIN``) in a state; fail if the newest head ends before."""
        head = self.heads[-1]

        def look() -> Job | None:
            found = [job for job in self.queue() if process in job.name and job.state == state]
            assert found or head.running(), f"Nextflow ended without a {process} job\n{head.output()[-4000:]}"
            return found[0] if found else None

        return wait_until(look, timeout, lambda: f"no {process} job is {state}\n{head.output()[-4000:]}")

    def close(self) -> None:
        """End heads and jobs, also after a failure."""
        for head in self.heads:
            if head.running():
                head.kill()
        self.bed.cancel(self.folder)


def copy_tree(account: Account, target: Path) -> None:
    """Copy the working tree, uncommitted changes included, to where all nodes see it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    made = target.with_suffix(".partial")
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, made / name)
    account.give(made).rename(target)


def visible(account: Account, path: Path, folder: Path) -> Path:
    """The file itself where the user can read it, else a copy (of its folder, with its name inside mended)."""
    if account.can_read(path):
        return path
    target = folder / path.name
    with locked(folder / f"{path.name}.lock"):
        if target.exists():
            return target
        if path.name != "nextflow":
            shutil.copyfile(path, target.with_suffix(".partial"))
            account.give(target.with_suffix(".partial")).rename(target)
            return target
        home = folder / "nextflow-program"
        shutil.copytree(path.parent / "lib", home / "lib")
        target.write_text(path.read_text().replace(str(path.parent), str(home)))
        target.chmod(0o755)
        account.give(home)
        return account.give(target)
