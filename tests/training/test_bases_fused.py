"""Claims about `--fuse`: a run weighs the adapters of trained tasks, which it neither changes nor copies."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from adapterbank.api import warm
from adapterbank.api.opened import open_bank
from adapterbank.errors import BackboneMismatch, ConfigError, InputError, PackageDamaged, PackageRequired
from adapterbank.inference.engine import Engine
from adapterbank.inference.loading import content_name
from adapterbank.slots.plan import Plan
from adapterbank.storage import records
from adapterbank.storage.package import STACKED
from plain_bert import bottleneck, plain_bert
from short_runs import stopped_once_saved
from small_data import FAST, flags, pairs, reviews, scores, shell, snapshot, write
from training.test_bases import rewrite, tensors_of, values

ROWS, PAIRS = reviews(), pairs()
TEXTS = [text for text, _ in ROWS[:6]]


@pytest.fixture
def bank(tmp_path, bert, no_flush):
    """Return a bank with three tasks to fuse."""
    made = open_bank(tmp_path / "bank", bert, device="cpu")
    made.train("a", ROWS, ROWS, **quick(size=4))
    made.train("b", PAIRS, PAIRS, **quick(size=3, seed=1))
    made.train("c", scores(), scores(), **quick(size=8, seed=2))
    return made


@pytest.fixture
def fused(bank):
    """Return the bank with two tasks that fuse others."""
    bank.train("f", ROWS, ROWS, **fusing("a,b,c"))
    bank.train("g", scores(), scores(), **fusing("c,a@1", train_norms=False))
    return bank


def quick(**options):
    return {**FAST, "few": "never", **options}


def fusing(names, **options):
    """Return the options of a short training that fuses tasks."""
    given = quick(fuse=names, lr=0.05, rank=4, **options)
    return {name: value for name, value in given.items() if name != "size"}


def named(bank, *refs):
    return [
        {"name": one.name, "version": one.version, "weights_sha256": one.weights_sha256} for one in map(bank.show, refs)
    ]


def by_formula(bank, ref, text):
    """Return a task's outputs for a text, from the files of its packages, in plain torch."""
    own = tensors_of(bank, ref)
    members = [tensors_of(bank, "{name}@{version}".format(**one)) for one in bank.show(ref).requires]

    def adapted(y, site):
        z = torch.stack([y + bottleneck(y, member, site) for member in members], 1)
        query, keys = y @ own[f"{site}.fusion.query"].T, z @ own[f"{site}.fusion.key"].T
        return torch.einsum("tk,tkd->td", torch.einsum("tr,tkr->tk", query, keys).softmax(-1), z)

    norms = {name: tensor for name, tensor in own.items() if ".norm." in name}
    out, head = plain_bert(bank.backbone, *bank.backbone.tokenize([text]), adapted, norms, own), bank.show(ref).method
    return (out * head["head"]["scale"] + head["head"]["shift"]).numpy()


def outputs_of(bank, ref, texts=TEXTS):
    return np.array(bank.engine.outputs(bank.backbone.tokenize(texts), [bank._load_task(ref)] * len(texts)))


# --- training


def test_a_run_fuses_the_versions_that_its_manifest_and_record_name(fused):
    for task, members in (("f", ["a", "b", "c"]), ("g", ["c", "a"])):
        made = fused.show(task)
        assert (made.requires, made.format) == (named(fused, *members), STACKED)
        (record,) = [one for one in records.read_all(fused.bank.records_path) if one.get("package") == f"{task}@1"]
        assert record["fuse"] == made.requires
        assert record["config"]["method"] == "fusion"
        assert record["config"]["fuse_sha256"] == [one["weights_sha256"] for one in made.requires]
        assert "on" not in record
    shown = repr(fused.show("f"))
    assert all(f"{ref}@1 ({fused.show(ref).weights_sha256[:12]})" in shown for ref in "abc")


