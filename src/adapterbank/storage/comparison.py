"""Two versions of a task compared by their scores: which is the better one, and how to say so. Reads manifests only."""

from __future__ import annotations

from typing import NamedTuple

from adapterbank.storage.package import Manifest


class Comparison(NamedTuple):
    """The scores of two versions on one split, by the metric that both have."""

    split: str
    metric: str
    new: float
    old: float
    same_rows: bool

    @property
    def is_lower(self) -> bool:
        """Whether the new version scores below the old one."""
        return self.new < self.old


def compare(new: Manifest, old: Manifest) -> Comparison | None:
    """Compare two versions on dev, or on test if only those rows are the same; None if no score is common to both."""
    metric = new.task["metric"]
    if metric != old.task["metric"]:
        return None
    found = []
    for split in ("dev", "test"):
        # A score on dev without dev rows is that of another model, which says nothing of this one.
        scores = [one.metrics.get(split, {}).get(metric) if split in one.data else None for one in (new, old)]
        if scores[0] is not None and scores[1] is not None:
            same = split in new.data and new.data[split] == old.data.get(split)
            found.append(Comparison(split, metric, scores[0], scores[1], same))
    return next((one for one in found if one.same_rows), found[0] if found else None)


def shortfall(new: Manifest, old: Manifest, default: str) -> list[str]:
    """Return the note about a new version that scores below the `old` default; empty if it does not."""
    found, name = compare(new, old), f"{old.name}@{old.version}"
    if found is None or not found.is_lower:
        return []
    rows = "" if found.same_rows else " (on other rows)"
    what = (
        f"The new version scores {found.metric} {found.new:.4f} on {found.split}, below {found.old:.4f}{rows} of {name}"
    )
    if default == "better":
        return [f"{what}, which remains the default."]
    return [f"{what}, which it replaces; rollback returns to it, and the option default=better would have kept it."]
