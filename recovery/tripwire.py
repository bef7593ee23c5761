"""A worker's death, felt as it begins: a robust mutex that its main thread holds for life.

The kernel tells a parent of a killed child only after the child's memory is torn down,
which takes tens of milliseconds for a process of torch's size. A robust mutex is marked
and its waiter woken first of all. It lies in the page that worker and agent share; where
it cannot be had, the agent's pidfd is all there is, and nothing but time is lost.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

# In the shared page, whose start is the count of committed steps.
_ARMED = 1016
_OFFSET = 1024
_EOWNERDEAD = 130
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1

_libc = ctypes.CDLL(None)


def arm(page: mmap.mmap) -> bool:
    """In the worker's main thread: hold the mutex until this process ends. False where it cannot be had."""
    try:
        mutex, attributes = _mutex(page), ctypes.create_string_buffer(64)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST))
        _check(_libc.pthread_mutex_init(ctypes.byref(mutex), attributes))
        _check(_libc.pthread_mutex_lock(ctypes.byref(mutex)))
    except (OSError, AttributeError):
        return False
    # Never unmapped, not even by Python's last moments: the kernel looks for the mutex after them.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))
    page[_ARMED] = 1
    return True


def wait(page: mmap.mmap) -> bool:
    """In a thread of the agent: return when the worker's main thread ends; True if it did.

    False, at once, where the worker has not armed the page.
    """
    if not page[_ARMED]:
        return False
    result: int = _libc.pthread_mutex_lock(ctypes.byref(_mutex(page)))
    return result == _EOWNERDEAD


def killed_by(pid: int) -> int | None:
    """The signal that a process is ending by, while the kernel still tears it down; None: not by one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            status = int(file.read().rpartition(b")")[2].split()[49])
    except (OSError, IndexError, ValueError):
        return None
    return status & 0x7F or None


def _mutex(page: mmap.mmap) -> Any:
    return (ctypes.c_char * 64).from_buffer(page, _OFFSET)


def _check(result: int) -> None:
    if result:
        raise OSError(result, "robust mutex")
