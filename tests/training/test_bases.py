"""Claims about `--on`: a run stands on a trained task, which it neither changes nor copies, and cannot lose."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from adapterbank.api.opened import open_bank
from adapterbank.encoder.batch import pack
from adapterbank.encoder.forward import forward
from adapterbank.errors import BackboneMismatch, ConfigError, InputError, PackageDamaged, PackageRequired
from adapterbank.inference import graphs
from adapterbank.inference.engine import Engine
from adapterbank.inference.loading import content_name
from adapterbank.inference.runner import segments
from adapterbank.methods import Options
from adapterbank.slots import heads
from adapterbank.slots.plan import Head, Plan, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import FORMAT, STACKED
from adapterbank.storage.reading import seal
from adapterbank.studies import size_search
from adapterbank.training import graph_step, loop, together
from adapterbank.training.bases import Base
from adapterbank.training.graph_rule import ALWAYS
from jobs import assert_close, job_on, train_jobs
from plain_kernels import PLAIN
from short_runs import quick, stopped_once_saved
from small_data import flags, pairs, reviews, scores, shell, snapshot, write

ROWS, PAIRS = reviews(), pairs()
TEXTS = [text for text, _ in ROWS[:6]]


@pytest.fixture
def bank(tmp_path, bert, no_flush):
    return open_bank(tmp_path / "bank", bert, device="cpu")


@pytest.fixture
def stacked(bank):
    """Return a bank with a task and two that stand on it, one of them with LayerNorms of its own."""
    bank.train("shared", ROWS, ROWS, **quick())
    bank.train("a", PAIRS, PAIRS, **quick(on="shared"))
    bank.train("b", scores(), scores(), **quick(on="shared@1", train_norms=False))
    return bank


def tensors_of(bank, ref):
    return {name: torch.tensor(array) for name, array in bank.bank.get(ref).tensors().items()}


def computed_apart(bank, ref, texts):
    """Return a task's outputs from the files of its packages alone, put one on the other by the test."""
    chain = [bank.show(ref)]
    while chain[0].requires:
        chain.insert(0, bank.show("{name}@{version}".format(**chain[0].requires[0])))
    stacks, below = Stacks(bank.backbone.tensors), []
    for made in chain:
        slot = stacks.put(Plan.from_json(made.method), tensors_of(bank, f"{made.name}@{made.version}"), *below)
        below = [slot]
    rows = bank.backbone.tokenize(*texts) if isinstance(texts, tuple) else bank.backbone.tokenize(texts)
    batch, route = pack(rows), Route(stacks, segments([(slot, len(row)) for row in rows]))
    with torch.inference_mode():
        (found,) = heads.outputs(forward(bank.backbone.config, route, batch), batch, route)
    return found.numpy()


def values(bank, task, texts=TEXTS):
    """Return the probabilities or the number of each text's answer."""
    found = bank.predict(task, texts, [PAIRS[0][1]] * len(texts) if task == "a" else None)
    return np.array([[one.value] if one.value is not None else list(one.probabilities.values()) for one in found])


# --- training


def test_a_run_stands_on_the_version_that_its_manifest_and_record_name(stacked):
    base = stacked.show("shared")
    named = [{"name": "shared", "version": 1, "weights_sha256": base.weights_sha256}]
    for task in ("a", "b"):
        made = stacked.show(task)
        assert (made.requires, made.format) == (named, STACKED)
        (record,) = [one for one in records.read_all(stacked.bank.records_path) if one.get("package") == f"{task}@1"]
        assert record["on"] == named[0]
        assert record["config"]["on_sha256"] == base.weights_sha256
    assert json.loads((stacked.bank.get("a").path / "manifest.json").read_bytes())["format"] == STACKED
    plain = json.loads((stacked.bank.get("shared").path / "manifest.json").read_bytes())
    assert (plain["format"], "requires" in plain) == (FORMAT, False)


def test_a_package_has_only_its_own_tensors_by_their_own_names(stacked):
    assert {*tensors_of(stacked, "a")} == {*tensors_of(stacked, "shared")}
    own = {name for name in tensors_of(stacked, "shared") if ".norm." not in name}
    assert {*tensors_of(stacked, "b")} == own


def test_training_leaves_every_byte_of_what_it_stands_on(bank):
    bank.train("shared", ROWS, ROWS, **quick())
    before = snapshot(bank.path / "tasks" / "shared")
    bank.train("t", PAIRS, PAIRS, **quick(on="shared"))
    assert snapshot(bank.path / "tasks" / "shared") == before


