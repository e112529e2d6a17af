"""Claims about `adapterbank.cli.console`: no text from a file reaches the terminal as a command to it."""

from __future__ import annotations

import json

from adapterbank.cli import console

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x7f\x9b31m\r\nb\tc\ud800é中"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x7f\x9b31m\r\nb\tc\ud800é中"


def test_control_characters_are_written_out_and_all_others_stay():
    assert console.escaped(HOSTILE) == SHOWN
    assert console.escaped(HOSTILE, keep="\n\t") == SHOWN.replace(r"\n", "\n").replace(r"\t", "\t")


def test_every_way_to_print_escapes(capsys):
    console.print_message(HOSTILE)
    assert capsys.readouterr().err == f"{SHOWN}\n"
    console.print_table(["name", HOSTILE], [[HOSTILE, "1"]])
    head, row = capsys.readouterr().out.splitlines()
    assert head.endswith(SHOWN)
    assert row.startswith(SHOWN)
    console.print_text(HOSTILE)
    assert not set(capsys.readouterr().out) & {"\x1b", "\x07", "\x7f", "\x9b", "\r"}


def test_json_is_the_same_value_without_control_characters(capsys):
    console.print_json({HOSTILE: [HOSTILE]})
    text = capsys.readouterr().out
    assert json.loads(text) == {HOSTILE: [HOSTILE]}
    assert not set(text) & {"\x1b", "\x07", "\x7f", "\x9b", "\r"}
    assert "\n" not in console.json_text({HOSTILE: 1})
