"""The generator and the noise made of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import _native

from . import reference

U32 = st.integers(0, 2**32 - 1)

# Known answers of Random123 (kat_vectors, philox4x32 10).
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter, key, expected):
    assert _native.philox4x32_10(counter, key) == expected
    assert reference.philox(counter, key) == expected


@given(st.lists(U32, min_size=4, max_size=4), st.lists(U32, min_size=2, max_size=2))
def test_philox_equals_the_reference(counter, key):
    assert _native.philox4x32_10(counter, key) == reference.philox(counter, key)


@given(st.integers(0, 2**64 - 1), U32, U32, st.lists(st.integers(0, 2**31 - 1), max_size=8))
def test_noise_is_a_function_of_seed_choice_position_and_id(seed, choice, position, ids):
    got = _native.gumbel_noise(seed, choice, position, ids)
    want = [reference.gumbel(seed, choice, position, i) for i in ids]
    np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)


def test_noise_is_standard_gumbel():
    noise = np.array(_native.gumbel_noise(7, 0, 3, list(range(200_000))))
    assert abs(noise.mean() - np.euler_gamma) < 4 * np.pi / np.sqrt(6 * len(noise))
    assert abs(noise.var() - np.pi**2 / 6) < 0.03
    cdf = np.exp(-np.exp(-np.sort(noise)))
    distance = np.abs(cdf - (np.arange(len(noise)) + 0.5) / len(noise)).max()
    assert distance < 1.95 / np.sqrt(len(noise))  # Kolmogorov-Smirnov, p = 0.001


def test_neighbouring_seeds_choices_and_positions_are_unrelated():
    base = np.array(_native.gumbel_noise(5, 1, 9, list(range(20_000))))
    for seed, choice, position in [(6, 1, 9), (5, 2, 9), (5, 1, 10), (5 + 2**32, 1, 9)]:
        other = np.array(_native.gumbel_noise(seed, choice, position, list(range(20_000))))
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.03