@pytest.mark.parametrize("train_norms", [True, False])
def test_trained_layer_norms_begin_as_those_of_the_base(bank, train_norms):
    bank.train("shared", ROWS, ROWS, **quick())
    bank.train("t", PAIRS, PAIRS, **quick(on="shared", train_norms=train_norms, lr=1e-12))
    base, own = tensors_of(bank, "shared"), tensors_of(bank, "t")
    norms = [name for name in own if ".norm." in name]
    assert bool(norms) == train_norms
    for name in norms:
        torch.testing.assert_close(own[name], base[name], atol=1e-6, rtol=0)
        assert not torch.equal(base[name], bank.backbone.tensors[name])


@pytest.mark.parametrize("method", ["adapter", "lora", "ia3", "layernorm", "bitfit", "feature"])
def test_every_method_stands_on_every_other(bank, method):
    for below in ("adapter", "lora"):
        bank.train(below, ROWS, ROWS, **quick(below))
        bank.train("t", ROWS, ROWS, **quick(method, on=below))
        np.testing.assert_allclose(
            np.array(bank.engine.outputs(bank.backbone.tokenize(TEXTS), [bank._load_task("t")] * 6)),
            computed_apart(bank, "t", TEXTS),
            atol=1e-5,
        )
    assert [(one.ref, one.ok) for one in bank.audit() if not one.ok] == []


def test_few_labels_stand_on_a_task_too(bank):
    bank.train("shared", ROWS, ROWS, **quick())
    result = bank.train("t", reviews(8), size=4, on="shared", max_length=32)
    assert "fitted" in result.record
    found = bank.engine.outputs(bank.backbone.tokenize(TEXTS), [bank._load_task("t")] * 6)
    np.testing.assert_allclose(np.array(found)[:, 0].shape, (6,))
    assert any("on the encoder with shared@1" in note for note in result.notes)
    assert all(one.ok for one in bank.audit())


def test_a_resumed_run_ends_as_an_unbroken_one(bank, monkeypatch):
    bank.train("shared", ROWS, ROWS, **quick())
    whole = bank.train("t", PAIRS, PAIRS, **quick(on="shared")).package.tensors()
    stopped_once_saved(monkeypatch, lambda: bank.train("t", PAIRS, PAIRS, **quick(on="shared")))
    again = bank.train("t", PAIRS, PAIRS, resume=True, **quick(on="shared"))
    assert "Resuming after epoch 1." in again.notes
    assert all(np.array_equal(array, whole[name]) for name, array in again.package.tensors().items())


def test_runs_on_different_bases_train_in_one_batch_as_alone(bank, monkeypatch):
    file = str(write(bank.path.parent / "t.csv", ROWS))
    for seed, name in enumerate(("s", "t")):
        bank.train(name, ROWS, ROWS, **quick(seed=seed))
    grouped = []
    group = loop.group_jobs
    monkeypatch.setattr(loop, "group_jobs", lambda *given: grouped.append(group(*given)) or grouped[-1])
    study = {"task": "u", "train": file, "dev": file, "on": ["none", "s", "t"], **quick(device="cpu")}
    bank.sweep(study, keep="all")
    assert [[len(jobs) for jobs in one.values()] for one in grouped] == [[3]]
    swept = {one["config"].get("on", "none"): one for one in records.read_all(bank.bank.records_path)
             if one["config"]["task"] == "u"}  # fmt: skip
    assert {*swept} == {"none", "s", "t"}
    for on, record in swept.items():
        alone = bank.train("u", file, file, **quick(on=on)).package
        for name, array in bank.bank.get(record["package"]).tensors().items():
            np.testing.assert_allclose(alone.tensors()[name], array, atol=1e-5, err_msg=f"{on} {name}")


def test_the_option_reaches_shell_and_yaml(bank):
    bank.train("shared", ROWS, ROWS, **quick())
    file = write(bank.path.parent / "t.csv", ROWS)
    common = ["train", "--bank", bank.path, "--task", "t", "--train", file, "--dev", file, "--device", "cpu", "--json"]
    found = shell(*common, "--on", "shared@1", *flags(quick()))
    assert (found.code, found.json["on"]["name"]) == (0, "shared"), found.err
    config = bank.path.parent / "config.yaml"
    config.write_text("on: shared\nbackbone: " + bank.backbone.name + "\n")
    again = shell(*common, "--config", config, *flags(quick()))
    assert (again.code, again.json["config"]["on"]) == (0, "shared"), again.err
    assert again.json["metrics"] == found.json["metrics"]
    assert f"shared@1 ({bank.show('shared').weights_sha256[:12]})" in repr(bank.show("t"))


