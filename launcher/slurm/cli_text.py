"""Slurm asked by its own commands, their answers in words: works with every release.

`scontrol show job` prints `Name=value` pairs in one line. Releases before 23.02 have nothing better:
their scontrol knows no --json.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep.launcher.slurm import nokill
from everstep.launcher.slurm.client import (
    Job,
    Node,
    Partition,
    SlurmError,
    UnknownJob,
    expand,
    fold,
)
from everstep.launcher.slurm.commands import Runner, run_command
from everstep.recovery.errors import UsageError


@dataclass(frozen=True)
class CliText:
    """A SlurmClient over `scontrol`, `sbatch` and `scancel`."""

    run: Runner = run_command
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    # --- questions ------------------------------------------------------------------------------

    def version(self) -> str:
        """The release, from `scontrol --version`: `slurm-wlm 24.11.5`, `slurm 23.02.7`."""
        return self.run(["scontrol", "--version"]).split()[-1]

    def job(self, job_id: int) -> Job:
        """One job, and whether it was made with --no-kill as far as that can be told."""
        for record in records(self._show("-d", "job", str(job_id)), "JobId"):
            if record["JobId"] == str(job_id):
                return self._with_no_kill(read_job(record), batch=record.get("BatchFlag", "1") != "0")
        raise unknown_job(job_id)

    def job_parts(self, job: str) -> tuple[Job, ...]:
        """The jobs that a user means by `12`, `12_3` or `12+1`."""
        try:
            return tuple(read_job(record) for record in records(self._show("-d", "job", job), "JobId"))
        except UnknownJob as error:
            raise unknown_job(job) from error

    def nodes(self, names: Sequence[str] | None = None) -> tuple[Node, ...]:
        """The named nodes, in the order of the names; without names, all of them."""
        if names is not None and not names:
            return ()
        said = self._show("-d", "node", *([] if names is None else [fold(names)]))
        return in_order(map(read_node, records(said, "NodeName")), names)

    def partitions(self) -> tuple[Partition, ...]:
        """The partitions that the user may see."""
        said = self._show("partition")
        return tuple(map(read_partition, records(said, "PartitionName")))

    def config(self) -> Mapping[str, str]:
        """Slurm's configuration, as `scontrol show config` words it."""
        pairs = (line.partition("=") for line in self.run(["scontrol", "show", "config"]).splitlines())
        return {name.strip(): value.strip() for name, equals, value in pairs if equals}

    # --- requests -------------------------------------------------------------------------------

    def submit(
        self,
        argv: Sequence[str],
        *,
        script: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> int:
        """Submit a batch job; its number."""
        said = self.run(["sbatch", "--parsable", *argv], stdin=script, env=env, cwd=cwd, once=True)
        # "7", or "7;cluster"; a site's plugin may have printed lines of its own before it.
        number = (said.strip().splitlines() or [""])[-1].partition(";")[0]
        if not number.isdigit():
            raise SlurmError(f"sbatch answered {said.strip()!r}, no number of a job: see `squeue --me`")
        return int(number)

    def test_submit(
        self,
        argv: Sequence[str],
        *,
        script: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> str:
        """What Slurm thinks of such a job, and when it would start."""
        words = ["sbatch", "--test-only", *argv]
        return self.run(words, stdin=script, env=env, cwd=cwd, errors_too=True).strip()

    def cancel(self, job_id: int, signal: str | None = None) -> None:
        """End a job, or send it a signal."""
        how = ["--signal", signal] if signal else []
        try:
            self.run(["scancel", *how, str(job_id)])
        except UnknownJob:
            return

    def requeue(self, job_id: int, *, hold: bool = False) -> None:
        """Put a job back into the queue; with `hold` it stays there until `release`."""
        self.run(["scontrol", "requeuehold" if hold else "requeue", str(job_id)])

    def release(self, job_id: int) -> None:
        """Let a held job start."""
        self.run(["scontrol", "release", str(job_id)])

    def update_job(self, job_id: int, **fields: str) -> None:
        """Change a job, by scontrol's own names."""
        self.run(["scontrol", "update", f"JobId={job_id}", *_assignments(fields)])

    def update_nodes(self, names: Sequence[str], **fields: str) -> None:
        """Change nodes, by scontrol's own names."""
        if names:
            self.run(["scontrol", "update", f"NodeName={fold(names)}", *_assignments(fields)])

    # --- parts ----------------------------------------------------------------------------------

    def _show(self, *words: str) -> str:
        # Times in unix seconds: words in this machine's time zone would have to be guessed back.
        env = {**self.environ, "SLURM_TIME_FORMAT": "%s"}
        return self.run(["scontrol", "-o", "show", *words], env=env)

    def _with_no_kill(self, job: Job, *, batch: bool, record: Mapping[str, object] | None = None) -> Job:
        """The job, with what is known of how it was made."""
        verdict = nokill.judge(
            record=record,
            script=self._script(job.job_id) if batch else "",
            submit_line=self._submit_line(job.job_id),
            environ=self.environ if self.environ.get("SLURM_JOB_ID") == str(job.job_id) else {},
        )
        return replace(job, no_kill=verdict.value, no_kill_reason=verdict.reason)

    def _script(self, job_id: int) -> str | None:
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


def unknown_job(job_id: int | str) -> UnknownJob:
    """What is said where Slurm has no such job."""
    return UnknownJob(f"Slurm knows no job {job_id}: `squeue --me` lists yours")


def in_order(nodes: Iterable[Node], names: Sequence[str] | None) -> tuple[Node, ...]:
    """The nodes in the order of the names. Raises SlurmError where one is missing."""
    known = {node.name: node for node in nodes}
    if names is None:
        return tuple(known.values())
    missing = [name for name in names if name not in known]
    if missing:
        raise SlurmError(f"Slurm knows no node {fold(missing)}: `sinfo -N` lists them")
    return tuple(known[name] for name in names)


def _assignments(fields: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in fields.items()]


# --- reading `Name=value` -------------------------------------------------------------------------

_PAIR = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9/:_]*)=")


