"""Which GPUs should be idle: `--idle-gpus`, or those of the job in whose Prolog or Epilog we are."""

from __future__ import annotations

import re
from collections.abc import Mapping

ALL: frozenset[int | str] = frozenset(range(1024))
"""Whatever GPUs there are."""

_HIGHEST = 4095
_CONTEXTS = ("prolog_slurmd", "epilog_slurmd")


def parse(words: str) -> frozenset[int | str]:
    """`all`, or numbers, ranges and UUIDs such as `0,2-3,GPU-1f2e3d4c`. Raises ValueError for other words."""
    if words == "all":
        return ALL
    found: set[int | str] = set()
    for word in words.split(","):
        word = word.strip()
        numbers = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", word)
        if numbers is not None:
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if not first <= last <= _HIGHEST:
                raise ValueError(word)
            found.update(range(first, last + 1))
        elif re.fullmatch(r"GPU-[0-9a-fA-F-]{8,}", word):
            found.add(word.lower())
        else:
            raise ValueError(word)
    return frozenset(found)


def of_job(environ: Mapping[str, str]) -> tuple[frozenset[int | str] | None, tuple[str, ...]]:
    """The GPUs of the job in whose Prolog or Epilog we are, None elsewhere; and what cannot be understood."""
    words = environ.get("SLURM_JOB_GPUS", "")
    if not words or environ.get("SLURM_SCRIPT_CONTEXT") not in _CONTEXTS:
        return None, ()
    try:
        return parse(words), ()
    except ValueError as error:
        return None, (
            f"SLURM_JOB_GPUS={words[:100]!r} is not understood at {str(error)!r}: "
            "nothing looked for left-over processes on the job's GPUs",
        )