# --- use


def test_stacked_tasks_are_beside_all_others_as_alone(stacked):
    tasks = ["a", "b", "shared"]
    apart = {task: values(open_bank(stacked.path, stacked.backbone, device="cpu"), task) for task in tasks}
    mixed = stacked.predict(
        [task for _ in TEXTS for task in ("b", "shared", None)], [text for text in TEXTS for _ in range(3)]
    )
    np.testing.assert_allclose([[one.value] for one in mixed[::3]], apart["b"], atol=1e-5)
    np.testing.assert_allclose([list(one.probabilities.values()) for one in mixed[1::3]], apart["shared"], atol=1e-5)
    np.testing.assert_allclose(values(stacked, "a"), apart["a"], atol=1e-5)


def test_predictions_are_those_of_the_packages_put_one_on_the_other(stacked):
    rows = stacked.backbone.tokenize(TEXTS)
    found = stacked.engine.outputs(rows, [stacked._load_task("b")] * len(rows))
    np.testing.assert_allclose(np.array(found), computed_apart(stacked, "b", TEXTS), atol=1e-5)
    bare = stacked.show("b").method
    stacks = Stacks(stacked.backbone.tensors)
    slot = stacks.put(Plan.from_json(bare), tensors_of(stacked, "b"))
    batch, route = pack(rows), Route(stacks, segments([(slot, len(row)) for row in rows]))
    with torch.inference_mode():
        (without,) = heads.outputs(forward(stacked.backbone.config, route, batch), batch, route)
    assert np.abs(without.numpy() - np.array(found)).max() > 1e-3  # the base matters


def test_what_several_tasks_stand_on_is_in_memory_once(stacked):
    engine = Engine(stacked.backbone, device="cpu", programs=False)
    bank = stacked.bank
    sizes = {}
    for task in ("shared", "a", "b"):
        engine.load(bank.get(task), content_name(bank.get(task)))
        sizes[task] = engine.slots.bytes
    alone = Engine(stacked.backbone, device="cpu", programs=False)
    alone.load(bank.get("b"))
    assert len(engine.residents) == 3
    assert alone.slots.bytes == sizes["shared"] + sizes["b"] - sizes["a"]
    assert len(alone.residents) == 2
    alone.remove("b@1")
    assert (alone.residents, alone.slots.bytes) == ({}, 0)


