"""Slurm asked by its own commands and their JSON: works with every release that has `--json`.

scontrol has it since 23.02. Before, `sinfo --json` and `squeue --json` list the same records, all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.launcher.slurm import nokill
from everstep.launcher.slurm.client import Job, Node, expand, fold
from everstep.recovery.errors import UsageError

Runner = Callable[[Sequence[str]], str]
"""Runs a command and returns what it printed; raises UsageError where it failed."""


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


def run_command(argv: Sequence[str], timeout: float = 30.0) -> str:
    """Run a Slurm command and return its output, or raise UsageError with its own last word."""
    program = require(argv[0])
    shown = " ".join(argv)
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"`{shown}` gave no answer in {timeout:g} s: is slurmctld up (`scontrol ping`)?"
        ) from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise UsageError(f"`{shown}` failed: {said}")
    return done.stdout


@dataclass(frozen=True)
class CliJson:
    """A SlurmClient over `scontrol --json`."""

    run: Runner = run_command
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    def version(self) -> str:
        """The release, from `scontrol --version`: `slurm-wlm 24.11.5`, `slurm 23.02.7`."""
        return self.run(["scontrol", "--version"]).split()[-1]

    def job(self, job_id: int) -> Job:
        """One job, and whether it was made with --no-kill as far as that can be told."""
        for record in self._jobs(str(job_id)):
            if number(record.get("job_id")) == job_id:
                break
        else:
            raise UsageError(f"Slurm knows no job {job_id}: `squeue --me` lists yours")
        verdict = nokill.judge(
            record=record,
            script=self._script(job_id, record),
            submit_line=self._submit_line(job_id),
            environ=self.environ if self.environ.get("SLURM_JOB_ID") == str(job_id) else {},
        )
        return read_job(record, verdict)

    def nodes(self, names: Sequence[str]) -> tuple[Node, ...]:
        """The named nodes, in the order of the names."""
        if not names:
            return ()
        known = {node.name: node for node in map(read_node, self._nodes(fold(names)))}
        missing = [name for name in names if name not in known]
        if missing:
            raise UsageError(f"Slurm knows no node {fold(missing)}: `sinfo -N` lists them")
        return tuple(known[name] for name in names)

    def all_nodes(self) -> tuple[Node, ...]:
        """Every node that the caller may see, in Slurm's order."""
        return tuple(map(read_node, self._nodes()))

    def job_parts(self, job: str) -> tuple[Job, ...]:
        """The jobs that a user means by `12`, `12_3` or `12+1`: a job, an array's tasks, a het job's parts.

        Nothing is said of --no-kill, which takes more questions. Raises UsageError where Slurm knows none.
        """
        records = self._jobs(job)
        if not records:
            raise UsageError(f"Slurm knows no job {job}: `squeue --me` lists yours")
        return tuple(read_job(record, nokill.NoKill(None, "not asked")) for record in records)

    def _nodes(self, *hostlist: str) -> list[Mapping[str, Any]]:
        try:
            return self._records(["scontrol", "show", "nodes", *hostlist, "--json"], "nodes")
        except UsageError as error:
            if not _has_no_json(error):
                raise
            return self._records(["sinfo", "--json"], "nodes")

    def _jobs(self, job: str) -> list[Mapping[str, Any]]:
        try:
            return self._records(["scontrol", "show", "job", job, "--json"], "jobs")
        except UsageError as error:
            if not _has_no_json(error):
                raise
            return [each for each in self._records(["squeue", "--json"], "jobs") if job in _job_names(each)]

    def _records(self, argv: Sequence[str], key: str) -> list[Mapping[str, Any]]:
        text = self.run(argv)
        try:
            answer = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"`{' '.join(argv)}` did not answer in JSON: Everstep needs Slurm 22.05 or later, "
                "with the serializer/json plugin"
            ) from error
        records = answer.get(key) if isinstance(answer, dict) else None
        if not isinstance(records, list):
            raise UsageError(f"`{' '.join(argv)}` answered without {key!r}: {_errors(answer)}")
        return [record for record in records if isinstance(record, dict)]

    def _script(self, job_id: int, record: Mapping[str, Any]) -> str | None:
        if record.get("batch_flag") is False:
            return ""
        try:
            return self.run(["scontrol", "write", "batch_script", str(job_id), "-"])
        except UsageError:  # not a batch job, or another user's
            return None

    def _submit_line(self, job_id: int) -> str | None:
        # Only where the site keeps accounts; without them sacct fails, and that is no news.
        try:
            told = self.run(["sacct", "-n", "-X", "-P", "-o", "SubmitLine", "-j", str(job_id)])
        except UsageError:
            return None
        lines = told.strip().splitlines()
        return lines[-1].strip() or None if lines else None


