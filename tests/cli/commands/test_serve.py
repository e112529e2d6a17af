"""`adapterbank serve`: a real process on a real port, from its start to its stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from adapterbank.cli.commands import serve
from adapterbank.errors import InputError
from adapterbank.install import extra_command
from adapterbank.serving.http.auth import Keys
from adapterbank.serving.service.bank_mirror import MIRROR_FOLDER
from adapterbank.storage import cache
from adapterbank.storage.bank import Bank
from adapterbank.tasks.spec import Examples
from serving.small_bank import PATIENCE, SmallBank
from serving.training import FAST, table
from small_data import shell


@pytest.fixture
def small(tmp_path, bert, new_slot, no_flush):
    made = SmallBank(tmp_path / "bank", bert, new_slot)
    made.put("sentiment")
    return made


def call(address, value=None, **headers):
    data = json.dumps(value).encode() if value is not None and not isinstance(value, bytes) else value
    request = urllib.request.Request(address, data, {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


def status(address, secret=None):
    try:
        call(address, **({"authorization": f"Bearer {secret}"} if secret else {}))
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code
    return 200


def until(true):
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def rest(process):
    """Wait for a process to end, and return the rest of its standard error.

    Not with `communicate`, which would skip what was read into the buffer along with the first line.
    """
    process.wait(PATIENCE)
    return process.stderr.read()


@pytest.fixture
def start(small):
    started = []

    def begin(*words):
        command = [sys.executable, "-c", "from adapterbank.cli.entry import main; main()", "serve", "--port", "0"]
        command += ["--device", "cpu", *words]
        command += [] if "--bank" in words else ["--bank", str(small.bank.path)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        line = process.stderr.readline()
        if "created the bank" in line:
            line = process.stderr.readline()
        assert "serving" in line, line
        address = line.split()[-1].strip()
        until(lambda: status(f"{address}/readyz") == 200)
        return process, address

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=["terminate", "ctrl-c"])
def test_the_server_answers_as_the_engine_does_and_stops_cleanly(start, small, how):
    process, address = start("--no-train")
    found = call(f"{address}/v1/tasks/sentiment/predict", {"text": "the cat sat"})
    (wanted,) = small.alone("sentiment").predict([("sentiment", Examples(["the cat sat"]))])[0]
    assert found["predictions"][0]["probabilities"] == pytest.approx(wanted.probabilities, abs=1e-5)
    process.send_signal(how)
    lines = rest(process).splitlines()
    assert process.returncode == 0
    assert lines[-1] == "adapterbank: stopped."
    events = [json.loads(line) for line in lines[:-1]]
    assert {event["event"] for event in events} >= {"loaded", "request"}
    assert "the cat" not in str(events)


def test_a_bank_behind_a_url_is_followed_and_not_written_to(start, small):
    process, address = start("--bank", f"local://{small.bank.path}")
    assert call(f"{address}/v1/tasks/sentiment/predict", {"text": "the cat sat"})["version"] == 1
    small.put("sentiment", 1)
    until(lambda: call(f"{address}/v1/tasks/sentiment/predict", {"text": "the cat sat"})["version"] == 2)
    found = call(f"{address}/v1/tasks/sentiment/predict", {"text": "the cat sat"})
    (wanted,) = small.alone("sentiment").predict([("sentiment", Examples(["the cat sat"]))])[0]
    assert found["predictions"][0]["probabilities"] == pytest.approx(wanted.probabilities, abs=1e-5)
    for path in ("train", "rollback"):
        with pytest.raises(urllib.error.HTTPError, match="409") as refused:
            call(f"{address}/v1/tasks/sentiment/{path}", {})
        with refused.value as answer:
            error = json.loads(answer.read())["error"]
        assert (error["code"], "change the bank at its source" in error["message"]) == ("conflict", True)
    mirrors = [path for path in (cache.folder() / MIRROR_FOLDER).iterdir() if path.is_dir()]
    assert [path.name.split("-")[0] for path in mirrors] == [str(process.pid)]
    process.send_signal(signal.SIGTERM)
    assert rest(process).endswith("adapterbank: stopped.\n")
    assert not mirrors[0].exists()
    assert not (small.bank.path / "serving").exists()


def test_the_keys_of_a_bank_behind_a_url_are_required(start, small):
    url = f"local://{small.bank.path}"
    with pytest.raises(InputError, match="add one with: adapterbank keys add --keys FILE"):
        serve.find_keys(url, "0.0.0.0", None, small.bank.path)
    keys = Keys(small.bank.path / "keys.json")
    secret = keys.add("me", ["predict"])
    _, address = start("--bank", url)
    assert len(call(f"{address}/v1/tasks", authorization=f"Bearer {secret}")["tasks"]) == 1
    keys.revoke("me")
    until(lambda: status(f"{address}/v1/tasks", secret) == 401)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "sun"], "engine is 'sun'; it must be one of local, ray"),
        (["--engine", "ray", "--device", "cuda:1"], "each Ray replica has its own GPU"),
        (["--engine", "ray", "--precision", "auto"], "each Ray replica would measure for itself"),
        (["--device", "toaster"], "device is 'toaster'"),
        (["--engine", "ray", "--replicas", "none"], "as in 1:4"),
        (["--bank", "nonsense://bank"], "nonsense://bank cannot be opened"),
        (
            ["--bank", "s3://bucket/bank", "--create"],
            "s3://bucket/bank is a URL; create the bank locally and copy it there",
        ),
    ],
)
def test_a_mistake_is_reported_before_anything_is_loaded(small, words, message):
    bank = [] if "--bank" in words else ["--bank", str(small.bank.path)]
    found = shell("serve", "--port", "0", *bank, *words)
    assert found.code == 2
    assert message in found.err


def test_create_makes_a_new_bank_for_the_encoder_that_is_named(tmp_path, bert, start):
    new = tmp_path / "new"
    found = shell("serve", "--port", "0", "--bank", str(new))
    assert (found.code, new.exists()) == (2, False)
    assert "new does not exist; " in found.err
    assert "or serve with --create" in found.err
    assert (
        "name the encoder to create it for with --backbone"
        in shell("serve", "--port", "0", "--bank", str(new), "--create").err
    )
    named = ["--bank", str(new), "--backbone", str(bert.folder)]
    assert (
        shell("serve", "--port", "0", *named).code == 2
    )  # so that a disk that is not mounted is not served as an empty bank
    found = shell("serve", "--create", "--host", "0.0.0.0", "--port", "0", *named)
    assert "add one with: adapterbank keys add --keys FILE" in found.err
    with serve.listening("127.0.0.1", 0) as taken:
        found = shell("serve", "--create", "--port", str(taken.getsockname()[1]), *named)
    assert "Cannot listen on" in found.err
    assert not new.exists()
    _, address = start("--create", *named)
    assert call(f"{address}/v1/tasks")["tasks"] == []
    assert Bank.open(new).backbone["sha256"] == bert.sha256
    options = "&".join(f"{name}={value}" for name, value in FAST.items())
    url = f"{address}/v1/tasks/first/train?{options}"
    run = call(url, table(), **{"content-type": "text/csv"})["id"]
    until(lambda: call(f"{address}/v1/runs/{run}")["state"] == "done")
    assert call(f"{address}/v1/tasks/first/predict", {"text": "the cat sat"})["version"] == 1


def test_json_prints_the_address(start, small):
    process, address = start("--no-train", "--no-page", "--json")
    process.terminate()
    assert json.loads(process.communicate(timeout=PATIENCE)[0]) == {"bank": str(small.bank.path), "address": address}


def test_the_keys_of_a_bank_are_required_on_any_address(start, small):
    secret = Keys(small.bank.path / "keys.json").add("me", ["predict"])
    _, address = start("--no-train", "--no-page")
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        call(f"{address}/v1/tasks")
    refused.value.close()
    listed = call(f"{address}/v1/tasks", authorization=f"Bearer {secret}")
    assert [task["name"] for task in listed["tasks"]] == ["sentiment"]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "example.org"])
def test_an_address_that_other_machines_can_reach_requires_keys(small, host):
    with pytest.raises(InputError, match="requires API keys; add one with: adapterbank keys add --bank"):
        serve.find_keys(str(small.bank.path), host, None)
    Keys(small.bank.path / "keys.json").add("me", ["predict"])
    assert serve.find_keys(str(small.bank.path), host, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_address_requires_no_keys(small, host):
    assert serve.find_keys(str(small.bank.path), host, None) is None


def test_a_missing_file_of_keys_is_reported(small):
    with pytest.raises(
        InputError, match=r"nowhere\.json does not exist; create it with: adapterbank keys add --keys nowhere\.json"
    ):
        serve.find_keys(str(small.bank.path), "127.0.0.1", "nowhere.json")


@pytest.mark.parametrize("named", [True, False], ids=["--keys", "the bank's"])
def test_revoking_the_last_key_does_not_open_the_server_to_everyone(small, named):
    file = small.bank.path / "keys.json"
    Keys(file).add("me", ["predict"])
    Keys(file).revoke("me")
    with pytest.raises(
        InputError, match=r"keys\.json contains no keys; delete it to serve without keys, or add one with"
    ):
        serve.find_keys(str(small.bank.path), "127.0.0.1", str(file) if named else None)


def test_without_keys_only_local_host_names_are_accepted(start):
    _, address = start("--no-train")
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        call(f"{address}/v1/tasks", host="evil.example")
    refused.value.close()
    assert call(f"{address}/v1/tasks", host="localhost")["tasks"]


def test_a_port_in_use_is_reported_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError, match=rf"^Cannot listen on 127\.0\.0\.1 port {port}: address already in use; choose"
        ):
            serve.listening("127.0.0.1", port)


def test_responses_are_sent_without_delay():
    """Without TCP_NODELAY a response's body waits until its head is acknowledged, 40 ms on a kept connection."""

    async def run():
        found = asyncio.get_running_loop().create_future()

        class Server(asyncio.Protocol):
            def connection_made(self, transport):
                taken = transport.get_extra_info("socket")
                found.set_result(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        with serve.listening("127.0.0.1", 0) as listener:
            server = await asyncio.get_running_loop().create_server(Server, sock=listener)
            _, writer = await asyncio.open_connection(*listener.getsockname())
            try:
                return await asyncio.wait_for(found, 60)
            finally:
                writer.close()
                server.close()

    assert asyncio.run(run())


def test_missing_libraries_are_reported_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr(serve, "REQUIRED", ("a_library_that_is_not_there",))
    with pytest.raises(InputError, match=re.escape(extra_command("serve"))):
        serve.command("bank")