def test_a_package_has_only_the_attention_the_norms_and_the_head(fused, bert):
    sites = [f"layers.{i}.{site}" for i in range(3) for site in ("attention", "feedforward")]
    attention = {f"{site}.fusion.{part}" for site in sites for part in ("query", "key")}
    norms = {name for name in bert.tensors if ".norm." in name}
    assert {*tensors_of(fused, "f")} == attention | norms | {"head.weight", "head.bias"}
    assert {*tensors_of(fused, "g")} == attention | {"head.weight", "head.bias"}
    params, tensors = fused.show("f").params, tensors_of(fused, "f")
    assert params["trained"] == sum(tensor.numel() for tensor in tensors.values())


def test_training_leaves_every_byte_of_the_members(bank):
    before = snapshot(bank.path / "tasks")
    bank.train("f", ROWS, ROWS, **fusing("a,b,c"))
    assert {name: data for name, data in snapshot(bank.path / "tasks").items() if not name.startswith("f")} == before


def test_every_tensor_of_the_fusion_trains(bank):
    start = bank.train("f", ROWS, ROWS, **fusing("a,b,c") | {"lr": 1e-12, "epochs": 1}).package.tensors()
    found = bank.train("f", ROWS, ROWS, **fusing("a,b,c")).package.tensors()
    assert all(not np.allclose(array, start[name], atol=1e-4) for name, array in found.items() if "head" not in name)
    queries = [array for name, array in start.items() if name.endswith("query")]
    assert queries
    assert all(np.abs(array).max() < 1e-6 for array in queries)  # at first the mean of the members
    norms = {name: array for name, array in start.items() if ".norm." in name}
    for name, array in norms.items():  # those of the encoder, not those of a member
        np.testing.assert_allclose(array, bank.backbone.tensors[name].numpy(), atol=1e-6)


@pytest.mark.parametrize("task", ["f", "g"])
def test_answers_are_those_of_the_formula(fused, task):
    found = outputs_of(fused, task)
    for text, out in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(out, by_formula(fused, task, text), atol=1e-5)
    assert [(one.ref, one.ok) for one in fused.audit() if not one.ok] == []


def test_a_resumed_run_ends_as_an_unbroken_one(bank, monkeypatch):
    whole = bank.train("f", ROWS, ROWS, **fusing("a,b")).package.tensors()
    stopped_once_saved(monkeypatch, lambda: bank.train("f", ROWS, ROWS, **fusing("a,b")))
    again = bank.train("f", ROWS, ROWS, resume=True, **fusing("a,b"))
    assert "Resuming after epoch 1." in again.notes
    assert all(np.array_equal(array, whole[name]) for name, array in again.package.tensors().items())


def test_few_labels_fuse_tasks_too(bank):
    result = bank.train("f", reviews(8), fuse="a,b", max_length=32)
    assert "fitted" in result.record
    assert any("on the encoder with a@1, b@1" in note for note in result.notes)
    assert all(one.ok for one in bank.audit())


def test_runs_of_a_study_train_together_as_alone(bank):
    file = str(write(bank.path.parent / "t.csv", ROWS))
    study = {"task": "u", "train": file, "dev": file, "method": ["adapter", "fusion"], "fuse": ["a,b", "b,c,a"]}
    bank.sweep({**study, **quick(device="cpu")}, keep="all")
    swept = [one for one in records.read_all(bank.bank.records_path) if one["config"]["task"] == "u"]
    fuses = [one["config"].get("fuse", "none") for one in swept]
    assert sorted(fuses) == ["a,b", "b,c,a", "none"]
    for fuse, record in zip(fuses, swept, strict=True):
        options = quick() if fuse == "none" else {k: v for k, v in quick(fuse=fuse).items() if k != "size"}
        alone = bank.train("u", file, file, **options).package.tensors()
        for name, array in bank.bank.get(record["package"]).tensors().items():
            np.testing.assert_allclose(alone[name], array, atol=1e-5, err_msg=f"{fuse} {name}")