def read_job(record: Mapping[str, Any], verdict: nokill.NoKill) -> Job:
    """A job from one record of `scontrol show job --json`, of any release that has it."""
    resources = record.get("job_resources")
    return Job(
        job_id=number(record.get("job_id")) or 0,
        state=states(record.get("job_state")),
        nodes=expand(str(record.get("nodes") or "")),
        cpus_per_node=_cpus_per_node(resources if isinstance(resources, dict) else {}),
        no_kill=verdict.value,
        no_kill_reason=verdict.reason,
        waits_for=_waits_for(record),
    )


def read_node(record: Mapping[str, Any]) -> Node:
    """A node from one record of `scontrol show nodes --json`."""
    return Node(
        name=_text(record, "name"),
        state=states(record.get("state")) | states(record.get("state_flags")),
        address=_text(record, "address"),
        partitions=_words(record.get("partitions")),
        gres=_text(record, "gres"),
        gres_used=_text(record, "gres_used"),
        reason=_text(record, "reason"),
        reason_by=_text(record, "reason_set_by_user"),
        reason_at=float(number(record.get("reason_changed_at")) or 0),
        comment=_text(record, "comment"),
        extra=_text(record, "extra"),
    )


def states(value: object) -> frozenset[str]:
    """State words in either form: a list, or one string (older releases) with `+` between flags."""
    if isinstance(value, str):
        value = value.replace("*", "+NOT_RESPONDING").split("+")
    if not isinstance(value, list):
        return frozenset()
    return frozenset(str(word).strip().upper() for word in value if str(word).strip())


def number(value: object) -> int | None:
    """A number in either form: plain, or {"set": …, "infinite": …, "number": …}; None where it is not set."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _has_no_json(error: UsageError) -> bool:
    # getopt's last word, after "unrecognized option '--json'".
    return "scontrol --help" in str(error)


def _job_names(record: Mapping[str, Any]) -> set[str]:
    """What a user may call a job: its number, its array's with or without the task's, its het job's."""
    names = {str(number(record.get("job_id")))}
    if array := number(record.get("array_job_id")):
        names |= {str(array), f"{array}_{number(record.get('array_task_id'))}"}
    if het := number(record.get("het_job_id")):
        names |= {str(het), f"{het}+{number(record.get('het_job_offset'))}"}
    return names


def _waits_for(record: Mapping[str, Any]) -> str:
    reason = _text(record, "state_reason")
    if reason in ("", "None"):
        return ""
    told = _text(record, "state_description")
    return f"{reason}: {told}" if told and not told.startswith(reason) else told or reason


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""


def _words(value: object) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return tuple(str(word) for word in words if word)


def _cpus_per_node(resources: Mapping[str, Any]) -> str:
    """The CPUs of each node as SLURM_JOB_CPUS_PER_NODE writes them, from the JSON's allocation."""
    nodes = resources.get("nodes")
    allocation = nodes.get("allocation") if isinstance(nodes, dict) else None
    counts: list[int] = []
    for entry in allocation if isinstance(allocation, list) else []:
        cpus = entry.get("cpus") if isinstance(entry, dict) else None
        if (count := number(cpus.get("count") if isinstance(cpus, dict) else None)) is None:
            return ""
        counts.append(count)
    return ",".join(map(str, counts))


def _errors(answer: object) -> str:
    errors = answer.get("errors") if isinstance(answer, dict) else None
    told = [error for error in errors or [] if isinstance(error, dict)]
    texts = [str(error.get("description") or error.get("error")) for error in told]
    return "; ".join(texts) or "no reason given"
