"""Words: a text that was given as words is a text that knows them."""

from __future__ import annotations

import json
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


def test_words_of_other_scripts_keep_their_marks_and_ideographs_are_words():
    assert words_of("नई दिल्ली में") == ["नई", "दिल्ली", "में"]
    assert words_of("cafe\u0301s, می\u200cخواهم") == ["cafe\u0301s", ",", "می\u200cخواهم"]
    assert words_of("我在Berlin。") == ["我", "在", "Berlin", "。"]
    family = "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}"
    assert words_of(
        f"ok {family}\N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}!\N{HEAVY BLACK HEART}\ufe0f"
    ) == [
        *(
            "ok",
            family,
            "\N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}",
            "!",
            "\N{HEAVY BLACK HEART}\ufe0f",
        ),
    ]


def test_an_address_ends_before_the_mark_that_ends_a_sentence():
    assert words_of("(see https://x.org/a_b/).") == ["(", "see", "https://x.org/a_b/", ")", "."]


def test_a_copy_knows_the_words_too():
    text = Words.of(["a.b", "c"])
    again = pickle.loads(pickle.dumps(text))
    assert (again, again.spans) == (text, text.spans)


def test_lists_of_words_are_joined_and_other_values_are_left():
    assert joined(["a", "b"]).spans == ((0, 1), (2, 3))
    for written in ("['a', 'b']", '["a", "b"]', " [ 'a' , \"b\", ]\n"):
        assert joined(written).spans == ((0, 1), (2, 3))
    words = ["it's", 'a "b"', "1.0", "\u200b", "\\d", "\N{GRINNING FACE}", "", "a\nb"]
    for written in (repr(words), json.dumps(words)):
        assert [joined(written)[start:end] for start, end in joined(written).spans] == words
    assert joined(r"['\x']") == "x"
    for text in ("[Laughter]", "[live] I saw Ann [video]", "['a' 'b']", "[]", "['a', 1]", "[["):
        assert joined(text) is text
    assert joined("a b") == "a b"
    assert joined([1, 2]) == [1, 2]
    assert joined(None) is None
