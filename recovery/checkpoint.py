"""Checkpoints on disk, the last tier: complete and verified, or not there at all.

    path/step-00000120/   manifest.json   what belongs to it, with sizes and digests; written last
                          .metadata       torch.distributed.checkpoint's own index
                          __0_0.distcp    the tensors, under names such as model.blocks.0.weight
    path/.everstep-*      a checkpoint being written or deleted; never read
    path/.everstep-lock   held by the process that writes here

A checkpoint is made under a hidden name, synced and then renamed, so that a visible one is
whole even if the machine stops. It is read only after every file matches the manifest:
the index is a pickle, and is not opened before. (That guards against torn files, not against
somebody who may write to the directory.) Files are made with the umask, so that a group can
share them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import os
import re
import shutil
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import xxhash
from everstep.recovery import state
from everstep.recovery.errors import UsageError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

Log = Callable[[str], object]

_FORMAT = 1
_MANIFEST = "manifest.json"
_SKELETON = "everstep-skeleton"  # no object can have this name: it is no identifier
_HIDDEN = ".everstep-"
_LOCK = ".everstep-lock"
_NAME = re.compile(r"step-(\d{8,})")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

# POSIX locks belong to the process (unlike flock's, a forked DataLoader worker does not keep
# them after its parent's death), and any close of the file gives them up: one descriptor a
# directory, kept as long as the process lives.
_locks: dict[str, int] = {}


class TornCheckpoint(Exception):
    """A checkpoint that must not be used, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Found:
    """A verified checkpoint, read into CPU memory."""

    committed: int
    path: Path
    skeleton: bytes
    tensors: list[torch.Tensor]
    extra: dict[str, Any]