def test_the_option_reaches_shell_yaml_and_python(bank):
    file = write(bank.path.parent / "t.csv", ROWS)
    common = ["train", "--bank", bank.path, "--task", "t", "--train", file, "--dev", file, "--device", "cpu", "--json"]
    options = fusing("")
    del options["fuse"]
    found = shell(*common, "--fuse", "a, b@1", *flags(options))
    assert (found.code, found.json["fuse"]) == (0, named(bank, "a", "b")), found.err
    config = bank.path.parent / "config.yaml"
    config.write_text(f"fuse: a,b\nbackbone: {bank.backbone.name}\n")
    again = shell(*common, "--config", config, *flags(options))
    assert (again.code, again.json["fuse"], again.json["metrics"]) == (0, found.json["fuse"], found.json["metrics"])
    listed = bank.train("t", ROWS, ROWS, fuse=["a", "b"], **options)
    assert listed.record["fuse"] == named(bank, "a", "b")


# --- use


def test_fused_tasks_are_beside_all_others_as_alone(fused):
    tasks = ["f", "a", "g"]
    apart = {task: outputs_of(open_bank(fused.path, fused.backbone, device="cpu"), task) for task in tasks}
    rows, names = fused.backbone.tokenize(TEXTS), [fused._load_task(task) for task in tasks]
    mixed = fused.engine.outputs([row for row in rows for _ in (*tasks, None)], [*names, None] * len(rows))
    for k, task in enumerate(tasks):
        np.testing.assert_allclose(np.array(mixed[k::4]), apart[task], atol=1e-5)


