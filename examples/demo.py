"""Demo: train real tasks one after the other on one frozen encoder, and check that none is forgotten.

    make demo

The MiniLM encoder, BBC news and two sets of film reviews all come from installed packages.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import adapterbank
from adapterbank.api.progress import Display
from adapterbank.cli.console import format_size, print_table
from demo_data import Prepared, write_bbc, write_reviews


@dataclass(frozen=True)
class DemoTask:
    """One task of the demo: its data, the maximum length of its texts, and texts to predict."""

    prepare: Callable[[Path], Prepared]
    max_length: int
    """In tokens; short, so that two CPU cores need only a few minutes."""
    texts: tuple[str, ...]
    """Texts to predict at the end."""


TASKS = (
    DemoTask(
        lambda folder: write_bbc(folder, train=400, dev=200),
        64,
        ("The striker scored twice before half-time.", "Shares fell after the bank cut its forecast."),
    ),
    DemoTask(
        lambda folder: write_reviews(folder, source="rotten_tomatoes", train=1200, dev=400),
        64,
        ("A warm, funny and beautifully acted film.", "Two hours that I will never get back."),
    ),
    DemoTask(
        lambda folder: write_reviews(folder, source="imdb", train=500, dev=200),
        96,
        ("I would happily watch it again tomorrow.", "The plot makes no sense and nobody seems to care."),
    ),
)


def main() -> None:
    """Prepare, train, compare, predict, audit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bank", help="new folder for the bank (default: a temporary one)")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        demo(Path(options.bank or Path(scratch) / "bank"), Path(scratch), options.epochs)


def demo(place: Path, scratch: Path, epochs: int) -> None:
    """Run the demo with a bank at `place` and its data in `scratch`."""
    began = time.perf_counter()
    bank = adapterbank.open_bank(place, backbone="minilm")
    print(f"One frozen encoder: {bank.backbone.name}, {bank.backbone.parameters:,} parameters\n")
    prepared = [task.prepare(scratch) for task in TASKS]
    first_texts = _dev_texts(prepared[0])
    before: list[adapterbank.Prediction] = []
    for task, data in zip(TASKS, prepared, strict=True):
        _train(bank, task, data, epochs)
        before = before or bank.predict(prepared[0].name, first_texts)
    _compare(bank)
    _predict(bank, prepared)
    after = bank.predict(prepared[0].name, first_texts)
    same = sum(a == b for a, b in zip(before, after, strict=True))
    print(f"\nNothing is forgotten: {prepared[0].name!r} was first. Of its {len(before)} dev texts, {same} have")
    print(f"bit-identical probabilities after training {len(prepared) - 1} more tasks. The bank's audit:")
    findings = list(bank.audit())
    for finding in findings:
        print(f"  {'same' if finding.ok else 'DIFFERENT'}  {finding.ref}  {finding.how}")
    print(f"\n{time.perf_counter() - began:.0f} s in total.")
    if same != len(before) or not all(finding.ok for finding in findings):
        raise SystemExit("The first task's outputs have changed. This must never happen; please report it.")


def _train(bank: adapterbank.OpenBank, task: DemoTask, data: Prepared, epochs: int) -> None:
    print(f"\nTraining {data.name!r}: {data.counts['train']} texts, {data.counts['dev']} dev texts")
    with Display(lines=True) as display:
        bank.train(
            data.name,
            data.train,
            data.dev,
            epochs=epochs,
            max_length=task.max_length,
            watch=display.watch,
            note=display.note,
        )


def _compare(bank: adapterbank.OpenBank) -> None:
    """Print each task's score and size, then compare all of them with one full copy of the encoder per task."""
    tasks = bank.tasks()
    rows = [
        [
            m.name,
            f"{100 * m.metrics['dev']['accuracy']:.1f} %",
            f"{100 * m.metrics['dev']['majority']:.1f} %",
            f"{m.params['trained']:,}",
            f"{m.params['percent']:.2f} %",
            format_size(m.bytes),
        ]
        for m in tasks
    ]
    print()
    print_table(["task", "accuracy", "majority class", "trained parameters", "of encoder", "on disk"], rows)
    encoder = bank.backbone.parameters
    total = encoder + sum(m.params["trained"] for m in tasks)
    print(f"\nAll {len(tasks)} tasks together: {total:,} parameters, {total / encoder:.2f}× the encoder,")
    print(f"instead of {len(tasks)}× with one fine-tuned copy per task (the paper, nine tasks: 1.3× instead of 9×).")


def _predict(bank: adapterbank.OpenBank, prepared: list[Prepared]) -> None:
    """Predict with all tasks at once: rows of different tasks share a batch."""
    rows = [(data.name, text) for task, data in zip(TASKS, prepared, strict=True) for text in task.texts]
    print("\nRows of all tasks, in one batch:")
    predictions = bank.predict([name for name, _ in rows], [text for _, text in rows])
    for (name, text), found in zip(rows, predictions, strict=True):
        assert found.label is not None and found.probabilities is not None
        print(f"  {name:<16} {found.label:<14} {found.probabilities[found.label]:.2f}  {text}")


def _dev_texts(data: Prepared) -> list[str]:
    from adapterbank.tasks.tables import read_table

    return [str(text) for text in read_table(data.dev).columns["text"]]


if __name__ == "__main__":
    main()
