"""Batching: within its budget, in time, fair, bounded; a thousand random histories say so."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterbank.serving.service.scheduler import LONGEST_WAIT, Full, Parcel, Scheduler

BUDGET = 64


def queue(budget=BUDGET, bound=10**9, wait=1.0):
    return Scheduler(budget=budget, bound=bound, wait=wait)


def add(batching, task, sizes, now=0.0, value=None):
    parcel = Parcel(task, value, sum(sizes))
    batching.enter([parcel], now)
    batching.make_ready(parcel, sizes)
    return parcel


def rows_of(batch):
    """Give each row that was taken: its parcel and its number there."""
    return [(part.parcel, number) for part in batch for number in range(part.start, part.stop)]


def sizes_of(batch):
    assert [part.tokens for part in batch] == [sum(part.parcel.sizes[part.start : part.stop]) for part in batch]
    return [parcel.sizes[number] for parcel, number in rows_of(batch)]


def drain(batching):
    while batch := batching.take():
        yield batch


parcels = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.lists(st.integers(1, 90), min_size=1, max_size=8)), max_size=30
)


@given(parcels)
def test_a_batch_has_no_more_tokens_than_the_budget_unless_it_is_one_row(given_parcels):
    batching = queue()
    for task, sizes in given_parcels:
        add(batching, task, sizes)
    for batch in drain(batching):
        assert sum(sizes_of(batch)) <= BUDGET or len(rows_of(batch)) == 1


@given(parcels)
def test_every_row_is_taken_once_and_a_parcels_rows_in_their_order(given_parcels):
    batching = queue()
    made = [add(batching, task, sizes) for task, sizes in given_parcels]
    taken = [row for batch in drain(batching) for row in rows_of(batch)]
    for parcel in made:
        assert [number for mine, number in taken if mine is parcel] == list(range(len(parcel.sizes)))
    assert len(taken) == sum(len(parcel.sizes) for parcel in made)
    assert batching.waiting == batching.ready == 0


@given(parcels, st.data())
def test_what_is_cancelled_is_never_taken_and_counts_for_nothing(given_parcels, data):
    batching = queue()
    made = [add(batching, task, sizes) for task, sizes in given_parcels]
    first = batching.take()
    gone = [parcel for parcel in made if data.draw(st.booleans())]
    for parcel in gone:
        batching.cancel(parcel)
        batching.cancel(parcel)  # twice is once
    left = sum(sum(p.sizes) for p in made if p not in gone) - sum(
        parcel.sizes[number] for parcel, number in rows_of(first) if parcel not in gone
    )
    assert batching.waiting == batching.ready == left
    assert not [part for batch in drain(batching) for part in batch if part.parcel in gone]
    assert batching.due_in(0.0) is None


@given(parcels, st.integers(1, 200))
def test_no_more_tokens_wait_than_the_bound_unless_one_parcel_is_larger(given_parcels, bound):
    batching = queue(bound=bound)
    entered, hints = [], []
    for task, sizes in given_parcels:
        parcel = Parcel(task, None, sum(sizes) // 2)  # a guess that is too low
        try:
            batching.enter([parcel], 0.0)
            batching.make_ready(parcel, sizes)
            entered.append(parcel)
        except Full as full:
            batching.cancel(parcel)  # as who asked for more than this parcel does
            hints.append(full.retry_after)
        assert batching.waiting <= bound or len(entered) == 1
    assert sum(len(rows_of(batch)) for batch in drain(batching)) == sum(len(parcel.sizes) for parcel in entered)
    assert all(1 <= hint <= LONGEST_WAIT for hint in hints)


@given(
    flood=st.integers(1, 40),
    others=st.lists(st.integers(1, 8), min_size=1, max_size=7),
    before=st.integers(0, 3),
)
def test_a_flood_delays_another_tasks_row_by_no_more_than_the_next_batch(flood, others, before):
    batching = queue()
    for _ in range(flood):
        add(batching, "flood", [8] * 40)
    for _ in range(before):
        batching.take()
    late = [add(batching, f"other {i}", [size]) for i, size in enumerate(others)]
    batch = batching.take()
    assert {part.parcel for part in batch} >= set(late)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), st.integers(2, 20))
def test_tasks_that_all_flood_get_equal_shares(order, rounds):
    batching = queue()
    tasks = list(dict.fromkeys(order))
    for task in tasks:
        add(batching, task, [7] * 400)
    got = dict.fromkeys(tasks, 0)
    for _ in range(rounds):
        for part in batching.take():
            got[part.parcel.task] += part.tokens
    assert max(got.values()) - min(got.values()) <= BUDGET


@settings(max_examples=50)
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=40))
def test_with_many_tasks_nobody_waits_longer_than_all_others_together(sizes):
    batching = queue()
    for i, size in enumerate(sizes):
        add(batching, i, [size] * 50)
    seen = set()
    for _ in range(3 * len(sizes)):
        seen |= {part.parcel.task for part in batching.take()}
    assert seen == set(range(len(sizes)))


class Turns(OrderedDict):
    """Counts how often a task has had its turn."""

    count = 0

    def move_to_end(self, *given):
        self.count += 1
        super().move_to_end(*given)


@given(parcels)
def test_turns_that_nobody_could_use_are_skipped_and_change_nothing(given_parcels):
    quick, plain = queue(), queue()
    plain._skip_turns = lambda share: None
    for task, sizes in given_parcels:
        add(quick, task, sizes)
        add(plain, task, sizes)
    for mine, theirs in zip(drain(quick), drain(plain), strict=True):
        assert [(part.parcel.task, part.start, part.stop) for part in mine] == [
            (part.parcel.task, part.start, part.stop) for part in theirs
        ]


def test_a_batch_of_many_tasks_with_long_rows_takes_few_turns():
    batching, tasks = queue(), 300
    for task in range(tasks):
        add(batching, task, [BUDGET] * 3)
    batching._lines = Turns(batching._lines)
    assert len(list(drain(batching))) == 3 * tasks
    assert batching._lines.count < 20 * tasks  # of 64 tokens each, a share being one


def test_a_batch_is_due_when_it_is_full_or_its_oldest_row_has_waited():
    batching = queue(wait=1.0)
    assert batching.due_in(5.0) is None
    add(batching, "a", [10], now=5.0)
    assert batching.due_in(5.25) == 0.75
    add(batching, "b", [10], now=5.5)
    assert batching.due_in(5.5) == 0.5
    assert batching.due_in(7.0) == 0.0
    add(batching, "b", [BUDGET], now=5.5)
    assert batching.due_in(5.5) == 0.0


def test_what_is_not_tokenised_yet_is_counted_but_not_taken():
    batching = queue()
    parcel = Parcel("a", None, 30)
    batching.enter([parcel], 0.0)
    assert (batching.waiting, batching.ready, batching.take()) == (30, 0, [])
    batching.make_ready(parcel, [5, 6])
    assert (batching.waiting, batching.ready, sizes_of(batching.take())) == (11, 11, [5, 6])


def test_a_parcel_that_is_cancelled_while_it_is_tokenised_stays_out():
    batching = queue()
    parcel = Parcel("a", None, 30)
    batching.enter([parcel], 0.0)
    batching.cancel(parcel)
    batching.make_ready(parcel, [5, 6])
    assert (batching.waiting, batching.take()) == (0, [])


def test_one_task_fills_half_of_the_queue_and_leaves_room_for_others():
    batching = queue(bound=100)
    for _ in range(5):
        add(batching, "flood", [10])
    with pytest.raises(Full, match="50 of them this task's, which may hold as many as are free"):
        add(batching, "flood", [10])
    add(batching, "other", [10])
    assert batching.waiting == 60


def test_an_empty_queue_takes_any_request_whole_however_many_tasks_it_names():
    batching = queue(bound=100)
    parcels = [Parcel(task, None, 80) for task in ("a", "b", "a")]
    batching.enter(parcels, 0.0)
    assert batching.waiting == 240
    late = Parcel("c", None, 1)
    with pytest.raises(Full):
        batching.enter([late], 0.0)
    for parcel in parcels:
        batching.make_ready(parcel, [45, 45])  # more than was guessed, and still theirs
    assert (batching.waiting, batching.ready, late.inside) == (270, 270, False)
    assert sum(sum(sizes_of(batch)) for batch in drain(batching)) == 270


def test_of_a_request_that_has_no_room_nothing_is_counted():
    batching = queue(bound=100)
    add(batching, "a", [30])
    parcels = [Parcel("b", None, 40), Parcel("c", None, 40)]
    with pytest.raises(Full, match="30 tokens wait in a queue of 100; come"):
        batching.enter(parcels, 0.0)
    assert (batching.waiting, [parcel.inside for parcel in parcels]) == (30, [False, False])
    with pytest.raises(Full, match="30 of them this task's"):  # the task has what it had, and this twice
        batching.enter([Parcel("a", None, 25), Parcel("a", None, 25)], 0.0)
    with pytest.raises(Full, match="30 tokens wait in a queue of 100; come"):  # more than is free for anyone
        batching.enter([Parcel("a", None, 80)], 0.0)
    batching.enter([Parcel("b", None, 35), Parcel("c", None, 35)], 0.0)
    assert batching.waiting == 100


def test_who_is_refused_is_told_to_come_when_the_queue_has_drained():
    batching = queue(bound=100)
    add(batching, "a", [90])
    with pytest.raises(Full, match="90 tokens wait in a queue of 100; come again in 1 s") as refused:
        add(batching, "b", [20])
    assert refused.value.retry_after == 1  # nothing is known of the pace yet
    batching.computed(tokens=60, seconds=2.0)
    with pytest.raises(Full) as refused:
        add(batching, "b", [20])
    assert refused.value.retry_after == 3  # 90 tokens at 30 a second


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"bound": 0}, {"wait": -1.0}])
def test_a_queue_that_could_not_work_is_refused(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        queue(**wrong)
