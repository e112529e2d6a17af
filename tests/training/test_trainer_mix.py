"""Claims about `--mix`: copies of each addition in training, two draws a step, and their mean afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from adapterbank import config as configs
from adapterbank.api.opened import open_bank
from adapterbank.encoder.dropout import row_keys
from adapterbank.errors import ConfigError, InputError
from adapterbank.inference.rows import epoch_order
from adapterbank.kinds.table import KINDS
from adapterbank.methods import METHODS, Options
from adapterbank.serving.jobs import options
from adapterbank.slots.mixture import Mixture
from adapterbank.slots.plan import Head, make_plan
from adapterbank.storage import records
from adapterbank.training import eager_step, run_state
from adapterbank.training.graph_rule import ALWAYS
from adapterbank.training.loop import group_jobs
from adapterbank.training.optimizer import AdamSettings
from jobs import assert_close, assert_same_bits, job_on, kept_after, reviews, train_jobs
from short_runs import job_of, quick, stopped_once_saved
from small_data import FAST, flags, shell, write
from small_data import reviews as rows_of

ROWS = rows_of()
WITH = ["adapter", "lora", "ia3"]


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


def mixed(bert, new_slot, options=None, *, mix=3, seed=0, head=None, **changes):
    """Return a small job with so many copies, all different."""
    options, head = options or Options(size=4), head or Head("classification", 2)
    plan = make_plan(options, depth=bert.config.layers, head=head)
    initial = new_slot(bert, Mixture(plan, mix).whole, seed=seed, sigma=0.05)
    return job_on(bert, new_slot, options, head=head, seed=seed, mix=mix, initial=initial, **changes)


# --- against an implementation of its own


class Oracle:
    """BERT of `transformers` with adapters in forward hooks, torch's AdamW, and the draws of `Mixture`."""

    def __init__(self, model, job):
        self.model, self.job = model.eval(), job
        self.own = {name: tensor.clone().requires_grad_() for name, tensor in job.initial.items()}
        decaying = {name for name in self.own if name.endswith(".weight") and ".norm." not in name}
        adam = job.settings
        groups = [
            {"params": [t for name, t in self.own.items() if (name in decaying) == decays], "weight_decay": decay}
            for decays, decay in ((True, adam.weight_decay), (False, 0.0))
        ]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=adam.epsilon)
        self.losses = []

    def logits(self, rows, tensors):
        """Return the logits of rows with the tensors of one adapter a site."""
        lengths = [len(row) for row in rows]
        grid = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for line, row in zip(grid, rows, strict=True):
            line[: len(row)] = torch.tensor(np.asarray(row.ids, np.int64))
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        hooks, norms = [], {"embeddings.LayerNorm": "embeddings.norm"}
        for i, layer in enumerate(self.model.encoder.layer):
            for site, module in (("attention", layer.attention.output), ("feedforward", layer.output)):
                hooks.append(module.dense.register_forward_hook(_adapter(f"layers.{i}.{site}.adapter", tensors)))
            norms[f"encoder.layer.{i}.attention.output.LayerNorm"] = f"layers.{i}.attention.norm"
            norms[f"encoder.layer.{i}.output.LayerNorm"] = f"layers.{i}.feedforward.norm"
        changed = {f"{t}.{leaf}": tensors[f"{o}.{leaf}"] for t, o in norms.items() for leaf in ("weight", "bias")}
        inputs = {"input_ids": grid, "attention_mask": mask}
        hidden = torch.func.functional_call(self.model, changed, (), inputs).last_hidden_state
        for hook in hooks:
            hook.remove()
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return mean @ tensors["head.weight"].T + tensors["head.bias"]

    def step(self, batch, step, rate):
        """Take one step as the paper describes it: the loss of one draw, and how much another one differs from it."""
        rows = [self.job.train.tokens[i] for i in batch]
        targets = torch.tensor([self.job.train.targets[i] for i in batch])
        names = [name for name in self.own if ".adapter-" not in name]
        draws = self.job.mixture.draw(names, self.job.seed, step)
        first, second = (self.logits(rows, {name: self.own[own] for name, own in draw.items()}) for draw in draws)
        p, q = first.log_softmax(1), second.log_softmax(1)
        both = (p.exp() * (p - q)).sum(1) + (q.exp() * (q - p)).sum(1)
        loss = F.nll_loss(p, targets) + both.mean() / 2
        for tensor in self.own.values():
            tensor.grad = torch.zeros_like(tensor)  # copies that are not drawn, too, for their moments
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.own.values(), self.job.settings.clip)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.losses.append(loss.item())

    def merged(self):
        """Return the mean of the copies."""
        found = {name: [t] for name, t in self.own.items() if ".adapter-" not in name}
        for name, tensor in self.own.items():
            if ".adapter-" in name:
                found[name.replace(".adapter-2.", ".adapter.").replace(".adapter-3.", ".adapter.")].append(tensor)
        return {name: sum(each).detach() / len(each) for name, each in found.items()}


