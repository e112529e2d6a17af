"""Tests of `adapterbank.config`: all mistakes are reported at once, each with its value and what to do."""

from __future__ import annotations

import dataclasses
from dataclasses import fields

import pytest

from adapterbank import config as configs
from adapterbank.config import Config, option, parse, read, resolve, unused_options
from adapterbank.errors import ConfigError, InputError
from adapterbank.methods import METHODS

NUMERIC = [f for f in fields(Config) if f.metadata["low"] is not None]
CHOSEN = [f for f in fields(Config) if f.metadata["choices"]]
SPECIAL = {name for row in METHODS.values() for name in row.uses}
ANOTHER = {
    **{"size": 8, "layers": "0", "sites": "attention", "activation": "relu", "sigma": 0.5, "placement": "parallel"},
    **{"combine": "multiply", "inner_norm": True, "depth": 2, "train_norms": False, "top": 2},
    **{"rank": 4, "alpha": 8.0, "targets": "key", "trials": 3, "minutes": 1.0, "mix": 2, "narrow_after": 2},
    "fuse": "a,b",
}
"""A value that is not the default, for each option that only some methods use."""


def mistakes(**values):
    with pytest.raises(ConfigError) as caught:
        parse(values)
    return caught.value.mistakes


SIZES = "a whole number, widths by layer such as 8,8,16 (8/16,0/4,32 by layer and site), or 64to32"


def test_every_mistake_is_reported_together():
    found = mistakes(
        size="big", lr=-1, epochs=0, metod="full", sites="knee", device="gpu", kind="classes", seed=0.5, train_norms=3
    )
    named = ("size", "lr", "epochs", "'metod'", "sites", "device", "kind", "seed", "train_norms")
    assert len(found) == len(named)
    for name in named:
        assert sum(sentence.startswith(f"{name} is ") for sentence in found) == 1, name
    assert all("\n" not in sentence and sentence.endswith((".", "?")) for sentence in found)


def test_an_unknown_option_is_refused_with_the_nearest_one():
    assert mistakes(epoch=3) == ("'epoch' is not an option of a run. Did you mean 'epochs'?",)
    assert mistakes(**{"max-lenght": 3}) == ("'max-lenght' is not an option of a run. Did you mean 'max_length'?",)


def test_an_unknown_option_that_resembles_none_is_refused_with_all_options():
    (sentence,) = mistakes(zzzz=1)
    assert all(f.name in sentence for f in fields(Config))


@pytest.mark.parametrize("field", CHOSEN, ids=lambda f: f.name)
def test_a_value_outside_its_choices_is_refused_with_the_choices_and_the_nearest(field):
    choice = list(field.metadata["choices"])[-1]
    sentence = next(s for s in mistakes(**{field.name: choice + "x"}) if s.startswith(field.name))
    assert repr(choice + "x") in sentence
    assert all(one in sentence for one in field.metadata["choices"])
    assert f"Did you mean {choice!r}?" in sentence


@pytest.mark.parametrize("field", NUMERIC, ids=lambda f: f.name)
def test_a_number_below_or_above_its_range_is_refused_with_the_range(field):
    low, high = field.metadata["low"], field.metadata["high"]
    for value in [low - 1, *([high + 1] if high is not None else [])]:
        sentence = next(s for s in mistakes(**{field.name: value}) if s.startswith(field.name))
        assert str(value) in sentence
        assert f"{low:g}" in sentence


@pytest.mark.parametrize("field", NUMERIC, ids=lambda f: f.name)
def test_a_range_includes_its_ends(field):
    for value in (field.metadata["low"], field.metadata["high"]):
        method = {"method": next((name for name, row in METHODS.items() if field.name in row.uses), "adapter")}
        if value is not None and (field.name, value) != ("lr", 0):
            assert getattr(parse({**method, field.name: value}), field.name) == value


