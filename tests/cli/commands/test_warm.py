"""`adapterbank warm`: what it says, and what it refuses."""

from __future__ import annotations

from adapterbank.api import warm as api
from adapterbank.api.warm import Warmed
from small_data import shell


def test_a_machine_without_a_gpu_is_told_so(checkpoint):
    found = shell("warm", "--backbone", str(checkpoint("bert")[0]), "--device", "cpu")
    assert (found.code, found.out) == (2, "")
    assert "nothing is compiled; use a GPU" in found.err
    assert found.err.count("\n") == 1


def test_it_says_how_many_forms_it_compiled_and_where_they_are(monkeypatch, tmp_path):
    asked = {}

    def pretend(name, bank, **options):
        asked.update(options, name=name, bank=bank)
        return Warmed(2, tmp_path)

    monkeypatch.setattr(api, "warm_up", pretend)
    found = shell("warm", "--backbone", "minilm", "--size", "8", "--size", "64")
    assert found.code == 0
    assert found.out.startswith("Compiled 2 forms of tasks for minilm in ")
    assert str(tmp_path) in found.out
    assert (asked["name"], asked["bank"], asked["sizes"], asked["max_length"]) == ("minilm", None, [8, 64], 128)
    told = shell("warm", "--json").json
    assert (told["forms"], told["folder"], told["backbone"]) == (2, str(tmp_path), "minilm")
