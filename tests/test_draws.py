"""RandomStream: the generator, the inverse distribution function, and streams that depend on nothing but their key."""

from __future__ import annotations

import hashlib
import json
import math

import mpmath
import numpy as np
import pytest
import scipy.stats

from adapterbank.draws import RandomStream

MASK = 2**64 - 1
FIRST = ["0x1.5b8e4c0000000p-2", "-0x1.0e63660000000p-1", "0x1.21eb920000000p+0"]
CHECKSUM = "a3a0f286cd3d3b828086daad6a0a187540537263fed5a31fbc8530b5f2dc17ff"
ORDER = [5, 9, 7, 2, 0, 4, 8, 1, 3, 6]


def philox(key: tuple[int, int], counter: int) -> list[int]:
    """Compute a block of Philox 4x64-10 as in Salmon et al. 2011, section 3.3 and Random123's constants."""
    (k0, k1), (a, b, c, d) = key, [counter >> 64 * place & MASK for place in range(4)]
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (second >> 64) ^ b ^ k0, second & MASK, (first >> 64) ^ d ^ k1, first & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [a, b, c, d]


def bits(count: int, *key: int | str) -> list[int]:
    """Compute the first numbers of a key's stream; the counter starts at one."""
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    words = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")
    return [number for block in range(1, count // 4 + 2) for number in philox(words, block)][:count]


def symmetric(count: int, *key: int | str) -> list[mpmath.mpf]:
    return [(mpmath.mpf(number >> 12) + 0.5) / 2**51 - 1 for number in bits(count, *key)]


def test_the_reference_is_philox():
    # The known answers of Random123 for a key and a counter of zeros and of ones.
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    assert philox((0, 0), 0) == zeros
    assert philox((MASK, MASK), 2**256 - 1) == ones


@pytest.mark.parametrize("key", [(0, "head.weight"), (2**31 - 1, "layers.11.feedforward.adapter.up.weight")])
def test_truncated_normals_are_the_exact_quantiles_of_philox_numbers(key):
    with mpmath.workdps(40):
        half = mpmath.erf(mpmath.sqrt(2)) / 2  # the share of the distribution between zero and two sigma
        exact = [0.02 * mpmath.sqrt(2) * mpmath.erfinv(2 * half * v) for v in symmetric(400, *key)]
    found = RandomStream(*key).truncated_normal((20, 20), 0.02).ravel()
    assert found.dtype == np.float32
    assert found.tolist() == [float(np.float32(float(value))) for value in exact]


def test_uniform_numbers_are_those_of_philox():
    found = RandomStream(7, "a").uniform((3, 5), 0.25)
    assert found.ravel().tolist() == [float(np.float32(float(v) / 4)) for v in symmetric(15, 7, "a")]


def test_a_permutation_sorts_the_numbers_of_philox():
    numbers = bits(50, 3, "rows", 1)
    assert RandomStream(3, "rows", 1).permutation(50).tolist() == sorted(range(50), key=numbers.__getitem__)


def test_a_key_draws_these_numbers_on_every_machine():
    found = RandomStream(0, "head.weight").truncated_normal((400, 250), 1.0)
    assert [float(value).hex() for value in found.ravel()[:3]] == FIRST
    assert hashlib.sha256(found.astype("<f4").tobytes()).hexdigest() == CHECKSUM
    assert RandomStream(0, "rows", 0).permutation(10).tolist() == ORDER


def test_the_quantiles_are_right_over_the_whole_range():
    class Grid(RandomStream):
        """Evenly spaced numbers in place of random ones."""

        def _symmetric(self, shape):
            return np.linspace(-1, 1, math.prod(shape)).reshape(shape)

    half = scipy.stats.norm.cdf(2) - 0.5
    v = np.linspace(-1, 1, 200_001)
    found = Grid().truncated_normal((len(v),), 1.0)
    exact = scipy.stats.norm.ppf(0.5 + v * half)
    assert np.abs(found - exact).max() < 1.3e-7  # half a unit in the last place of a number below two


def test_truncated_normals_have_the_moments_and_the_distribution_of_one():
    drawn = RandomStream(5, "moments").truncated_normal((1_000_000,), 1.0).astype(np.float64)
    true = scipy.stats.truncnorm(-2, 2)
    assert abs(drawn.mean()) < 5 * true.std() / 1000
    assert abs(drawn.var() - true.var()) < 5 * math.sqrt(true.stats("k") + 2) * true.var() / 1000
    assert np.abs(drawn).max() <= 2
    assert scipy.stats.kstest(drawn, true.cdf).pvalue > 1e-3


def test_seeds_and_names_are_independent():
    streams = [RandomStream(seed, name).uniform((100_000,), 1.0) for seed in range(4) for name in ("a", "b", "ab")]
    found = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(found).max() < 5 / math.sqrt(100_000)
    assert len({stream[:4].tobytes() for stream in streams}) == len(streams)
    assert not np.array_equal(RandomStream(1, "1").uniform((4,), 1.0), RandomStream("1", 1).uniform((4,), 1.0))


def test_a_stream_goes_on_and_starts_anew_with_its_key():
    stream = RandomStream(1, "a")
    first, second = stream.permutation(30), stream.permutation(30)
    assert not np.array_equal(first, second)
    assert np.array_equal(RandomStream(1, "a").permutation(30), first)
    assert sorted(first.tolist()) == list(range(30))


def test_every_order_of_a_few_numbers_is_equally_likely():
    stream = RandomStream("orders")
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(6000):
        order = tuple(stream.permutation(3).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert scipy.stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_numbers_below_a_bound_are_equally_likely():
    found = RandomStream("numbers").integers(60_000, 7)
    assert found.min() == 0
    assert scipy.stats.chisquare(np.bincount(found, minlength=7)).pvalue > 1e-3
    assert len(np.bincount(found)) == 7
