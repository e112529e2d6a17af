"""Hostile HTTP: requests drawn from the server's own document, to a server with keys and to one without.

Every answer is held against the document: its status, its code, its type, its schema; a request that the document
allows must succeed, and one that it forbids must not. No answer may be a 5xx, name a path of the machine, repeat a long
request, or tell a key of one task about another.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from adapterbank.serving.http.auth import FILE, Keys
from trials.frame import Case, Stage, Trial
from trials.http_attacks import Attack, Operation, World, draw_attack
from trials.http_wire import Answer, connect, exchange, receive
from trials.server import KINDS, Server, TrialBank

GRANTS: dict[str, tuple[tuple[str, ...], list[str] | None, int | None]] = {
    "admin": (("admin",), None, None),
    "reader": (("predict",), None, None),
    "trainer": (("train",), None, None),
    "limited": (("predict", "train"), ["mine"], None),
    "slow": (("predict", "train"), None, 60),
    "revoked": (("admin",), None, None),
}
"""Scopes, tasks and rate of each key."""
OPEN = re.compile(r"/(healthz|readyz|favicon\.ico|page/.*)?")
"""What is answered without a key."""
UNLISTED = re.compile(r"/(docs|openapi\.json|favicon\.ico|page/.*)?")
"""What is answered and not in the document."""
LONGEST = 4096
"""Characters of an error's message."""
SECONDS = 30.0
"""Seconds within which an ordinary request is answered."""
RAW_SECONDS = 1.0
"""The same for what is no HTTP: the server may wait for the rest."""
STALLED = 100.0
"""Seconds after which a stalled request must have been refused: a head has 30, a body 60."""
TEND = 100
"""Cases between two looks at the server as a whole."""


@dataclass
class Target:
    """One of the two servers."""

    known: TrialBank
    server: Server
    world: World
    validators: dict[str, Any] = field(default_factory=dict)
    stalled: list[tuple[Case, Attack, socket.socket, float]] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    """Request ids whose errors in the log have been told."""

    @property
    def locked(self) -> bool:
        """Whether it has keys."""
        return bool(self.world.keys)


def make_target(stage: Stage, *, locked: bool) -> Target:
    """Start a server of a new bank."""
    known = TrialBank(stage.folder / ("locked" if locked else "open"), seed=stage.seed, texts=12)
    secrets: dict[str, str] = {}
    if locked:
        keys = Keys(known.bank.path / FILE)
        secrets = {name: keys.add(name, *grant) for name, grant in GRANTS.items()}
    tasks = {f"private-{kind}": kind for kind in KINDS} | {"mine": "classification"}
    for number, (name, kind) in enumerate(tasks.items()):
        known.put(name, number, kind)
    _put_spares(known)
    server = Server(known.bank.path)
    stage.closing.callback(server.kill)
    document = server.ask("GET", "/openapi.json", key=secrets.get("admin", ""))[1]
    if locked:
        Keys(known.bank.path / FILE).revoke("revoked")
    bodies = {name: _body(known, number, kind) for number, (name, kind) in enumerate(tasks.items())}
    return Target(known, server, World(document, secrets, bodies, ("spare-0", "spare-1")))


def _body(known: TrialBank, number: int, kind: str) -> dict[str, Any]:
    rows = [*known.answers(kind, number)][:3]
    pairs = {"pairs": [pair for _, pair in rows]} if kind == "span" else {}
    return {"texts": [text for text, _ in rows], **pairs}


def _put_spares(known: TrialBank) -> None:
    """Put the tasks that requests may remove, where one has."""
    there = set(known.bank.names())
    for number, name in enumerate(("spare-0", "spare-1")):
        for _ in range(0 if name in there else 2):
            known.put(name, number, "classification")


# --- what the document says


def address(path: str) -> str:
    """Return the address of a request, without its query."""
    return urllib.parse.unquote(path.partition("?")[0].partition("#")[0])


def documented(target: Target, method: str, path: str) -> Operation | None:
    """Return the operation that a request names; None if there is none."""
    for known, template in target.world.operations:
        pattern = "[^/]+".join(map(re.escape, re.split(r"{\w+}", template)))
        if method == known and re.fullmatch(pattern, address(path)):
            return known, template
    return None


def scope_of(operation: Operation) -> str:
    """Return the scope that an operation needs."""
    method, path = operation
    if path in ("/healthz", "/readyz"):
        return "open"
    if path.endswith("/predict"):
        return "predict"
    if path.endswith("/train") or path.startswith("/v1/runs"):
        return "train"
    return "admin" if method == "DELETE" or path.endswith("/rollback") else "any"


