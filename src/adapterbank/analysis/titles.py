"""The titles of tasks in figures and tables. Computes nothing."""

from __future__ import annotations

from adapterbank.analysis.paper import GLUE_COLUMNS
from adapterbank.training.dataset import catalog_name

_TITLES = {
    **{task: title for title, (task, split, _) in GLUE_COLUMNS.items() if split == "dev"},
    **{"glue/mnli": "MNLI", "glue/wnli": "WNLI", "glue/ax": "GLUE diagnostics"},
    **{"squad/v1": "SQuAD 1.1", "squad/v2": "SQuAD 2.0", "squad/v1-articles": "SQuAD 1.1 by articles"},
    **{"paper/20newsgroups": "20 Newsgroups", "paper/20newsgroups-bydate": "20 Newsgroups by date"},
    **{"paper/sms_spam": "SMS spam", "paper/us_economy": "US economy", "agnews": "AG News", "trec": "TREC"},
    **{"mr": "MR", "subj": "Subj", "cr": "CR", "sst5": "SST-5", "banking77": "Banking77", "clinc150": "CLINC150"},
    "imdb": "IMDB",
}
"""Name in the catalog -> title, if it is not the name with a capital letter."""


def task_title(task: str) -> str:
    """Return the title of a task of a bank; a task that is not in the catalog has the name that its owner gave it."""
    name = catalog_name(task)
    if name is None:
        return task
    return _TITLES.get(name) or name.rpartition("/")[2].replace("_", " ").capitalize()
