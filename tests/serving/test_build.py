"""Claims about the server built from plain values: what a bank that cannot be written to answers."""

from __future__ import annotations

from adapterbank.serving import build
from adapterbank.serving.build import UNWRITABLE, ServerSettings
from serving.dummy import ask, code


def test_a_bank_that_cannot_be_written_to_refuses_training_with_the_reason(small, monkeypatch):
    monkeypatch.setattr(build.checkpoint, "load", lambda name: small.backbone)
    settings = ServerSettings(str(small.bank.path), device="cpu", page=False)
    train = {"content": b"text,label\nfine,good\n", "headers": {"Content-Type": "text/csv", "Host": "localhost"}}
    app = build.build(settings, jobs=lambda weights: None)
    answer = ask(app, "POST", "/v1/tasks/new/train", **train)
    assert (answer.status_code, code(answer)) == (409, "conflict")
    assert answer.json()["error"]["message"] == UNWRITABLE
    without = build.build(settings)  # --no-train
    assert ask(without, "POST", "/v1/tasks/new/train", **train).status_code == 404