def test_what_is_asked_for_outlives_those_that_stand_on_it_and_the_reverse(stacked):
    engine, bank = Engine(stacked.backbone, device="cpu", programs=False), stacked.bank
    base = content_name(bank.get("shared"))
    engine.load(bank.get("a"), "a")
    assert engine.load(bank.get("shared"), base) == base
    engine.remove("a")
    assert [*engine.residents] == [base]
    engine.load(bank.get("a"), "a")
    rows = stacked.backbone.tokenize(TEXTS)
    before = engine.outputs(rows, ["a"] * 6)
    size = engine.slots.bytes
    assert engine.load(bank.get("shared"), base) == base
    assert engine.slots.bytes == size
    engine.remove(base)
    assert {*engine.residents} == {base, "a"}
    assert np.array_equal(np.array(engine.outputs(rows, ["a"] * 6)), np.array(before))
    engine.remove("a")
    assert not engine.residents


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0, 1.7])
def test_a_small_budget_changes_no_result(stacked, share):
    whole, bank = Engine(stacked.backbone, device="cpu"), stacked.bank
    for task in ("shared", "a", "b"):
        whole.load(bank.get(task), content_name(bank.get(task)))
    names = [*whole.residents]
    small = Engine(stacked.backbone, device="cpu", budget=int(share * whole.slots.bytes / 2))
    for task in ("b", "a", "shared"):
        small.load(bank.get(task), content_name(bank.get(task)))
    rows = stacked.backbone.tokenize(TEXTS)
    for chosen in (names, names[::-1], names[:1], names[1:], names * 2):
        tokens = [row for row in rows for _ in chosen]
        tasks = [name for _ in rows for name in chosen]
        for ours, theirs in zip(small.outputs(tokens, tasks), whole.outputs(tokens, tasks), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        handles = [small.slots.find(name) for name in names]
        assert all(one.users == 0 for one in handles)
        assert handles[0].carries == sum(one.slot is not None for one in handles[1:])
        if share:
            assert small.slots.bytes <= max(small.slots.budget, sum(one.bytes for one in handles))
    assert bool(small.slots.evictions or small.slots.loads) == (share < 2)


def test_the_audit_covers_what_a_task_stands_on(stacked):
    assert [(one.ref, one.ok, one.how) for one in stacked.audit()] == [
        (ref, True, "to the bit") for ref in ("a@1", "b@1", "shared@1")
    ]
    weights = stacked.bank.get("shared").path / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    stacked.train("c", ROWS, ROWS, **quick())
    found = {one.ref: one for one in stacked.audit()}
    assert {ref: one.ok for ref, one in found.items()} == {"a@1": False, "b@1": False, "c@1": True, "shared@1": False}
    assert "has been changed" in found["a@1"].how


def test_the_list_counts_what_tasks_stand_on_once(stacked):
    encoder = stacked.backbone.parameters
    trained = sum(stacked.show(task).params["trained"] for task in ("a", "b", "shared"))
    stacked.train("shared", ROWS, ROWS, **quick(seed=5))
    newer = stacked.show("shared@2").params["trained"]
    expected = f"{(encoder + trained + newer) / encoder:.2f}× the encoder's"
    assert expected in repr(stacked.tasks())
    assert expected in repr(stacked)
    assert expected in shell("tasks", "--bank", stacked.path).out


def test_a_chain_is_computed_checked_and_kept(stacked):
    stacked.train("top", PAIRS, PAIRS, **quick(on="b"))
    texts = (TEXTS, [PAIRS[0][1]] * 6)
    rows = stacked.backbone.tokenize(*texts)
    found = stacked.engine.outputs(rows, [stacked._load_task("top")] * len(rows))
    np.testing.assert_allclose(np.array(found), computed_apart(stacked, "top", texts), atol=1e-5)
    assert all(one.ok for one in stacked.audit())
    with pytest.raises(PackageRequired, match=r"b@1 cannot be removed, because top@1 stands on it; remove it first\."):
        stacked.remove("b")


# --- what is protected


def test_what_tasks_stand_on_cannot_be_removed(stacked):
    before = snapshot(stacked.path)
    message = r"shared@1 cannot be removed, because a@1, b@1 stand on it; remove them first\."
    for ref in ("shared", "shared@1"):
        with pytest.raises(PackageRequired, match=message):
            stacked.remove(ref)
    refused = shell("remove", "--bank", stacked.path, "--task", "shared", "--yes")
    assert (refused.code, "because a@1, b@1 stand on it" in refused.err) == (2, True), refused
    assert snapshot(stacked.path) == before
    stacked.remove("a")
    stacked.remove("b@1")
    stacked.remove("shared")
    assert not stacked.tasks()


def test_a_task_without_what_it_stands_on_is_listed_as_a_problem_and_no_rollback_leads_to_it(stacked):
    stacked.train("b", ROWS, ROWS, **quick())
    assert stacked.rollback("b") == 1
    assert stacked.rollback("b", to=2) == 2
    shutil.rmtree(stacked.path / "tasks" / "shared")
    missing = "stands on shared@1, which is not in this bank; restore that version from a copy of the bank"
    packages, problems = stacked.bank.listing()
    assert [package.ref for package in packages] == ["b@2"]
    (problem,) = problems
    assert problem.startswith(f"a@1 {missing}")
    found = shell("tasks", "--bank", stacked.path)
    assert f"a@1 {missing}" in found.err
    with pytest.raises(PackageDamaged, match=rf"b@1 {missing}"):
        stacked.rollback("b", to=1)
    assert stacked.bank.default("b") == 2


def test_a_run_protects_what_it_stands_on_until_it_has_ended(bank, monkeypatch):
    bank.train("shared", ROWS, ROWS, **quick())
    refused = []

    def stop(progress):
        with pytest.raises(PackageRequired, match=r"because the unfinished run .* of 'a' stands on it") as caught:
            bank.remove("shared")
        refused.append(caught)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bank.train("a", ROWS, ROWS, watch=stop, **quick(on="shared"))
    assert refused
    bank.remove("shared")  # nothing of the run was saved
    bank.train("shared", ROWS, ROWS, **quick())
    stopped_once_saved(monkeypatch, lambda: bank.train("a", ROWS, ROWS, **quick(on="shared")))
    with pytest.raises(PackageRequired, match="let a run end, or remove its state by gc --runs"):
        bank.remove("shared")
    bank.train("a", ROWS, ROWS, resume=True, **quick(on="shared"))
    with pytest.raises(PackageRequired, match=r"because a@1 stands on it; remove it first\.$"):
        bank.remove("shared")
    assert not list(bank.bank.runs_path.iterdir())


def test_a_base_that_tasks_stand_on_while_they_teach_is_protected(bank, monkeypatch):
    bank.train("shared", ROWS, ROWS, **quick())

    def remove(*given):
        with pytest.raises(PackageRequired, match="the unfinished run"):
            bank.remove("shared")
        raise KeyboardInterrupt

    monkeypatch.setattr(together._Together, "score", remove)
    with pytest.raises(KeyboardInterrupt):
        bank.teach_together({"a": ROWS, "b": ROWS}, "both", **quick(on="shared"))
    assert not list(bank.bank.runs_path.iterdir())
    bank.remove("shared")


def test_versions_of_one_task_that_stand_on_each_other_are_removed_together(bank):
    bank.train("t", ROWS, ROWS, **quick())
    bank.train("t", ROWS, ROWS, **quick(on="t@1"))
    with pytest.raises(PackageRequired, match="because t@2 stands on it"):
        bank.remove("t@1")
    bank.remove("t")
    assert not bank.tasks()


def test_gc_keeps_what_tasks_stand_on(stacked):
    for seed in (1, 2):
        stacked.train("shared", ROWS, ROWS, **quick(seed=seed))
    assert stacked.gc() == []
    assert stacked.bank.versions("shared") == [1, 2, 3]
    stacked.remove("a")
    stacked.remove("b")
    assert [one.path.name for one in stacked.gc(dry_run=True)] == ["1"]
    stacked.gc()
    assert stacked.bank.versions("shared") == [2, 3]


# --- other commands


def test_pruning_and_ablation_remove_only_the_own_adapters(stacked):
    found = stacked.ablate("a", PAIRS)
    assert found["layers"] == [0, 1, 2]
    manifest, tensors = stacked.show("a"), tensors_of(stacked, "a")
    plan = Plan.from_json(manifest.method)
    base = stacked.show("shared")
    stacks = Stacks(stacked.backbone.tensors)
    under = stacks.put(Plan.from_json(base.method), tensors_of(stacked, "shared"))
    kept = {name: tensor for name, tensor in tensors.items() if not plan.removes(name, (0, 1, 2))}
    slot = stacks.put(plan.without((0, 1, 2)), kept, under)
    rows = stacked.backbone.tokenize([text for text, _, _ in PAIRS], [pair for _, pair, _ in PAIRS])
    batch, route = pack(rows), Route(stacks, segments([(slot, len(row)) for row in rows]))
    with torch.inference_mode():
        (outputs,) = heads.outputs(forward(stacked.backbone.config, route, batch), batch, route)
    names = manifest.task["labels"]
    right = [names[k] == label for k, (_, _, label) in zip(outputs.argmax(1).tolist(), PAIRS, strict=True)]
    (bare,) = [one for one in found["spans"] if (one["first"], one["last"]) == (0, 2)]
    assert bare["scores"]["accuracy"] == pytest.approx(np.mean(right))
    _, result = stacked.prune("a", PAIRS, tolerance=100.0)
    assert result.package.manifest.requires == manifest.requires
    assert not [name for name in result.package.tensors() if ".adapter." in name]
    assert all(one.ok for one in stacked.audit())


def test_soups_are_of_packages_on_one_base(stacked):
    stacked.train("b", scores(), scores(), **quick(on="shared", train_norms=False, lr=0.005))
    made = stacked.soup(["b@1", "b@2"])
    assert made.requires == stacked.show("b@1").requires
    assert all(one.ok for one in stacked.audit())
    stacked.train("b", scores(), scores(), **quick(train_norms=False))
    with pytest.raises(InputError, match=r"they stand on different packages, shared@1 and nothing; train each"):
        stacked.soup(["b@1", "b@4"])


def test_a_run_starts_only_from_what_stands_where_it_does(stacked):
    started = stacked.train("c", PAIRS, PAIRS, **quick(on="shared", start_from="a"))
    assert started.record["start_from"]["package"] == "a@1"
    for options, message in (
        ({"start_from": "a"}, r"a@1 stands on shared@1, and this run on nothing; use the same --on"),
        ({"start_from": "shared", "on": "shared"}, r"shared@1 stands on nothing, and this run on shared@1; use the"),
    ):
        with pytest.raises(ConfigError, match=message):
            stacked.train("c", PAIRS, PAIRS, **quick(**options))


def test_a_bank_is_copied_with_what_its_tasks_stand_on(stacked, tmp_path, bert):
    before = values(stacked, "a")
    shutil.copytree(stacked.path, tmp_path / "copy")
    np.testing.assert_array_equal(values(open_bank(tmp_path / "copy", bert, device="cpu"), "a"), before)


def test_a_package_is_put_only_beside_what_it_stands_on(stacked, tmp_path, bert):
    other = Bank.open(tmp_path / "other", bert.reference, create=True)
    one, base = stacked.bank.get("a"), stacked.bank.get("shared")
    before = snapshot(other.path / "tasks")
    with pytest.raises(PackageDamaged, match=r"The package 'a' stands on shared@1, which is not in this bank"):
        other.put(one.manifest, one.tensors())
    assert snapshot(other.path / "tasks") in (before, {})
    other.put(base.manifest, base.tensors())
    other.put(one.manifest, one.tensors())
    np.testing.assert_array_equal(values(open_bank(other.path, bert, device="cpu"), "a"), values(stacked, "a"))


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": "nobody"}, r"on: 'nobody' is not a task of this bank\."),
        ({"on": "shared@7"}, r"'shared' has no version 7"),
        ({"on": "bank/tasks/shared/1"}, r"on is 'bank/tasks/shared/1', a path; name a task of this bank"),
        ({"on": "shared", "method": "full"}, r"on is 'shared', but method 'full' changes whole layers; use another"),
        ({"on": "whole"}, r"on is 'whole', but whole@1 cannot carry this run: a package that changes whole layers"),
        ({"on": "shared", "method": "automl"}, r"on is 'shared', but method 'automl' does not use it; leave it out\."),
    ],
)
def test_what_cannot_carry_a_run_is_refused(bank, options, message):
    bank.train("shared", ROWS, ROWS, **quick())
    if options["on"] == "whole":
        bank.train("whole", ROWS, ROWS, **quick("top"))
    before = snapshot(bank.path)
    given = quick(**options)
    given = {name: given[name] for name in ("method", "on", "few")} if given["method"] == "automl" else given
    with pytest.raises(Exception, match=message):
        bank.train("t", PAIRS, PAIRS, **given)
    assert snapshot(bank.path) == before


