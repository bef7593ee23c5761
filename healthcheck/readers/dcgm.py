"""`dcgmi diag -j`: every result of every test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """One result of one test."""

    test: str
    gpu: str
    """gpu3; empty where the result is the node's."""
    status: str
    """pass, fail, warn, skip, not run."""
    words: str
    advice: int | None
    """DCGM's error severity; None where it tells none."""


def parse(output: bytes) -> list[Outcome]:
    """All outcomes. Raises ValueError where there is no diagnostic in the output."""
    text = output.decode("utf-8", "replace")
    start = text.find("{")
    if start < 0:
        raise ValueError("no JSON in dcgmi's output")
    data, _ = json.JSONDecoder().raw_decode(text[start:])  # warnings may stand before and after it
    categories = next(
        (each["test_categories"] for each in _dicts(data) if isinstance(each.get("test_categories"), list)),
        None,
    )
    if categories is None:
        raise ValueError("no test_categories in dcgmi's output")
    return [
        outcome
        for category in categories
        if isinstance(category, dict)
        for test in _list(category.get("tests"))
        for outcome in _outcomes(test)
    ]


def _outcomes(test: dict[str, Any]) -> Iterator[Outcome]:
    name = str(test.get("name", "?"))
    for result in _list(test.get("results")):
        gpu = result.get("gpu_id", result.get("gpu_ids", ""))
        if result.get("entity_group") == "GPU":
            gpu = result.get("entity_id", "")
        words, advice = _warnings(result.get("warnings", result.get("info", "")))
        device = f"gpu{gpu}" if str(gpu).isdigit() else ""
        yield Outcome(name, device, str(result.get("status", "")).strip().lower(), words, advice)


def _warnings(value: Any) -> tuple[str, int | None]:
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return str(value), None
    words = [str(each.get("warning", each)) if isinstance(each, dict) else str(each) for each in value]
    advice = [
        each["error_severity"]
        for each in value
        if isinstance(each, dict) and isinstance(each.get("error_severity"), int)
    ]
    return "; ".join(words), max(advice, default=None)


def _list(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _dicts(data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        yield data
        for value in data.values():
            yield from _dicts(value)
