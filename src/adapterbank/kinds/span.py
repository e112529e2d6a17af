"""Span: a question about a document, whose answer is a stretch of the document's text (SQuAD).

The head gives a start and an end score for each token. The score of an answer is the start score of its first token
plus the end score of its last. "No answer" has a score as well, that of the first token. Over several windows of a
document the lowest of these counts, since "no answer" requires that no window has one (BERT's SQuAD code does the
same).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from adapterbank.errors import DataError, InputError
from adapterbank.kinds.divergence import between_softmaxes
from adapterbank.kinds.kind import HeadOutputs, Kind
from adapterbank.kinds.values import as_number, as_text, is_missing, short
from adapterbank.metrics import answer_scores

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from adapterbank.encoder.batch import Tokens
    from adapterbank.slots.plan import Head
    from adapterbank.tasks.columns import Columns
    from adapterbank.tasks.spec import Task
    from adapterbank.tasks.tables import Table

SPAN_TEXTS = ("question", "context")
ANSWERS = ("answers", "answer")
"""Usual names of the answer column."""
NO_ANSWER = (0, 0)
"""The target of a window without the answer: the first token, as in BERT's SQuAD code."""
LONGEST_ANSWER = 30
"""Tokens of the longest answer, as in BERT's SQuAD code."""
_CANDIDATES = 20
"""Answers that each window contributes to a list of the best, as in BERT's SQuAD code."""


# --- answers in a table ---------------------------------------------------------------------------------------


def has_no_answer(value: Any) -> bool:
    """Return whether a cell states that its question has no answer: an empty list, as in SQuAD 2.0."""
    texts = value.get("text") if isinstance(value, dict) else value
    return isinstance(texts, (list, tuple)) and len(texts) == 0


def _recognizes(columns: Columns, values: Sequence[Any]) -> bool:
    texts, label = tuple(name.strip().lower() for name in columns.text), (columns.label or "").strip().lower()
    return (texts == SPAN_TEXTS and label in ANSWERS) or any(isinstance(value, dict) for value in values)


def _read_targets(table: Table, task: Task, rows: Sequence[int]) -> tuple[list[Any], list[str]]:
    """Return (start, end, acceptable answers) in characters of the context; (-1, -1, ("",)) without an answer."""
    targets: list[Any] = []
    moved = 0
    for row in rows:
        if has_no_answer(table.columns[task.label][row]):
            targets.append((-1, -1, ("",)))
            continue
        answers, hints = _answers(table, task, row)
        context = as_text(table.columns[task.text[1]][row])
        found = [
            (start, start + len(answer), hint is not None and start != hint)
            for answer, hint in zip(answers, hints, strict=True)
            if (start := _nearest(context, answer, hint or 0)) is not None
        ]
        if not found:
            raise DataError(
                f"{table.at(row)}: the answer {short(answers[0])!r} does not occur in its context; "
                f"correct the row, or use --kind classification if the answers are classes."
            )
        start, end, elsewhere = found[0]
        moved += elsewhere
        targets.append((start, end, tuple(answers)))
    share = f"{moved} of {len(rows)} answers are not at their answer_start"
    return targets, [f"{table.source}: {share}; the nearest occurrence is used."] if moved else []


def _answers(table: Table, task: Task, row: int) -> tuple[list[str], list[int | None]]:
    """Return the answers of a row and the place that the table states for each."""
    value: Any = table.columns[task.label][row]
    starts: Any = table.columns.get("answer_start", [None] * table.rows)[row]
    if isinstance(value, dict):
        value, starts = value.get("text"), value.get("answer_start")
    texts = list(value) if isinstance(value, (list, tuple)) else [value]
    hints = list(starts) if isinstance(starts, (list, tuple)) else [starts] * len(texts)
    answers = ["" if is_missing(text) else str(text).strip() for text in texts]
    if not answers or not all(answers):
        raise DataError(
            f"{table.at(row)}: the answer is empty; write an empty list for a question without an answer, as SQuAD 2.0 "
            f"does, or remove the row."
        )
    numbers = [as_number(hint) for hint in hints]
    if len(numbers) != len(answers) or any(
        hint is not None and number is None for hint, number in zip(hints, numbers, strict=True)
    ):
        raise DataError(
            f"{table.at(row)}: answer_start is {short(starts)}; give one position for each of the "
            f"{len(answers)} answers, or leave it out."
        )
    return answers, [None if number is None else int(number) for number in numbers]


def _nearest(context: str, answer: str, hint: int) -> int | None:
    """Return where the answer occurs nearest to the position stated."""
    if context.startswith(answer, max(0, hint)):
        return max(0, hint)
    before, after = context.rfind(answer, 0, max(0, hint) + len(answer)), context.find(answer, max(0, hint))
    found = [start for start in (before, after) if start >= 0]
    return min(found, key=lambda start: abs(start - hint), default=None)


