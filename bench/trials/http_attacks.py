"""Requests drawn from a server's own OpenAPI document: right ones, and the same bent in every way.

A request knows what the document says of it: `valid` (it must succeed, or fail for a reason of state), `invalid` (it
must be refused), `raw` (no HTTP at all: a closed connection is an answer too), or none of these.
"""

from __future__ import annotations

import json
import random
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "FOO", "get")
ODD: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 3, 101, 2**31, 2**63, 10**400, -(10**30), 0.5, 91.0, 1e308, float("nan")),
    *(float("inf"), "", "x", "word200", "\x00", "\ud800", "é\u202e\U0001f600", "x" * 5000, [], {}, [[]], [None]),
    *({"": ""}, ["a", 1], {"text": "a"}, [{}] * 300),
)
NAMES = (
    *("", ".", "..", "%2e%2e", "%2e%2e%2f%2e%2e%2fkeys.json", "%00", "a%00b", "%", "%zz", "%ff%fe", "a%2Fb", "a b"),
    *("@", "@1", *(f"private-span@{version}" for version in ("", "0", "1", "-1", "1e3", "%31", "9" * 300)), "nowhere"),
    *("Private-Span", "private-span%0a", "mine%20", "é", "x" * 101, "x" * 60_000, "task.json", ".lock", "-x", "~"),
)
PATHS = (
    *("/", "//", "/v1", "/v1/", "/v1//tasks", "/v1/tasks/", "/v2/tasks", "/docs", "/openapi.json", "/favicon.ico"),
    *("/../../etc/passwd", "/static/../../keys.json", "/%2e%2e/keys.json", "/keys.json", "/v1/tasks?x=1", "/.env"),
    *("/v1/runs/", "/v1/runs/../tasks", "/V1/TASKS", "/v1/tasks;x=1", "/v1/tasks#x", "/healthz/", "/metrics?x=%ff"),
)
CONTENT_TYPES = (
    *("", "text/plain", "application/json; charset=utf-16", "application/xml", "multipart/form-data; boundary=x"),
    *("application/x-www-form-urlencoded", "application/json, text/html", "x" * 5000, "text/csv", "\xff"),
)
TEXT = "word110 word345 word1200 word777"
TABLE = "text,label\n" + "".join(f"word{200 + i} word{300 + i % 2},{'no' if i % 2 else 'yes'}\n" for i in range(24))
SMALL = {
    "epochs": ("1", "2"),
    "size": ("1", "4", "8"),
    "batch": ("4", "8"),
    "lr": ("0.001", "0.01"),
    "seed": ("0", "7"),
}
"""Options of a valid training request: a run that takes a moment."""

Operation = tuple[str, str]
"""Method and path of the document."""


@dataclass
class Attack:
    """A request, and what the document says of it."""

    operation: Operation
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    who: str
    """The name of the key that it sends; empty for none."""
    valid: bool = True
    invalid: bool = False
    raw: bool = False
    refused: bool = False
    """Whether an answer with 2xx is wrong in any case."""
    cut: int | None = None
    """Bytes after which the client leaves."""
    stalled: str = ""
    """Which part is not sent to its end, on a connection that stays open: head or body."""
    pieces: int = 1
    pause: float = 0.0
    bent: list[str] = field(default_factory=list)

    @property
    def message(self) -> bytes:
        """The bytes to send."""
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers)]
        return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + self.body


@dataclass
class World:
    """What requests are drawn from."""

    document: Mapping[str, Any]
    keys: Mapping[str, str]
    """Secrets by name; empty for a server without keys."""
    tasks: Mapping[str, Mapping[str, Any]]
    """A right body for each task."""
    spare: Sequence[str]
    """Tasks that may be removed."""
    runs: list[str] = field(default_factory=list)
    """Ids of runs that a server has told."""

    @property
    def operations(self) -> list[Operation]:
        """Every method and path of the document."""
        return [(method.upper(), path) for path, methods in self.document["paths"].items() for method in methods]

    def about(self, operation: Operation) -> Mapping[str, Any]:
        """Return what the document says of an operation."""
        found: Mapping[str, Any] = self.document["paths"][operation[1]][operation[0].lower()]
        return found