def _adapter(prefix, tensors):
    down, up = ([tensors[f"{prefix}.{module}.{leaf}"] for leaf in ("weight", "bias")] for module in ("down", "up"))

    def add(module, inputs, output):
        return output + F.linear(F.gelu(F.linear(output, *down), approximate="tanh"), *up)

    return add


@pytest.fixture
def oracle(bert, new_slot, checkpoint):
    """Train eight steps both ways; return the state and the oracle."""
    seen = []
    settings = AdamSettings(bias_correction=True, weight_decay=0.1, clip=0.5)
    job = mixed(bert, new_slot, rate=5e-3, settings=settings, score=lambda outputs: seen.append(outputs) or 0.0)
    (state,) = train_jobs(bert, job, dropout=0.0)
    found = Oracle(checkpoint("bert")[1], job)
    for step in range(8):
        order = epoch_order([len(row) for row in job.train.tokens], 6, seed=0, epoch=step // 4)
        found.step(order[step % 4], step, 5e-3 * (8 - step) / 7 if step else 5e-3)
    return state, found, seen[-1]


def test_losses_weights_gradients_and_merge_are_those_of_a_plain_implementation(oracle):
    state, plain, _ = oracle
    for epoch in (0, 1):
        assert state.history[epoch]["loss"] == pytest.approx(np.mean(plain.losses[4 * epoch : 4 * epoch + 4]), rel=1e-5)
    assert state.tensors["weights"].keys() == plain.own.keys()
    for name, tensor in plain.own.items():
        torch.testing.assert_close(state.tensors["weights"][name], tensor.detach(), rtol=1e-3, atol=2e-5)
        moments = plain.adam.state[tensor]
        torch.testing.assert_close(state.tensors["first"][name], moments["exp_avg"], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(state.tensors["second"][name], moments["exp_avg_sq"], rtol=1e-3, atol=1e-8)
    merged = plain.merged()
    best = state.tensors["best"]
    assert best.keys() == merged.keys()
    assert len(best) < len(plain.own)


def test_dev_rows_are_scored_with_the_merged_adapter(oracle):
    state, plain, outputs = oracle
    last = plain.job.mixture.merge(state.tensors["weights"])
    for name, tensor in plain.merged().items():
        torch.testing.assert_close(last[name], tensor, rtol=1e-3, atol=2e-5)
    with torch.no_grad():
        expected = plain.logits(plain.job.dev.tokens, last)
    np.testing.assert_allclose(np.array(outputs), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_the_merged_weights_of_the_best_epoch_are_kept(bert, new_slot):
    graded = iter([0.1, 0.9, 0.2])
    job = mixed(bert, new_slot, epochs=3, score=lambda outputs: next(graded))
    end, kept = kept_after(bert, job)
    assert end.best_epoch == 2
    merged = job.mixture.merge(kept[1].tensors["weights"])
    assert end.tensors["best"].keys() == merged.keys()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in end.tensors["best"].items())


# --- draws, dropout, memory, resume, company


def test_the_second_pass_has_masks_of_its_own(bert, new_slot, monkeypatch):
    calls = []
    monkeypatch.setattr(eager_step, "row_keys", lambda *a: calls.append(row_keys(*a)) or calls[-1])
    train_jobs(bert, mixed(bert, new_slot, epochs=1), dropout=0.1)
    for first, second in zip(calls[::2], calls[1::2], strict=True):
        assert len(first) == len(second)
        assert not {*first.tolist()} & {*second.tolist()}


@pytest.mark.parametrize("method", WITH)
def test_a_step_in_parts_is_the_whole_step(bert, new_slot, monkeypatch, method):
    job = mixed(bert, new_slot, Options(method, size=4, rank=4))
    (whole,) = train_jobs(bert, job, dropout=0.1)
    parts = []
    original = eager_step.EagerStep._losses
    monkeypatch.setattr(eager_step.EagerStep, "_losses", lambda *a: parts.append(a[3]) or original(*a))
    monkeypatch.setattr("adapterbank.training.trainer.token_limit", lambda config, device: 40)
    (cut,) = train_jobs(bert, job, dropout=0.1)
    assert len(parts) > 2 * whole.step
    assert_close(cut, whole, 1e-4)


def test_both_passes_read_the_kept_outputs_of_the_frozen_lower_layers(bert, new_slot, monkeypatch):
    jobs = [mixed(bert, new_slot, Options(size=4, layers="2"), seed=seed) for seed in (0, 1)]
    upper = train_jobs(bert, *jobs, dropout=0.0)
    monkeypatch.setattr("adapterbank.training.loop.first_trained_layer", lambda names, depth: 0)
    for found, expected in zip(upper, train_jobs(bert, *jobs, dropout=0.0), strict=True):
        assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("method", WITH)
def test_a_resumed_run_ends_with_the_same_bits(bert, new_slot, tmp_path, method):
    job = mixed(bert, new_slot, Options(method, size=4, rank=4), epochs=3)
    end, kept = kept_after(bert, job, dropout=0.1)
    run_state.save(tmp_path, kept[0])
    assert run_state.load(tmp_path).epoch == 1
    (resumed,) = train_jobs(bert, job, dropout=0.1, resume={0: run_state.load(tmp_path, job)})
    assert_same_bits(resumed, end)


def test_a_state_of_another_number_of_copies_is_refused(bert, new_slot, tmp_path):
    run_state.save(tmp_path, kept_after(bert, mixed(bert, new_slot, mix=2))[1][0])
    for job in (mixed(bert, new_slot, mix=3), job_on(bert, new_slot)):
        with pytest.raises(InputError, match="its tensors are not those of the run"):
            run_state.load(tmp_path, job)


def test_runs_with_and_without_copies_train_beside_each_other_as_alone(bert, new_slot):
    jobs = [mixed(bert, new_slot, seed=1), job_on(bert, new_slot, seed=2), mixed(bert, new_slot, mix=2, seed=3)]
    alone = [train_jobs(bert, job, dropout=0.1)[0] for job in jobs]
    for found, expected in zip(train_jobs(bert, *jobs, dropout=0.1), alone, strict=True):
        assert_close(found, expected, 1e-4)


def test_on_a_gpu_runs_with_copies_share_no_group_with_others(bert, new_slot, monkeypatch):
    monkeypatch.setattr("adapterbank.training.loop.runs_graphs", lambda device: True)
    jobs = [mixed(bert, new_slot), job_on(bert, new_slot), mixed(bert, new_slot, mix=2)]
    assert [*group_jobs(bert.config, jobs, torch.device("cpu")).values()] == [[0, 2], [1]]


def test_where_steps_run_as_graphs_a_mixture_is_trained_eagerly(bert, new_slot, monkeypatch):
    eager, _ = kept_after(bert, mixed(bert, new_slot))
    monkeypatch.setattr("adapterbank.inference.graphs.DEVICES", ("cpu",))
    monkeypatch.setattr("adapterbank.training.trainer.GraphStep", None)
    (found,) = train_jobs(bert, mixed(bert, new_slot), rule=ALWAYS)
    assert_same_bits(found, eager)


def test_a_run_that_begins_again_begins_with_all_copies(bert, new_slot, monkeypatch):
    monkeypatch.setattr("adapterbank.training.trainer.FEWEST_STEPS", 8)
    again = iter([True])
    job = mixed(bert, new_slot, rate=9e-3, epochs=4, collapsed=lambda outputs, losses: next(again, False))
    (found,) = train_jobs(bert, job)
    assert len(found.restarts) == 1
    (fresh,) = train_jobs(bert, mixed(bert, new_slot, rate=3e-3, epochs=4))
    assert_close(found, fresh, 1e-5)


def test_the_average_of_epochs_is_that_of_their_merged_weights(bert, new_slot):
    graded = iter([0.1, 0.2, 0.9])
    job = mixed(bert, new_slot, averages=True, score=lambda outputs: next(graded))
    end, kept = kept_after(bert, job)
    first, second = (job.mixture.merge(one.tensors["weights"]) for one in kept)
    assert end.average["kept"]
    assert end.kept is end.tensors["average"]
    for name, tensor in end.tensors["average"].items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)
    assert end.tensors["weights"].keys() == job.initial.keys()


@pytest.mark.parametrize("kind", ["multilabel", "regression"])
def test_other_kinds_train_on_their_own_consistency(bert, new_slot, monkeypatch, kind):
    head = Head(kind, 2 if kind == "multilabel" else 1)
    job = mixed(bert, new_slot, head=head, epochs=1, score=lambda outputs: 0.0)
    given = reviews(20, 0).targets
    targets = [(one,) for one in given] if kind == "multilabel" else [float(one) for one in given]
    object.__setattr__(job.train, "targets", targets)
    calls, row = [], KINDS[kind]
    patched = {**vars(row), "consistency": lambda *a: calls.append(row.consistency(*a)) or calls[-1]}
    monkeypatch.setitem(KINDS, kind, type(row)(**patched))
    train_jobs(bert, job)
    assert [len(one) for one in calls] == [6, 6, 6, 2]
    assert all((one > 0).all() for one in calls)


# --- in a bank


@pytest.mark.parametrize("method", WITH)
def test_the_package_is_as_that_of_a_plain_run_and_the_record_and_the_recipe_say_mix(bank, method):
    plain, result = (bank.train("s", ROWS, ROWS, **quick(method, mix=mix)) for mix in (1, 4))
    assert result.record["params"] == plain.record["params"]
    assert result.package.manifest.method == plain.package.manifest.method
    shapes = [{name: t.shape for name, t in one.package.tensors().items()} for one in (plain, result)]
    assert shapes[0] == shapes[1]
    assert (result.record["config"]["mix"], result.package.manifest.recipe["mix"]) == (4, 4)
    assert "mix" not in plain.record["config"]
    assert "mix" not in plain.package.manifest.recipe
    assert result.record_path != plain.record_path
    assert all(finding.ok for finding in bank.audit())


def test_the_score_in_the_record_is_that_of_the_package(bank):
    result = bank.train("s", ROWS, ROWS, **quick(epochs=3, mix=2))
    best = result.record["history"][result.record["best_epoch"] - 1]["score"]
    assert bank.evaluate("s", ROWS)["accuracy"] == best == result.record["metrics"]["dev"]["accuracy"]


@pytest.mark.parametrize("method", WITH)
def test_all_copies_start_at_the_tensors_of_a_task(bank, method):
    source = bank.train("s", ROWS, ROWS, **quick(method)).package.tensors()
    job = job_of(bank, ROWS, **quick(method, start_from="s", mix=3))
    for name in job.mixture.names(job.initial):
        if not name.startswith("head."):
            for own in job.mixture.copies_of(name):
                np.testing.assert_array_equal(job.initial[own].numpy(), source[name])
    result = bank.train("t", ROWS, ROWS, **quick(method, start_from="s", mix=3))
    assert result.record["start_from"]["package"] == "s@1"
    (found,) = train_jobs(bank.backbone, job)
    down = next(name for name in job.initial if job.plan.split(name) and name in job.mixture.names(job.initial))
    each = [found.tensors["weights"][own] for own in job.mixture.copies_of(down)]
    assert not any(torch.equal(each[0], other) for other in each[1:])  # their steps set them apart


def test_new_copies_differ(bank):
    job = job_of(bank, ROWS, **quick(mix=4))
    for name in job.mixture.names(job.initial):
        each = [job.initial[own] for own in job.mixture.copies_of(name)]
        if len(each) > 1 and name.endswith(".weight"):
            assert len({tensor.numpy().tobytes() for tensor in each}) == 4
    plain = job_of(bank, ROWS, **quick())
    assert all(torch.equal(tensor, job.initial[name]) for name, tensor in plain.initial.items())


@pytest.mark.parametrize("kind", ["span", "tagging"])
def test_kinds_that_answer_tokens_train_too(bank, kind):
    if kind == "span":
        rows = [{"question": "it was", "context": text, "answers": {"text": [text.split()[1]], "answer_start": [4]}}
                for text, _ in ROWS]  # fmt: skip
    else:
        rows = [{"tokens": text.split(), "tags": ["O"] * 4 + ["B-X"]} for text, _ in ROWS]
    result = bank.train("t", rows, rows, kind=kind, mix=2, epochs=1, size=4, max_length=32, batch=8)
    assert np.isfinite(result.record["history"][0]["loss"])


def test_the_pooled_outputs_of_windows_are_compared(bank, monkeypatch):
    calls, row = [], KINDS["classification"]
    patched = {**vars(row), "consistency": lambda x, y, *a: calls.append((x, y)) or row.consistency(x, y, *a)}
    monkeypatch.setitem(KINDS, "classification", type(row)(**patched))
    rows = [(f"{text} " * (1 + i % 3), label) for i, (text, label) in enumerate(ROWS)]
    result = bank.train("t", rows, ROWS, **quick(epochs=1, mix=2, max_length=8, long="windows"))
    assert result.record["windows"] > 1
    assert [(x.shape, y.shape) for x, y in calls] == [((8, 2), (8, 2))] * 3


def test_an_interrupted_run_resumes_to_the_same_package(bank, monkeypatch):
    options = quick(epochs=3, mix=2, average=True)
    whole = bank.train("s", ROWS, ROWS, **options).package.manifest
    stopped_once_saved(monkeypatch, lambda: bank.train("s", ROWS, ROWS, **options))
    result = bank.train("s", ROWS, ROWS, **options, resume=True)
    assert "Resuming after epoch 1." in result.notes
    assert result.package.manifest.weights_sha256 == whole.weights_sha256


def test_a_study_compares_runs_with_and_without_copies(bank, tmp_path):
    file = str(write(tmp_path / "s.csv", ROWS))
    study = {"task": "t", "train": file, "dev": file, "mix": [1, 2], **quick(device="cpu")}
    assert bank.sweep(study).progress.new == 2
    found = {one["config"].get("mix", 1): one for one in records.read_all(bank.bank.records_path)}
    assert sorted(found) == [1, 2]
    alone = bank.train("t", file, file, **quick(mix=2)).record
    assert alone["config"] == found[2]["config"]
    losses = [[epoch["loss"] for epoch in one["history"]] for one in (alone, found[2])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("options", [{"size": "auto"}, {"start_from": "auto"}], ids=["size", "start"])
def test_searches_train_their_candidates_with_copies(bank, monkeypatch, options):
    rows, seen = rows_of(320), []
    bank.train("s", rows[:100], ROWS, **quick())
    original = Mixture.draw
    monkeypatch.setattr(Mixture, "draw", lambda self, *a: seen.append(self.copies) or original(self, *a))
    result = bank.train("t", rows, ROWS, **{**quick(epochs=1, mix=2), **options})
    assert result.record["config"]["mix"] == 2
    assert len(seen) > 2 * len(rows) // FAST["batch"]  # steps of the candidates and of the run itself
    assert {*seen} == {2}


def test_a_run_with_copies_trains_in_epochs_however_few_its_labels(bank):
    assert "fitted" not in bank.train("s", ROWS, ROWS, size=4, max_length=32, mix=2).record


def test_the_shell_trains_with_copies(bank, tmp_path, checkpoint):
    file = write(tmp_path / "s.csv", ROWS)
    words = ("train", "--bank", bank.path, "--task", "s", "--train", file, "--dev", file)
    found = shell(*words, "--backbone", checkpoint("bert")[0], *flags(quick(device="cpu", mix=2)), "--json")
    assert found.code == 0, found
    assert found.json["config"]["mix"] == 2


def test_a_loss_above_that_of_the_prior_is_no_collapse_as_it_counts_the_consistency_too(bank):
    outputs = [np.array([1.0, 0.0]), np.array([0.0, 1.0])] * (len(ROWS) // 2)
    same = [np.array([1.0, 0.0])] * len(ROWS)
    plain, job = (job_of(bank, ROWS, **quick(mix=mix)) for mix in (1, 2))
    assert [one.collapsed(outputs, [0.8]) for one in (plain, job)] == [True, False]
    assert [one.collapsed(same, [0.8]) for one in (plain, job)] == [True, True]


def test_a_request_over_http_may_ask_for_copies():
    assert options.check("t", {"mix": "3"}, "csv") == ("t", {"mix": 3})


# --- refusals


@pytest.mark.parametrize("method", sorted({*METHODS} - {*WITH}))
def test_methods_without_additions_refuse_copies(method):
    with pytest.raises(ConfigError, match=rf"mix is 4, but method '{method}' does not use it; leave it out\."):
        configs.parse({"method": method, "mix": 4})


@pytest.mark.parametrize("mix", [0, 17])
def test_the_number_of_copies_has_limits(mix):
    with pytest.raises(ConfigError, match=f"mix is {mix}; it must be from 1 to 16"):
        configs.parse({"mix": mix})


def test_a_run_that_stands_on_a_task_has_no_copies():
    with pytest.raises(ConfigError, match="mix is 2, but on is 'shared', with which copies do not train"):
        configs.parse({"mix": 2, "on": "shared"})


def test_the_recipe_for_few_labels_has_no_copies():
    with pytest.raises(ConfigError, match="mix is 2, but few is 'always', whose recipe has no copies"):
        configs.parse({"mix": 2, "few": "always"})


def test_a_soup_of_fresh_runs_needs_one_number_of_copies(bank):
    settings = ((2, 0.01), (2, 0.02), (1, 0.01))
    refs = [bank.train("s", ROWS, ROWS, **quick(mix=mix, lr=lr)).package.ref for mix, lr in settings]
    bank.soup(refs[:2])
    with pytest.raises(InputError, match=r"the means of 2 and of 1 copies; train each with the same --mix"):
        bank.soup(refs[1:])