def may(target: Target, attack: Attack, operation: Operation) -> bool:
    """Whether the key of a request allows an operation on the task that the path names."""
    scope = scope_of(operation)
    if not target.locked or scope == "open":
        return True
    if attack.who not in GRANTS or attack.who == "revoked":
        return False
    scopes, tasks, _ = GRANTS[attack.who]
    named = re.match(r"/v1/tasks/([^/@?]+)", urllib.parse.unquote(attack.path))
    fits = tasks is None or named is None or named[1] in tasks
    return fits and ("admin" in scopes or scope == "any" or scope in scopes)


def expected(target: Target, attack: Attack) -> set[int]:
    """Return the statuses that answer a valid request."""
    method, path = attack.operation
    if not may(target, attack, attack.operation):
        known = attack.who in GRANTS and attack.who != "revoked"
        return {403, 404, 429} if known else {401}
    if path == "/v1/predict" and attack.who == "limited" and b'"mine"' not in attack.body:
        return {403}
    wanted = {202, 429} if path.endswith("/train") else {200}
    if "{id}" in path or method == "DELETE" or path.endswith("/rollback"):
        wanted |= {403, 404, 409}
    return wanted | ({429} if attack.who == "slow" else set())


# --- judging one answer


def problems(target: Target, attack: Attack, answer: Answer) -> list[str]:
    """Return everything that is wrong with an answer."""
    status = answer.status
    if not status:
        return [] if attack.raw or attack.cut is not None else [f"no answer ({answer.error})"]
    found = [f"answered with {status}"] if status >= 500 else []
    if not answer.whole:
        found.append("the answer was cut off")
    if 200 <= status < 300:
        found += _trespass(target, attack, answer)
    if str(target.known.folder) in answer.text:
        found.append("the answer names a path of the machine")
    if attack.raw and 400 <= status < 500 and answer.kind != "application/json":
        return found  # the HTTP library refuses what is no HTTP
    if attack.method == "HEAD" or status == 304:
        return found
    operation = documented(target, attack.method, attack.path)
    found += _unlisted(attack, answer) if operation is None else _mismatch(target, attack, answer, operation)
    intact = operation == attack.operation and not attack.raw and attack.cut is None
    if intact and attack.valid and status not in expected(target, attack):
        found.append(f"a valid request got {status}, not one of {sorted(expected(target, attack))}")
    if intact and attack.invalid and 200 <= status < 300:
        found.append(f"a request that the document forbids got {status}")
    if intact and attack.valid and status == 200 and attack.operation[1] == "/v1/tasks/{task}/predict":
        found += _wrong(target, attack, answer.json)
    return found


def _trespass(target: Target, attack: Attack, answer: Answer) -> list[str]:
    """Return the ways in which a 2xx goes past the keys."""
    if OPEN.fullmatch(address(attack.path)):
        return []
    if attack.refused:
        return ["a request under a foreign name, or with two values of one header, was answered"]
    if not target.locked:
        return []
    if attack.who not in GRANTS or attack.who == "revoked":
        return ["an answer without a key"]
    operation = documented(target, attack.method, attack.path)
    if operation and not may(target, attack, operation):
        return [f"the key {attack.who!r} does not allow this"]
    if attack.who == "limited" and "private-" in answer.text:
        return ["a key of one task reads another's name"]
    return []


def _unlisted(attack: Attack, answer: Answer) -> list[str]:
    """Judge the answer at an address, or with a method, that the document does not have."""
    if UNLISTED.fullmatch(address(attack.path)) and answer.status in (200, 404, 405):
        return []
    known = {400, 401, 403, 404, 405, 413, 415, 422, 429, 431}
    return [] if answer.status in known else [f"{answer.status} at an address that the document does not have"]


def _mismatch(target: Target, attack: Attack, answer: Answer, operation: Operation) -> list[str]:
    """Hold an answer against the document."""
    listed = target.world.about(operation)["responses"]
    about = listed.get(str(answer.status))
    if about is None:
        return [] if attack.raw and answer.status == 400 else [f"{answer.status} is not in the document"]
    content = about.get("content", {})
    if answer.kind not in content:
        return [f"the type {answer.kind!r} of a {answer.status} is not in the document"]
    found = []
    if answer.kind == "application/json":
        try:
            value = json.loads(answer.text, parse_constant=lambda name: 1 / 0)
        except (ValueError, ZeroDivisionError):
            return ["the body is not JSON"]
        error = next(iter(_validator(target, content[answer.kind]["schema"]).iter_errors(value)), None)
        found += [f"the body does not fit its schema: {error.message[:300]}"] if error else []
        if answer.status >= 400 and not error:
            code, message = value["error"]["code"], value["error"]["message"]
            found += [f"the code {code!r} is not in the document"] if code not in about["description"] else []
            found += [f"a message of {len(message)} characters"] if len(message) > LONGEST else []
    return found + ([] if "x-request-id" in answer.headers else ["there is no X-Request-Id"])


def _validator(target: Target, schema: dict[str, Any]) -> Any:
    import jsonschema

    name = json.dumps(schema, sort_keys=True)
    if name not in target.validators:
        whole = {**schema, "components": target.world.document["components"]}
        target.validators[name] = jsonschema.Draft202012Validator(whole)
    return target.validators[name]


