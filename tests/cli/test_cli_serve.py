"""Claims about `adapterbank serve`: a real process on a real port, from its start to its stop."""

from __future__ import annotations

import asyncio
import json
import os
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
from adapterbank.serving.http.auth import Keys
from adapterbank.serving.service.bank_mirror import FOLDER
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
    """Wait for the end of a process, and give what it said since its first line.

    What came with that line has been read with it, and `communicate` would pass it over.
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
        if "is a new bank" in line:
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
def test_it_answers_as_the_engine_does_and_stops_politely(start, small, how):
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
            told = json.loads(answer.read())["error"]
        assert (told["code"], "change it there" in told["message"]) == ("conflict", True)
    mirrors = [path for path in (cache.folder() / FOLDER).iterdir() if path.is_dir()]
    assert [path.name.split("-")[0] for path in mirrors] == [str(process.pid)]
    process.send_signal(signal.SIGTERM)
    assert rest(process).endswith("adapterbank: stopped.\n")
    assert not mirrors[0].exists()
    assert not (small.bank.path / "serving").exists()


def test_keys_of_a_bank_behind_a_url_are_asked_for(start, small):
    url = f"local://{small.bank.path}"
    with pytest.raises(InputError, match="make one: adapterbank keys add --keys FILE"):
        serve.find_keys(url, "0.0.0.0", None, small.bank.path)
    keys = Keys(small.bank.path / "keys.json")
    secret = keys.add("me", ["predict"])
    _, address = start("--bank", url)
    assert len(call(f"{address}/v1/tasks", authorization=f"Bearer {secret}")["tasks"]) == 1
    keys.revoke("me")
    until(lambda: status(f"{address}/v1/tasks", secret) == 401)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", "sun"], "engine is 'sun'; it must be one of local, ray"),
        (["--engine", "ray", "--device", "cuda:1"], "each replica of the engine ray has a GPU of its own"),
        (["--device", "toaster"], "device is 'toaster'"),
        (["--engine", "ray", "--replicas", "none"], "as in 1:4"),
        (["--bank", "nonsense://bank"], "nonsense://bank cannot be opened"),
        (["--bank", "s3://bucket/bank", "--create"], "s3://bucket/bank is a URL; make it here and copy it"),
    ],
)
def test_a_slip_is_told_before_anything_is_loaded(small, words, told):
    bank = [] if "--bank" in words else ["--bank", str(small.bank.path)]
    found = shell("serve", "--port", "0", *bank, *words)
    assert found.code == 2
    assert told in found.err


def test_a_bank_that_is_not_there_yet_is_made_for_an_encoder_that_is_named(tmp_path, bert, start):
    new = tmp_path / "new"
    told = shell("serve", "--port", "0", "--bank", str(new))
    assert (told.code, new.exists()) == (2, False)
    assert "new does not exist; " in told.err
    assert "or serve with --create" in told.err
    assert "name its encoder with --backbone" in shell("serve", "--port", "0", "--bank", str(new), "--create").err
    named = ["--bank", str(new), "--backbone", str(bert.folder)]
    assert shell("serve", "--port", "0", *named).code == 2  # so a disk that is missing is not served as an empty bank
    told = shell("serve", "--create", "--host", "0.0.0.0", "--port", "0", *named)
    assert "make one: adapterbank keys add --keys FILE" in told.err
    with serve.listening("127.0.0.1", 0) as taken:
        told = shell("serve", "--create", "--port", str(taken.getsockname()[1]), *named)
    assert "cannot be listened on" in told.err
    assert not new.exists()
    _, address = start("--create", *named)
    assert call(f"{address}/v1/tasks")["tasks"] == []
    assert Bank.open(new).backbone["sha256"] == bert.sha256
    options = "&".join(f"{name}={value}" for name, value in FAST.items())
    url = f"{address}/v1/tasks/first/train?{options}"
    run = call(url, table(), **{"content-type": "text/csv"})["id"]
    until(lambda: call(f"{address}/v1/runs/{run}")["state"] == "done")
    assert call(f"{address}/v1/tasks/first/predict", {"text": "the cat sat"})["version"] == 1


def test_with_json_it_says_where_it_listens(start, small):
    process, address = start("--no-train", "--no-page", "--json")
    process.terminate()
    assert json.loads(process.communicate(timeout=PATIENCE)[0]) == {"bank": str(small.bank.path), "address": address}


def test_keys_of_the_bank_are_asked_for_on_any_address(start, small):
    secret = Keys(small.bank.path / "keys.json").add("me", ["predict"])
    _, address = start("--no-train", "--no-page")
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        call(f"{address}/v1/tasks")
    refused.value.close()
    listed = call(f"{address}/v1/tasks", authorization=f"Bearer {secret}")
    assert [task["name"] for task in listed["tasks"]] == ["sentiment"]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "example.org"])
def test_an_address_that_others_can_reach_needs_keys(small, host):
    with pytest.raises(InputError, match="starts with keys only; make one: adapterbank keys add --bank"):
        serve.find_keys(str(small.bank.path), host, None)
    Keys(small.bank.path / "keys.json").add("me", ["predict"])
    assert serve.find_keys(str(small.bank.path), host, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_alone_needs_no_keys(small, host):
    assert serve.find_keys(str(small.bank.path), host, None) is None


def test_a_file_of_keys_that_is_not_there_is_told(small):
    with pytest.raises(InputError, match=r"There is no file of keys nowhere\.json"):
        serve.find_keys(str(small.bank.path), "127.0.0.1", "nowhere.json")


@pytest.mark.parametrize("named", [True, False], ids=["--keys", "the bank's"])
def test_a_file_whose_last_key_was_revoked_does_not_open_the_server_to_all(small, named):
    file = small.bank.path / "keys.json"
    Keys(file).add("me", ["predict"])
    Keys(file).revoke("me")
    with pytest.raises(InputError, match=r"keys\.json has no key left; delete it to serve without keys, or make one"):
        serve.find_keys(str(small.bank.path), "127.0.0.1", str(file) if named else None)


def test_without_keys_it_answers_to_this_machines_names_alone(start):
    _, address = start("--no-train")
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        call(f"{address}/v1/tasks", host="evil.example")
    refused.value.close()
    assert call(f"{address}/v1/tasks", host="localhost")["tasks"]


def test_a_port_in_use_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError, match=rf"^127\.0\.0\.1 port {port} cannot be listened on: address already in use; choose"
        ):
            serve.listening("127.0.0.1", port)


def test_what_is_written_to_a_connection_is_sent_at_once():
    """Without that the body of every answer waits until its head is acknowledged, some 40 ms on a kept connection."""

    async def run():
        found = asyncio.get_running_loop().create_future()

        class Server(asyncio.Protocol):
            def connection_made(self, transport):
                taken = transport.get_extra_info("socket")
                found.set_result(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        with serve.listening("127.0.0.1", 0) as door:
            server = await asyncio.get_running_loop().create_server(Server, sock=door)
            _, writer = await asyncio.open_connection(*door.getsockname())
            try:
                return await asyncio.wait_for(found, 60)
            finally:
                writer.close()
                server.close()

    assert asyncio.run(run())


def test_without_its_libraries_it_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr(serve, "_NEEDS", ("a_library_that_is_not_there",))
    with pytest.raises(InputError, match=r"pip install 'adapterbank\[serve\]'"):
        serve.command("bank")
