"""Nodes asked over SSH, by a server in this process: who is believed, who is refused, and in which words."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from everstep.healthcheck import ssh
from everstep.healthcheck.ssh import Answer, Settings

paramiko = pytest.importorskip("paramiko")

SICK = {
    "check": "xid",
    "device": "gpu3",
    "status": "critical",
    "severity": "reset",
    "reason": "Xid 95",
    "value": None,
    "limit": None,
    "seconds": 0.1,
}
ANSWER = {
    "node": "elsewhere",
    "profile": "p5",
    "level": "light",
    "status": "critical",
    "severity": "reset",
    "results": [SICK],
}


class Server(paramiko.ServerInterface):  # type: ignore[misc]
    """A node with sshd: says `reply` to any command, or nothing at all."""

    def __init__(self, user_key: Any, reply: bytes | None) -> None:
        self.host_key = paramiko.ECDSAKey.generate()
        self.user_key = user_key
        self.reply = reply
        self.commands: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.transports: list[Any] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transport.add_server_key(self.host_key)
            self.transports.append(transport)
            try:
                transport.start_server(server=self)
            except (paramiko.SSHException, OSError, EOFError):
                transport.close()

    def check_auth_publickey(self, username: str, key: Any) -> int:
        return paramiko.AUTH_SUCCESSFUL if key == self.user_key else paramiko.AUTH_FAILED

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: Any, command: bytes) -> bool:
        self.commands.append(command.decode())
        if self.reply is not None:
            threading.Thread(target=self._say, args=(channel, self.reply), daemon=True).start()
        return True

    def _say(self, channel: Any, reply: bytes) -> None:
        time.sleep(0.1)  # paramiko says yes to the command after our return, and tells nobody when it has
        channel.sendall(reply)
        channel.sendall_stderr(b"bash: everstep: command not found\n")
        channel.send_exit_status(2)
        channel.close()

    def close(self) -> None:
        if self.listener.fileno() == -1:
            return
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.listener.close()
        for transport in self.transports:
            transport.close()


class Client:
    """A user with a home of its own: a key, known hosts, ~/.ssh/config."""

    def __init__(self, home: Path) -> None:
        self.folder = home / ".ssh"
        self.folder.mkdir(mode=0o700)
        self.key = paramiko.ECDSAKey.generate()
        self.key.write_private_key_file(str(self.folder / "id_ecdsa"))
        self.servers: list[Server] = []

    def server(self, reply: bytes | None = json.dumps(ANSWER).encode(), *, known: bool = True) -> Server:
        server = Server(self.key, reply)
        self.servers.append(server)
        (self.folder / "config").write_text(
            f"Host n1\n  HostName 127.0.0.1\n  Port {server.port}\n  User hpc\n"
        )
        if known:
            key = server.host_key
            line = f"[127.0.0.1]:{server.port} {key.get_name()} {key.get_base64()}\n"
            (self.folder / "known_hosts").write_text(line)
        return server


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    one = Client(tmp_path)
    yield one
    for server in one.servers:
        server.close()


def ask(**settings: Any) -> Answer:
    return ssh.ask_one("n1", "10.0.0.1", Settings(**{"connect_s": 60.0, "answer_s": 60.0, **settings}))


def test_a_node_is_asked_for_its_light_checks(client: Client) -> None:
    server = client.server()
    answer = ask()
    assert answer.fault == ""
    assert answer.record is not None
    assert (answer.record.node, answer.record.by, answer.record.source) == ("n1", "ssh", "ssh")
    assert answer.record.report.results[0].reason == "Xid 95"
    assert server.commands == ["everstep health check --level light --json"]


def test_a_host_key_that_is_not_known_is_refused(client: Client) -> None:
    server = client.server(known=False)
    answer = ask()
    assert answer.record is None
    assert answer.fault == "ssh n1: its host key is not known; `ssh n1` once, or --ssh-accept-new"
    assert server.commands == []


def test_a_host_key_that_is_not_known_is_taken_where_the_user_says_so(client: Client) -> None:
    client.server(known=False)
    assert ask(accept_new=True).record is not None


def test_a_host_key_that_has_changed_is_never_taken(client: Client) -> None:
    server = client.server(known=False)
    other = paramiko.ECDSAKey.generate()
    line = f"[127.0.0.1]:{server.port} {other.get_name()} {other.get_base64()}\n"
    (client.folder / "known_hosts").write_text(line)
    answer = ask(accept_new=True)
    assert answer.record is None
    assert "not the one that is known" in answer.fault
    assert server.commands == []


def test_a_node_that_does_not_let_one_in_is_said_so(client: Client) -> None:
    server = client.server()
    server.user_key = paramiko.ECDSAKey.generate()
    assert "did not let you in" in ask().fault


def test_a_node_without_everstep_is_told_in_its_own_words(client: Client) -> None:
    client.server(b"")
    assert ask().fault.endswith("ended with 2: bash: everstep: command not found")


@pytest.mark.parametrize("reply", [b"{}", b"[]", b"\xff", b'{"results": 3}'])
def test_an_answer_that_is_no_report_is_a_fault(client: Client, reply: bytes) -> None:
    client.server(reply)
    answer = ask()
    assert answer.record is None
    assert answer.fault.startswith("ssh n1: ")


def test_a_node_that_says_nothing_is_given_up(client: Client) -> None:
    client.server(None)
    assert "gave no answer in 0.3 s" in ask(answer_s=0.3).fault


def test_a_node_where_nobody_listens_is_said_so(client: Client) -> None:
    client.server().close()
    assert ask().fault.startswith("ssh n1: ")


def test_many_nodes_are_asked_and_each_answers_for_itself() -> None:
    def one(name: str, address: str, settings: Settings) -> Answer:
        return Answer(None, f"{name} at {address}")

    records, faults = ssh.ask_all({"a": "1", "b": "2"}, Settings(), ask=one)
    assert records == {}
    assert faults == ["a at 1", "b at 2"]
