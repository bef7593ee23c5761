"""Slurm's own commands, run with patience: a time limit, and tries again while the controller restarts."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from everstep.launcher.slurm.client import SlurmBusy, SlurmError, UnknownJob
from everstep.recovery.errors import UsageError


class Runner(Protocol):
    """Runs a command and returns what it printed; raises UsageError where it failed."""

    def __call__(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        errors_too: bool = False,
        once: bool = False,
    ) -> str:
        """`errors_too`: what it printed as errors belongs to the answer; `once`: asking twice would do harm,
        so it is tried again only where the first try cannot have reached Slurm."""


def require(command: str = "srun", path: str | None = None) -> str:
    """The full path of a Slurm command.

    Raises UsageError (exit 64) where it is not on the PATH, with what to do.
    """
    found = shutil.which(command, path=path)
    if found is None:
        raise UsageError(
            f"{command} not found: this host has no Slurm commands on its PATH; load the Slurm module "
            "(`module load slurm`) or log in to a host that has them, or use `everstep run` to run on this "
            "machine alone"
        )
    return found


# A controller that is not there (yet): nothing has reached it, so any request may be made again.
_NOT_REACHED = re.compile(
    r"unable to contact slurm controller|connection refused|communication connection failure"
    r"|backup controller|in standby mode|no route to host|transport endpoint is not connected",
    re.IGNORECASE,
)
# One that is there, and has more to do than it can: what was asked may have been done all the same.
_OVERLOADED = re.compile(
    r"socket timed out|resource temporarily unavailable|zero bytes were transmitted|temporarily unable"
    r"|connection reset|connection timed out|communications shutdown|unexpected message received"
    r"|slurmctld is busy|send_recv_controller_msg",
    re.IGNORECASE,
)
_NO_SUCH_JOB = re.compile(r"invalid job id", re.IGNORECASE)


@dataclass(frozen=True)
class Patience:
    """How long Slurm is waited for."""

    timeout: float = 30.0
    """Seconds for one command."""
    limit: float = 60.0
    """Seconds in all: no new try begins after that."""
    first_wait: float = 0.5
    """Seconds before the second try; each next wait is twice as long, up to `longest_wait`."""
    longest_wait: float = 8.0


def wait_before_retry(
    said: str, *, tries: int, passed: float, once: bool, patience: Patience
) -> float | None:
    """Seconds to wait until the same command is tried again; None: it is not.

    Parameters
    ----------
    said
        All that the failed command printed.
    tries, passed
        How often it was tried, and the seconds since the first try began.
    once
        Whether doing it twice would do harm.
    """
    if not (_NOT_REACHED.search(said) or (_OVERLOADED.search(said) and not once)):
        return None
    wait = min(patience.first_wait * 2.0 ** (tries - 1), patience.longest_wait)
    return wait if passed + wait < patience.limit else None


@dataclass(frozen=True)
class Commands:
    """A Runner of the commands on this machine."""

    patience: Patience = Patience()
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def __call__(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        errors_too: bool = False,
        once: bool = False,
    ) -> str:
        began, tries = self.clock(), 0
        program = require(argv[0], (env or {}).get("PATH"))
        while True:
            tries += 1
            done = self._run([program, *argv[1:]], " ".join(argv), stdin, env, cwd)
            if done.returncode == 0:
                return done.stdout + done.stderr if errors_too else done.stdout
            said = f"{done.stdout}\n{done.stderr}"
            passed = self.clock() - began
            wait = wait_before_retry(said, tries=tries, passed=passed, once=once, patience=self.patience)
            if wait is None:
                raise _error(argv, done.stdout, done.stderr, tries, passed)
            self.sleep(wait)

    def _run(
        self,
        argv: Sequence[str],
        shown: str,
        stdin: str | None,
        env: Mapping[str, str] | None,
        cwd: str | None,
    ) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                list(argv),
                input=stdin or "",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.patience.timeout,
                check=False,
                env=None if env is None else dict(env),
                cwd=cwd,
            )
        except subprocess.TimeoutExpired as error:
            # Slurm's commands try again by themselves for seconds: this silence is long enough.
            raise SlurmBusy(
                f"`{shown}` gave no answer in {self.patience.timeout:g} s: is slurmctld up (`scontrol ping`)?"
            ) from error
        except OSError as error:
            raise SlurmError(f"`{shown}` could not be started: {error}") from error


run_command: Runner = Commands()
"""The commands on this machine, with the usual patience."""


def _error(argv: Sequence[str], stdout: str, stderr: str, tries: int, passed: float) -> SlurmError:
    said = (stderr.strip() or stdout.strip() or "no message").splitlines()[-1]
    shown = " ".join(argv)
    everything = f"{stdout}\n{stderr}"
    if _NOT_REACHED.search(everything) or _OVERLOADED.search(everything):
        often = f" ({tries} times in {passed:.0f} s)" if tries > 1 else ""
        return SlurmBusy(f"`{shown}` failed{often}: {said}: is slurmctld up (`scontrol ping`)?")
    if _NO_SUCH_JOB.search(everything):
        return UnknownJob(f"`{shown}` failed: {said}")
    return SlurmError(f"`{shown}` failed: {said}")


def outside_job(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what Slurm says of the job that we are in, to submit another job from.

    A new job would inherit it all, and some of it (SLURM_MEM_PER_NODE beside --mem-per-cpu, say) makes its
    sruns fail.
    """
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT")
    prefixes = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_")
    return {k: v for k, v in environ.items() if k in kept or not k.startswith(prefixes)}