def test_a_new_bank_has_nothing_to_stand_on(bank):
    with pytest.raises(ConfigError, match=r"on is 's', but there is no bank to find it in; train that task first\."):
        bank.train("t", PAIRS, PAIRS, **quick(on="s"))


def rewrite(package, **changes):
    """Write other fields into a manifest, with a checksum that matches them."""
    file = package.path / "manifest.json"
    value = json.loads(file.read_bytes())
    value.pop("checksum")
    file.write_text(json.dumps(seal({**value, **changes})))


def missing(bank):
    shutil.rmtree(bank.bank.get("shared").path)


def changed(bank):
    rewrite(bank.bank.get("a"), requires=[{**bank.show("a").requires[0], "weights_sha256": "0" * 64}])


def another(bank):
    shutil.rmtree(bank.bank.get("shared").path)
    shutil.copytree(bank.bank.get("c").path, bank.path / "tasks" / "shared" / "1")


def circle(bank):
    made = bank.bank.get("a").manifest
    own = {"name": "a", "version": 1, "weights_sha256": made.weights_sha256}
    rewrite(bank.bank.get("shared"), requires=[own], format=STACKED)


def elsewhere(bank):
    rewrite(bank.bank.get("a"), requires=[{**bank.show("a").requires[0], "name": "../../c"}])


