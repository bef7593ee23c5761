"""Slurm asked by its own commands and their JSON, which has one meaning whatever a job is called.

Releases from 23.02 on have `scontrol --json`; before, sinfo and squeue list the same records, all of them.
Where the site's Slurm was built without the serializer/json plugin, the same is asked in words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everstep.launcher.slurm import cli_text, nokill
from everstep.launcher.slurm.cli_text import CliText, gres_per_node, in_order, unknown_job
from everstep.launcher.slurm.client import Job, Node, SlurmBusy, SlurmError, UnknownJob, expand, fold
from everstep.launcher.slurm.commands import require, run_command

__all__ = ["CliJson", "NoJson", "number", "read_job", "read_node", "require", "run_command", "states"]


class NoJson(SlurmError):
    """This Slurm does not answer in JSON, or not in one that we know."""


@dataclass(frozen=True)
class CliJson(CliText):
    """A SlurmClient over `scontrol --json`, `sbatch` and `scancel`."""

    def job(self, job_id: int) -> Job:
        """One job, and whether it was made with --no-kill as far as that can be told."""
        try:
            found = self._records(["scontrol", "show", "job", str(job_id), "--json"], "jobs")
        except NoJson:
            return super().job(job_id)
        for record in found:
            if number(record.get("job_id")) == job_id:
                batch = record.get("batch_flag") is not False
                return self._with_no_kill(read_job(record), batch=batch, record=record)
        raise unknown_job(job_id)

    def nodes(self, names: Sequence[str] | None = None) -> tuple[Node, ...]:
        """The named nodes, in the order of the names; without names, all of them."""
        if names is not None and not names:
            return ()
        which = [] if names is None else [fold(names)]
        for way in (["scontrol", "show", "nodes", *which, "--json"], ["sinfo", "--json"]):
            try:
                return in_order(map(read_node, self._records(way, "nodes")), names)
            except NoJson:
                continue
        return super().nodes(names)

    def job_parts(self, job: str) -> tuple[Job, ...]:
        """The jobs that a user means by `12`, `12_3` or `12+1`."""
        try:
            found = self._records(["scontrol", "show", "job", job, "--json"], "jobs")
        except NoJson:
            try:
                listed = self._records(["squeue", "--json"], "jobs")
            except NoJson:
                return super().job_parts(job)
            found = [record for record in listed if job in _job_names(record)]
        if not found:
            raise unknown_job(job)
        return tuple(map(read_job, found))

    def _records(self, argv: Sequence[str], key: str) -> list[Mapping[str, Any]]:
        shown = " ".join(argv)
        try:
            answer = json.loads(self.run(argv))
        except (SlurmBusy, UnknownJob):
            raise
        except SlurmError as error:
            raise NoJson(str(error)) from error
        except json.JSONDecodeError as error:
            raise NoJson(f"`{shown}` did not answer in JSON") from error
        found = answer.get(key) if isinstance(answer, dict) else None
        if not isinstance(found, list):
            raise NoJson(f"`{shown}` answered without {key!r}: {_errors(answer)}")
        return [record for record in found if isinstance(record, dict)]


def read_job(record: Mapping[str, Any], verdict: nokill.NoKill | None = None) -> Job:
    """A job from one record of `scontrol show job --json`, of any release that has it."""
    resources, details = record.get("job_resources"), record.get("gres_detail")
    nodes = expand(_text(record.get("nodes")))
    shared = states(record.get("shared"))
    given = _text(details[0]) if isinstance(details, list) and details else ""
    limit = number(record.get("time_limit"))
    state = states(record.get("job_state"))
    over = not state & {"PENDING", "RUNNING", "SUSPENDED"}
    job = Job(
        job_id=number(record.get("job_id")) or 0,
        state=state,
        nodes=nodes,
        cpus_per_node=_cpus_per_node(resources if isinstance(resources, dict) else {}),
        name=_text(record.get("name")),
        user=_text(record.get("user_name")),
        partition=_text(record.get("partition")),
        account=_text(record.get("account")),
        qos=_text(record.get("qos")),
        constraint=_text(record.get("features")),
        gres=gres_per_node(_text(record.get("tres_per_node")), given),
        cpus_per_task=number(record.get("cpus_per_task")),
        memory_per_node=number(record.get("memory_per_node")) or None,
        memory_per_cpu=number(record.get("memory_per_cpu")) or None,
        exclusive=bool(shared & {"NONE", "EXCLUSIVE"}),
        excluded=expand(_text(record.get("excluded_nodes"))),
        reservation=_text(record.get("resv_name")),
        num_nodes=number(record.get("node_count")) or len(nodes),
        time_limit=limit,
        submit_time=number(record.get("submit_time")) or None,
        start_time=number(record.get("start_time")) or None,
        # A job without a limit ends in a year, says the JSON.
        end_time=(number(record.get("end_time")) or None) if limit is not None or over else None,
        requeue=record["requeue"] if isinstance(record.get("requeue"), bool) else None,
        preempted=bool(number(record.get("preempt_time"))),
        batch=record["batch_flag"] if isinstance(record.get("batch_flag"), bool) else None,
        restarts=number(record.get("restart_cnt")) or 0,
        reason=_text(record.get("state_reason")),
        waits_for=_waits_for(record),
        comment=_text(record.get("comment")),
        command=_text(record.get("command")),
        workdir=_text(record.get("current_working_directory")),
        stdout=_text(record.get("standard_output")),
    )
    return job if verdict is None else replace(job, no_kill=verdict.value, no_kill_reason=verdict.reason)


def read_node(record: Mapping[str, Any]) -> Node:
    """A node from one record of `scontrol show nodes --json`."""
    return Node(
        name=_text(record.get("name")),
        state=states(record.get("state")) | states(record.get("state_flags")),
        reason=_text(record.get("reason")),
        features=_words(record.get("features")),
        gres=_text(record.get("gres")),
        partitions=_words(record.get("partitions")),
        version=_text(record.get("version")),
        address=_text(record.get("address")),
        gres_used=_text(record.get("gres_used")),
        reason_by=_text(record.get("reason_set_by_user")),
        reason_at=float(number(record.get("reason_changed_at")) or 0),
        comment=_text(record.get("comment")),
        extra=_text(record.get("extra")),
    )


def _job_names(record: Mapping[str, Any]) -> set[str]:
    """What a user may call a job: its number, its array's with or without the task's, its het job's."""
    names = {str(number(record.get("job_id")))}
    if array := number(record.get("array_job_id")):
        names |= {str(array), f"{array}_{number(record.get('array_task_id'))}"}
    if het := number(record.get("het_job_id")):
        names |= {str(het), f"{het}+{number(record.get('het_job_offset'))}"}
    return names


def _waits_for(record: Mapping[str, Any]) -> str:
    reason, told = _text(record.get("state_reason")), _text(record.get("state_description"))
    if not reason or not told:
        return reason
    return told if told.startswith(reason) else f"{reason}: {told}"


def states(value: object) -> frozenset[str]:
    """State words in either form: a list, or one string (older releases) with `+` between flags."""
    if isinstance(value, str):
        return cli_text.states(value)
    if not isinstance(value, list):
        return frozenset()
    return frozenset(str(word).strip().upper() for word in value if str(word).strip())


def number(value: object) -> int | None:
    """A number in either form: plain, or {"set": …, "infinite": …, "number": …}; None where it is not set."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _text(value: object) -> str:
    return value if isinstance(value, str) and value not in ("None", "(null)") else ""


def _words(value: object) -> tuple[str, ...]:
    # A list, or one string in older releases.
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
