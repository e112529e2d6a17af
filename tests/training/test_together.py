"""Claims about teaching together: the shared slot and every head are trained as by a plain loop over the tasks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapterbank.api.opened import open_bank
from adapterbank.encoder.batch import pack
from adapterbank.encoder.forward import forward
from adapterbank.encoder.placed import place
from adapterbank.errors import ConfigError, InputError, TrainingError
from adapterbank.inference.rows import epoch_order
from adapterbank.inference.runner import segments
from adapterbank.methods import Options
from adapterbank.slots import heads
from adapterbank.slots.plan import Head
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from adapterbank.training import together
from adapterbank.training.optimizer import Schedule
from adapterbank.training.together import order, shares, teach
from jobs import job_on
from small_data import FAST, flags, pairs, reviews, scores, shell, snapshot, write

TASKS = {"a": reviews(40), "b": scores(24), "c": pairs(16)}


@pytest.fixture
def bank(tmp_path, bert, no_flush):
    return open_bank(tmp_path / "bank", bert, device="cpu")


def test_a_task_is_drawn_in_proportion_to_the_root_of_its_rows():
    np.testing.assert_allclose(shares([100, 400, 2500]), [10 / 80, 20 / 80, 50 / 80])
    drawn = np.bincount(order([100, 400, 2500], 20000, seed=3, epoch=1)) / 20000
    np.testing.assert_allclose(drawn, [0.125, 0.25, 0.625], atol=0.02)
    assert order([9, 4], 50, seed=3, epoch=1) == order([9, 4], 50, seed=3, epoch=1)
    assert order([9, 4], 50, seed=3, epoch=1) != order([9, 4], 50, seed=3, epoch=2)
    assert order([9, 4], 50, seed=3, epoch=1) != order([9, 4], 50, seed=4, epoch=1)


# --- against a plain loop


def two_jobs(backbone, new_slot, **changes):
    """Return two jobs of one form with the same tensors below their heads, and heads of different widths."""
    first = job_on(backbone, new_slot, rows=20, seed=1, rate=0.01, **changes)
    second = job_on(backbone, new_slot, head=Head("classification", 3), rows=9, seed=2, rate=0.01, **changes)
    below = {name: tensor for name, tensor in first.initial.items() if not name.startswith("head.")}
    return [first, replace(second, initial=second.initial | below, seed=first.seed)]


def plain_adam(tensors, gradients, moments, rate, settings, step):
    """Update tensors in place by the formula of `optimizer`, for one slot."""
    norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients.values()))
    for name, gradient in gradients.items():
        gradient = gradient * min(1.0, settings.clip / float(norm))
        m, v = moments.setdefault(name, [torch.zeros_like(gradient), torch.zeros_like(gradient)])
        m.copy_(0.9 * m + 0.1 * gradient)
        v.copy_(0.999 * v + 0.001 * gradient**2)
        right = (1 - 0.9**step, 1 - 0.999**step) if settings.bias_correction else (1, 1)
        change = (m / right[0]) / ((v / right[1]).sqrt() + settings.epsilon)
        decays = not name.endswith("bias") and ".norm." not in name
        tensors[name] = tensors[name] - rate * (change + settings.weight_decay * decays * tensors[name])


def plain_loop(backbone, jobs):
    """Train without a shared slot: each step puts the present tensors and its task's head into stacks of their own."""
    below = {name: tensor.clone() for name, tensor in jobs[0].initial.items() if not name.startswith("head.")}
    own = [{name: job.initial[name].clone() for name in job.initial if name not in below} for job in jobs]
    sizes, steps = [job.train.units for job in jobs], sum(-(-job.train.units // job.batch) for job in jobs)
    schedule, moments = Schedule(jobs[0].rate, steps * jobs[0].epochs, jobs[0].warmup), [{} for _ in range(3)]
    counts, losses, trail = [0, 0], [], []
    for step in range(steps * jobs[0].epochs):
        epoch, place_in = divmod(step, steps)
        task = order(sizes, steps, seed=jobs[0].seed, epoch=epoch)[place_in]
        job, tensors = jobs[task], {**below, **own[task]}
        turns, at = divmod(counts[task], -(-job.train.units // job.batch))
        lengths = [len(row) for row in job.train.tokens]
        chosen = epoch_order(lengths, job.batch, seed=job.seed, epoch=turns)[at]
        counts[task] += 1
        stacks = Stacks(backbone.tensors)
        slot = stacks.put(job.plan, tensors)
        stacks.require_gradients(torch.float32)
        rows = [job.train.tokens[i] for i in chosen]
        batch, route = pack(rows), Route(stacks, segments([(slot, len(row)) for row in rows]))
        (out,) = heads.outputs(forward(backbone.config, route, batch), batch, route)
        targets = torch.tensor([job.train.targets[i] for i in chosen])
        loss = torch.nn.functional.cross_entropy(out, targets)
        loss.backward()
        found = {block: torch.zeros_like(block.tensor) for block in stacks.blocks}
        for block, gradient in found.items():
            for name, view in block.layout.views(gradient).items():
                if block.views[name].grad is not None:
                    view.copy_(block.views[name].grad)
        gradients = stacks.take(slot, found)
        losses.append(loss.item())
        rate = schedule.at(step)
        part = {name: gradients[name] for name in below}
        plain_adam(below, part, moments[2], rate, job.settings, step + 1)
        part = {name: gradients[name] for name in own[task]}
        plain_adam(own[task], part, moments[task], rate, job.settings, counts[task])
        if place_in == steps - 1:
            trail.append(({**below, **own[0]}, float(np.mean(losses[-steps:]))))
    return trail


@pytest.mark.parametrize("method", ["adapter", "lora", "bitfit"])
def test_two_tasks_are_taught_as_by_a_plain_loop(bert, new_slot, method):
    jobs = two_jobs(bert, new_slot, options=Options(method), epochs=3)
    taught = teach(place(bert, torch.device("cpu"), torch.float32), jobs, dropout=0.0)
    trail = plain_loop(bert, jobs)
    for epoch, (_, loss) in zip(taught.state.history, trail, strict=True):
        assert epoch["loss"] == pytest.approx(loss, abs=1e-5)
    expected = trail[taught.state.best_epoch - 1][0]
    found = taught.state.tensors["best"]
    assert found.keys() == jobs[0].initial.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    assert max((found[name] - jobs[0].initial[name]).abs().max() for name in found) > 1e-2


def test_the_epoch_with_the_best_mean_of_the_dev_scores_is_kept(bert, new_slot):
    given = [iter([0.2, 0.9, 0.4, 0.3]), iter([0.3, 0.1, 0.8, 0.2])]
    jobs = [
        replace(job, score=lambda outputs, own=own: next(own))
        for job, own in zip(two_jobs(bert, new_slot, epochs=4), given, strict=True)
    ]
    encoder = place(bert, torch.device("cpu"), torch.float32)
    seen = []
    taught = teach(encoder, jobs, watch=seen.append)
    assert taught.scores == [[0.2, 0.3], [0.9, 0.1], [0.4, 0.8], [0.3, 0.2]]
    assert [round(epoch["score"], 6) for epoch in taught.state.history] == [0.25, 0.5, 0.6, 0.25]
    assert (taught.state.best_epoch, taught.state.epoch) == (3, 4)
    assert [round(one.score, 6) for one in seen if one.score is not None] == [0.25, 0.5, 0.6, 0.25]
    given = [iter([0.9, 0.1, 0.1]), iter([0.9, 0.1, 0.1])]
    stopped = [
        replace(job, patience=2, score=lambda outputs, own=own: next(own)) for job, own in zip(jobs, given, strict=True)
    ]
    assert teach(encoder, stopped).state.epoch == 3


def test_a_run_that_diverges_writes_nothing(bert, new_slot):
    jobs = [replace(job, rate=1e30) for job in two_jobs(bert, new_slot)]
    with pytest.raises(TrainingError, match=r"The learning rate 1e\+30 is probably too high: try --lr 1e\+29"):
        teach(place(bert, torch.device("cpu"), torch.float32), jobs)


# --- as a package


OPTIONS = FAST


def test_a_package_is_taught_by_several_tasks_and_carries_others(bank, bert):
    bank.train("other", reviews(), reviews(), few="never", **OPTIONS)
    encoder = {name: tensor.clone() for name, tensor in bert.tensors.items()}
    before = snapshot(bank.path / "tasks")
    result = bank.teach_together(TASKS, "shared", **OPTIONS)
    after = snapshot(bank.path / "tasks")
    assert {name: after[name] for name in before} == before
    assert all(torch.equal(tensor, encoder[name]) for name, tensor in bert.tensors.items())
    assert result.package.ref == "shared@1"
    told = result.record["together"]
    assert [(one["task"], one["metric"]) for one in told] == [("a", "accuracy"), ("b", "spearman"), ("c", "accuracy")]
    np.testing.assert_allclose([one["share"] for one in told], shares([one["data"]["train"]["rows"] for one in told]))
    best = result.record["history"][result.record["best_epoch"] - 1]
    assert best["score"] == pytest.approx(np.mean([one["score"] for one in told]))
    assert result.record["metrics"]["dev"]["accuracy"] == pytest.approx(told[0]["score"])
    assert bank.show("shared").task["labels"] == ["negative", "positive"]
    made = bank.train("small", pairs(16), pairs(16), few="never", on="shared", **OPTIONS).package
    assert made.manifest.requires[0]["weights_sha256"] == bank.show("shared").weights_sha256
    assert [(one.ref, one.how) for one in bank.audit() if not one.ok] == []
    again = bank.teach_together(TASKS, "shared", **OPTIONS)
    assert all(np.array_equal(array, again.package.tensors()[name]) for name, array in result.package.tensors().items())


def test_tasks_are_taught_on_top_of_another_one(bank):
    bank.train("under", reviews(), reviews(), few="never", **OPTIONS)
    made = bank.teach_together(TASKS, "shared", on="under", **OPTIONS).package
    assert [one["name"] for one in made.manifest.requires] == ["under"]
    assert all(one.ok for one in bank.audit())


def test_the_command_names_files(bank, tmp_path):
    first, second = write(tmp_path / "a.csv", reviews(40)), write(tmp_path / "b.csv", scores(24), ("text", "score"))
    common = ["teach-together", "--bank", bank.path, "--backbone", bank.backbone.name, "--device", "cpu"]
    named = ["--tasks", f"a={first},b={second}", "--name", "shared", *flags(OPTIONS)]
    found = shell(*common, *named, "--json")
    assert found.code == 0, found.err
    assert [one["task"] for one in found.json["together"]] == ["a", "b"]
    assert "note: a: No dev data given: 4 of 40 training rows are held out for it." in found.err
    shown = shell(*common, *named)
    assert shown.code == 0, shown.err
    assert shown.out.startswith("shared@2  on dev: a accuracy ")
    trained = shell("train", "--bank", bank.path, "--task", "t", "--train", first, "--on", "shared", *flags(OPTIONS))
    assert trained.code == 0, trained.err


def test_an_interruption_leaves_the_bank_as_it_was(bank, tmp_path, monkeypatch):
    bank.train("other", reviews(), reviews(), few="never", **OPTIONS)
    file, before = write(tmp_path / "a.csv", reviews(40)), snapshot(bank.path)

    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(together._Together, "score", interrupt)
    found = shell("teach-together", "--bank", bank.path, "--tasks", f"a={file},b={file}", "--name", "shared",
                  "--device", "cpu", *flags(OPTIONS))  # fmt: skip
    assert found.code == 130
    assert found.err.endswith("stopped before the end of the first epoch; the bank's tasks are unchanged.\n")
    assert snapshot(bank.path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "full"}, r"method is 'full', which leaves nothing that other tasks can stand on; use another"),
        ({"method": "feature"}, r"method is 'feature', which leaves nothing that other tasks can stand on"),
        ({"method": "automl"}, r"method is 'automl', which trains no slot"),
        ({"few": "always"}, r"few is 'always', but tasks are taught together in epochs; leave it out"),
        ({"average": True}, r"average is True, but epochs of tasks that are taught together are not averaged"),
        ({"mix": 2}, r"mix is 2, but tasks that are taught together share one slot; leave it out"),
        ({"size": "8to4"}, r"size is '8to4', but adapters that tasks teach together are not narrowed; use one width"),
        ({"on": "nobody"}, r"there is no bank to find it in"),
    ],
)
def test_what_cannot_be_taught_together_is_refused(bank, options, message):
    with pytest.raises(ConfigError, match=message):
        bank.teach_together(TASKS, "shared", **{"max_length": 32, **options})
    assert not bank.path.exists()


def test_tasks_are_two_or_more_each_of_them_once(bank):
    with pytest.raises(ConfigError, match=r"tasks is a; name two tasks or more to teach together, each of them once"):
        bank.teach_together({"a": reviews()}, "shared")
    with pytest.raises(InputError, match=r"name each of them once"):
        bank.teach_together(["glue/rte", "glue/rte"], "shared")
    for tasks, message in (("a=x.csv,a=y.csv", "'a=y.csv' occurs twice"), ("nobody", "'nobody' is neither name=file")):
        found = shell("teach-together", "--bank", bank.path, "--tasks", tasks, "--name", "shared")
        assert (found.code, message in found.err) == (2, True), found.err


@pytest.mark.parametrize("option", ["task", "train", "dev", "test"])
def test_data_that_would_be_that_of_every_task_is_refused(bank, option):
    with pytest.raises(InputError, match=rf"{option} is given for all tasks; give each its own data, as in \{{"):
        bank.teach_together(TASKS, "shared", **OPTIONS, **{option: "rows.csv"})
    own = {name: {"train": rows, "dev": reviews(16)} for name, rows in (("a", reviews()), ("b", reviews(32)))}
    found = bank.teach_together(own, "shared", **OPTIONS).record
    assert [one["data"]["dev"]["rows"] for one in found["together"]] == [16, 16]


def test_a_name_that_no_folder_can_have_is_refused(bank):
    with pytest.raises(InputError, match=r"'\.\./x' cannot be a task name"):
        bank.teach_together(TASKS, "../x")


def test_its_record_stands_beside_those_of_other_runs(bank, tmp_path):
    bank.teach_together(TASKS, "shared", **OPTIONS)
    bank.train("t", reviews(), reviews(), few="never", on="shared", **OPTIONS)
    file = str(write(tmp_path / "t.csv", reviews()))
    study = {"task": "shared", "train": file, "dev": file, "lr": [0.01, 0.02], **{**OPTIONS, "lr": [0.01, 0.02]}}
    outcome = bank.sweep({**study, "few": "never", "device": "cpu"}, keep="best")
    assert not outcome.progress.failed
    found = shell("report", "--records", bank.bank.records_path, "--out", tmp_path / "report.html")
    assert found.code == 0, found.err
    assert "shared" in (tmp_path / "report.html").read_text()