def several(bank):
    rewrite(bank.bank.get("a"), requires=bank.show("a").requires * 2)


def whole_layers(bank):
    bank.train("shared", ROWS, ROWS, **quick("full"))
    made = bank.show("shared@2")
    rewrite(bank.bank.get("a"), requires=[{"name": "shared", "version": 2, "weights_sha256": made.weights_sha256}])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (missing, r"a@1 stands on shared@1, which is not in this bank; restore that version from a copy"),
        (changed, r"a@1 stands on shared@1 with the weights 000000000000, but the shared@1 of this bank has others"),
        (another, r"a@1 stands on shared@1, but .*shared/1 contains another package"),
        (circle, r"a@1 stands in a circle: a@1 on shared@1 on a@1; remove it and train it again"),
        (elsewhere, r"a@1 stands on '\.\./\.\./c', which is no name of a task"),
        (several, r"a@1 cannot be used \(it stands on several packages side by side, which only a fusion does"),
        (whole_layers, r"a@1 cannot be used \(a package that changes whole layers carries no other"),
    ],
)
def test_a_base_that_is_not_the_right_one_is_refused_for_its_tasks_alone(stacked, spoil, message):
    stacked.train("c", PAIRS, PAIRS, **quick())
    before = stacked.predict("c", TEXTS, [PAIRS[0][1]] * 6)
    spoil(stacked)
    fresh = open_bank(stacked.path, stacked.backbone, device="cpu")
    with pytest.raises(PackageDamaged, match=message):
        values(fresh, "a")
    after = fresh.predict("c", TEXTS, [PAIRS[0][1]] * 6)
    assert [one.probabilities for one in after] == [one.probabilities for one in before]
    assert not next(one for one in fresh.audit() if one.ref == "a@1").ok
    with pytest.raises(PackageDamaged):
        fresh.train("d", PAIRS, PAIRS, **quick(on="a"))