class _File(msgspec.Struct, frozen=True):
    bytes: int
    xxh3_128: str


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    committed: int
    everstep: str
    torch: str
    written: float
    fingerprint: str
    files: dict[str, _File]
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints in one directory, on a file system that all nodes share.

    Every rank makes one; only one process at a time may `save`. `every` is in steps,
    `keep` how many of the newest remain. Raises `UsageError` at once where the directory
    cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], every: int, keep: int = 2, log: Log = print) -> None:
        for name, number in (("every", every), ("keep", keep)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UsageError(f"checkpoint({name}={number!r}): must be a whole number of at least 1")
        self.path = Path(path).absolute()
        self.every = every
        self.keep = keep
        self._log = log
        self._warned = False
        probe = self.path / f"{_HIDDEN}probe-{_whoami()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as exc:
            raise UsageError(
                f"checkpoint({str(path)!r}): cannot write there: {_words(exc)}; "
                "name a directory that this user can write to, on a file system that all nodes share"
            ) from None

    def due(self, committed: int) -> bool:
        """Whether a checkpoint belongs at this boundary."""
        return committed > 0 and committed % self.every == 0

    # ------------------------------------------------------------ writing

    def save(self, committed: int, snap: state.Snapshot, extra: dict[str, Any]) -> Path | None:
        """Write the checkpoint of `committed` steps; `extra` is plain data that goes into the manifest.

        Returns its directory, or None where it could not be written: that is said in one
        line, the older checkpoints are as they were, and training can go on.
        """
        begun = time.monotonic()
        target = self._dir(committed)
        temporary = self.path / f"{_HIDDEN}tmp-{target.name}-{_whoami()}"
        try:
            locked = self._lock()
            if locked is None:
                self._refuse(committed, f"another run is writing there ({self._lock_owner()})")
                return None
            self._sweep(locked)
            fingerprint = state.fingerprint(snap)
            if self._is_there(committed, fingerprint):
                return target  # the step was done again, with the same result
            foreign = self._foreign(committed)
            if foreign is not None:
                self._refuse(committed, f"{self._dir(foreign).name} there is from another run")
                return None
            self._write(temporary, committed, snap, extra, fingerprint)
            self._publish(temporary, target)
            self._prune()
        except (OSError, RuntimeError, CheckpointException) as exc:
            shutil.rmtree(temporary, ignore_errors=True)
            newest = self.candidates()
            remains = f"the newest is still {self._dir(newest[0]).name}" if newest else "there is none yet"
            self._log(
                f"WARNING: no checkpoint at step {committed}: {_words(exc)} in {self.path}; "
                f"training goes on, {remains}"
            )
            return None
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        size = len(snap.skeleton) + sum(t.numel() * t.element_size() for t in snap.tensors)
        self._log(f"checkpoint {target.name}: {size / 1e6:.1f} MB in {time.monotonic() - begun:.2f} s")
        return target

    def set_aside(self) -> Path | None:
        """Move all checkpoints into a new folder set-aside-N, for a run that starts over beside them."""
        steps = self.candidates()
        if not steps:
            return None
        number = 1
        while (self.path / f"set-aside-{number}").exists():
            number += 1
        folder = self.path / f"set-aside-{number}"
        folder.mkdir()
        for step in steps:
            self._dir(step).rename(folder / self._dir(step).name)
        _sync(self.path)
        return folder

    def _write(
        self, folder: Path, committed: int, snap: state.Snapshot, extra: dict[str, Any], fingerprint: str
    ) -> None:
        folder.mkdir()
        content = {
            spec.path: tensor if _as_it_is(tensor) else state.to_wire(tensor)
            for spec, tensor in zip(state.specs(snap.skeleton), snap.tensors, strict=True)
        }
        content[_SKELETON] = torch.frombuffer(bytearray(snap.skeleton), dtype=torch.uint8)
        # One thread: what a second one of FileSystemWriter's meets (a full disk) is lost, and
        # the save seems to succeed. It also syncs its files.
        writer = FileSystemWriter(folder, thread_count=1, sync_files=True)
        with _no_warnings():
            dcp_save(content, storage_writer=writer, no_dist=True)
        files = {p.name: _File(p.stat().st_size, _hash(p)) for p in sorted(folder.iterdir())}
        manifest = _Manifest(
            format=_FORMAT,
            committed=committed,
            everstep=_everstep_version(),
            torch=str(torch.__version__),
            written=time.time(),
            fingerprint=fingerprint,
            files=files,
            extra=extra,
        )
        with (folder / _MANIFEST).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        _sync(folder)

    def _publish(self, temporary: Path, target: Path) -> None:
        if target.exists():  # torn: a valid one was found before
            target.rename(self.path / f"{_HIDDEN}trash-{target.name}-{_whoami()}")
        temporary.rename(target)
        _sync(self.path)

    def _is_there(self, committed: int, fingerprint: str) -> bool:
        try:
            return self._verify(committed).fingerprint == fingerprint
        except TornCheckpoint:
            return False

    def _foreign(self, committed: int) -> int | None:
        """A valid checkpoint of this step or a later one: a run begins at its newest, so it is not ours."""
        for step in self.candidates():
            if step >= committed:
                with contextlib.suppress(TornCheckpoint):
                    self._read(step)
                    return step
        return None

    def _refuse(self, committed: int, why: str) -> None:
        self._log(
            f"WARNING: no checkpoint at step {committed}: {why}, in {self.path}; training goes on. "
            "Give each run a directory of its own"
        )

    def _prune(self) -> None:
        """Delete all that are older than the newest `keep` complete ones."""
        complete = 0
        for step in self.candidates():
            if complete >= self.keep:
                trash = self.path / f"{_HIDDEN}trash-{self._dir(step).name}-{_whoami()}"
                self._dir(step).rename(trash)  # at once, so that nobody sees half of it
                shutil.rmtree(trash, ignore_errors=True)
                continue
            with contextlib.suppress(TornCheckpoint):
                self._manifest(step)
                complete += 1

    def _sweep(self, locked: bool) -> None:
        """Delete what writers left that were killed. Without locks: only those known to be dead."""
        for entry in self.path.glob(f"{_HIDDEN}*-*"):
            host, _, pid = entry.name.rpartition("-")[0].rpartition("-")
            host = host.rpartition("-")[2]
            here = host == _host() and pid.isdigit()
            if here and int(pid) == os.getpid():
                continue
            if locked or (here and not psutil.pid_exists(int(pid))):
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)

    def _lock(self) -> bool | None:
        """Become the directory's writer. None where another process is, False where locks do not work."""
        key = os.path.realpath(self.path)
        if key in _locks:
            return True
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(fd)
            if exc.errno in (errno.EACCES, errno.EAGAIN):
                return None
            if exc.errno not in _NO_LOCKS:
                raise
            if not self._warned:
                self._warned = True
                self._log(f"{self.path} is on a file system without locks; let only one run write there")
            return False
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
        _locks[key] = fd
        return True

    def _lock_owner(self) -> str:
        with contextlib.suppress(OSError):
            return (self.path / _LOCK).read_text(errors="replace").strip() or "unknown"
        return "unknown"

    # ------------------------------------------------------------ reading

    def candidates(self) -> list[int]:
        """The steps that there are checkpoints of, newest first; none of them is verified yet."""
        try:
            names = [entry.name for entry in os.scandir(self.path) if entry.is_dir()]
        except OSError:
            return []
        return sorted((int(m[1]) for name in names if (m := _NAME.fullmatch(name))), reverse=True)

    def load(self, committed: int) -> tuple[bytes, list[torch.Tensor]]:
        """The skeleton and the tensors of a checkpoint, verified. Raises `TornCheckpoint`."""
        found = self._read(committed)
        return found.skeleton, found.tensors

    def newest_valid(self, log: Log | None = None) -> Found | None:
        """The newest checkpoint that is what its manifest says; each that is not is named and skipped."""
        log = log or self._log
        for step in self.candidates():
            try:
                return self._read(step)
            except TornCheckpoint as exc:
                log(f"WARNING: checkpoint {self._dir(step)} is skipped: {exc.reason}")
        return None

    def _read(self, committed: int) -> Found:
        manifest = self._verify(committed)
        folder = self._dir(committed)
        try:
            reader = FileSystemReader(folder)
            content: dict[str, Any] = {}
            for key, item in reader.read_metadata().state_dict_metadata.items():
                if not isinstance(item, TensorStorageMetadata):
                    raise TornCheckpoint(f"{key} in it is no tensor")
                content[key] = torch.empty(item.size, dtype=item.properties.dtype)
            with _no_warnings():
                dcp_load(content, storage_reader=reader, no_dist=True)
            skeleton = bytes(state.as_bytes(content[_SKELETON]))
            tensors = [content[spec.path] for spec in state.specs(skeleton)]
        except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as exc:
            raise TornCheckpoint(f"it cannot be read: {_words(exc)}") from exc
        if state.fingerprint(state.Snapshot(skeleton, tensors)) != manifest.fingerprint:
            raise TornCheckpoint("the state read from it is not the one that was written")
        return Found(committed, folder, skeleton, tensors, manifest.extra)

    def _manifest(self, committed: int) -> _Manifest:
        """A checkpoint's manifest, with its files there in the right sizes. Raises `TornCheckpoint`."""
        folder = self._dir(committed)
        try:
            manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=_Manifest)
        except FileNotFoundError:
            raise TornCheckpoint(f"it has no {_MANIFEST}") from None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise TornCheckpoint(f"its {_MANIFEST} cannot be read: {_words(exc)}") from exc
        if manifest.format != _FORMAT:
            raise TornCheckpoint(f"it is in format {manifest.format}; this everstep reads format {_FORMAT}")
        if manifest.committed != committed:
            raise TornCheckpoint(f"it says that it is of step {manifest.committed}")
        if ".metadata" not in manifest.files:
            raise TornCheckpoint("its manifest does not list .metadata")
        for name, file in manifest.files.items():
            if "/" in name or name == "..":
                raise TornCheckpoint(f"its manifest lists {name!r}, outside of it")
            try:
                size = (folder / name).stat().st_size
            except OSError as exc:
                raise TornCheckpoint(f"{name}: {_words(exc)}") from exc
            if size != file.bytes:
                raise TornCheckpoint(f"{name} has {size} bytes instead of {file.bytes}")
        return manifest

    def _verify(self, committed: int) -> _Manifest:
        manifest = self._manifest(committed)
        for name, file in manifest.files.items():
            try:
                actual = _hash(self._dir(committed) / name)
            except OSError as exc:
                raise TornCheckpoint(f"{name}: {_words(exc)}") from exc
            if actual != file.xxh3_128:
                raise TornCheckpoint(f"{name} is damaged: its digest is not the one in the manifest")
        return manifest

    def _dir(self, committed: int) -> Path:
        return self.path / f"step-{committed:08d}"


def _as_it_is(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _host() -> str:
    return socket.gethostname().replace("-", "_")


def _whoami() -> str:
    return f"{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _words(exc: BaseException) -> str:
    """What an exception says, in one line; what is inside of DCP's own."""
    if isinstance(exc, CheckpointException) and exc.failures:
        exc = next(iter(exc.failures.values()))[0]
    cause: BaseException | None = exc
    while cause is not None:  # torch's writer reports a full disk as a wrong position, raised from the reason
        if isinstance(cause, OSError):
            exc = cause
        cause = cause.__cause__ or cause.__context__
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return str(digest.hexdigest())


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Without DCP's warning that no_dist, which we ask for, saves in a single process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _everstep_version() -> str:
    try:
        return importlib.metadata.version("everstep")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