def test_a_learning_rate_of_zero_is_refused():
    assert mistakes(lr=0) == ("lr is 0, so nothing would train; use a positive number.",)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("size", "4.5", SIZES),
        ("size", "8,", SIZES),
        ("size", "8;8", SIZES),
        ("size", "auto", SIZES),
        ("size", "0,0", "above 0 in some layer"),
        ("size", "8,4097", "from 0 to 4096 in each layer"),
        ("size", "8,/4", SIZES),
        ("size", True, "a number"),
        ("size", None, "a whole number"),
        ("size", {"a": 4}, "a whole number"),
        ("seed", "1e400", "a whole number"),
        ("lr", "fast", "a number"),
        ("lr", "nan", "a number"),
        ("lr", float("inf"), "a number"),
        ("train_norms", "perhaps", "true or false"),
        ("train_norms", 1, "true or false"),
        ("task", True, "text"),
        ("label", {"a": 1}, "text"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_right_one(name, value, wanted):
    assert mistakes(**{name: value}) == (f"{name} is {value!r}; it must be {wanted}.",)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3"])
def test_devices_have_the_names_that_torch_gives_them(device):
    assert parse({"device": device}).device == device


@pytest.mark.parametrize("sites", ["", "attention,", "attention;feedforward", "Attention"])
def test_sites_are_one_or_both_of_two(sites):
    (sentence,) = mistakes(sites=sites)
    assert sentence == f"sites is {sites!r}; it must be attention or feedforward, or both separated by a comma."


@pytest.mark.parametrize("targets", ["", "query,", "query;value", "Query", "knee"])
def test_targets_are_names_of_linear_layers(targets):
    (sentence,) = mistakes(method="lora", targets=targets)
    choices = "query, key, value, output, up, down"
    assert sentence == f"targets is {targets!r}; it must be one or more of {choices}, separated by commas."


def test_a_method_without_an_encoder_refuses_options_that_train_one():
    given = {"lr": 0.1, "epochs": 3, "batch": 8, "pooling": "first", "head_hidden": 4, "class_weights": "balanced"}
    found = mistakes(method="automl", **given)
    assert [sentence.split(" is ")[0] for sentence in found] == sorted(given)


def test_strings_from_the_shell_become_numbers_and_booleans():
    found = parse({"size": "8", "lr": "1e-3", "train_norms": "no", "max-length": "64", "bias-correction": "true"})
    assert (found.size, found.lr, found.train_norms, found.max_length) == (8, 0.001, False, 64)
    assert found.bias_correction is True
    assert [type(value) for value in (found.size, found.lr)] == [int, float]


def test_a_config_reads_what_it_wrote():
    config = parse({"task": "a", "size": 8, "labels": ["no", "yes"], "lr": 1e-3})
    assert config.labels == "no,yes"
    assert parse(config.to_json()) == config


def test_every_number_has_a_lower_and_an_upper_limit():
    numbers = [f for f in fields(Config) if str(f.type).partition(" ")[0] in ("int", "float")]
    assert len(numbers) > 15
    assert [f.name for f in numbers if f.metadata["low"] is None or f.metadata["high"] is None] == []
    for f in numbers:
        with pytest.raises(ConfigError, match=rf"{f.name} is .*; it must be from .* to "):
            parse({f.name: 1e308, "method": next(name for name in METHODS if f.name not in unused_options(name))})


def test_a_number_beyond_any_float_is_a_mistake_like_others():
    with pytest.raises(ConfigError, match=r"limit is 1000.*…; it must be a whole number"):
        parse({"limit": 10**400})


# --- YAML ---------------------------------------------------------------------------------------------------


def test_overrides_win_over_a_yaml_file_which_wins_over_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("task: mrpc\nsize: 8\nlr: 1e-3\nlayers: [0, 2]\nsites:\n  - attention\nmax-length: 64\nseed: 3\n")
    found = read(file, {"size": "16", "max_length": 32}, {"seed": 1, "backbone": "mpnet"})
    assert (found.task, found.size, found.lr, found.layers, found.sites) == ("mrpc", 16, 0.001, "0,2", "attention")
    assert (found.max_length, found.seed, found.backbone) == (32, 3, "mpnet")


def test_all_mistakes_of_a_yaml_file_are_reported_together(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("sice: 8\nlr: fast\n3: x\n")
    with pytest.raises(ConfigError) as caught:
        read(file, {"epochs": 0})
    assert [sentence.split(" is ")[0] for sentence in caught.value.mistakes] == ["'sice'", "lr", "'3'", "epochs"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"size: [4", "cannot be read as YAML"),
        (b"\xff\xfe", "cannot be read as YAML"),
        (b"", "'name: value' lines"),
        (b"- size\n", "'name: value' lines"),
    ],
)
def test_a_file_without_options_is_refused_in_one_line(tmp_path, content, message):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read(file, {})
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_yaml_file_is_reported_with_its_path(tmp_path):
    with pytest.raises(InputError, match=r"There is no config file .*run\.yaml"):
        read(tmp_path / "run.yaml", {})


# --- methods ------------------------------------------------------------------------------------------------


def test_this_file_has_a_value_for_every_option_that_only_some_methods_use():
    assert set(ANOTHER) == SPECIAL


@pytest.mark.parametrize("method", METHODS)
def test_an_option_that_a_method_does_not_use_is_refused(method):
    used = {*METHODS[method].uses}
    given = {"method": method, **ANOTHER}
    if SPECIAL - used:
        found = mistakes(**given)
        assert [sentence.split(" is ")[0] for sentence in found] == sorted(SPECIAL - used)
        assert all(f"method {method!r} does not use it; leave it out." in sentence for sentence in found)
    assert parse({"method": method, **{name: ANOTHER[name] for name in used}})


