"""`training.graph_rule`: when steps run as graphs."""

from __future__ import annotations

import pytest

from adapterbank.training.graph_rule import ALWAYS, NEVER, GraphRule, StepClock

RULE = GraphRule(measured=3, kernels=2.0, compiler=30.0, saved=0.5)


@pytest.mark.parametrize(
    ("seconds", "left", "kernels", "worth"),
    [
        ([0.02, 0.02], 10**6, True, False),  # not measured yet
        ([9.0, 0.02, 0.02], 199, True, False),
        ([9.0, 0.02, 0.02], 200, True, True),  # 200 steps save half of 4 seconds
        ([9.0, 0.02, 0.02], 2999, False, False),
        ([9.0, 0.02, 0.02], 3000, False, True),
        ([9.0, 0.2, 0.2], 20, True, True),
        ([0.02] * 9, 0, True, False),
    ],
)
def test_a_graph_is_worth_it_once_it_saves_more_than_it_costs(seconds, left, kernels, worth):
    assert StepClock(RULE, seconds).worth_a_graph(left, kernels=kernels) is worth


@pytest.mark.parametrize("kernels", [True, False])
def test_there_is_always_or_never_a_graph_without_a_measurement(kernels):
    assert StepClock(ALWAYS).worth_a_graph(0, kernels=kernels)
    assert not StepClock(NEVER, [100.0] * 1000).worth_a_graph(10**9, kernels=kernels)
