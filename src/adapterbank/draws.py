"""Random numbers that a key alone decides, on every machine and with every version of numpy and torch.

`torch.nn.init` and numpy's `Generator` may draw other numbers in a later version. Here the bits are those of Philox
4x64-10 (Salmon et al. 2011), a function of key and counter whose output numpy guarantees. What follows uses only sums,
products and quotients of float64, which IEEE 754 rounds in one way; a logarithm may differ in its last bit.
"""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

_ABOVE = (
    1.999999999998463678,
    46.3939068170796958,
    386.2972413206978035,
    1420.966190624776484,
    2320.861668766259662,
    1514.070813078410568,
    302.9414670051464042,
    8.266675311391708837,
)
_BELOW = (
    1.0,
    24.90681321746337408,
    227.2512140324426396,
    943.779820959557015,
    1821.977065597563557,
    1516.582326528575161,
    451.3247184247927113,
    30.19559560790711801,
)
"""Coefficients, lowest power first, of the quotient in `truncated_normal`, fitted by least squares with 60 digits.

It is off by less than 2e-12, while rounding to float32 is off by up to 6e-8. All are positive, so nothing cancels.
"""


class RandomStream:
    """A stream of random numbers; equal keys give equal streams, and different keys independent ones."""

    def __init__(self, *key: int | str) -> None:
        """Start the stream of a key, such as a seed and the name of a tensor."""
        digest = hashlib.sha256(json.dumps(key).encode()).digest()
        self._bits = np.random.Philox(key=np.frombuffer(digest, "<u8", 2))

    def uniform(self, shape: tuple[int, ...], bound: float) -> Array:
        """Draw uniformly between `-bound` and `bound`."""
        return (bound * self._symmetric(shape)).astype(np.float32)

    def truncated_normal(self, shape: tuple[int, ...], sigma: float) -> Array:
        """Draw from the normal distribution with standard deviation `sigma` before it is truncated at two sigma.

        With v uniform in (-1, 1) and F the normal distribution function, x = sigma F⁻¹(1/2 + v (F(2) - 1/2)). This is v
        times a smooth function of 1 - v², which a quotient of two polynomials approximates.
        """
        v = self._symmetric(shape)
        rest = (1.0 - v) * (1.0 + v)
        return (sigma * (v * (_polynomial(_ABOVE, rest) / _polynomial(_BELOW, rest)))).astype(np.float32)

    def permutation(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Draw an order of the numbers below `count`."""
        return np.argsort(self._bits.random_raw(count), kind="stable")

    def integers(self, count: int, below: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Draw so many of the numbers below `below`, which must be far below 2**64, with replacement."""
        return (self._bits.random_raw(count) % np.uint64(below)).astype(np.int64)

    def _symmetric(self, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Draw odd multiples of 2**-52 in (-1, 1), which are exact in float64."""
        whole = (self._bits.random_raw(math.prod(shape)) >> np.uint64(12)).astype(np.float64)
        return ((whole + (0.5 - 2.0**51)) * 2.0**-51).reshape(shape)


def _polynomial(
    coefficients: tuple[float, ...], x: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    value = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value *= x
        value += coefficient
    return value
