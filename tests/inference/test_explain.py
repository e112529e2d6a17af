"""`inference.explain`: a word's share is what the answer loses without it, and the rows that find it are bounded."""

from __future__ import annotations

import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LinearRegression, LogisticRegression

from adapterbank.errors import InputError
from adapterbank.inference.explain import WORDS, Explainer, explained, find_words, summary
from adapterbank.inference.predictions import Prediction
from adapterbank.tasks.spec import Examples

TEXTS = ["a warm film", "a dull film", "warm and funny", "dull and long", "a funny film", "a long film"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't over-think it, John!", ["Don't", "over-think", "it", ",", "John", "!"]),
        ("Gut\N{NO-BREAK SPACE}so…  3.5 %", ["Gut", "so", "…", "3", ".", "5", "%"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("我爱film", ["我", "爱", "film"]),
        ("super\N{GRINNING FACE}\N{GRINNING FACE} e\N{COMBINING ACUTE ACCENT}te", ["super", "😀😀", "e\u0301te"]),
        ("  \n", []),
    ],
)
def test_words_are_found_in_any_script_with_their_characters(text, words):
    assert [text[start:end] for start, end in find_words(text)] == words


def test_a_linear_models_shares_are_its_coefficients():
    counts = CountVectorizer(token_pattern=r"\w+").fit(TEXTS)
    model = LinearRegression().fit(counts.transform(TEXTS), [5, 1, 4, 1, 4, 2])

    def predict(requests):
        ((_, rows),) = requests
        return [[Prediction(value=float(value)) for value in model.predict(counts.transform(rows.texts))]]

    ((found,),) = explained(predict, [("stars", Examples(["a warm, warm and long film"]))])
    weight = dict(zip(counts.get_feature_names_out(), model.coef_, strict=True))
    assert found.value == pytest.approx(model.predict(counts.transform(["a warm, warm and long film"]))[0])
    assert found.explanation["of"] == "value"
    shares = [(one["word"], one["share"]) for one in found.explanation["words"]]
    wanted = [("a", weight["a"]), ("warm", weight["warm"]), (",", 0.0), ("warm", weight["warm"])]
    wanted += [(word, weight[word]) for word in ("and", "long", "film")]
    assert [word for word, _ in shares] == [word for word, _ in wanted]
    assert [share for _, share in shares] == pytest.approx([share for _, share in wanted], abs=1e-6)


def test_a_classifiers_shares_are_changes_of_the_most_probable_labels_probability():
    counts = CountVectorizer(token_pattern=r"\w+").fit(TEXTS)
    model = LogisticRegression(C=10).fit(counts.transform(TEXTS), ["good", "bad", "good", "bad", "good", "bad"])

    def predict(requests):
        rows = model.predict_proba(counts.transform(requests[0][1].texts))
        return [[Prediction(probabilities=dict(zip(model.classes_, row.tolist(), strict=True))) for row in rows]]

    ((found,),) = explained(predict, [("film", Examples(["a warm film, not long"]))])
    assert found.explanation["of"] == "good"
    for one in found.explanation["words"]:
        text = "a warm film, not long"
        text = text[: one["start"]] + text[one["end"] :]
        (without,) = model.predict_proba(counts.transform([text]))[:, list(model.classes_).index("good")]
        assert one["share"] == pytest.approx(found.probabilities["good"] - without, abs=1e-6)
    best = max(found.explanation["words"], key=lambda one: one["share"])
    worst = min(found.explanation["words"], key=lambda one: one["share"])
    assert (best["word"], worst["word"]) == ("warm", "long")


def test_both_texts_of_a_pair_are_explained():
    explainer = Explainer.of(Examples(["one two"], ["three"]))
    rows = explainer.to_examples()
    assert list(zip(rows.texts, rows.pairs, strict=True)) == [
        ("one two", "three"),
        ("two", "three"),
        ("one ", "three"),
        ("one two", ""),
    ]
    ((at, told),) = explainer.explain([(None, 1.0), (None, 0.25), (None, 1.0), (None, 1.5)])
    assert at == 0
    assert [(one["in"], one["word"], one["share"]) for one in told["words"]] == [
        ("text", "one", 0.75),
        ("text", "two", 0.0),
        ("pair", "three", -0.5),
    ]


@pytest.mark.parametrize(
    ("first", "second", "counts"), [(500, 500, (64, 64)), (10, 500, (10, 118)), (500, 10, (118, 10)), (3, 4, (3, 4))]
)
def test_the_words_of_a_long_row_are_bounded_and_the_rest_is_counted(first, second, counts):
    explainer = Explainer.of(Examples(["a " * first], ["b " * second]))
    (one,) = explainer.examples
    assert tuple(sum(word.place == place for word in one.words) for place in (0, 1)) == counts
    assert explainer.rows == sum(counts) + 1 <= WORDS + 1
    ((_, told),) = explainer.explain([(None, 0.0)] * explainer.rows)
    assert told.get("left_out", 0) == first + second - sum(counts)


def test_an_answer_without_a_number_is_refused():
    with pytest.raises(InputError, match="neither probabilities nor a value"):
        explained(lambda requests: [[Prediction(answer="a")] * 2], [("span", Examples(["why"]))])


def test_a_summary_has_the_largest_shares_in_the_order_of_the_text():
    shares = {"a": 0.0, "dull": -0.25, "funny": 0.5, "film": 0.001}
    words = [{"word": word, "share": share} for word, share in shares.items()]
    assert summary({"of": "good", "words": words}) == "good: dull -0.25, funny +0.50, film +0.0010"
    assert summary({"of": "good", "words": words}, most=1) == "good: funny +0.50"
    assert summary({"of": "good", "words": words[:1]}) == "good: no word alone changes the answer"


def test_many_texts_are_explained_in_order():
    def predict(requests):
        return [[Prediction(value=float(len(text))) for text in requests[0][1].texts]]

    (found,) = explained(predict, [("length", Examples([f"word {k}" for k in range(40)]))])
    assert [one.value for one in found] == [float(len(f"word {k}")) for k in range(40)]
    assert [one.explanation["words"][1]["word"] for one in found] == [str(k) for k in range(40)]
