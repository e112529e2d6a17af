"""`adapterbank soup`: what it prints, and how it refuses."""

from __future__ import annotations

from adapterbank.api.opened import open_bank
from cli.invoke import run
from small_data import FAST, shell


def test_soup_prints_the_new_version_with_its_score_where_there_is_data(one_task, bert):
    open_bank("bank", bert, device="cpu").train("s", "train.csv", "train.csv", **{**FAST, "lr": 0.02})
    assert run("soup", "s@1", "s@2").out.startswith("s@3  the average of 2, ")
    found = shell("soup", "--bank", "bank", "s@1", "s@2", "--as", "both", "--data", "train.csv")
    assert (found.code, found.out.startswith("both@1  accuracy ")) == (0, True)
    assert "on train.csv  the average of 2" in found.out
    as_json = run("soup", "s@1", "s@2", "--json").json
    assert ([one["package"] for one in as_json["recipe"]["soup"]], as_json["version"]) == (["s@1", "s@2"], 4)


def test_one_version_is_refused_in_one_line(one_task):
    found = shell("soup", "--bank", "bank", "s@1")
    assert (found.code, found.err) == (
        2,
        "adapterbank: A soup needs two packages or more, each of them once; these are s@1.\n",
    )
