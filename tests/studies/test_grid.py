"""Claims about `adapterbank.studies.grid`: a YAML file of lists becomes its runs, and its mistakes are reported."""

from __future__ import annotations

import pytest

from adapterbank.config import parse
from adapterbank.errors import ConfigError, InputError
from adapterbank.studies import grid
from adapterbank.training.dataset import canonical


def values(runs, *names):
    return [tuple(getattr(run, name) for name in names) for run in runs]


def test_lists_multiply_and_single_values_are_common():
    runs = grid.make({"task": ["glue/cola", "glue/rte"], "size": [8, 64], "lr": ["3e-4", 1e-3], "epochs": 3}).runs
    assert len(runs) == 8
    assert values(runs, "task", "size", "lr", "epochs")[:3] == [
        *(("glue-cola", 8, 3e-4, 3), ("glue-cola", 8, 1e-3, 3), ("glue-cola", 64, 3e-4, 3))
    ]


def test_a_run_has_the_config_of_a_single_run_with_the_same_options():
    (run,) = grid.make({"task": "glue/cola", "method": "full"}).runs
    assert run == canonical(parse({"task": "glue/cola", "method": "full"}))


def test_seeds_are_a_number_or_a_list():
    assert values(grid.make({"task": "mr", "seeds": 3}).runs, "seed") == [(0,), (1,), (2,)]
    assert values(grid.make({"task": "mr", "seeds": [5, 7]}).runs, "seed") == [(5,), (7,)]


def test_a_block_inherits_the_options_that_its_method_uses_and_its_own_must_fit():
    tasks = ["mr", {"task": "trec", "epochs": 2}]
    blocks = [{"size": [8, 64]}, {"method": "full"}, {"method": "automl", "trials": 3}]
    study = grid.make({"task": tasks, "epochs": 5, "lr": 1e-3, "sigma": 0.1, "blocks": blocks})
    assert [len(block.runs) for block in study.blocks] == [4, 2, 2]
    assert values(study.blocks[1].runs, "epochs", "lr", "sigma") == [(5, 1e-3, 0.01), (2, 1e-3, 0.01)]
    assert values(study.blocks[2].runs, "epochs", "trials") == [(None, 3), (None, 3)]
    with pytest.raises(ConfigError, match="size is 8, but method 'full' does not use it"):
        grid.make({"task": "mr", "blocks": [{"method": "full", "size": 8}]})


def test_a_list_of_one_method_inherits_what_that_method_alone_would():
    above = {"task": [{"task": "glue/cola", "epochs": 3}], "epochs": 5, "lr": 1e-3}
    made = [grid.make({**above, "blocks": [{"method": method}]}).runs for method in ("automl", ["automl"])]
    assert made[0] == made[1]


def test_blocks_add_to_the_common_options_and_a_run_of_two_blocks_is_run_once():
    study = grid.make({"task": "mr", "blocks": [{"size": [8, 64]}, {"name": "one", "size": 64}, {"method": "full"}]})
    assert [len(block.runs) for block in study.blocks] == [2, 1, 1]
    assert [block.name for block in study.blocks] == ["block 1", "one", "block 3"]
    assert len(study.runs) == 3


def test_a_mapping_in_a_list_adds_its_own_options():
    runs = grid.make({"task": ["mr", {"task": "glue/sst2", "limit": 100}], "limit": 0}).runs
    assert values(runs, "task", "limit") == [("mr", 0), ("glue-sst2", 100)]
    runs = grid.make({"limit": 0, "task": ["mr", {"task": "glue/sst2", "limit": 100}]}).runs
    assert values(runs, "task", "limit") == [("mr", 0), ("glue-sst2", 100)]


def test_each_of_several_methods_takes_the_options_that_it_uses():
    runs = grid.make({"task": "mr", "method": ["adapter", "full", "top"], "size": [8, 16], "top": [1, 2]}).runs
    assert values(runs, "method", "size", "top") == [
        *(("adapter", 8, 1), ("adapter", 16, 1), ("full", 64, 1), ("top", 64, 1), ("top", 64, 2))
    ]


def test_an_option_that_the_only_method_does_not_use_is_a_mistake():
    with pytest.raises(ConfigError, match="size is 8, but method 'full' does not use it"):
        grid.make({"task": "mr", "method": "full", "size": [8, 64]})


def test_the_file_overrides_the_catalogs_options_and_overrides_override_the_file():
    assert values(grid.make({"task": "squad/v1"}).runs, "max_length") == [(384,)]
    assert values(grid.make({"task": "squad/v1", "max_length": 128}).runs, "max_length") == [(128,)]
    given = grid.make({"task": "mr", "device": "cuda"}, {"device": "cpu"}, {"backbone": "x", "device": "auto"}).runs
    assert values(given, "device", "backbone") == [("cpu", "x")]


def test_a_file_may_have_dashes_in_its_names(tmp_path):
    (tmp_path / "s.yaml").write_text("task: mr\nmax-length: [16, 32]\nselect: {per: max-length, seeds: [1, 2]}\n")
    study = grid.read(tmp_path / "s.yaml")
    assert values(study.runs, "max_length") == [(16,), (32,)]
    assert study.blocks[0].select == grid.Select(("max_length",), "best", (1, 2))


