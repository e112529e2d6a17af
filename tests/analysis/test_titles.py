"""Titles: every task of the catalog has one that people use, and one's own task keeps its name."""

from __future__ import annotations

import pytest

from adapterbank.analysis.titles import task_title
from adapterbank.tasks.catalog import CATALOG, bank_name


@pytest.mark.parametrize(
    ("task", "title"),
    [("glue-mnli", "MNLI"), ("glue-sst2", "SST-2"), ("paper-sms_spam", "SMS spam"), ("my_tickets-2", "my_tickets-2")],
)
def test_a_task_has_its_title(task, title):
    assert task_title(task) == title


def test_titles_are_distinct_within_the_catalogs_suites():
    for suite in ("glue", "squad", "paper", ""):
        names = [name for name in CATALOG if name.rpartition("/")[0] == suite]
        titles = [task_title(bank_name(name)) for name in names]
        assert len(set(titles)) == len(titles)
        assert all(title[0].isupper() or title[0].isdigit() for title in titles)
