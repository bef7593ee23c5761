"""The run's secret: whoever has it derives the same keys, and nobody else does."""

from __future__ import annotations

import pytest
import zmq
from everstep.launcher.keys import keys_from, new_secret
from everstep.recovery.errors import UsageError


def test_all_agents_derive_the_same_keys_from_one_secret() -> None:
    secret = new_secret()
    assert keys_from(secret) == keys_from(secret)


def test_another_run_has_other_keys() -> None:
    one, other = keys_from(new_secret()), keys_from(new_secret())
    assert one.server_public != other.server_public
    assert one.client_secret != other.client_secret
    assert one.token(1) != other.token(1)


def test_no_two_keys_of_a_run_are_the_same() -> None:
    keys = keys_from(new_secret())
    every = [keys.server_secret, keys.server_public, keys.client_secret, keys.client_public, keys.token_root]
    assert len(set(every)) == len(every)


def test_the_public_keys_belong_to_the_secret_ones() -> None:
    keys = keys_from(new_secret())
    assert zmq.curve_public(keys.server_secret) == keys.server_public
    assert zmq.curve_public(keys.client_secret) == keys.client_public


def test_a_generations_token_is_no_other_generations() -> None:
    keys = keys_from(new_secret())
    assert len({keys.token(generation) for generation in range(100)}) == 100


@pytest.mark.parametrize("secret", ["", "abc", "zz" * 32, "00" * 31, "00" * 33, "é" * 64])
def test_a_missing_or_damaged_secret_is_refused_in_one_line(secret: str) -> None:
    with pytest.raises(UsageError, match="everstep run") as caught:
        keys_from(secret)
    assert "\n" not in str(caught.value)
    assert not secret or secret not in str(caught.value)
