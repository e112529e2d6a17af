"""`training.run` for LoRA, IA3 and BitFit: their packages load, predict and are validated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapterbank.api.opened import open_bank
from adapterbank.errors import PackageDamaged
from small_data import reviews

ROWS = reviews()
FAST = {"epochs": 2, "lr": 0.01, "batch": 8, "max_length": 32}


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"method": "lora"},
        {"method": "lora", "rank": 3, "alpha": 1, "targets": "up,key", "layers": "1-2"},
        {"method": "ia3"},
        {"method": "ia3", "layers": "1-2"},
        {"method": "bitfit"},
        {"method": "bitfit", "layers": "2"},
    ],
)
def test_a_package_predicts_as_trained_after_loading_and_passes_the_audit(bank, bert, options):
    result = bank.train("s", ROWS, ROWS, **FAST, **options)
    again = open_bank(bank.path, bert, device="cpu")
    assert again.evaluate("s", ROWS)["accuracy"] == result.record["metrics"]["dev"]["accuracy"]
    assert all(finding.ok for finding in again.audit())
    assert [name for name in ("lora", "ia3") if result.package.manifest.method[name]] == [options["method"]][
        : options["method"] != "bitfit"
    ]


@pytest.mark.parametrize("change", [{"rank": 7}, {"alpha": 0}, {"alpha": "x"}, {"rank": 0}, {"targets": ["knee"]}])
def test_a_plan_that_does_not_match_the_tensors_of_the_package_is_refused(bank, bert, change):
    package = bank.train("s", ROWS, ROWS, **FAST, method="lora").package
    plan = package.manifest.method
    manifest = replace(package.manifest, method={**plan, "lora": {**plan["lora"], **change}})
    with pytest.raises(PackageDamaged, match=r"s@1 (has other tensors than its method|cannot be used)"):
        bank.engine.load(replace(package, manifest=manifest))
