"""Claims about `adapterbank.tasks.yaml_files`: any file gives plain values, or one sentence."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from adapterbank.errors import InputError
from adapterbank.tasks.yaml_files import MAX_BYTES, read_yaml

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{i}: &b{i} [{', '.join([f'*b{i - 1}' if i else '*a'] * 10)}]\n" for i in range(9)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000))


def written(folder, text):
    file = folder / "s.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("task: 2024-13-45\nsize: 2024-12-24", {"task": "2024-13-45", "size": "2024-12-24"}),
        ("a: [1, 0x10, 1.5, 1e3, yes, ~, text]", {"a": [1, 16, 1.5, "1e3", True, None, "text"]}),
        ("a: &m {x: 1}\nb: {<<: *m, y: 2}\nc: [*m, *m]", {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}] * 2}),
    ],
)
def test_dates_are_text_and_other_values_and_aliases_are_those_of_yaml(tmp_path, text, value):
    assert read_yaml(written(tmp_path, text)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b\nepochs: 0b_", "line 2: '0b_' is not a value of type int"),
        ("lr: !!float abc", "line 1: 'abc' is not a value of type float"),
        ("a: !!int ''", "line 1: '' is not a value of type int"),
        ("a: !!bool x", "'x' is not a value of type bool"),
        ("a: 0x" + "f" * 6000, "is not a value of type int"),
        ("a: " + "1" * 6000, "is not a value of type int"),
        ("a: !!timestamp x", "timestamp"),
        ("a: !!python/name:os.system x", "python/name"),
        ("a: " + "[" * 5000, "more than 32 levels"),
        ("a: " + "[\n" * 5000, "more than 32 levels"),
        (CHAIN, "more than 32 levels"),
        (LAUGHS, "more than 100,000 values"),
        ("a: &a [*a]", "a value contains itself"),
        ("a: &a {b: [*a]}", "a value contains itself"),
        ("? [a]\n: b", "a name is a list"),
        ('a: "\\uD800"', "is not a value of type str"),
        ('a: "\\UFFFFFFFF"', "cannot be read as YAML"),
        ("#" * (MAX_BYTES + 1), "more than 1,048,576 bytes"),
    ],
)
def test_a_hostile_file_is_refused_in_one_sentence(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as caught:
        read_yaml(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_no_more_than_the_limit_is_read_of_a_device_without_end():
    with pytest.raises(InputError, match="/dev/zero has more than 1,048,576 bytes"):
        read_yaml("/dev/zero")


def test_a_pipe_is_read_as_a_shell_passes_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pipe.write_text, "task: x\n")
        assert read_yaml(pipe) == {"task": "x"}
