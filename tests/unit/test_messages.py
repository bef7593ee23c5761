"""Messages come back as they were; what is none of ours is refused, whatever its bytes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, get_args, get_origin

import msgspec
import pytest
from everstep.launcher import messages as m
from hypothesis import given
from hypothesis import strategies as st

DECODERS: list[tuple[Callable[[bytes], Any], Any]] = [
    (m.decode_from_worker, m.FromWorker),
    (m.decode_to_worker, m.ToWorker),
    (m.decode_from_agent, m.FromAgent),
    (m.decode_to_agent, m.ToAgent),
]


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type can travel with."""
    simple = {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=40),
    }
    if kind in simple:
        return simple[kind]
    inner = get_args(kind)
    if get_origin(kind) is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
    if get_origin(kind) is list:
        return st.lists(values(inner[0]), max_size=3)
    if inner:
        return st.one_of(*map(values, inner))
    return st.builds(kind, **{f.name: values(f.type) for f in msgspec.structs.fields(kind)})


MESSAGES = {decode: values(union) for decode, union in DECODERS}


@st.composite
def said(draw: st.DrawFn) -> tuple[Callable[[bytes], Any], m.Struct]:
    """A decoder, and a message that it should know."""
    decode = draw(st.sampled_from(list(MESSAGES)))
    return decode, draw(MESSAGES[decode])


@given(said())
def test_every_message_comes_back_as_it_was(one: tuple[Callable[[bytes], Any], m.Struct]) -> None:
    decode, message = one
    assert decode(m.encode(message)) == message


@given(st.sampled_from([d for d, _ in DECODERS]), st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_else_happens(
    decode: Callable[[bytes], Any], data: bytes
) -> None:
    with pytest.raises(m.BadMessage):
        decode(data)


@given(said(), st.sampled_from([d for d, _ in DECODERS]), st.data())
def test_a_damaged_message_is_refused_or_is_another_message(
    one: tuple[Callable[[bytes], Any], m.Struct], decode: Callable[[bytes], Any], data: st.DataObject
) -> None:
    damaged = bytearray(m.encode(one[1]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(damaged) - 1)))
        how = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if how == "flip" and damaged:
            damaged[at] ^= data.draw(st.integers(1, 255))
        elif how == "cut":
            del damaged[at:]
        else:
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=3))
    with contextlib.suppress(m.BadMessage):
        assert isinstance(decode(bytes(damaged)), m.Struct)


def test_arrays_nested_without_end_are_refused() -> None:
    """A RecursionError of the decoder once got through to whoever read."""
    deep = b"\x82\xa4type\xa4Note\xa1z" + b"\x91" * (100 * sys.getrecursionlimit()) + b"\x00"
    with pytest.raises(m.BadMessage):
        m.decode_from_worker(deep)


def test_text_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(m.BadMessage):
        m.decode_from_worker(m.encode(m.Note("xx")).replace(b"xx", b"\xff\xfe"))


def test_fields_of_a_later_version_are_passed_over() -> None:
    data = m.encode(m.Note("hi")).replace(b"\x82", b"\x83", 1) + b"\xa3new\x01"
    assert m.decode_from_worker(data) == m.Note("hi")


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_frames_are_the_same_however_the_stream_is_cut(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(m.Frames.frame(f) for f in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader, got = m.Frames(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.feed(stream[begin:end])
    assert got == frames


@given(st.integers(m.Frames.LIMIT + 1, 2**32 - 1))
def test_an_absurd_length_is_refused_before_its_bytes_are_waited_for(size: int) -> None:
    with pytest.raises(m.BadMessage):
        m.Frames().feed(size.to_bytes(4, "little"))


@given(st.binary(max_size=2000))
def test_a_stream_of_nonsense_raises_nothing_else(data: bytes) -> None:
    with contextlib.suppress(m.BadMessage):
        m.Frames().feed(data)