def draw_attack(world: World, draw: random.Random, number: int) -> Attack:
    """Draw a request; three of four are bent, some of them twice."""
    weights = [3 if "predict" in path else 0.4 if path.endswith("train") else 1 for _, path in world.operations]
    attack = _right(world, draw, draw.choices(world.operations, weights)[0])
    attack.headers.append(("X-Request-Id", f"case-{number}"))
    for _ in range(draw.choice((0, 1, 1, 2))):
        bend = draw.choices([*BENDS], [*BENDS.values()])[0]
        attack.valid = False
        attack.bent.append(bend.__name__.strip("_"))
        bend(world, draw, attack)
    if attack.method == "DELETE":  # the other tasks stay, so that their answers can be compared
        attack.path = re.sub(r"(?i)private-\w+|mine", draw.choice(world.spare), attack.path)
    _frame_body(attack)
    return attack


def _right(world: World, draw: random.Random, operation: Operation) -> Attack:
    """Return a request that is right by the document, and by what it cannot say."""
    method, template = operation
    who = draw.choice(["", "garbage", *world.keys]) if world.keys else ""
    task = draw.choice([*world.tasks])
    body, headers, query = b"", [("Host", "localhost")], ""
    if template.endswith("/predict"):
        headers.append(("Content-Type", "application/json"))
        form = dict(world.tasks[task])
        if template == "/v1/predict":
            name = {"texts": "text", "pairs": "pair"}
            form = {"rows": [{"task": task, **{name[key]: value[0] for key, value in form.items()}}]}
        body = json.dumps(form).encode()
    elif template.endswith("/train"):
        headers.append(("Content-Type", "text/csv"))
        body, task = TABLE.encode(), f"fresh-{draw.randrange(3)}"
        chosen = {name: draw.choice(values) for name, values in SMALL.items() if draw.random() < 0.7}
        query = "?" + urllib.parse.urlencode({"epochs": "1", "max_length": "16", **chosen})
    elif method == "DELETE" or template.endswith("/rollback"):
        task = draw.choice(world.spare)
    place, known = draw.random(), draw.random() < 0.8  # drawn in any case, so that the rest does not depend on runs
    run = world.runs[int(place * len(world.runs))] if world.runs and known else "0" * 32
    path = template.replace("{task}", task).replace("{id}", run) + query
    if who:
        headers.append(("Authorization", f"Bearer {world.keys.get(who, 'abk_' + 'x' * 43)}"))
    return Attack(operation, method, path, headers, body, who)


def _frame_body(attack: Attack) -> None:
    """State the length of the body, unless the request was bent there."""
    names = {name.lower() for name, _ in attack.headers}
    if (attack.body or attack.method in ("POST", "PUT")) and not names & {"content-length", "transfer-encoding"}:
        attack.headers.append(("Content-Length", str(len(attack.body))))


# --- ways to bend a request


