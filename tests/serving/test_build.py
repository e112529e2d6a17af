"""Claims about the server built from plain values: what a bank that cannot be written to answers."""

from __future__ import annotations

from dataclasses import replace

from adapterbank.encoder.quickest import LayoutChoice
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


def test_a_server_takes_the_measured_precision_and_keeps_no_other_matrices(small, monkeypatch):
    times = {"fp32": 0.004, "int8": 0.001}

    def choose(backbone):
        backbone.laid_out("fp32")
        backbone.keep_only("int8")
        return LayoutChoice("int8", times)

    monkeypatch.setattr(build.checkpoint, "load", lambda name: replace(small.backbone))
    monkeypatch.setattr(build, "choose_layout", choose)
    app = build.build(ServerSettings(str(small.bank.path), device="cpu", page=False, precision="auto"))
    engine = app.state.service.engine
    assert (engine.layout, list(engine.backbone._laid_out)) == ("int8", ["int8"])
    assert str(app.state.choice) == "precision int8, chosen by a measurement: 4.0 ms in fp32, 1.0 ms in int8"
    plain = build.build(ServerSettings(str(small.bank.path), device="cpu", page=False))
    assert (plain.state.service.engine.layout, plain.state.choice) == ("fp32", None)
