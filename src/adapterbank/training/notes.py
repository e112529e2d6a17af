"""What a run tells its user before it trains: what is cut, read in windows, without effect. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from adapterbank.config import Config
from adapterbank.inference.rows import Rows
from adapterbank.slots.plan import Plan
from adapterbank.training.bases import Base, Members
from adapterbank.training.pairs import count_steps
from adapterbank.training.start import Start


def note_lengths(config: Config, rows: Rows, examples: int, note: Callable[[str], None]) -> None:
    """Note the training texts that are longer than a row, and what becomes of them."""
    if rows.cut and not rows.pooling:
        ways = "; --long windows reads them whole" if rows.owners is None else ""
        note(
            f"{rows.cut} of {examples} training texts are longer than max_length {config.max_length} and are cut{ways}."
        )
    if rows.unreachable:
        note(
            f"{rows.unreachable} training rows are left out: their answer fits no window of {config.max_length} tokens."
        )
    longer = sum(len(windows) > 1 for windows in rows.by_example(examples)) if rows.owners is not None else 0
    if longer and rows.pooling:
        note(
            f"{longer} of {examples} training texts are longer than max_length {config.max_length} and are read in "
            f"windows: {len(rows)} rows in all, so that training takes longer; --long cut reads only their beginning."
        )
        if rows.cut:
            note(
                f"{rows.cut} of them are longer than {config.max_windows} windows, of which parts are left out "
                f"(--max-windows, --max-length)."
            )
    elif longer:
        note(
            f"{longer} of {examples} training documents are longer than {config.max_length} tokens with their "
            f"question and are cut into overlapping windows: {len(rows)} rows in all."
        )


def without_effect(config: Config) -> str:
    """Return which options have no effect without a choice on dev, as the end of a sentence."""
    names = [name for name in ("patience", "average") if getattr(config, name)]
    return f", and {' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect" if names else ""


def few_labels(plan: Plan, start: Start | Base | Members | None, rows: Mapping[str, Rows], batch: int) -> str:
    """Return what the recipe for few labels does, in place of the usual one."""
    count, what = rows["train"].units, "the head is fitted by logistic regression"
    if not plan.only_head:
        steps = count_steps(count, batch)
        what = f"{steps} steps train on pairs of rows, then {what}"
    encoder = f"the encoder with {start.ref}" if start else "the bare encoder"
    score = (
        ""
        if "dev" in rows
        else (f" No row is held out; the dev score is that of cross-validated logistic regressions on {encoder}.")
    )
    return f"Few labels: {what}, on all {count} rows.{score} --few never trains as with many."