def records(text: str, first: str) -> list[dict[str, str]]:
    """The records of `scontrol -o`: one a line, each beginning with `first=`."""
    return [pairs(line) for line in text.splitlines() if line.startswith(f"{first}=")]


def pairs(line: str) -> dict[str, str]:
    """`Name=value Other=two words` as a mapping; the first of a name counts, `(null)` is empty."""
    found = list(_PAIR.finditer(line))
    values: dict[str, str] = {}
    for at, match in enumerate(found):
        end = found[at + 1].start() if at + 1 < len(found) else len(line)
        value = line[match.end() : end].strip()
        values.setdefault(match[1], "" if value in ("(null)", "N/A", "None") else value)
    return values


def read_job(record: Mapping[str, str]) -> Job:
    """A job from one line of `scontrol -o show -d job`."""
    get = record.get
    nodes = expand(get("NodeList", ""))
    count = get("NumNodes", "").partition("-")[0]
    per_cpu, per_node = megabytes(get("MinMemoryCPU", "")), megabytes(get("MinMemoryNode", ""))
    asked = get("TresPerNode", "") or get("TRES_PER_NODE", "") or get("Gres", "")
    return Job(
        job_id=int(record["JobId"]),
        state=states(get("JobState", "")),
        nodes=nodes,
        cpus_per_node=_cpus_per_node(record),
        name=get("JobName", ""),
        user=get("UserId", "").partition("(")[0],
        partition=get("Partition", ""),
        account=get("Account", ""),
        qos=get("QOS", ""),
        constraint=get("Features", ""),
        gres=gres_per_node(asked, get("GRES", "")),
        cpus_per_task=number(get("CPUs/Task", "")),
        memory_per_node=per_node,
        memory_per_cpu=per_cpu,
        exclusive=get("OverSubscribe", "") == "NO",
        excluded=expand(get("ExcNodeList", "")),
        reservation=get("Reservation", ""),
        num_nodes=int(count) if count.isdigit() else len(nodes),
        time_limit=minutes(get("TimeLimit", "")),
        submit_time=number(get("SubmitTime", "")),
        start_time=number(get("StartTime", "")),
        end_time=number(get("EndTime", "")),
        requeue={"0": False, "1": True}.get(get("Requeue", "")),
        preempted=get("PreemptTime", "None") not in ("None", "N/A", ""),
        batch={"0": False, "1": True}.get(get("BatchFlag", "")),
        restarts=number(get("Restarts", "")) or 0,
        reason=get("Reason", ""),
        waits_for=get("Reason", ""),
        comment=get("Comment", ""),
        command=get("Command", ""),
        workdir=get("WorkDir", ""),
        stdout=get("StdOut", ""),
    )