@pytest.mark.parametrize(
    ("seeds", "select", "further"), [(1, 5, 4), (5, 5, 0), ([0], [0], 0), ([7], [0, 1], 2), (3, [], 0)]
)
def test_the_runs_after_the_selection_are_counted(seeds, select, further):
    block = {"task": ["mr", "subj"], "size": [8, 64], "seeds": seeds, "select": {"seeds": select}}
    assert grid.make(block).further == 2 * further


def test_all_mistakes_are_reported_together_with_their_blocks():
    blocks = [{"size": [0, 8]}, {"name": "odd", "sise": 8, "lr": "much"}, {"select": {"per": "colour"}}]
    with pytest.raises(ConfigError) as caught:
        grid.make({"task": "mr", "blocks": blocks})
    mistakes = caught.value.mistakes
    assert mistakes[0].startswith("block 1: size is 0; it must be")
    assert any(one.startswith("odd: 'sise' is not an option of a run. Did you mean 'size'?") for one in mistakes)
    assert any(one.startswith("odd: lr is 'much'; it must be a number") for one in mistakes)
    assert any(one.startswith("block 3: select: 'colour' is not an option") for one in mistakes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 8}, "task is missing"),
        ({"task": "mine"}, "'mine' is not a task of the catalog, so it needs 'train'"),
        ({"task": "mr", "seeds": 0}, "seeds is 0; it must be a number of seeds .* or a list"),
        ({"task": "mr", "seeds": "three"}, "seeds is 'three'"),
        ({"task": "mr", "select": "best"}, "select is 'best'; it takes per, by and seeds"),
        ({"task": "mr", "select": {"by": "luck"}}, "by is 'luck'; it must be one of best, mean, repeated"),
        ({"task": "mr", "blocks": []}, "'blocks' must be a list of blocks"),
        ([], "A study consists of 'name: value' lines"),
        ({"task": "mr", "size": []}, "size is an empty list, so there is nothing to run"),
        ({"task": "mr", "seeds": []}, "seed is an empty list, so there is nothing to run"),
        ({"task": "mr", "seed": 3, "seeds": 2}, "seed is 3 and seeds is 2; give one of them"),
        ({"task": ["mr", "my task"], "train": "t.csv"}, "'my task' cannot be a task name; use 1 to 100 of"),
        ({"task": "mine@2", "train": "t.csv"}, "'mine@2' cannot be a task name"),
        ({"task": "glue/colla"}, "Did you mean 'glue/cola'"),
        ({"task": "mr", "seeds": 10**9}, "seeds is 1000000000; it must be a number of seeds .at most 100,000"),
        ({"task": "mr", "size": [8] * 1000, "seeds": 1000}, "its lists make 1,000,000 runs"),
        ({"task": "mr"} | {f"o{i}": [1, 2] for i in range(20000)}, "its lists make more than 10.12 runs"),
        ({"task": "mr", "seeds": 60_000, "blocks": [{"lr": 1e-3}, {"lr": 1e-4}]}, "its lists make 60,000 runs"),
        ({"task": "mr", "seeds": 2, "select": {"per": "seed", "seeds": 90_000}}, "select adds up to 180,000 runs"),
    ],
)
def test_an_invalid_study_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        grid.make(given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read as YAML"),
        (None, "There is no file"),
        ("task: mr\nsize: 8\nsize: 16", "'size' occurs twice"),
        ("- 1", "s.yaml is not a study"),
    ],
)
def test_an_unreadable_file_is_reported_in_one_sentence(tmp_path, text, message):
    if text:
        (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        grid.read(tmp_path / "s.yaml")
    assert "\n" not in str(caught.value)


def test_a_run_is_named_by_its_differing_options():
    runs = grid.make({"task": "mr", "size": 8, "lr": 3e-4, "epochs": 3, "sigma": [1e-2, 1e-3]}).runs
    assert grid.describe(runs[1], grid.differing(runs)) == "mr adapter size 8 lr 0.0003 epochs 3 seed 0 sigma 0.001"
    (full,) = grid.make({"task": "mr", "method": "full", "lr": 3e-5, "epochs": 3}).runs
    assert grid.describe(full) == "mr full lr 3e-05 epochs 3 seed 0"


def test_a_recorded_config_is_returned_with_other_seeds():
    (run,) = grid.make({"task": "mr", "seeds": [4]}).runs
    record = {"config": {**run.to_json(), "data": {}, "backbone_sha256": "x"}}
    assert grid.options(record) == run
    assert values(grid.with_seeds(record["config"], [4, 5]), "seed") == [(4,), (5,)]
    assert grid.options({"config": {"task": "mr"}}) is None


def test_the_newest_record_with_scores_of_a_run_counts():
    (run,) = grid.make({"task": "mr"}).runs
    made = [
        {"config": run.to_json(), "created": "2026-01-02", "failure": "no data"},
        {"config": run.to_json(), "created": "2026-01-01", "data": "old"},
        {"config": run.to_json(), "created": "2026-01-03", "data": "new"},
        {"config": {"task": "of another version"}},
    ]
    for order in (made, made[::-1]):
        assert grid.latest(order) == {run: made[2]}
    assert grid.latest(made[:1]) == {run: made[0]}


def test_an_option_that_a_method_does_not_use_makes_no_difference():
    blocks = [{"method": "automl", "trials": 2}, {"method": "bitfit", "lr": 1e-3, "epochs": 1}]
    runs = grid.make({"task": "mr", "blocks": blocks}).runs
    assert [grid.describe(run, grid.differing(runs)) for run in runs] == [
        "mr automl seed 0",
        "mr bitfit lr 0.001 epochs 1 seed 0",
    ]