def test_an_encoder_that_differs_is_refused(stacked, tiny):
    with pytest.raises(BackboneMismatch, match=r"a@1 was trained on backbone"):
        Engine(tiny("roberta"), device="cpu").load(stacked.bank.get("a"))
    package = stacked.bank.get("shared")
    rewrite(package, backbone={**package.manifest.backbone, "sha256": "0" * 64})
    with pytest.raises(BackboneMismatch, match=r"a@1 stands on shared@1, which was trained on backbone .* \(000000"):
        Engine(stacked.backbone, device="cpu").load(stacked.bank.get("a"))


def test_sizes_and_starts_are_searched_on_a_base(stacked, monkeypatch):
    tried = []

    def train(encoder, jobs, **options):
        tried.extend(jobs)
        return loop.train(encoder, jobs, **options)

    monkeypatch.setattr(size_search, "SIZES", (2, 4))
    monkeypatch.setattr(size_search, "train", train)
    found = stacked.train("d", reviews(48), reviews(), few="never", on="shared", size="auto", epochs=1, max_length=32)
    assert found.record["on"]["name"] == "shared"
    assert found.package.manifest.requires[0]["name"] == "shared"
    norms = {name: tensor for name, tensor in tensors_of(stacked, "shared").items() if ".norm." in name}
    assert {job.plan.additions[0].size for job in tried} == {2, 4}
    assert all(job.base.ref == "shared@1" for job in tried)
    assert norms
    assert all(torch.equal(job.initial[name], tensor) for job in tried for name, tensor in norms.items())
    found = stacked.train("e", PAIRS, PAIRS, **quick(on="shared", start_from="auto"))
    assert found.package.manifest.requires[0]["name"] == "shared"
    assert all(one.ok for one in stacked.audit())


def test_where_steps_are_graphs_those_of_stacked_runs_are_eager_and_the_same(bert, new_slot, monkeypatch):
    plan = make_plan(Options(size=4), depth=3, head=Head("classification", 2))
    under = {name: tensor for name, tensor in new_slot(bert, plan, seed=9).items() if not name.startswith("head.")}
    base = Base(None, plan, under)
    plain = job_on(bert, new_slot, seed=1)
    jobs = [plain, replace(plain, base=base), replace(job_on(bert, new_slot, seed=2), base=base)]
    expected = train_jobs(bert, *jobs)
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graph_step, "find_kernels", lambda device: PLAIN)
    found = train_jobs(bert, *jobs, rule=ALWAYS)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)
    close = [torch.equal(found[0].tensors["weights"][name], found[1].tensors["weights"][name]) for name in under]
    assert not any(close)  # the base matters