def _value(world: World, draw: random.Random, attack: Attack) -> None:
    """Replace, add, leave out or nest something in the JSON."""
    if not attack.body.startswith(b"{"):
        return
    try:
        form = json.loads(attack.body)
    except (ValueError, RecursionError):
        return
    form = form or {"text": TEXT}
    places = [(form, key) for key in form]
    for part in list(form.values()):
        inner = part if isinstance(part, list) else []
        places += [(inner, i) for i in range(len(inner))]
        places += [(one, key) for one in inner if isinstance(one, dict) for key in one]
    where, key = draw.choice(places)
    action = draw.choice(("replace", "replace", "replace", "remove", "add", "many"))
    if action == "replace":
        where[key] = draw.choice(ODD)
    elif action == "remove":
        del where[key]
    elif action == "many" and isinstance(where, list):
        where += [where[0]] * draw.choice((1, 255, 256, 300))
    else:
        form[draw.choice(("best", "text", "pair", "pairs", "rows", "task", "__proto__", "", "x" * 1000))] = draw.choice(
            ODD
        )
    attack.body = json.dumps(form, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    _weigh(world, attack)


def _bytes(world: World, draw: random.Random, attack: Attack) -> None:
    """Send other bytes than JSON."""
    if not attack.body:
        return
    cut = draw.randrange(len(attack.body))
    text = attack.body.decode(errors="replace")
    attack.body = draw.choice(
        (
            *(b"", b"null", b"[]", b'"', b"{", b"\xff\xfe", b"\xef\xbb\xbf" + attack.body, attack.body[:cut]),
            *(attack.body + b"}", text.encode("utf-16"), b"[" * 100_000, b'{"texts":' * 5000, b" " * 70_000),
            *(attack.body[:cut] + bytes([draw.randrange(256)]) + attack.body[cut:], b'{"text":"a","text":"b"}'),
            *(b'{"text":"' + b"a" * 100_001 + b'"}', b'{"texts":["' + b"\\u0041" * 700_001 + b'"]}'),
        )
    )
    _weigh(world, attack)


def _weigh(world: World, attack: Attack) -> None:
    """Ask the document's schema whether the body is valid."""
    import jsonschema

    if attack.operation[1].endswith("/predict"):
        schema = world.about(attack.operation)["requestBody"]["content"]["application/json"]["schema"]
        try:
            value = json.loads(attack.body.decode())
            attack.invalid = not jsonschema.Draft202012Validator(schema).is_valid(value)
        except (ValueError, RecursionError):
            attack.invalid = True


def _path(world: World, draw: random.Random, attack: Attack) -> None:
    if "{task}" in attack.operation[1] and draw.random() < 0.7:
        attack.path = attack.operation[1].replace("{task}", draw.choice(NAMES))
    elif draw.random() < 0.5:
        attack.path = draw.choice(PATHS)
    else:
        attack.path += draw.choice(
            ("/", "?", "?x=1", "%00", "%0a", "//", "/..", "?a=%ff&a=2", "#x", "?" + "a=1&" * 5000)
        )
    attack.raw |= " " in attack.path or not attack.path.isascii() or attack.path == "" or len(attack.path) > 60_000


def _query(world: World, draw: random.Random, attack: Attack) -> None:
    """Set an option of training to a value that its schema allows, or does not."""
    known = [one for one in world.about(attack.operation).get("parameters", ()) if one["in"] == "query"]
    if not known:
        return
    one = draw.choice(known)
    schema = one["schema"]
    low, high = schema.get("minimum"), schema.get("maximum")
    odd = [
        "",
        "x",
        "-1",
        "0",
        "1",
        "1e308",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "0x10",
        "1_000",
        "９",
        "true",
        "91.0",
        "9" * 400,
    ]
    odd += [str(low - 1), str(low)] if low is not None else []
    odd += [str(high + 1), str(high)] if high is not None else []
    value = draw.choice([*odd, *schema.get("enum", ())])
    wrong = draw.choice(("value", "value", "value", "unknown", "twice"))
    pairs = [(one["name"], value)]
    pairs = [("bank", "/etc")] if wrong == "unknown" else pairs * 2 if wrong == "twice" else pairs
    start, _, query = attack.path.partition("?")
    kept = [(k, v) for k, v in urllib.parse.parse_qsl(query) if k != one["name"]]
    attack.path = f"{start}?{urllib.parse.urlencode([*kept, *pairs])}"
    attack.invalid = wrong != "value" or not _allows(schema, value)


def _allows(schema: Mapping[str, Any], value: str) -> bool:
    """Whether a schema may allow a value of the query; where spelling decides, it may."""
    if "enum" in schema:
        return value in schema["enum"]
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if schema["type"] in ("integer", "number"):
        try:
            number = float(value)
        except ValueError:
            return False
        return schema.get("minimum", number) <= number <= schema.get("maximum", number)
    return True


def _method(world: World, draw: random.Random, attack: Attack) -> None:
    attack.method = draw.choice(METHODS)
    attack.raw |= attack.method in ("CONNECT", "FOO", "get", "TRACE")


def _type(world: World, draw: random.Random, attack: Attack) -> None:
    attack.headers = [(name, value) for name, value in attack.headers if name != "Content-Type"]
    if kind := draw.choice(CONTENT_TYPES):
        attack.headers.append(("Content-Type", kind))
    if draw.random() < 0.3:
        attack.headers.append(("Content-Encoding", draw.choice(("gzip", "br", "identity", "gzip, gzip", "x" * 500))))


def _header(world: World, draw: random.Random, attack: Attack) -> None:
    """Add headers that are odd, and lawful."""
    attack.headers += draw.choice(
        (
            [("Origin", "http://evil.example")],
            [("Sec-Fetch-Site", "cross-site")],
            [("Accept-Encoding", "gzip")],
            [("Expect", "100-continue")],
            [("Accept", "text/html")],
            [("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-Host", "evil.example")],
            [("Range", "bytes=0-1")],
            [("Connection", "close")],
            [("If-None-Match", "*")],
            [("Upgrade", "websocket"), ("Connection", "Upgrade")],
            [(f"X-Many-{i}", "1") for i in range(500)],
            [("X-Long", "x" * 20_000)],
            [("Cookie", "key=" + "x" * 4000)],
            [("X-HTTP-Method-Override", "DELETE")],
        )
    )
    attack.raw |= any(name == "Upgrade" for name, _ in attack.headers)


def _host(world: World, draw: random.Random, attack: Attack) -> None:
    """Ask under another name, as a page does that resolves its own name to this machine."""
    name = draw.choice(
        ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "0x7f.1", "[::2]", "8.8.8.8")
    )
    if attack.refused:  # it has two hosts already
        return
    attack.headers = [("Host", name), *((known, value) for known, value in attack.headers if known != "Host")]
    attack.refused = not world.keys


