"""Words: a text that was given as words is a text that knows them."""

from __future__ import annotations

import pickle

from adapterbank.kinds.words import Words, joined, word_spans


def words_of(text):
    return [text[start:end] for start, end in word_spans(text)]


def test_words_are_joined_by_blanks_and_found_again():
    words = ["New York", "", "is", "big", "."]
    text = Words.of(words)
    assert text == "New York  is big ."
    assert words_of(text) == words


def test_a_plain_text_is_split_at_blanks_and_marks():
    assert words_of("I saw @ann's well-known U.S. film (2010)!") == [
        *("I", "saw", "@ann's", "well-known", "U.S", ".", "film", "(", "2010", ")", "!"),
    ]
    assert words_of("see https://x.org/a?b=1 #now") == ["see", "https://x.org/a?b=1", "#now"]
    assert words_of(" \n") == []


def test_a_copy_knows_the_words_too():
    text = Words.of(["a.b", "c"])
    again = pickle.loads(pickle.dumps(text))
    assert (again, again.spans) == (text, text.spans)


def test_lists_of_words_are_joined_and_other_values_are_left():
    assert joined(["a", "b"]).spans == ((0, 1), (2, 3))
    assert joined("['a', 'b']") == "a b"
    assert joined("a b") == "a b"
    assert joined([1, 2]) == [1, 2]
    assert joined(None) is None