def test_members_are_in_memory_once(fused):
    engine, bank, sizes = Engine(fused.backbone, device="cpu", programs=False), fused.bank, {}
    before = 0
    for task in ("a", "b", "c", "f", "g"):
        engine.load(bank.get(task), content_name(bank.get(task)))
        sizes[task], before = engine.slots.bytes - before, engine.slots.bytes
    alone = Engine(fused.backbone, device="cpu", programs=False)
    alone.load(bank.get("f"))
    assert len(alone.residents) == 4
    assert alone.slots.bytes == sum(sizes[task] for task in "abcf")
    alone.load(bank.get("g"))
    assert alone.slots.bytes == engine.slots.bytes
    for name in ("f@1", "g@1"):
        alone.remove(name)
    assert (alone.residents, alone.slots.bytes) == ({}, 0)


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_a_small_budget_changes_no_result(fused, share):
    whole, bank = Engine(fused.backbone, device="cpu"), fused.bank
    names = [whole.load(bank.get(task), content_name(bank.get(task))) for task in ("a", "b", "c", "f", "g")]
    small = Engine(fused.backbone, device="cpu", budget=int(share * whole.slots.bytes))
    for task in ("g", "f", "c", "a", "b"):
        small.load(bank.get(task), content_name(bank.get(task)))
    rows = fused.backbone.tokenize(TEXTS)
    for chosen in (names, names[::-1], names[:1], names[3:], names[2:4], names * 2):
        tokens, tasks = [row for row in rows for _ in chosen], [name for _ in rows for name in chosen]
        for ours, theirs in zip(small.outputs(tokens, tasks), whole.outputs(tokens, tasks), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert all(small.slots.find(name).users == 0 for name in names)
    assert bool(small.slots.evictions or small.slots.loads) == (share < 1)


def test_the_list_counts_members_once(fused):
    encoder = fused.backbone.parameters
    trained = sum(fused.show(task).params["trained"] for task in "abcfg")
    assert f"{(encoder + trained) / encoder:.2f}× the encoder's" in repr(fused.tasks())


def test_a_task_stands_on_a_fused_one(fused):
    fused.train("top", PAIRS, PAIRS, **quick(on="f"))
    assert fused.show("top").requires == named(fused, "f")
    assert all(one.ok for one in fused.audit())
    rows = fused.backbone.tokenize(TEXTS)
    fresh = Engine(fused.backbone, device="cpu")
    found = np.array(fresh.outputs(rows, [fresh.load(fused.bank.get("top"))] * len(rows)))
    np.testing.assert_allclose(found, outputs_of(fused, "top"), atol=1e-5)
    assert len(fresh.residents) == 5
    with pytest.raises(PackageRequired, match=r"f@1 cannot be removed, because top@1 stands on it"):
        fused.remove("f")


def test_a_task_fuses_an_earlier_version_of_itself(bank):
    bank.train("a", ROWS, ROWS, **fusing("a@1,b"))
    assert bank.show("a").requires == named(bank, "a@1", "b")
    assert all(one.ok for one in bank.audit())
    with pytest.raises(ConfigError, match=r"a@2 is not trained on the bare encoder, but with other tasks beneath it"):
        bank.train("a", ROWS, ROWS, **fusing("a,b"))
    with pytest.raises(PackageRequired, match=r"a@1 cannot be removed, because a@2 stands on it"):
        bank.remove("a@1")
    bank.remove("a")
    assert [task.name for task in bank.tasks()] == ["b", "c"]


def test_a_base_that_is_taught_together_may_fuse_tasks(fused):
    options = {name: value for name, value in quick(fuse="a,b", rank=4).items() if name not in ("size", "few")}
    made = fused.teach_together({"x": ROWS, "y": PAIRS}, "shared", **options)
    assert made.package.manifest.requires == named(fused, "a", "b")
    fused.train("top", PAIRS, PAIRS, **quick(on="shared"))
    assert all(one.ok for one in fused.audit())


def test_starts_are_compared_on_the_same_members(fused):
    fused.train("f", ROWS, ROWS, **fusing("a,b"))
    found = fused.train("h", reviews(260), ROWS, **fusing("a,b", start_from="auto") | {"epochs": 1})
    assert found.record["fuse"] == named(fused, "a", "b")
    assert "f@2" in repr(found.record["starting"]["trials"])


def test_only_what_kernels_cover_is_compiled_ahead(fused):
    plans, longest = warm._plans_of(fused.path, fused.backbone)
    assert ([plan.method for plan in plans], longest) == (["adapter"] * 3, 32)


# --- other commands


def test_members_cannot_be_removed(fused):
    with pytest.raises(PackageRequired, match=r"a@1 cannot be removed, because f@1, g@1 stand on it"):
        fused.remove("a")
    fused.train("b", PAIRS, PAIRS, **quick())
    fused.train("b", PAIRS, PAIRS, **quick(seed=5))
    assert fused.gc() == []
    assert 1 in fused.bank.versions("b")
    fused.remove("f")
    fused.remove("b@1")
    with pytest.raises(PackageRequired, match=r"because g@1 stands on it"):
        fused.remove("c")


def test_pruning_and_ablation_remove_the_fusion_of_layers(fused):
    found = fused.ablate("f", ROWS)
    assert found["layers"] == [0, 1, 2]
    _, result = fused.prune("f", ROWS, tolerance=100.0)
    assert result.package.manifest.requires == fused.show("f@1").requires
    assert not [name for name in result.package.tensors() if ".fusion." in name]
    assert all(one.ok for one in fused.audit())
    (bare,) = [one for one in found["spans"] if (one["first"], one["last"]) == (0, 2)]
    dev = result.record["metrics"]["dev"]["accuracy"]
    assert bare["scores"]["accuracy"] == pytest.approx(dev)


def test_soups_are_of_one_set_of_members(fused):
    fused.train("f", ROWS, ROWS, **fusing("a,b,c") | {"lr": 0.01})
    made = fused.soup(["f@1", "f@2"])
    assert made.requires == fused.show("f@1").requires
    assert all(one.ok for one in fused.audit())
    fused.train("f", ROWS, ROWS, **fusing("a,b"))
    with pytest.raises(InputError, match=r"they stand on different packages, a@1, b@1, c@1 and a@1, b@1; train each"):
        fused.soup(["f@1", "f@4"])


def test_a_run_starts_only_from_what_fuses_the_same(fused):
    started = fused.train("h", PAIRS, PAIRS, **fusing("a,b,c", start_from="f"))
    assert started.record["start_from"]["package"] == "f@1"
    with pytest.raises(
        ConfigError, match=r"f@1 stands on a@1, b@1, c@1, and this run on a@1, b@1; use the same --fuse"
    ):
        fused.train("h", PAIRS, PAIRS, **fusing("a,b", start_from="f"))
    message = r"was trained with method 'adapter', and this run uses 'fusion'; name a task that fuses the same ones"
    with pytest.raises(ConfigError, match=message):
        fused.train("h", PAIRS, PAIRS, **fusing("a,b", start_from="a"))


def test_a_bank_is_copied_with_the_members(fused, tmp_path, bert):
    before = values(fused, "g")
    shutil.copytree(fused.path, tmp_path / "copy")
    np.testing.assert_array_equal(values(open_bank(tmp_path / "copy", bert, device="cpu"), "g"), before)


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fuse": "a"}, r"fuse is 'a'; it must name two tasks or more, each once, separated by commas\."),
        ({"fuse": "a,b,a"}, r"fuse is 'a,b,a'; it must name two tasks or more, each once"),
        ({"fuse": "a,,b"}, r"fuse is 'a,,b'; it must name two tasks or more"),
        (
            {"fuse": "a,a@1"},
            r"fuse is 'a,a@1', but a@1, a@1 cannot carry this run: a fusion needs two packages or more",
        ),
        ({"fuse": "none", "method": "fusion"}, r"fuse is 'none'; it must name two tasks or more"),
        ({"fuse": "a,nobody"}, r"fuse: 'nobody' is not a task of this bank\."),
        ({"fuse": "a,b@7"}, r"'b' has no version 7"),
        ({"fuse": "a,bank/tasks/b/1"}, r"fuse is 'bank/tasks/b/1', a path; name a task of this bank"),
        ({"fuse": "a,low"}, r"cannot carry this run: low@1 adds something else than adapters, or nothing"),
        ({"fuse": "a,whole"}, r"a package that changes whole layers carries no other and stands on none"),
        ({"fuse": "a,upper"}, r"upper@1 has no adapter at layers\.0\.attention; choose layers and sites where all"),
        ({"fuse": "a,stacked"}, r"stacked@1 is not trained on the bare encoder, but with other tasks beneath it"),
        ({"fuse": "a,f"}, r"f@1 is not trained on the bare encoder, but with other tasks beneath it"),
        ({"fuse": "a,b", "on": "c"}, r"fuse is 'a,b', but on is 'c', and fused tasks stand on the encoder; leave one"),
        ({"fuse": "a,b", "mix": 2}, r"mix is 2, but method 'fusion' does not use it"),
        ({"fuse": "a,b", "size": "8to4"}, r"size is '8to4', but method 'fusion' does not use it"),
        ({"fuse": "a,b", "size": "auto"}, r"size is 'auto', but method 'fusion' has no size"),
        ({"fuse": "a,b", "method": "adapter"}, r"fuse is 'a,b', but method 'adapter' does not use it"),
        ({"fuse": "a,b", "method": "automl"}, r"fuse is 'a,b', but method 'automl' does not use it"),
    ],
    ids=str,
)
def test_what_cannot_be_fused_is_refused(bank, options, message):
    name = options["fuse"].rpartition(",")[2]
    if name in ("low", "whole", "upper", "stacked", "f"):
        made = {"low": {"method": "lora"}, "whole": {"method": "top"}, "upper": {"layers": "upper", "size": 4},
                "stacked": {"on": "a", "size": 4}, "f": {"fuse": "a,b"}}[name]  # fmt: skip
        bank.train(name, ROWS, ROWS, **{k: v for k, v in quick().items() if k != "size"}, **made)
    before = snapshot(bank.path)
    with pytest.raises(Exception, match=message):
        bank.train("t", PAIRS, PAIRS, max_length=32, **options)
    assert snapshot(bank.path) == before