def _wrong(target: Target, attack: Attack, found: dict[str, Any]) -> list[str]:
    form = json.loads(attack.body)
    rows = zip(form["texts"], form.get("pairs") or [None] * len(form["texts"]), strict=True)
    right = all(
        target.known.is_right(found["task"], found["version"], row, one)
        for row, one in zip(rows, found["predictions"], strict=True)
    )
    return [] if right else ["a wrong answer"]


# --- the campaign


def send(target: Target, attack: Attack, case: Case) -> Answer | None:
    """Send a request; return the answer, None for a client that leaves or stalls."""
    message = attack.message
    if attack.cut is not None or attack.stalled:
        wire = connect(target.server.port, SECONDS)
        head = message.index(b"\r\n\r\n") + 4
        cut = attack.cut if attack.cut is not None else head - 3 if attack.stalled == "head" else len(message) - 1
        with contextlib.suppress(ConnectionError):
            wire.sendall(message[:cut])
        if attack.stalled and attack.cut is None:
            target.stalled.append((case, attack, wire, time.monotonic()))
        else:
            wire.close()
        return None
    return exchange(
        target.server.port,
        message,
        head=attack.method == "HEAD",
        pieces=attack.pieces,
        pause=attack.pause,
        seconds=RAW_SECONDS if attack.raw else SECONDS,
    )


def tend(stage: Stage, target: Target, counts: Counter[str]) -> None:
    """Look at the server as a whole: errors in its log by request, stalled requests, tasks to put back."""
    for error in list(target.server.errors):
        id = str(error.get("request_id", ""))
        if error.get("event") == "failed" and id not in target.told:
            target.told.add(id)
            number = int(id[5:]) if id.startswith("case-") and id[5:].isdecimal() else stage.tries
            stage.fail(stage.case(number), f"the log has a trace: {error.get('problem')}", line=error)
    for one in list(target.stalled):
        case, attack, wire, since = one
        if not select.select([wire], [], [], 0)[0] and time.monotonic() - since < STALLED:
            continue
        target.stalled.remove(one)
        wire.settimeout(1)
        answer = receive(wire)
        wire.close()
        counts["stalled requests that were ended"] += 1
        if time.monotonic() - since >= STALLED:
            stage.fail(case, "a stalled request is never ended", part=attack.stalled, request=attack.message)
        elif answer.status >= 500 or (answer.status and 200 <= answer.status < 300 and not attack.invalid):
            stage.fail(case, f"a stalled request got {answer.status}", request=attack.message, body=answer.body)
    _put_spares(target.known)


def run(stage: Stage) -> None:
    """See the module's docstring."""
    targets = [make_target(stage, locked=locked) for locked in (True, False)]
    counts: Counter[str] = Counter()
    for case in stage.cases():
        target = targets[case.random.random() < 0.5]
        attack = draw_attack(target.world, case.random, case.number)
        try:
            answer = send(target, attack, case)
        except OSError as error:
            answer = Answer(error=repr(error))
        counts[str(answer.status if answer else "left")] += 1
        for what in problems(target, attack, answer) if answer else []:
            evidence = {"request": attack.message, "status": answer.status, "body": answer.body} if answer else {}
            stage.fail(case, what, keys=target.locked, who=attack.who, bent=attack.bent, **evidence)
        if answer and answer.status == 202:
            with contextlib.suppress(ValueError, LookupError):
                target.world.runs.append(answer.json["id"])
        if case.number % TEND == TEND - 1:
            for one in targets:
                tend(stage, one, counts)
        if target.server.process.poll() is not None:
            stage.fail(case, "the server has ended", request=attack.message, log=list(target.server.tail))
            return
    for one in targets:
        finish(stage, one, counts)
    stage.note("answers by status", dict(sorted(counts.items())))


def finish(stage: Stage, target: Target, counts: Counter[str]) -> None:
    """Judge the server at the end."""
    tend(stage, target, counts)
    case, key = stage.case(stage.tries), target.world.keys.get("admin", "")
    for _, _, wire, _ in target.stalled:
        wire.close()
    if broken := target.server.broken(key):
        stage.fail(case, f"the server counts {broken:.0f} answers as 5xx", errors=list(target.server.errors))
    stage.note(f"memory of the server with{'' if key else 'out'} keys, MB", target.server.figures()["megabytes"])
    if not target.server.stop():
        stage.fail(case, "the server did not stop within its time", log=list(target.server.tail))


TRIAL = Trial(
    name="hostile_http",
    promise=(
        "No request, right or wrong, gets a 5xx, an answer other than the OpenAPI document says, a path of the "
        "machine, or anything that its key does not allow."
    ),
    full=10_000,
    run=run,
    weight=2.0,
)
