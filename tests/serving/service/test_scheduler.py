"""Claims about the scheduler: within its budget, in time, fair and bounded, in a thousand random histories."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterbank.serving.service.scheduler import LONGEST_WAIT, QueueFull, RowGroup, Scheduler

BUDGET = 64


def queue(budget=BUDGET, bound=10**9, wait=1.0):
    return Scheduler(budget=budget, bound=bound, wait=wait)


def add(scheduler, task, sizes, now=0.0, value=None):
    group = RowGroup(task, value, sum(sizes))
    scheduler.enter([group], now)
    scheduler.make_ready(group, sizes)
    return group


def rows_of(batch):
    """Return each row that was taken: its group and its number there."""
    return [(part.group, number) for part in batch for number in range(part.start, part.stop)]


def sizes_of(batch):
    assert [part.tokens for part in batch] == [sum(part.group.sizes[part.start : part.stop]) for part in batch]
    return [group.sizes[number] for group, number in rows_of(batch)]


def drain(scheduler):
    while batch := scheduler.take():
        yield batch


groups = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.lists(st.integers(1, 90), min_size=1, max_size=8)), max_size=30
)


@given(groups)
def test_a_batch_has_no_more_tokens_than_the_budget_unless_it_is_one_row(given_groups):
    scheduler = queue()
    for task, sizes in given_groups:
        add(scheduler, task, sizes)
    for batch in drain(scheduler):
        assert sum(sizes_of(batch)) <= BUDGET or len(rows_of(batch)) == 1


@given(groups)
def test_every_row_is_taken_once_and_a_groups_rows_in_their_order(given_groups):
    scheduler = queue()
    made = [add(scheduler, task, sizes) for task, sizes in given_groups]
    taken = [row for batch in drain(scheduler) for row in rows_of(batch)]
    for group in made:
        assert [number for mine, number in taken if mine is group] == list(range(len(group.sizes)))
    assert len(taken) == sum(len(group.sizes) for group in made)
    assert scheduler.waiting == scheduler.ready == 0


@given(groups, st.data())
def test_a_cancelled_group_is_never_taken_and_counts_for_nothing(given_groups, data):
    scheduler = queue()
    made = [add(scheduler, task, sizes) for task, sizes in given_groups]
    first = scheduler.take()
    gone = [group for group in made if data.draw(st.booleans())]
    for group in gone:
        scheduler.cancel(group)
        scheduler.cancel(group)  # twice is once
    left = sum(sum(p.sizes) for p in made if p not in gone) - sum(
        group.sizes[number] for group, number in rows_of(first) if group not in gone
    )
    assert scheduler.waiting == scheduler.ready == left
    assert not [part for batch in drain(scheduler) for part in batch if part.group in gone]
    assert scheduler.due_in(0.0) is None


@given(groups, st.integers(1, 200))
def test_no_more_tokens_wait_than_the_bound_unless_one_group_is_larger(given_groups, bound):
    scheduler = queue(bound=bound)
    entered, hints = [], []
    for task, sizes in given_groups:
        group = RowGroup(task, None, sum(sizes) // 2)  # a guess that is too low
        try:
            scheduler.enter([group], 0.0)
            scheduler.make_ready(group, sizes)
            entered.append(group)
        except QueueFull as full:
            scheduler.cancel(group)  # as a request with several groups does
            hints.append(full.retry_after)
        assert scheduler.waiting <= bound or len(entered) == 1
    assert sum(len(rows_of(batch)) for batch in drain(scheduler)) == sum(len(group.sizes) for group in entered)
    assert all(1 <= hint <= LONGEST_WAIT for hint in hints)


@given(
    flood=st.integers(1, 40),
    others=st.lists(st.integers(1, 8), min_size=1, max_size=7),
    before=st.integers(0, 3),
)
def test_a_flood_delays_another_tasks_row_by_no_more_than_the_next_batch(flood, others, before):
    scheduler = queue()
    for _ in range(flood):
        add(scheduler, "flood", [8] * 40)
    for _ in range(before):
        scheduler.take()
    late = [add(scheduler, f"other {i}", [size]) for i, size in enumerate(others)]
    batch = scheduler.take()
    assert {part.group for part in batch} >= set(late)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), st.integers(2, 20))
def test_tasks_that_all_flood_get_equal_shares(order, rounds):
    scheduler = queue()
    tasks = list(dict.fromkeys(order))
    for task in tasks:
        add(scheduler, task, [7] * 400)
    got = dict.fromkeys(tasks, 0)
    for _ in range(rounds):
        for part in scheduler.take():
            got[part.group.task] += part.tokens
    assert max(got.values()) - min(got.values()) <= BUDGET


@settings(max_examples=50)
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=40))
def test_with_many_tasks_none_waits_longer_than_all_others_together(sizes):
    scheduler = queue()
    for i, size in enumerate(sizes):
        add(scheduler, i, [size] * 50)
    seen = set()
    for _ in range(3 * len(sizes)):
        seen |= {part.group.task for part in scheduler.take()}
    assert seen == set(range(len(sizes)))


class Turns(OrderedDict):
    """Counts how often a task has had its turn."""

    count = 0

    def move_to_end(self, *given):
        self.count += 1
        super().move_to_end(*given)


@given(groups)
def test_skipping_turns_that_no_task_can_use_changes_nothing(given_groups):
    quick, plain = queue(), queue()
    plain._skip_turns = lambda share: None
    for task, sizes in given_groups:
        add(quick, task, sizes)
        add(plain, task, sizes)
    for mine, theirs in zip(drain(quick), drain(plain), strict=True):
        assert [(part.group.task, part.start, part.stop) for part in mine] == [
            (part.group.task, part.start, part.stop) for part in theirs
        ]


def test_a_batch_of_many_tasks_with_long_rows_takes_few_turns():
    scheduler, tasks = queue(), 300
    for task in range(tasks):
        add(scheduler, task, [BUDGET] * 3)
    scheduler._queues = Turns(scheduler._queues)
    assert len(list(drain(scheduler))) == 3 * tasks
    assert scheduler._queues.count < 20 * tasks  # of 64 tokens each, a share being one


def test_a_batch_is_due_when_it_is_full_or_its_oldest_row_has_waited():
    scheduler = queue(wait=1.0)
    assert scheduler.due_in(5.0) is None
    add(scheduler, "a", [10], now=5.0)
    assert scheduler.due_in(5.25) == 0.75
    add(scheduler, "b", [10], now=5.5)
    assert scheduler.due_in(5.5) == 0.5
    assert scheduler.due_in(7.0) == 0.0
    add(scheduler, "b", [BUDGET], now=5.5)
    assert scheduler.due_in(5.5) == 0.0


def test_untokenised_rows_are_counted_but_not_taken():
    scheduler = queue()
    group = RowGroup("a", None, 30)
    scheduler.enter([group], 0.0)
    assert (scheduler.waiting, scheduler.ready, scheduler.take()) == (30, 0, [])
    scheduler.make_ready(group, [5, 6])
    assert (scheduler.waiting, scheduler.ready, sizes_of(scheduler.take())) == (11, 11, [5, 6])


def test_a_group_that_is_cancelled_while_it_is_tokenised_stays_out():
    scheduler = queue()
    group = RowGroup("a", None, 30)
    scheduler.enter([group], 0.0)
    scheduler.cancel(group)
    scheduler.make_ready(group, [5, 6])
    assert (scheduler.waiting, scheduler.take()) == (0, [])


def test_one_task_takes_half_of_the_queue_and_leaves_space_for_others():
    scheduler = queue(bound=100)
    for _ in range(5):
        add(scheduler, "flood", [10])
    with pytest.raises(QueueFull, match="50 of them by this task, which may take as many as are free"):
        add(scheduler, "flood", [10])
    add(scheduler, "other", [10])
    assert scheduler.waiting == 60


def test_an_empty_queue_accepts_any_request_with_any_number_of_tasks():
    scheduler = queue(bound=100)
    groups = [RowGroup(task, None, 80) for task in ("a", "b", "a")]
    scheduler.enter(groups, 0.0)
    assert scheduler.waiting == 240
    late = RowGroup("c", None, 1)
    with pytest.raises(QueueFull):
        scheduler.enter([late], 0.0)
    for group in groups:
        scheduler.make_ready(group, [45, 45])  # more than was guessed, and still theirs
    assert (scheduler.waiting, scheduler.ready, late.queued) == (270, 270, False)
    assert sum(sum(sizes_of(batch)) for batch in drain(scheduler)) == 270


def test_a_refused_request_counts_nothing():
    scheduler = queue(bound=100)
    add(scheduler, "a", [30])
    groups = [RowGroup("b", None, 40), RowGroup("c", None, 40)]
    with pytest.raises(QueueFull, match="30 of 100 tokens in the queue are taken; try"):
        scheduler.enter(groups, 0.0)
    assert (scheduler.waiting, [group.queued for group in groups]) == (30, [False, False])
    with pytest.raises(QueueFull, match="30 of them by this task"):  # the task has what it had, and this twice
        scheduler.enter([RowGroup("a", None, 25), RowGroup("a", None, 25)], 0.0)
    with pytest.raises(QueueFull, match="30 of 100 tokens in the queue are taken; try"):  # more than is free for anyone
        scheduler.enter([RowGroup("a", None, 80)], 0.0)
    scheduler.enter([RowGroup("b", None, 35), RowGroup("c", None, 35)], 0.0)
    assert scheduler.waiting == 100


def test_retry_after_is_the_time_until_the_queue_has_drained():
    scheduler = queue(bound=100)
    add(scheduler, "a", [90])
    with pytest.raises(QueueFull, match="90 of 100 tokens in the queue are taken; try again in 1 s") as refused:
        add(scheduler, "b", [20])
    assert refused.value.retry_after == 1  # nothing is known of the pace yet
    scheduler.computed(tokens=60, seconds=2.0)
    with pytest.raises(QueueFull) as refused:
        add(scheduler, "b", [20])
    assert refused.value.retry_after == 3  # 90 tokens at 30 a second


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"bound": 0}, {"wait": -1.0}])
def test_invalid_settings_of_a_queue_are_refused(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        queue(**wrong)