def test_tasks_of_some_layers_are_fused_there(bank):
    bank.train("upper", ROWS, ROWS, **quick(layers="upper"))
    bank.train("f", ROWS, ROWS, **fusing("a,upper", layers="upper"))
    assert {name.split(".")[1] for name in tensors_of(bank, "f") if ".fusion." in name} == {"1", "2"}
    assert all(one.ok for one in bank.audit())


def missing(bank):
    shutil.rmtree(bank.bank.get("b").path)


def damaged(bank):
    file = bank.bank.get("b").path / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def changed(bank):
    requires = bank.show("f").requires
    rewrite(bank.bank.get("f"), requires=[{**requires[0], "weights_sha256": "0" * 64}, *requires[1:]])


def circle(bank):
    rewrite(bank.bank.get("b"), requires=named(bank, "f", "a"), format=STACKED)


def one_alone(bank):
    rewrite(bank.bank.get("f"), requires=bank.show("f").requires[:1])


def twice(bank):
    rewrite(bank.bank.get("f"), requires=bank.show("f").requires[:1] * 2)


def other_method(bank):
    bank.train("low", ROWS, ROWS, **{k: v for k, v in quick(method="lora").items() if k != "size"})
    rewrite(bank.bank.get("f"), requires=named(bank, "a", "low"))