@pytest.mark.parametrize("given", ["a, b@2", " a,b@2 ", ["a", "b@2"], ("a ", " b@2")])
def test_fused_tasks_are_the_same_however_they_are_written(given):
    assert parse({"fuse": given}) == parse({"fuse": "a,b@2", "method": "fusion"})
    assert parse({"fuse": "b@2,a"}) != parse({"fuse": "a,b@2"})


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.slot])
def test_resolve_fills_in_the_defaults_of_the_method_and_keeps_given_values(method):
    defaults = METHODS[method].defaults
    needed = {"fuse": "a,b"} if method == "fusion" else {}
    found = resolve(parse({"method": method, **needed}))
    assert {name: getattr(found, name) for name in defaults} == {name: row.value for name, row in defaults.items()}
    given = {"lr": 0.5, "epochs": 3, "weight_decay": 0.0, "epsilon": 0.1, "bias_correction": False, "pooling": "first"}
    assert set(given) == set(defaults)
    kept = resolve(parse({"method": method, **needed, **given}))
    assert {name: getattr(kept, name) for name in given} == given


def test_the_help_of_an_option_names_all_methods_that_use_it_if_there_are_several():
    for f in fields(Config):
        users = [name for name, row in METHODS.items() if f.name in row.uses]
        missing = [name for name in users if name not in f.metadata["help"].lower()]
        assert len(users) < 2 or not missing, (f.name, missing)


def test_only_optional_fields_and_those_that_depend_on_the_method_default_to_none():
    optional = {"dev", "test", "data_root", "text", "text_pair", "label", "kind", "labels", "metric", "dropout"}
    optional |= {"label_separator", "separator", "header"}
    empty = {f.name for f in fields(Config) if f.default is None}
    assert empty == optional | set(METHODS["adapter"].defaults)


def test_every_default_is_an_allowed_value():
    assert configs.check(Config()) == []
    assert parse({}) == Config()


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().size = 3


def test_a_field_that_came_later_is_part_of_the_identity_only_when_it_is_set():
    earlier = dataclasses.make_dataclass(
        "Earlier", [("extra", str, option("no", "Extra.", group="Data", later=True))], bases=(Config,), frozen=True
    )
    assert earlier().to_json() == Config().to_json()
    assert earlier(extra="yes").to_json() == {**Config().to_json(), "extra": "yes"}


def test_separators_are_checked_before_a_file_is_opened():
    assert parse({"separator": "tab", "label_separator": ";"}).separator == "tab"
    with pytest.raises(ConfigError) as caught:
        parse({"separator": "xy", "label_separator": "", "header": "maybe"})
    assert len(caught.value.mistakes) == 3
    assert "separator is 'xy'; it must be one of , ; | : or tab." in caught.value.mistakes


def test_options_of_reading_leave_the_identity_of_earlier_runs_as_it_is():
    new = {"separator", "header", "label_separator", "drop_unlabelled"}
    assert not new & set(Config().to_json())
    assert (
        parse({"header": "no", "drop_unlabelled": "yes"}).to_json().items()
        >= {
            "header": False,
            "drop_unlabelled": True,
        }.items()
    )
    assert parse({"text": ["title", "body, plain"]}).text == 'title,"body, plain"'


@pytest.mark.parametrize(
    ("size", "width", "rate"),
    [
        (8, 384, 1e-3),
        (64, 384, 1e-3),
        (64, 0, 1e-3),
        (256, 384, 5e-4),
        (512, 128, 3.5e-4),
        (64, 768, 5e-4),
        (256, 768, 2.5e-4),
    ],
)
def test_the_default_rate_of_adapters_falls_with_size_and_width(size, width, rate):
    assert resolve(Config(size=size), width).lr == rate
    assert resolve(Config(size=size, lr=2e-3), width).lr == 2e-3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mix": 2}, "size is '8to4', but mix is 2, with which adapters are not narrowed; leave one of them out."),
        ({"on": "t"}, "size is '8to4', but on is 't', with which adapters are not narrowed; leave one of them out."),
        ({"depth": 2}, "size is '8to4', but depth is 2, and only one hidden layer is narrowed; use 1."),
        ({"epochs": 1}, "narrow_after is 1, but the run has 1 epoch; use fewer, or more --epochs."),
    ],
)
def test_what_a_narrowed_size_excludes_is_refused_before_any_data_is_read(options, sentence):
    assert mistakes(size="8to4", **options) == (sentence,)
    assert parse({"size": "8to4", "narrow_after": 12}).epochs is None  # a catalog task may have more epochs
