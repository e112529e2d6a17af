"""`adapterbank predict`: texts from options, files and pipes; predictions as JSON lines, in the same order."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from adapterbank.api.opened import open_bank
from adapterbank.inference.explain import summary
from adapterbank.tasks import streams
from small_data import COMMAND, FAST, answers, pairs, reviews, scores, shell, tags, write

ROWS = reviews()
TEXTS = ["the cat was good", "a bad dog", "", "why, who is it?", "the big red fox jumps over the lazy dog", "a bad dog"]


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoint):
    """Return a bank with five tasks; tests must not change it."""
    folder = tmp_path_factory.mktemp("predict") / "bank"
    bank = open_bank(folder, str(checkpoint("bert")[0]), device="cpu")
    bank.train("sentiment", ROWS, ROWS, **FAST)
    bank.train("score", {"sentence": [t for t, _ in scores()], "score": [s for _, s in scores()]}, **FAST)
    bank.train("tags", tags(), **FAST)
    bank.train("pair", pairs(), **FAST)
    bank.train("span", answers(), **FAST)
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bank").symlink_to(made)
    return tmp_path


def expected(task, texts=TEXTS, seconds=None):
    found = open_bank("bank", device="cpu").predict(task, texts, seconds)
    return [json.loads(json.dumps(one.to_json())) for one in found]


def ask(*words, task="sentiment", **options):
    found = shell("predict", "--bank", "bank", *(["--task", task] if task else []), *words, **options)
    assert (found.code, found.err) == (0, ""), found
    return found.answers


def test_texts_of_the_command_line_are_answered_in_order(here):
    found = ask(*(word for text in TEXTS for word in ("--text", text)))
    assert found == expected("sentiment")
    assert [set(answer) for answer in found] == [{"label", "probabilities"}] * len(TEXTS)


def test_uncertain_answers_are_null_with_their_probabilities(here):
    sure = expected("sentiment")
    least = sorted(max(one["probabilities"].values()) for one in sure)[3]
    words = [word for text in TEXTS for word in ("--text", text)]
    found = ask(*words, "--abstain", least)
    assert [one["probabilities"] for one in found] == [one["probabilities"] for one in sure]
    assert {one["label"] for one in found} == {None, *(one["label"] for one in found if one["label"])}
    refused = shell("predict", "--bank", "bank", "--task", "score", "--abstain", "0.8", "--text", "why")
    assert refused.code == 2
    assert "'score' is regression, which has no probabilities; leave out abstain." in refused.err


def test_lines_of_standard_input_are_answered_in_order_including_blank_ones(here):
    assert ask("-", input="\n".join(TEXTS) + "\n") == expected("sentiment")
    assert ask("-", input="\ufeff" + "\r\n".join(TEXTS)) == expected("sentiment")


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "json", "parquet", "jsonl.gz"])
def test_a_table_is_answered_in_order(here, ending):
    file = write(here / f"texts.{ending}", [(i, text) for i, text in enumerate(TEXTS)], ("id", "text"))
    assert ask(file) == expected("sentiment")


def test_a_text_file_is_read_line_by_line(here):
    (here / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    assert ask("texts.txt") == expected("sentiment")


def test_a_table_may_have_labels_and_another_usual_column_name(here):
    file = write(here / "review.csv", [(text, "positive") for text in TEXTS], ("review", "label"))
    assert ask(file) == expected("sentiment")


def test_rows_of_several_writes_keep_their_order(here, monkeypatch):
    monkeypatch.setattr(streams, "CHUNK_ROWS", 4)
    texts = [text for text, _ in reviews(11)]
    (here / "texts.txt").write_text("\n".join(texts))
    for found, alone in zip(ask("texts.txt"), expected("sentiment", texts), strict=True):
        assert found["probabilities"] == pytest.approx(alone["probabilities"], abs=1e-5)


def test_every_kind_has_its_own_output(here):
    assert set(ask("--text", "good", task="score")[0]) == {"value"}
    assert set(ask("--text", "good", task="tags")[0]) == {"labels", "probabilities"}
    assert set(ask("--text", "what was it", "--text-pair", "a red fox", task="span")[0]) == {"answer", "start", "end"}


def test_pairs_come_from_options_tabs_and_columns(here):
    firsts, seconds = ["the cat", "a dog"], ["it is a cat", "it is a fox"]
    wanted = expected("pair", firsts, seconds)
    rows = list(zip(firsts, seconds, strict=True))
    assert ask(*(w for a, b in rows for w in ("--text", a, "--text-pair", b)), task="pair") == wanted
    assert ask("-", input="".join(f"{a}\t{b}\n" for a, b in rows), task="pair") == wanted
    assert ask(write(here / "pairs.csv", rows, ("sentence1", "sentence2")), task="pair") == wanted


def test_every_script_is_supported(here):
    context = "café 日本語 🙂 fox"
    (answer,) = ask("--text", "what was it", "--text-pair", context, task="span")
    assert answer["answer"] == context[answer["start"] : answer["end"]]


def test_rows_that_name_their_tasks_are_answered_each_by_its_own(here):
    names = ["score", "sentiment", "tags", "score@1", "sentiment", "tags"]
    file = write(here / "mixed.jsonl", list(zip(names, TEXTS, strict=True)), ("task", "text"))
    found = ask("--task-column", "task", file, task=None)
    assert [answer.pop("task") for answer in found] == names
    for name, text, answer in zip(names, TEXTS, found, strict=True):
        (alone,) = expected(name, [text])
        assert set(answer) == set(alone)
        for key in {"value", "probabilities"} & set(answer):
            assert answer[key] == pytest.approx(alone[key], abs=1e-5)


def test_rows_of_a_single_task_also_name_it(here):
    file = write(here / "mixed.csv", [("sentiment", "good")], ("which", "text"))
    (answer,) = ask("--task-column", "which", file, task=None)
    assert answer["task"] == "sentiment"


def test_each_row_is_read_from_the_columns_of_its_own_task(here):
    rows = [("sentiment", "the cat was good", "x"), ("score", "x", "the cat was bad")]
    file = write(here / "wide.csv", rows, ("task", "text", "sentence"))
    first, second = ask("--task-column", "task", file, task=None)
    assert first["probabilities"] == pytest.approx(expected("sentiment", ["the cat was good"])[0]["probabilities"])
    assert second["value"] == pytest.approx(expected("score", ["the cat was bad"])[0]["value"], abs=1e-5)


def test_rows_of_pairs_of_single_texts_and_of_no_task_can_be_mixed(here):
    rows = [("pair", "what was it", "a red fox"), ("span", "what was it", "a red fox")]
    file = write(here / "two.csv", rows, ("task", "question", "context"))
    assert [set(answer) for answer in ask("--task-column", "task", file, task=None)] == [
        {"task", "label", "probabilities"},
        {"task", "answer", "start", "end"},
    ]
    mixed = [(*row, "") for row in rows] + [("score", "", "", "the dog was big"), ("", "", "", "the dog was big")]
    write(file, mixed, ("task", "question", "context", "text"))
    found = ask("--task-column", "task", file, task=None)
    assert [set(answer) - {"task"} for answer in found] == [
        {"label", "probabilities"},
        {"answer", "start", "end"},
        {"value"},
        {"embedding"},
    ]
    assert found[2]["value"] == pytest.approx(ask("--text", "the dog was big", task="score")[0]["value"], abs=1e-5)


@pytest.mark.parametrize(
    ("form", "given"),
    [
        ("jsonl", '{"text": "good"}\n{"text": "bad"}\n'),
        ("csv", "text\ngood\nbad\n"),
        ("tsv", "text\tx\ngood\t1\nbad\t2\n"),
    ],
)
def test_standard_input_may_be_a_table_with_format(here, form, given):
    found = shell("predict", "--bank", "bank", "--task", "sentiment", "-", "--format", form, input=given)
    assert found.answers == ask("--text", "good", "--text", "bad", task="sentiment")
    unknown = shell("predict", "--bank", "bank", "--task", "sentiment", "-", "--format", "xml", input=given)
    assert (unknown.code, unknown.out) == (2, "")
    assert "'xml' is not a format of the input" in unknown.err


def test_json_on_standard_input_without_format_prints_a_note(here):
    found = shell("predict", "--bank", "bank", "--task", "sentiment", "-", input='{"text": "good"}\n')
    assert "add --format jsonl" in found.err
    assert len(found.answers) == 1


def test_an_existing_output_file_is_unchanged_if_predicting_fails(here):
    (here / "answers.jsonl").write_text("mine\n")
    shutil.copytree(here / "bank", here / "broken")
    weights = here / "broken" / "tasks" / "sentiment" / "1" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    found = shell("predict", "--bank", "broken", "--task", "sentiment@1", "--text", "good", "-o", "answers.jsonl")
    assert found.code == 2
    assert (here / "answers.jsonl").read_text() == "mine\n"
    assert [path.name for path in here.glob(".answers*")] == []


def test_a_row_with_an_unknown_task_has_an_error_and_the_others_an_answer(here):
    file = write(here / "mixed.csv", [("sentiment", "a"), ("sentimant", "b")], ("task", "text"))
    found = shell("predict", "--bank", "bank", "--task-column", "task", file)
    assert found.code == 1
    assert "mixed.csv, line 3: 'sentimant' is not a task of this bank. Did you mean 'sentiment'?" in found.err
    first, second = found.answers
    assert first["task"] == "sentiment"
    assert "Did you mean 'sentiment'?" in second.pop("error")
    assert second == {}


def test_predictions_can_be_written_to_a_file(here):
    found = shell("predict", "--bank", "bank", "--task", "sentiment", "--text", "good", "--output", "answers.jsonl")
    assert (found.code, found.out, found.err) == (0, "", "Wrote 1 prediction to answers.jsonl\n")
    lines = (here / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == expected("sentiment", ["good"])


def test_a_closed_pipe_is_not_an_error(here):
    (here / "texts.txt").write_text("\n".join(TEXTS * 700))
    words = ["predict", "--bank", "bank", "--task", "sentiment", "texts.txt"]
    with (
        subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer,
        subprocess.Popen(["head", "-1"], stdin=writer.stdout, stdout=subprocess.PIPE) as reader,
    ):
        writer.stdout.close()
        out, _ = reader.communicate(timeout=900)
        err = writer.stderr.read()
        writer.stderr.close()
    assert (writer.returncode, err) == (0, b"")
    assert set(json.loads(out)) == {"label", "probabilities"}


def test_standard_input_is_utf8_in_every_locale(here):
    words = [*COMMAND, "predict", "--bank", "bank", "--task", "span", "-"]
    env = {
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),  # where the package is used without being installed
    }
    good = subprocess.run(words, input="what was it\tcafé".encode(), capture_output=True, env=env, check=False)
    assert (good.returncode, good.stderr) == (0, b"")
    answer = json.loads(good.stdout.decode())
    assert answer["answer"] == "café"[answer["start"] : answer["end"]]


def test_a_read_only_bank_can_be_used(here, made, tmp_path):
    copy = shutil.copytree(made, tmp_path / "copy")
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        found = shell("predict", "--bank", copy, "--task", "sentiment", "--text", "good")
    finally:
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert found.answers == expected("sentiment", ["good"])


def test_the_best_answers_are_listed_with_their_positions_in_the_text(catalog_bank):
    context = answers(1)[0]["context"] + " and the fox sat on a mat" * 8
    words = ["--text", "what was it", "--text-pair", context, "--device", "cpu"]
    (found,) = shell("predict", "--bank", catalog_bank, "--task", "squad/v2", "--best", "3", *words).answers
    assert set(found) == {"answer", "start", "end", "null_odds", "best"}
    assert len(found["best"]) == 3
    for one in found["best"]:
        assert context[one["start"] : one["end"]] == one["text"]


def test_in_a_terminal_the_largest_shares_are_shown_as_a_line_too(here):
    terminal, end = os.openpty()
    words = [*COMMAND, "predict", "--bank", "bank", "--task", "sentiment", "--explain", "--text", TEXTS[0]]
    done = subprocess.run(words, stdout=end, stderr=subprocess.PIPE, text=True, check=True)
    (answer,) = [json.loads(line) for line in os.read(terminal, 1 << 16).decode().splitlines()]
    os.close(terminal)
    os.close(end)
    assert done.stderr == summary(answer["explanation"]) + "\n"


def test_explanations_are_part_of_the_json(here):
    (found,) = ask("--explain", "--text", TEXTS[0])
    (wanted,) = open_bank("bank", device="cpu").predict("sentiment", TEXTS[:1], explain=True)
    assert found == json.loads(json.dumps(wanted.to_json()))
    assert [one["word"] for one in found["explanation"]["words"]] == TEXTS[0].split()
    refused = shell("predict", "--bank", "bank", "--task", "span", "--explain", "--text", "who", "--text-pair", "a dog")
    assert (refused.code, "neither probabilities nor a value" in refused.err) == (2, True)
