"""Claims about `adapterbank.training.narrowing`: the units with the largest effects are kept, exactly as they were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from adapterbank.encoder.placed import place
from adapterbank.inference.runner import outputs
from adapterbank.methods import Options
from adapterbank.slots.stack import Stacks
from adapterbank.training import wide_first
from adapterbank.training.job import ActiveRun, RunState
from adapterbank.training.narrowing import choose_units, fits, narrow_job, narrow_plan, narrow_tensors
from jobs import CPU, job_on

BY_SITE = [f"layers.{layer}.{site}" for layer in range(3) for site in ("attention", "feedforward")]


def job_of(bert, new_slot, size=8, **options):
    job = job_on(bert, new_slot, Options(size=size, **options))
    return job, RunState(tensors={"weights": dict(job.initial)})


def losses(bert, job, tensors, batches):
    """Return the mean loss of each batch, in float64 from the head outputs on."""
    stacks = Stacks(place(bert, CPU, torch.float32).tensors)
    slot = stacks.put(job.plan, tensors)
    found = outputs(bert.config, stacks, job.train.tokens, [slot] * len(job.train))
    each = cross_entropy(torch.tensor([out.tolist() for out in found], dtype=torch.float64),
                         torch.tensor(job.train.targets), reduction="none")  # fmt: skip
    return torch.stack([each[torch.from_numpy(batch)].mean() for batch in batches])


# --- the effects


@pytest.mark.parametrize(
    "options", [{}, {"activation": "relu", "inner_norm": True}, {"placement": "parallel", "combine": "multiply"}]
)
def test_an_effect_is_how_much_the_loss_changes_with_a_factor_of_the_unit(options, bert, new_slot):
    """By central differences of the loss, with the column of the up-projection that the unit feeds."""
    job, state = job_of(bert, new_slot, 3, **options)
    encoder, batches = place(bert, CPU, torch.float32), ActiveRun(0, job, state).epoch_batches()
    effects = wide_first.effects_of(encoder, job, state)
    assert list(effects) == BY_SITE
    step, largest = 0.05, 0.0
    for site in ("layers.0.feedforward", "layers.2.attention"):
        name, wanted = f"{site}.adapter.up.weight", []
        for unit in range(3):
            moved = []
            for factor in (1 + step, 1 - step):
                changed = job.initial[name].clone()
                changed[:, unit] *= factor
                moved.append(losses(bert, job, {**job.initial, name: changed}, batches))
            wanted.append(((moved[0] - moved[1]) / (2 * step)).abs().mean())
        torch.testing.assert_close(effects[site].double(), torch.stack(wanted), rtol=0.02, atol=5e-6)
        largest = max(largest, float(effects[site].max()))
    assert largest > 5e-4


def test_a_unit_that_feeds_nothing_has_no_effect(bert, new_slot):
    job, state = job_of(bert, new_slot)
    state.tensors["weights"]["layers.1.attention.adapter.up.weight"][:, [2, 5]] = 0.0
    effect = wide_first.effects_of(place(bert, CPU, torch.float32), job, state)["layers.1.attention"]
    assert [unit for unit, one in enumerate(effect.tolist()) if one == 0.0] == [2, 5]


# --- the choice


def test_levels_with_the_largest_mean_effects_are_kept_while_they_fit():
    effects = {
        "a": torch.tensor([1.0, 9.0, 1.0, 1.0, 8.0, 1.0, 1.0, 1.0]),
        "b": torch.tensor([5.0, 4.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0]),
        "c": torch.zeros(8),
    }
    assert choose_units(effects, 2) == {"a": [1, 4], "b": [0, 1, 2, 3], "c": []}
    assert choose_units(effects, 1) == {"a": [1, 4], "b": [0], "c": []}
    # 2 + 8 of 12 are taken; the next two of `a` fit, and nothing of `c` is left to fit.
    assert choose_units(effects, 4) == {"a": [0, 1, 2, 4], "b": list(range(8)), "c": []}


@given(st.lists(st.lists(st.floats(0, 1), min_size=16, max_size=16), min_size=1, max_size=5), st.integers(1, 15))
def test_no_more_units_are_kept_than_the_mean_allows_and_none_before_a_better_one(effects, mean):
    tensors = {str(site): torch.tensor(effect, dtype=torch.float64) for site, effect in enumerate(effects)}
    units = choose_units(tensors, mean)
    assert sum(map(len, units.values())) <= mean * len(effects)
    for site, kept in units.items():
        assert len(kept) in (0, 2, 4, 8, 16) or (mean == 1 and len(kept) == 1)
        assert kept == sorted(set(kept))
        left = [float(tensors[site][unit]) for unit in range(16) if unit not in kept]
        assert all(float(tensors[site][unit]) >= one for unit in kept for one in left)
    assert any(units.values())


def test_with_room_for_all_of_the_best_sites_widths_are_powers_of_two():
    effects = {
        str(site): torch.rand(64, generator=torch.Generator().manual_seed(site)) * (site + 1) for site in range(12)
    }
    widths = [len(kept) for kept in choose_units(effects, 32).values()]
    assert sum(widths) == 32 * 12
    assert set(widths) <= {0, 8, 16, 32, 64}
    assert widths[0] < widths[-1]


# --- what is left


@pytest.mark.parametrize("options", [{}, {"inner_norm": True, "combine": "multiply"}])
def test_without_units_that_feed_nothing_the_outputs_are_the_same(options, bert, new_slot):
    job, state = job_of(bert, new_slot, **options)
    weights = state.tensors["weights"]
    dead = dict(zip(BY_SITE, ([0, 7], range(6), range(8), [1, 2, 3, 4], [], range(7)), strict=True))
    for site, units in dead.items():
        weights[f"{site}.adapter.up.weight"][:, list(units)] = 0.0
    weights["layers.1.attention.adapter.up.bias"].zero_()  # it goes with the last unit
    units = {site: [unit for unit in range(8) if unit not in gone] for site, gone in dead.items()}
    narrow = narrow_job(job, units)
    kept = narrow_tensors(job.plan, weights, units)
    stacks = Stacks(place(bert, CPU, torch.float32).tensors)
    slots = stacks.put(job.plan, weights), stacks.put(narrow.plan, kept)
    wide, found = (outputs(bert.config, stacks, job.dev.tokens, [slot] * len(job.dev)) for slot in slots)
    for mine, its in zip(found, wide, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(its), atol=1e-6, rtol=1e-6)
    assert narrow.plan.additions[0].widths == (6, 2, 0, 4, 8, 1)
    assert not any(name.startswith("layers.1.attention.adapter") for name in kept)


def test_every_number_of_a_kept_unit_is_kept(bert, new_slot):
    job, _ = job_of(bert, new_slot)
    units = {site: [1, 6] for site in BY_SITE}
    found = narrow_tensors(job.plan, job.initial, units)
    assert found.keys() == job.initial.keys()
    for name, tensor in job.initial.items():
        if name.endswith((".down.weight", ".down.bias")):
            tensor = tensor[[1, 6]]
        elif name.endswith("adapter.up.weight"):
            tensor = tensor[:, [1, 6]]
        assert torch.equal(found[name], tensor), name
    assert narrow_plan(job.plan, units).additions[0].size == 2


@pytest.mark.parametrize(
    ("change", "fit"),
    [
        ({}, True),
        ({BY_SITE[0]: []}, True),
        ({BY_SITE[0]: [8]}, False),
        ({BY_SITE[0]: [-1]}, False),
        ({BY_SITE[0]: [2, 1]}, False),
        ({BY_SITE[0]: [1, 1]}, False),
        ({"layers.3.attention": [1]}, False),
        ({site: [] for site in BY_SITE}, False),
    ],
)
def test_only_units_of_the_plan_fit_it(change, fit, bert, new_slot):
    job, _ = job_of(bert, new_slot)
    assert fits(job.plan, {**{site: [0, 3] for site in BY_SITE}, **change}) is fit
