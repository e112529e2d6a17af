"""Each word's share in an answer: the text is predicted again without the word, for every word. Knows no engine.

Leave-one-out rather than gradient × input: it needs no gradients, so every method, kind and captured graph is explained
by the same rows that answer it; a share has the unit of the answer; and anyone can check it by leaving the word out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

from adapterbank.errors import InputError
from adapterbank.inference.predictions import Prediction
from adapterbank.kinds.table import KINDS
from adapterbank.tasks.spec import Examples, Task

WORDS = 128
"""The words of a row that are explained, the first ones; by default a text has no more tokens."""
_AT_ONCE = 16
"""Examples whose rows are predicted together: some two thousand rows."""
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Characters that are words of their own: the scripts of Chinese and Japanese have no blanks."""
_PLACES = ("text", "pair")

Measure = tuple[dict[str, float] | None, float | None]
"""The probabilities and the value of a prediction."""
Request = tuple[str | None, Examples]


@cache
def _word() -> re.Pattern[str]:
    """Return the pattern of a word: letters, digits and their marks, joined by - or ', or a run of other signs."""
    marks = [code for code in range(0x300, 0x1F000) if unicodedata.category(chr(code)).startswith("M")]
    ranges = [[code for _, code in run] for _, run in groupby(enumerate(marks), key=lambda one: one[1] - one[0])]
    inside = "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in ranges)
    letters = f"(?:(?![{_ALONE}])[\\w{inside}])+"
    return re.compile(f"[{_ALONE}][{inside}]*|{letters}(?:['’-]{letters})*|[^\\w\\s{inside}]+")


def find_words(text: str) -> list[tuple[int, int]]:
    """Return the first and last-plus-one character of each word of a text."""
    return [found.span() for found in _word().finditer(text)]


@dataclass(frozen=True)
class Word:
    """A word of an example, and where it is."""

    place: int
    """0 in the first text, 1 in the second."""
    start: int
    end: int


@dataclass(frozen=True)
class _Explained:
    """An example with the words that are left out of it, one at a time."""

    texts: tuple[str, ...]
    words: tuple[Word, ...]
    left_out: int
    """How many further words it has."""

    def rows(self) -> Iterable[tuple[str, ...]]:
        """Yield the example itself, then without each of its words."""
        yield self.texts
        for word in self.words:
            yield tuple(_without(text, word) if k == word.place else text for k, text in enumerate(self.texts))


@dataclass(frozen=True)
class Explainer:
    """The rows that explain some examples; `explain` turns what is predicted for them into explanations."""

    examples: tuple[_Explained, ...]

    @classmethod
    def of(cls, examples: Examples, most: int = WORDS) -> Explainer:
        """Find the words of examples, at most so many of each."""
        pairs = examples.pairs
        rows = [(text,) if pairs is None else (text, pairs[k]) for k, text in enumerate(examples.texts)]
        return cls(tuple(_find(row, min(most, WORDS)) for row in rows))

    @property
    def rows(self) -> int:
        """The number of rows: one more than the words of each example."""
        return sum(1 + len(one.words) for one in self.examples)

    @property
    def characters(self) -> int:
        """About the number of characters of all rows."""
        return sum((1 + len(one.words)) * sum(map(len, one.texts)) for one in self.examples)

    def to_examples(self) -> Examples:
        """Return the rows to predict."""
        rows = [row for one in self.examples for row in one.rows()]
        paired = any(len(row) == 2 for row in rows)
        return Examples([row[0] for row in rows], [row[1] for row in rows] if paired else None)

    def explain(self, measures: Sequence[Measure]) -> list[tuple[int, dict[str, Any]]]:
        """Return the row of each example itself, and its explanation, from the measures of all rows."""
        found, at = [], 0
        for one in self.examples:
            found.append((at, _explanation(one, measures[at : at + 1 + len(one.words)])))
            at += 1 + len(one.words)
        return found


_NOTHING = "The answer has neither probabilities nor a value, so no word has a share in it; leave 'explain' out."


def check_explainable(task: Task) -> None:
    """Refuse a task whose answers are tokens, before its rows are computed."""
    if KINDS[task.kind].per_token:
        raise InputError(_NOTHING)


def explained(
    predict: Callable[[Sequence[Request]], list[list[Prediction]]], requests: Sequence[Request]
) -> list[list[Prediction]]:
    """Predict requests with an explanation of each prediction."""
    found = []
    for name, examples in requests:
        predictions: list[Prediction] = []
        for start in range(0, len(examples), _AT_ONCE):
            part = range(start, min(start + _AT_ONCE, len(examples)))
            explainer = Explainer.of(examples.select(part))
            (rows,) = predict([(name, explainer.to_examples())])
            told = explainer.explain([(row.probabilities, row.value) for row in rows])
            predictions += [replace(rows[at], explanation=explanation) for at, explanation in told]
        found.append(predictions)
    return found


def explained_json(explainer: Explainer, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the predictions of the examples with their explanations, from those of all rows, as JSON values."""
    told = explainer.explain([(row.get("probabilities"), row.get("value")) for row in rows])
    return [{**rows[at], "explanation": explanation} for at, explanation in told]


def summary(explanation: Mapping[str, Any], most: int = 6) -> str:
    """Return an explanation as a line for people: the words with the largest shares, in the order of the text."""
    largest = sorted(explanation["words"], key=lambda word: -abs(word["share"]))[:most]
    shown = [word for word in explanation["words"] if word in largest and word["share"]]
    words = ", ".join(f"{word['word']} {word['share']:+.{2 if abs(word['share']) >= 0.01 else 4}f}" for word in shown)
    return f"{explanation['of']}: {words or 'no word alone changes the answer'}"


def _find(texts: tuple[str, ...], most: int) -> _Explained:
    """Return an example with its first words; of two long texts, half of the words are each one's."""
    spans = [find_words(text) for text in texts]
    counts = [most - min(sum(map(len, spans[1:])), max(most // 2, most - len(spans[0]))), most]
    chosen = [Word(place, *span) for place, found in enumerate(spans) for span in found[: counts[place]]][:most]
    return _Explained(texts, tuple(chosen), sum(map(len, spans)) - len(chosen))


def _without(text: str, word: Word) -> str:
    """Return a text without a word, and without one of the blanks around it."""
    before, after = text[: word.start], text[word.end :]
    blank = after[:1].isspace() and (not before or before[-1].isspace())
    return before + after[int(blank) :]


def _explanation(one: _Explained, measures: Sequence[Measure]) -> dict[str, Any]:
    answer, numbers = _answer(measures)
    words = [
        {
            "word": one.texts[word.place][word.start : word.end],
            "start": word.start,
            "end": word.end,
            **({"in": _PLACES[word.place]} if len(one.texts) == 2 else {}),
            "share": round(numbers[0] - number, 6) + 0.0,  # no minus sign before zero
        }
        for word, number in zip(one.words, numbers[1:], strict=True)
    ]
    return {"of": answer, "words": words} | ({"left_out": one.left_out} if one.left_out else {})


def _answer(measures: Sequence[Measure]) -> tuple[str, list[float]]:
    """Return what is explained, the most probable label or the value, and its number in each row."""
    probabilities, value = measures[0]
    if probabilities:
        label = max(probabilities, key=lambda name: probabilities[name])
        return label, [(row or {})[label] for row, _ in measures]
    if value is None:
        raise InputError(_NOTHING)
    return "value", [float(number or 0) for _, number in measures]
