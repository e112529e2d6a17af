"""`adapterbank data`: sizes, lengths, labels and problems of a data set."""

from __future__ import annotations

from small_data import reviews, shell, write


def test_data_counts_with_the_maximum_length_of_training(data_root, checkpoint):
    words = ["--data-root", data_root, "--backbone", checkpoint("bert")[0], "--json"]
    assert shell("data", "squad/v2", *words).json["max_length"] == 384
    assert shell("data", "glue/sst2", *words).json["max_length"] == 128


def test_data_describes_a_catalog_task(data_root, checkpoint):
    words = ["--data-root", data_root, "--backbone", checkpoint("bert")[0], "--max-length", "7"]
    found = shell("data", "glue/sst2", *words, "--json").json
    train = found["splits"]["train"]
    assert (train["rows"], train["labels"]) == (24, {"negative": 12, "positive": 12})
    assert train["tokens"]["p100"] == 7
    assert (train["longer"], found["shared"][0]) == (0, {"of": "dev", "in": "train", "rows": 24})
    text = shell("data", "glue/sst2", *words).out
    assert "dev rows that also occur in train: 24" in text
    assert "50.0 %" in text
    assert "6 questions without an answer" in shell("data", "squad/v2", *words).out


def test_data_describes_files_and_warns_of_a_misspelt_label(tmp_path, checkpoint):
    train = write(tmp_path / "train.csv", [*reviews(24), ("", "positive")])
    dev = write(tmp_path / "dev.csv", [(text, label.title()) for text, label in reviews(4)])
    words = ["--train", train, "--dev", dev, "--backbone", checkpoint("bert")[0]]
    found = shell("data", *words)
    assert found.code == 0
    assert "warning: dev has the label 'Positive' (2 rows); train spells it 'positive'." in found.out
    assert shell("data", *words, "--json").json["splits"]["train"]["empty"] == 1
    for odd in ([], ["glue/sst2", "--train", train], ["glue/sst2", "--text", "x"], ["glue/sst3"]):
        refused = shell("data", *odd)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)


def test_data_of_a_file_tells_the_columns_what_is_left_out_and_the_split(tmp_path, checkpoint):
    rows = [f"Nr {i};the {text};{label}" for i, (text, label) in enumerate(reviews(20))]
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(["title;body;tone", *rows, ";;positive", "x;y;", "x;y;Positive", "Nr 1;the z;negative"]))
    words = [file, "--text", "title,body", "--label", "tone", "--backbone", checkpoint("bert")[0]]
    found = shell("data", *words).out
    assert "text: title,body; label: tone" in found
    assert "train: rows left out: 1 with an empty text, 1 with no label" in found
    assert "rows used: train 22 (few labels: no row is held out)" in found
    assert "separates its fields with ';'" in found
    assert "the labels 'positive' (10) and 'Positive' (1) differ only in case" in found
    assert "train would refuse it: " in found
    dropped = shell("data", *words, "--drop-unlabelled", "--json").json
    assert (dropped["refused"], dropped["rows"]) == ([], {"train": 22})
    assert dropped["dropped"] == {"train": {"empty": 1, "unlabelled": 1}}
    assert dropped["columns"] == {"text": ["title,body"], "label": "tone"}


def test_data_of_a_file_with_many_rows_tells_what_would_be_held_out(tmp_path, checkpoint):
    file = tmp_path / "mine.csv"
    file.write_text("text,label\n" + "".join(f"{text} {i},{label}\n" for i, (text, label) in enumerate(reviews(200))))
    found = shell("data", file, "--backbone", checkpoint("bert")[0]).out
    assert "rows used: train 180, dev 20 (dev held out of train, seed 0)" in found