def _profile_text(profile: Mapping[str, Any]) -> str:
    return f"{profile['unanswerable']:,} questions without an answer"


# --- training -------------------------------------------------------------------------------------------------


def _window_targets(windows: Sequence[Tokens], target: Any) -> list[Any]:
    """Return each window's first and last token of the answer, or `NO_ANSWER`; nothing if no window has all of it."""
    start, end = target[0], target[1]
    if start < 0:
        return [NO_ANSWER] * len(windows)
    last = len(windows) - 1
    found = [_answer_tokens(row, start, end, first=i == 0, last=i == last) for i, row in enumerate(windows)]
    return [one or NO_ANSWER for one in found] if any(found) else []


def _answer_tokens(row: Tokens, start: int, end: int, *, first: bool, last: bool) -> tuple[int, int] | None:
    """Return the first and last token that overlap the characters `start` to `end` of the context.

    None if no token does, or if the answer continues in a neighbouring window.
    """
    import numpy as np

    assert row.offsets is not None
    inside = np.flatnonzero((row.offsets[:, 0] < end) & (row.offsets[:, 1] > start) & (row.offsets[:, 0] >= 0))
    if len(inside) == 0:
        return None
    context = row.offsets[row.offsets[:, 0] >= 0]
    if (not first and start < context[0, 0]) or (not last and end > context[-1, 1]):
        return None
    return int(inside[0]), int(inside[-1])


def _targets(targets: Sequence[Any], head: Head) -> Tensor:
    import torch

    return torch.tensor(targets, dtype=torch.int64)


