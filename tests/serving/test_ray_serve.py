"""Claims about the engine ray: on a real cluster on this machine, a replica killed under load loses no request."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")

import clusters
from adapterbank.errors import InputError, ServiceError
from adapterbank.install import extra_command
from adapterbank.serving import ray_serve
from adapterbank.serving.build import ServerSettings
from adapterbank.serving.ray_serve import Scale, autoscaling, deployed, parse_replicas
from adapterbank.tasks.spec import Examples

KILLED = """
import contextlib, json, os, random, re, signal, socket, sys, threading, time
from pathlib import Path

import httpx
import psutil
from ray import serve

import adapterbank
from adapterbank.storage import cache
from adapterbank.serving.service.bank_mirror import MIRROR_FOLDER
from adapterbank.serving.ray_serve import Scale, deployed
from adapterbank.serving.build import ServerSettings

bank, new = Path("bank").absolute(), Path("new").absolute()
words = "the cat sat on a mat and was very good".split()
mirrors = cache.folder() / MIRROR_FOLDER
predicted, failed, statuses, names = [], [], [], set()
stop, leaving, calm = threading.Event(), threading.Event(), threading.Event()

class Stopped(Exception):
    pass

class Client(adapterbank.Client):
    def _send(self, call):
        if leaving.is_set():  # while it was on its way here: the replicas may be gone
            raise Stopped
        reply = super()._send(call)
        if leaving.is_set() and reply.status == 404 and not isinstance(reply.body, dict):
            raise Stopped  # Ray's own answer, not ours: it arrived after the way here was gone
        statuses.append(reply.status)
        return reply

def port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]

def pids():
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, IndexError):
            if child.cmdline()[0].startswith("ray::ServeReplica"):
                found.add(child.pid)
    return found

def whole():
    states = serve.status().applications["adapterbank"].deployments["adapterbank"].replica_states
    return states == {"RUNNING": 2} and all(list(mirrors.glob(f"{pid}-*/tasks/t0")) for pid in pids())

def scraped():
    names.update(re.findall('replica="([^"]+)"', httpx.get(f"{url}/metrics", timeout=600).text))
    return len(names) > 1

def until(what, true):
    end = time.monotonic() + 600
    while not true():
        assert time.monotonic() < end, (what, failed)
        time.sleep(0.2)

def load(seed, retries, count):
    draw = random.Random(seed)
    with Client(url, retries=retries, timeout=600) as client:
        while not stop.is_set():
            task, texts = f"t{draw.randrange(3)}", [" ".join(draw.choices(words, k=6)) for _ in range(count)]
            try:
                answers = client.predict(task, texts)
            except Stopped:
                return
            except Exception as error:
                failed.append(repr(error))
            else:
                predicted.append((task, texts, [one.probabilities for one in answers]))
            time.sleep(1 if calm.is_set() else 0)

