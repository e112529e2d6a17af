"""`adapterbank prune`: what was removed, what it cost, and what cannot be pruned."""

from __future__ import annotations

from cli.invoke import on_task


def test_prune_prints_what_was_removed_and_what_it_cost(one_task):
    found = on_task("prune", "--tolerance", 100)
    assert found.code == 0
    assert "Without the adapters of layers 0, 1, 2: accuracy" in found.out
    assert "s@2  " in found.out
    assert "parameters instead of" in found.out
    assert on_task("prune", "--json").json["package"] is None
    assert on_task("prune", "--tolerance", -1).code == 2


def test_a_task_without_any_adapter_left_is_reported(one_task):
    on_task("prune", "--tolerance", 100)
    found = on_task("ablate")
    assert (found.code, found.err) == (
        2,
        "adapterbank: s@2 has no adapters left to remove; name an earlier version of the task.\n",
    )
    assert on_task("prune").out.splitlines()[-1] == "s@2 has no adapters left to remove."


def test_a_damaged_record_is_reported_before_a_version_without_a_record_is_made(one_task):
    (one_task / "bank" / "records" / "0123456789abcdef.json").write_text("{")
    found = on_task("prune", "--tolerance", 100)
    assert (found.code, "0123456789abcdef.json is not JSON" in found.err) == (2, True)
    assert not (one_task / "bank" / "tasks" / "s" / "2").exists()
