"""Whose files are followed: as root only what root owns and nobody else can write, the whole way to it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from everstep.healthcheck.errors import HealthError

LINKS = 40  # as many symbolic links as the kernel follows
FILE_LIMIT = 4 * 2**20  # bytes; nothing that is read here is nearly as long

LStat = Callable[[str], os.stat_result]


class Untrusted(HealthError):
    """A file that is not followed, and why."""


def resolve(path: str | Path, *, uid: int | None = None, lstat: LStat = os.lstat) -> Path:
    """The path with its links resolved, each folder and link on the way and the end of it looked at.

    For anybody but root nothing is refused: what they read and run is with their own rights anyway. Since
    only root can change any folder on the way, what was looked at is still there when it is opened.

    Raises Untrusted where something on the way is not root's alone, and FileNotFoundError.
    """
    full = os.path.abspath(path)
    uid = os.geteuid() if uid is None else uid
    if uid != 0:
        return Path(os.path.realpath(full))
    done, rest, links = "/", full.split("/")[1:], 0
    _look(done, path, lstat)
    while rest:
        part = rest.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            done = os.path.dirname(done)
            continue
        here = os.path.join(done, part)
        if not stat.S_ISLNK(_look(here, path, lstat)):
            done = here
            continue
        links += 1
        if links > LINKS:
            raise Untrusted(f"{path} is not followed: too many symbolic links")
        target = os.readlink(here)
        if target.startswith("/"):
            done = "/"
        rest = [*target.split("/"), *rest]
    return Path(done)


def read(path: str | Path, *, uid: int | None = None) -> bytes:
    """What a trusted file has in it. Raises Untrusted, FileNotFoundError, or another OSError."""
    where = resolve(path, uid=uid)
    # Not to wait for a writer, should it be a pipe.
    handle = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Untrusted(f"{path} is not read: it is no plain file")
        data = file.read(FILE_LIMIT + 1)
    if len(data) > FILE_LIMIT:
        raise Untrusted(f"{path} is not read: it is longer than {FILE_LIMIT >> 20} MiB")
    return data


def write(path: str | Path, data: bytes, *, mode: int = 0o644, uid: int | None = None) -> None:
    """Put a file in the place of `path`, whole or not at all; folders are made where they are missing.

    Raises Untrusted where the folder is not trusted, or an OSError.
    """
    folder, name = os.path.split(os.path.abspath(path))
    place = _made(folder, uid)
    new = place / f".{name}.{os.getpid()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(new, flags, mode)
    except FileExistsError:  # left by a process that had our number and was killed
        new.unlink()
        handle = os.open(new, flags, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(handle, mode)
        os.replace(new, place / name)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _made(folder: str, uid: int | None) -> Path:
    """The folder, resolved; made where it is missing, in a trusted one."""
    if not os.path.lexists(folder):
        above = _made(os.path.dirname(folder), uid)
        with contextlib.suppress(FileExistsError):  # another of us was faster
            os.mkdir(above / os.path.basename(folder), 0o755)
    return resolve(folder, uid=uid)


def _look(here: str, asked: str | Path, lstat: LStat) -> int:
    """The mode of what is there, if it is root's alone."""
    found = lstat(here)
    if found.st_uid != 0:
        raise Untrusted(
            f"{asked} is not followed: {here} belongs to user {found.st_uid}; `chown root {here}`"
        )
    # A link's own mode says nothing; who may change it is a matter of its folder.
    if not stat.S_ISLNK(found.st_mode) and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(f"{asked} is not followed: others can write {here}; `chmod go-w {here}`")
    return found.st_mode
