"""SQuAD's official scores of a prediction file, v1.1 and v2.0, and files in its format. It knows no models.

Both versions compare words (`metrics.answer_words`) and use the best of a question's answers. They differ when there
is nothing to compare: v1.1 gives F1 0 to an answer without words, and counts a missing prediction as wrong; v2.0 drops
gold answers without words, and gives 1 to an empty prediction for a question without an answer. All scores here are in
per cent, as the official scripts print them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapterbank.errors import DataError, UnknownName
from adapterbank.kinds.values import listed
from adapterbank.metrics import answer_scores
from adapterbank.tasks.tables import Table

VERSIONS = ("1.1", "2.0")


@dataclass(frozen=True)
class Best:
    """The best score that any threshold on the odds of "no answer" would reach."""

    score: float
    threshold: float


def gold_answers(table: Table, label: str = "answers") -> dict[str, list[str]]:
    """Return the answers of each question by its id; none for a question without an answer."""
    for name in ("id", label):
        if name not in table.columns:
            raise DataError(f"{table.source} has no column {name!r}; its columns: {listed(table.columns)}.")
    return {str(key): _texts(cell) for key, cell in zip(table.columns["id"], table.columns[label], strict=True)}


def check_version(version: str | None, gold: Mapping[str, Sequence[str]]) -> str:
    """Return the version whose script scores these questions: the one given, or 2.0 if any has no answer."""
    if version is not None and version not in VERSIONS:
        raise UnknownName(version, "a version of SQuAD", VERSIONS)
    unanswerable = sum(not answers for answers in gold.values())
    if version == "1.1" and unanswerable:
        raise DataError(
            f"{unanswerable} of {len(gold)} questions have no answer, which SQuAD 1.1 cannot score; use version 2.0."
        )
    return version or ("2.0" if unanswerable else "1.1")


def evaluate(
    gold: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    *,
    version: str,
    null_odds: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """Score predictions by question id as the official script of the version does.

    `null_odds` and `threshold` are v2.0's: if the odds of "no answer" are above it, the prediction counts as empty.
    """
    if not gold:
        raise DataError("There are no questions to score; give the data file of the predictions.")
    check_version(version, gold)
    if version == "1.1":
        return _first_version(gold, predictions)
    missing = [key for key in gold if key not in predictions or (null_odds is not None and key not in null_odds)]
    if missing:
        raise DataError(f"{len(missing)} of {len(gold)} questions have no prediction ({listed(missing, 3)}); add them.")
    raw = {key: answer_scores(predictions[key], answers, null_allowed=True) for key, answers in gold.items()}
    odds = null_odds if null_odds is not None else dict.fromkeys(gold, 0.0)
    kept = {key: raw[key] if odds[key] <= threshold else (float(not gold[key]),) * 2 for key in gold}
    found = _means(kept, list(gold), "")
    for prefix, wanted in (("HasAns_", True), ("NoAns_", False)):
        keys = [key for key, answers in gold.items() if bool(answers) == wanted]
        found |= _means(kept, keys, prefix) if keys else {}
    if null_odds is not None:
        for place, name in enumerate(("exact", "f1")):
            best = best_threshold({key: pair[place] for key, pair in raw.items()}, gold, predictions, null_odds)
            found |= {f"best_{name}": best.score, f"best_{name}_thresh": best.threshold}
    return found


def best_threshold(
    scores: Mapping[str, float],
    gold: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
) -> Best:
    """Return the threshold below which answers should be given: none at first, then one more with each step."""
    now = best = float(sum(not answers for answers in gold.values()))
    threshold = 0.0
    for key in sorted(null_odds, key=lambda key: null_odds[key]):
        if key in scores:
            now += scores[key] if gold[key] else -1.0 if predictions[key] else 0.0
            if now > best:
                best, threshold = now, null_odds[key]
    return Best(100 * best / len(scores), threshold)


def prediction_file(ids: Sequence[Any], answers: Sequence[str]) -> dict[str, str]:
    """Return what the official scripts read: the answer of each question by its id."""
    twice = len(ids) - len({str(key) for key in ids})
    if twice:
        raise DataError(f"{twice} questions share an id with another one; each needs its own.")
    return {str(key): answer for key, answer in zip(ids, answers, strict=True)}


def _texts(cell: Any) -> list[str]:
    texts = cell.get("text") if isinstance(cell, dict) else cell
    return [str(text) for text in texts] if isinstance(texts, (list, tuple)) else [str(texts or "")]


def _first_version(gold: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    scores = [answer_scores(predictions[key], gold[key], null_allowed=False) for key in gold if key in predictions]
    exact, f1 = (100 * sum(pair[place] for pair in scores) / len(gold) for place in (0, 1))
    return {"exact_match": exact, "f1": f1}


def _means(scores: Mapping[str, Sequence[float]], keys: Sequence[str], prefix: str) -> dict[str, float]:
    exact, f1 = (100 * sum(scores[key][place] for key in keys) / len(keys) for place in (0, 1))
    return {f"{prefix}exact": exact, f"{prefix}f1": f1, f"{prefix}total": len(keys)}