def read_node(record: Mapping[str, str]) -> Node:
    """A node from one line of `scontrol -o show -d node`."""
    reason, by, at = _reason(record.get("Reason", ""))
    return Node(
        name=record["NodeName"],
        state=states(record.get("State", "")),
        reason=reason,
        features=_words(record.get("AvailableFeatures", "")),
        gres=record.get("Gres", ""),
        gres_used=record.get("GresUsed", ""),
        partitions=_words(record.get("Partitions", "")),
        version=record.get("Version", ""),
        address=record.get("NodeAddr", ""),
        reason_by=by,
        reason_at=at,
        comment=record.get("Comment", ""),
        extra=record.get("Extra", ""),
    )


def read_partition(record: Mapping[str, str]) -> Partition:
    """A partition from one line of `scontrol -o show partition`."""
    return Partition(
        name=record["PartitionName"],
        nodes=expand(record.get("Nodes", "")),
        default=record.get("Default", "") == "YES",
        state=record.get("State", ""),
        preempt_mode=record.get("PreemptMode", ""),
        grace_time=number(record.get("GraceTime", "")) or 0,
        priority_tier=number(record.get("PriorityTier", "")) or 0,
    )


def states(word: str) -> frozenset[str]:
    """State words of one string: `IDLE+DRAIN`, and `down*` for a node that does not answer."""
    parts = word.replace("*", "+NOT_RESPONDING").split("+")
    return frozenset(part.strip().upper() for part in parts if part.strip())


def number(word: str) -> int | None:
    """A whole number; None where there is none (`Unknown`, `N/A`)."""
    return int(word) if word.isdigit() else None


def megabytes(word: str) -> int | None:
    """`4000M`, `4G`, `0` as MB; 0, which means all or nothing, is None."""
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", word)):
        return None
    factor = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024 * 1024}[found[2]]
    return int(float(found[1]) * factor) or None


def minutes(word: str) -> int | None:
    """`1-02:03:00` as minutes; None for UNLIMITED."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?", word)):
        return None
    days, first, second, third = (int(part or 0) for part in found.groups())
    if found[4] is None and found[1] is None:  # MM:SS
        return first
    return days * 1440 + first * 60 + second + (third > 0)


def gres_per_node(asked: str, given: str) -> str:
    """The GRES of each node, as --gres takes them.

    Parameters
    ----------
    asked
        What the job asked for on each node: `gres/gpu:2` (24.11), `gres:gpu:2` (22.05), `gpu:2`.
    given
        What it was given on its first node: `gpu:2(IDX:0-1)`.
    """
    words = _words(asked) or _words(re.sub(r"\([^)]*\)", "", given))
    found = [re.sub(r"^gres[:/]", "", word).replace("=", ":") for word in words]
    return ",".join(word for word in found if word)


def _cpus_per_node(record: Mapping[str, str]) -> str:
    """From `Nodes=n[1-2] CPU_IDs=0-1`, of which there is one for each kind of node (the first is read)."""
    hosts, ids = record.get("Nodes", ""), record.get("CPU_IDs", "")
    everywhere = expand(record.get("NodeList", ""))
    if not hosts or not ids or set(expand(hosts)) != set(everywhere):
        return ""  # nodes of several kinds: what this is asked for then says nothing
    count = sum(
        int(last or first) - int(first) + 1
        for first, _, last in (part.partition("-") for part in ids.split(","))
    )
    return ",".join([str(count)] * len(everywhere))


def _reason(words: str) -> tuple[str, str, float]:
    """`fan is loud [root@1796081230]`: why, who said so, and when in unix seconds (0: not known)."""
    if not (found := re.fullmatch(r"(.*?)\s*\[([^\]@]*)@([^\]]*)\]", words, re.DOTALL)):
        return words, "", 0.0
    return found[1], found[2], float(found[3]) if found[3].isdigit() else 0.0


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)