def _loss(x: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    """Return the mean of the start's and the end's cross-entropy over the tokens of the row."""
    import torch
    import torch.nn.functional as F

    rows = x.masked_fill(_beyond(x, counts), -torch.inf)  # [rows, longest, 2]
    both = F.cross_entropy(rows.transpose(1, 2).flatten(0, 1), targets.flatten(), reduction="none")
    return both.view(-1, 2).mean(1)


def _consistency(x: Tensor, y: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    """Return the mean of the start's and the end's divergence over the tokens of the row."""
    import torch

    beyond, lowest = _beyond(x, counts), torch.finfo(x.dtype).min
    rows = (part.masked_fill(beyond, lowest).transpose(1, 2) for part in (x, y))  # [rows, 2, longest]
    return between_softmaxes(*rows).mean(1)


def _beyond(x: Tensor, counts: Tensor) -> Tensor:
    """Return which places of `[rows, longest, 2]` are no tokens of their row, `[rows, longest, 1]`."""
    import torch

    return (torch.arange(x.shape[1], device=x.device) >= counts[:, None])[:, :, None]


# --- answers from outputs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpanAnswer:
    """A stretch of the document."""

    text: str
    start: int
    end: int
    """First and last-plus-one character; 0 and 0 for no answer."""
    score: float


@dataclass(frozen=True)
class Reading:
    """What a span head finds in one document."""

    answers: tuple[SpanAnswer, ...]
    """The best first, each text once; at least one."""
    null: float
    """The score of "no answer"."""

    @property
    def null_odds(self) -> float:
        """By how much "no answer" scores above the best answer."""
        return self.null - self.answers[0].score

    def choose(self, threshold: float | None) -> SpanAnswer:
        """Return the best answer, or the empty one if "no answer" scores above it by more than the threshold."""
        empty = threshold is not None and self.null_odds > threshold
        return SpanAnswer("", 0, 0, self.null) if empty else self.answers[0]

    def listed(self, threshold: float | None) -> list[dict[str, Any]]:
        """Return the answers with their probabilities among each other; "no answer" is one if there is a threshold."""
        import numpy as np

        every = [*self.answers, *([SpanAnswer("", 0, 0, self.null)] if threshold is not None else [])]
        every.sort(key=lambda answer: -answer.score)
        weights = np.exp(np.array([answer.score for answer in every]) - every[0].score)
        shares = weights / weights.sum()
        return [{**vars(answer), "probability": float(share)} for answer, share in zip(every, shares, strict=True)]


def read(outputs: Sequence[np.ndarray], rows: Sequence[Tokens], context: str, count: int = 1) -> Reading:
    """Return the `count` best answers over all windows of a document, from the `[tokens, 2]` outputs of each."""
    import numpy as np

    found: list[SpanAnswer] = []
    null = min(float(out[0].sum()) for out in outputs)
    for out, row in zip(outputs, rows, strict=True):
        assert row.offsets is not None
        inside = np.flatnonzero(row.offsets[:, 0] >= 0)
        if len(inside):
            places = row.offsets[inside]
            for score, first, last in best_spans(out[inside], 1 if count == 1 else max(count, _CANDIDATES)):
                found.append(_answer(context, int(places[first, 0]), int(places[last, 1]), score))
    found.sort(key=lambda answer: -answer.score)  # stable: of equal answers the earlier window's comes first
    once = {answer.text: answer for answer in reversed(found)}
    best = [answer for answer in found if once[answer.text] is answer][:count]
    return Reading(tuple(best) or (SpanAnswer("", 0, 0, null),), null)


def _answer(context: str, start: int, end: int, score: float) -> SpanAnswer:
    """Return the text of some tokens without surrounding blanks: ALBERT's pieces include the blank before them."""
    text = context[start:end]
    start += len(text) - len(text.lstrip())
    text = text.strip()
    return SpanAnswer(text, start, start + len(text), score)


def best_spans(x: np.ndarray, count: int) -> list[tuple[float, int, int]]:
    """Return the best (score, first, last) of `[tokens, 2]` outputs, none longer than `LONGEST_ANSWER`."""
    import numpy as np

    width = min(LONGEST_ANSWER, len(x))
    ends = np.concatenate([x[:, 1], np.full(width - 1, -np.inf, x.dtype)])
    sums = x[:, :1] + np.lib.stride_tricks.sliding_window_view(ends, width)  # [first, length - 1]
    flat = sums.ravel()
    order = [flat.argmax()] if count == 1 else np.argsort(-flat, kind="stable")[:count]
    found = [(float(flat[i]), int(i // width), int(i // width + i % width)) for i in order]
    return [span for span in found if span[2] < len(x)]


def _readings(given: HeadOutputs, count: int) -> list[Reading]:
    contexts = given.examples.pairs or []
    return [
        read([given.outputs[row] for row in mine], [given.rows.tokens[row] for row in mine], text, count)
        for mine, text in zip(given.rows.by_example(len(given.examples)), contexts, strict=True)
    ]


def _decide(given: HeadOutputs) -> list[Any]:
    return [one.choose(given.task.threshold).text for one in _readings(given, 1)]


def _predict(given: HeadOutputs, best: int) -> list[dict[str, Any]]:
    threshold, found = given.task.threshold, []
    for one in _readings(given, max(1, best)):
        answer = one.choose(threshold)
        fields: dict[str, Any] = {"answer": answer.text, "start": answer.start, "end": answer.end}
        if threshold is not None:
            fields["null_odds"] = one.null_odds
        if best:
            fields["best"] = tuple(one.listed(threshold)[:best])
        found.append(fields)
    return found


# --- the threshold of "no answer" -----------------------------------------------------------------------------


def _tune(dev: HeadOutputs) -> Task:
    if dev.task.threshold is None:
        return dev.task
    return replace(dev.task, threshold=tune_threshold(_readings(dev, 1), dev.examples.targets or []))


def tune_threshold(found: Sequence[Reading], targets: Sequence[Any]) -> float:
    """Return the threshold of "no answer" with the best F1 on these rows; below all odds if no answer is worth giving.

    SQuAD 2.0's own search (`benchmarks.squad.best_threshold`) starts at 0, as its odds are probabilities. Ours are
    differences of scores and may be negative.
    """
    gains: dict[float, float] = {}
    for one, target in zip(found, targets, strict=True):
        gold = list(target[2]) if target[0] >= 0 else []
        given, empty = (answer_scores(text, gold, null_allowed=True)[1] for text in (one.answers[0].text, ""))
        gains[one.null_odds] = gains.get(one.null_odds, 0.0) + given - empty
    threshold, now, best = min(gains, default=1.0) - 1.0, 0.0, 0.0
    for odds in sorted(gains):
        now += gains[odds]
        if now > best:
            best, threshold = now, odds
    return threshold


# --- scores ---------------------------------------------------------------------------------------------------


def _check_prediction(value: Any, labels: int, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{what} is {value!r}, not the text of an answer.")
    return value


def _check_target(value: Any, labels: int, what: str) -> tuple[str, ...]:
    answers = tuple(value[2]) if isinstance(value, (tuple, list)) and len(value) == 3 else ()
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise InputError(f"{what} is {value!r}, not (start, end, acceptable answer texts).")
    return answers


SPAN = Kind(
    name="span",
    metrics=("span_f1", "exact_match"),
    reported=("exact_match", "span_f1"),
    check_prediction=_check_prediction,
    check_target=_check_target,
    text_counts=(2,),
    text_columns=SPAN_TEXTS,
    label_columns=ANSWERS,
    recognizes=_recognizes,
    read_targets=_read_targets,
    clean=lambda label: label,
    initial_threshold=lambda values: 0.0 if any(map(has_no_answer, values)) else None,
    profile=lambda values: {"unanswerable": sum(map(has_no_answer, values))},
    profile_text=_profile_text,
    per_token=True,
    outputs=lambda labels: 2,
    window_targets=_window_targets,
    targets=_targets,
    loss=_loss,
    consistency=_consistency,
    decide=_decide,
    predict=_predict,
    readings=_readings,
    tune=_tune,
)