def loaded(retries, count):
    threads = [threading.Thread(target=load, args=(seed, retries, count), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    return threads

listens = port()
url = f"http://127.0.0.1:{listens}"
settings = ServerSettings(f"local://{bank}", device="cpu", page=False)
with deployed(settings, Scale(1, 2, target=1), host="127.0.0.1", port=listens):
    alone = len(pids())
    threads = loaded(8, 4)
    until("a second replica for what waits", whole)
    until("numbers of both", scraped)
    before = pids()
    until("answers", lambda: len(predicted) > 100)
    os.kill(min(before), signal.SIGSTOP)  # so that it dies with requests that it has not answered
    time.sleep(0.3)
    os.kill(min(before), signal.SIGKILL)
    calm.set()  # all six go on asking, but leave a machine of few cores the time to start a replica
    until("another replica", lambda: pids() - before and min(before) not in pids() and whole())
    calm.clear()
    count = len(predicted)
    until("answers of the new one", lambda: len(predicted) > count + 100)
    stop.set()
    for thread in threads:
        thread.join()
    new.rename(bank / "tasks" / "t3")
    served = lambda pid: any((place / "tasks" / "t3" / "task.json").exists() for place in mirrors.glob(f"{pid}-*"))
    until("mirrors", lambda: all(served(pid) for pid in pids()))
    time.sleep(1)
    with Client(url, retries=0) as client:
        for _ in range(40):
            predicted.append(("t3", ["the cat"], [one.probabilities for one in client.predict("t3", ["the cat"])]))
    stop.clear()
    threads = loaded(0, 100)
    time.sleep(1)
    leaving.set()
    stop.set()  # what was asked before this is answered, though the replicas are taken away
for thread in threads:
    thread.join()
left = [place.name for place in mirrors.glob("*-*")]
result = {"predicted": predicted, "failed": failed, "statuses": sorted(set(statuses)), "left": left}
result |= {"names": len(names), "alone": alone}
print(json.dumps(result))
"""


@pytest.mark.slow
def test_replicas_grow_with_the_queue_and_a_killed_one_loses_no_request_and_comes_back(small, tmp_path):
    pytest.importorskip("ray.serve", reason="pip install 'adapterbank[ray]'")
    for number in range(4):
        small.put(f"t{number}", number)
    engine = small.alone("t0", "t1", "t2", "t3")
    (small.bank.path / "tasks" / "t3").rename(tmp_path / "new")
    result = json.loads(clusters.run(KILLED, tmp_path))
    assert result["failed"] == []
    assert 200 in result["statuses"]  # the others are requests that were lost with the replica and sent again
    assert result["left"] == []
    assert result["alone"] == 1  # and two when requests were queued
    assert result["names"] == 2  # the metrics name their replica
    assert len(result["predicted"]) > 240
    wanted = engine.predict([(task, Examples(texts)) for task, texts, _ in result["predicted"]])
    for (_, _, got), expected in zip(result["predicted"], wanted, strict=True):
        for one, other in zip(got, expected, strict=True):
            assert one == pytest.approx(other.probabilities, abs=1e-5)


class Cluster:
    """Stands for Ray and Ray Serve: notes what is asked of them."""

    def __init__(self, *, running=False, fails=""):
        self.asked, self.running, self.fails, self.resources, self.options = [], running, fails, {"CPU": 2}, {}

    def __getattr__(self, name):
        return lambda *_, **options: self.asked.append((name, options))

    def cluster_resources(self):
        return self.resources

    def is_initialized(self):
        return False

    def status(self):
        message = f"Traceback:\n  File x\nadapterbank.errors.BackboneError: {self.fails}\n" if self.fails else ""
        deployments = {"adapterbank": SimpleNamespace(message=message)}
        return SimpleNamespace(
            proxies={"node": "HEALTHY"} if self.running else {},
            applications={"adapterbank": SimpleNamespace(deployments=deployments)},
        )

    def ingress(self, app):
        return lambda cls: cls

    def deployment(self, cls, **options):
        self.options = options
        return SimpleNamespace(bind=lambda: cls)

    def run(self, *_, **options):
        self.asked.append(("run", options))
        if self.fails:
            raise RuntimeError("Deploying application adapterbank failed.")


@pytest.fixture
def cluster(monkeypatch):
    def make(**options):
        made = Cluster(**options)
        monkeypatch.setattr(ray_serve, "libraries", lambda: (made, made))
        return made

    return make


def serve(settings, scale=None):
    with deployed(settings, scale or Scale(), host="127.0.0.1", port=8000, address="here") as as_told:
        return as_told


def test_ray_serve_is_started_on_the_requested_address_and_stopped_again(cluster):
    made = cluster()
    assert serve(ServerSettings("bank")) is True
    assert [name for name, _ in made.asked] == ["init", "start", "run", "delete", "shutdown", "shutdown"]
    assert made.asked[0][1]["address"] == "here"
    assert made.asked[1][1]["http_options"] == {"host": "127.0.0.1", "port": 8000}


def test_a_cluster_with_ray_serve_requires_keys(cluster):
    made = cluster(running=True)
    with pytest.raises(InputError, match="Ray Serve runs on this cluster already"):
        serve(ServerSettings("bank"))
    assert [name for name, _ in made.asked] == ["init", "shutdown"]


def test_only_our_own_app_is_deleted_from_a_cluster_with_ray_serve(cluster):
    made = cluster(running=True)
    assert serve(ServerSettings("bank", locked=True)) is False
    assert [name for name, _ in made.asked] == ["init", "run", "delete", "shutdown"]


def test_a_replica_has_a_gpu_if_the_cluster_has_some(cluster):
    made = cluster()
    for gpus, device, wanted in ((0, "auto", 0), (4, "auto", 1), (4, "cuda", 1), (4, "cpu", 0)):
        made.resources = {"CPU": 8, "GPU": gpus}
        serve(ServerSettings("bank", device=device), Scale(2, 2, cpus=3))
        assert made.options["ray_actor_options"] == {"num_cpus": 3, "num_gpus": wanted}
    assert made.options["num_replicas"] == 2
    serve(ServerSettings("bank"), Scale(1, 4))
    assert made.options["autoscaling_config"]["max_replicas"] == 4


def test_the_reason_why_no_replica_started_is_reported(cluster):
    made = cluster(fails="'nowhere' is neither a folder, nor a name.")
    with pytest.raises(ServiceError, match=r"^No replica could be started: 'nowhere' is neither a folder"):
        serve(ServerSettings("bank"))
    assert [name for name, _ in made.asked][-3:] == ["delete", "shutdown", "shutdown"]


def test_a_replica_whose_service_has_stopped_is_not_healthy(cluster):
    replica = ray_serve.replica_class(cluster(), ServerSettings("bank"), 1, ".")()
    replica.app = SimpleNamespace(state=SimpleNamespace(service=SimpleNamespace(alive=True)))
    assert replica.check_health() is None
    replica.app.state.service.alive = False
    with pytest.raises(RuntimeError, match="stopped computing"):
        replica.check_health()


@pytest.mark.parametrize(("text", "wanted"), [("1", (1, 1)), ("3", (3, 3)), ("1:4", (1, 4)), ("2:2", (2, 2))])
def test_replicas_are_one_number_or_two(text, wanted):
    assert parse_replicas(text) == wanted


@pytest.mark.parametrize("text", ["", "0", "-1", "4:1", "0:2", "1:", ":2", "a", "1:2:3", "1.5", "²"])
def test_an_invalid_number_of_replicas_is_reported(text):
    with pytest.raises(InputError, match=r"give a number, or the least and the most, as in 1:4"):
        parse_replicas(text)


def test_the_number_of_replicas_follows_the_queued_requests():
    config = pytest.importorskip("ray.serve.config", reason="pip install 'adapterbank[ray]'")
    made = config.AutoscalingConfig(**autoscaling(Scale(2, 5, target=7)))
    assert (made.min_replicas, made.max_replicas, made.target_ongoing_requests) == (2, 5, 7)


@pytest.mark.parametrize("missing", ["ray", "ray.serve"])
def test_without_ray_serve_the_error_says_what_to_install(monkeypatch, missing):
    pytest.importorskip("ray.serve", reason="pip install 'adapterbank[ray]'")
    import ray

    monkeypatch.delattr(ray, "serve", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=re.escape(extra_command("ray,serve"))):
        ray_serve.libraries()