def _twice(world: World, draw: random.Random, attack: Attack) -> None:
    """Send a header twice, of which one would do: no server may choose which."""
    name = draw.choice(("Host", "Authorization"))
    old = next((value for known, value in attack.headers if known == name), "Bearer abk_" + "y" * 43)
    pair = [(name, old), (name, "localhost:1" if name == "Host" else "Bearer abk_" + "x" * 43)]
    draw.shuffle(pair)
    attack.headers = [*pair, *((known, value) for known, value in attack.headers if known != name)]
    attack.raw, attack.refused = True, name == "Host" or bool(world.keys)


def _nonsense(world: World, draw: random.Random, attack: Attack) -> None:
    """Break HTTP itself: lengths, chunks, line ends."""
    attack.raw = True
    attack.headers += draw.choice(
        (
            [("Content-Length", "-1")],
            [("Content-Length", "99999999999999999999")],
            [("Content-Length", "1"), ("Content-Length", "2")],
            [("Content-Length", "3"), ("Transfer-Encoding", "chunked")],
            [("Transfer-Encoding", "chunked")],
            [("Transfer-Encoding", "gzip, chunked")],
            [("Transfer-Encoding", "xchunked")],
            [("X-Nul", "a\x00b")],
            [("X-Line", "a\r\n b")],
            [("X Space", "1")],
            [("X-Long", "x" * 70_000)],
            [("X-Bare", "a\rHost: evil")],
        )
    )
    if ("Transfer-Encoding", "chunked") in attack.headers:
        size = draw.choice((b"zz", b"-1", b"ffffffffffffffffff", b"5", b"0", b"5;x=" + b"y" * 5000))
        attack.body = size + b"\r\n" + attack.body + b"\r\n0\r\n\r\n"


def _leave(world: World, draw: random.Random, attack: Attack) -> None:
    """Leave after some bytes."""
    attack.cut = draw.randrange(1, len(attack.message) + 60)


def _slow(world: World, draw: random.Random, attack: Attack) -> None:
    """Send in pieces."""
    attack.pieces, attack.pause = draw.choice(((2, 0.2), (5, 0.05), (20, 0.01)))


def _stall(world: World, draw: random.Random, attack: Attack) -> None:
    """Send a part and keep the connection."""
    attack.stalled = draw.choice(("head", "body")) if attack.body else "head"


Bend = Callable[[World, random.Random, Attack], None]
BENDS: Mapping[Bend, float] = {
    **{_value: 6, _bytes: 3, _path: 4, _query: 4, _method: 3, _type: 2, _header: 2, _host: 1, _twice: 1, _nonsense: 2},
    **{_leave: 1, _slow: 0.3, _stall: 0.2},
}
"""The ways, and how often each is drawn."""
