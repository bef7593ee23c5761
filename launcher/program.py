"""Whether the script, module or program that the user named is there; if not, which one was meant."""

from __future__ import annotations

import difflib
import importlib.machinery
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from everstep.recovery.errors import UsageError


def check_program(
    name: str, *, kind: Literal["script", "module", "program"], cwd: Path, environ: Mapping[str, str]
) -> None:
    """Raise UsageError, with a guess at what was meant, where `name` cannot be started from `cwd`."""
    if kind == "script":
        path = cwd / name
        if not path.exists():
            raise UsageError(f"{name}: no such script{_nearest_file(path, cwd)}")
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise UsageError(f"{name} is a directory, not a script: name the file to run")
    elif kind == "module":
        if "PYTHON_EXEC" in environ:
            return  # another interpreter, whose modules are not ours to know
        top = name.partition(".")[0]
        if top in sys.builtin_module_names:
            return
        if not importlib.machinery.PathFinder.find_spec(top, [str(cwd), *sys.path]):
            raise UsageError(f"-m {name}: no module {top!r} for {sys.executable}: is it installed there?")
    elif shutil.which(str(cwd / name) if "/" in name else name, path=environ.get("PATH")) is None:
        raise UsageError(f"{name}: no such program, or not executable (--no-python runs it as it is)")


def _nearest_file(path: Path, cwd: Path) -> str:
    """A hint at the file that was meant: one like it beside it, or one of its name further in or out."""
    beside = _names(path.parent)
    if near := difflib.get_close_matches(path.name, beside, n=1):
        found = path.parent / near[0]
    else:
        elsewhere = [cwd, *(cwd / name for name in _names(cwd) if (cwd / name).is_dir())]
        places = [place / path.name for place in elsewhere if (place / path.name).is_file()]
        if not places:
            return f" in {path.parent}" if path.parent.is_dir() else f": {path.parent} does not exist"
        found = places[0]
    shown = found.relative_to(cwd) if found.is_relative_to(cwd) else found
    return f": did you mean {shown}?"


def _names(directory: Path, most: int = 2000) -> list[str]:
    """Names in a directory; few, since a shared one may hold very many."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(most), strict=False))
    except OSError:
        return []
