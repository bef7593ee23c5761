"""Nodes that Slurm cannot reach, asked over SSH: with the user's own agent, known hosts and ~/.ssh/config."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.records import Record, from_dict
from everstep.healthcheck.result import UNKNOWN

if TYPE_CHECKING:
    import paramiko

COMMAND = ("everstep", "health", "check", "--level", "light", "--json")
AT_ONCE = 16
MOST_OUTPUT = 4 * 2**20  # bytes


@dataclass(frozen=True)
class Settings:
    """How nodes are asked."""

    connect_s: float = 5.0
    answer_s: float = 15.0
    accept_new: bool = False
    """Take a host key that is not known. One that is known and differs is never taken."""
    command: Sequence[str] = COMMAND
    config: str = "~/.ssh/config"


@dataclass(frozen=True)
class Answer:
    """What came of asking one node: a record, or why there is none."""

    record: Record | None
    fault: str = ""


def ask_all(
    addresses: Mapping[str, str],
    settings: Settings,
    *,
    ask: Callable[[str, str, Settings], Answer] | None = None,
) -> tuple[dict[str, Record], list[str]]:
    """Ask these nodes (by name, with their addresses), several at a time: records, and faults in words."""
    ask = ask or ask_one
    records: dict[str, Record] = {}
    faults: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {name: pool.submit(ask, name, address, settings) for name, address in addresses.items()}
        for name, future in asked.items():
            answer = future.result()
            if answer.record is not None:
                records[name] = answer.record
            else:
                faults.append(answer.fault)
    return records, faults


def ask_one(name: str, address: str, settings: Settings) -> Answer:
    """Ask one node for its light checks."""
    paramiko = _paramiko()
    client = paramiko.SSHClient()
    try:
        client.load_system_host_keys()
        client.set_missing_host_key_policy(
            paramiko.AutoAddPolicy() if settings.accept_new else paramiko.RejectPolicy()
        )
        host = _host(name, address, settings)
        client.connect(
            **host,
            timeout=settings.connect_s,
            banner_timeout=settings.connect_s,
            auth_timeout=settings.connect_s,
            compress=False,
        )
        return _answer(client, name, settings)
    except paramiko.BadHostKeyException:
        return Answer(None, f"ssh {name}: its host key is not the one that is known: ask an administrator")
    except paramiko.AuthenticationException:
        return Answer(None, f"ssh {name}: it did not let you in; is your key in the agent (`ssh-add -l`)?")
    except paramiko.SSHException as error:
        if "not found in known_hosts" in str(error):
            return Answer(
                None, f"ssh {name}: its host key is not known; `ssh {name}` once, or --ssh-accept-new"
            )
        return Answer(None, f"ssh {name}: {_first_line(error)}")
    except (OSError, EOFError) as error:
        return Answer(None, f"ssh {name}: {_first_line(error) or 'no answer in time'}")
    finally:
        client.close()


def _answer(client: paramiko.SSHClient, name: str, settings: Settings) -> Answer:
    _, stdout, stderr = client.exec_command(shlex.join(settings.command), timeout=settings.answer_s)
    channel = stdout.channel
    deadline = time.monotonic() + settings.answer_s
    text = bytearray()
    while True:
        # A node that trickles is out of time as much as a silent one.
        channel.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            data = channel.recv(65536)
        except TimeoutError:
            return Answer(None, f"ssh {name}: the checks gave no answer in {settings.answer_s:g} s")
        if not data:
            break
        text += data
        if len(text) > MOST_OUTPUT:
            return Answer(None, f"ssh {name}: the answer is too long to be everstep's")
    try:
        answer = json.loads(bytes(text))
        return Answer(from_dict({**answer, "node": name, "at": time.time(), "by": "ssh"}, "ssh"))
    except (ValueError, TypeError):
        code = channel.recv_exit_status() if channel.exit_status_ready() else UNKNOWN
        said = stderr.channel.recv_stderr(4096).decode(errors="replace").strip().splitlines()
        return Answer(
            None,
            f"ssh {name}: `{shlex.join(settings.command)}` ended with {code}: {(said or ['no word'])[-1]}",
        )


def _host(name: str, address: str, settings: Settings) -> dict[str, Any]:
    """What to connect to, as ~/.ssh/config has it for that name."""
    found: dict[str, Any] = {"hostname": address or name}
    path = Path(settings.config).expanduser()
    if not path.is_file():
        return found
    told = _paramiko().SSHConfig.from_path(str(path)).lookup(name)
    if told.get("hostname", name) != name:
        found["hostname"] = told["hostname"]
    if "port" in told:
        found["port"] = int(told["port"])
    if "user" in told:
        found["username"] = told["user"]
    if "identityfile" in told:
        found["key_filename"] = [each for each in told["identityfile"] if os.path.exists(each)]
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _paramiko() -> Any:
    try:
        import paramiko
    except ImportError as error:
        raise HealthError("--ssh needs paramiko: `pip install 'everstep[ssh]'`") from error
    return paramiko