def of_a_fusion(bank):
    rewrite(bank.bank.get("f"), requires=named(bank, "a", "g"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (missing, r"f@1 stands on b@1, which is not in this bank; restore that version"),
        (damaged, r"tasks/b/1/weights.safetensors has been changed: its sha256 differs"),
        (changed, r"f@1 stands on a@1 with the weights 000000000000, but the a@1 of this bank has others"),
        (circle, r"f@1 stands in a circle: f@1 on b@1 on f@1; remove it and train it again"),
        (one_alone, r"f@1 cannot be used \(a fusion needs two packages or more, each of them once\)"),
        (twice, r"f@1 cannot be used \(a fusion needs two packages or more, each of them once\)"),
        (other_method, r"f@1 cannot be used \(low@1 adds something else than adapters, or nothing"),
        (of_a_fusion, r"f@1 cannot be used \(g@1 is not trained on the bare encoder, but with other tasks beneath"),
    ],
)
def test_members_that_are_not_the_right_ones_are_refused_for_their_tasks_alone(fused, spoil, message):
    before = fused.predict("g", TEXTS)
    spoil(fused)
    fresh = open_bank(fused.path, fused.backbone, device="cpu")
    with pytest.raises(PackageDamaged, match=message):
        values(fresh, "f")
    assert [one.value for one in fresh.predict("g", TEXTS)] == [one.value for one in before]
    assert not next(one for one in fresh.audit() if one.ref == "f@1").ok


def test_tasks_of_two_encoders_are_not_fused(bank, fused):
    package = bank.bank.get("b")
    rewrite(package, backbone={**package.manifest.backbone, "sha256": "0" * 64})
    with pytest.raises(BackboneMismatch, match=r"f@1 stands on b@1, which was trained on backbone .* \(000000"):
        Engine(bank.backbone, device="cpu").load(bank.bank.get("f"))
    with pytest.raises(BackboneMismatch, match=r"but the package b@1 is .* \(sha256 000000000000…\)"):
        bank.train("t", ROWS, ROWS, **fusing("a,b"))


def test_a_plan_that_fuses_nothing_is_refused(fused):
    rewrite(fused.bank.get("f"), requires=[], format=1)
    with pytest.raises(PackageDamaged, match="a fusion needs two packages or more"):
        values(open_bank(fused.path, fused.backbone, device="cpu"), "f")
    assert Plan.from_json(fused.show("f").method).fuses
