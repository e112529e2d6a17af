"""Packages with right checksums and wrong contents: manifests, pointers and weights that no training writes."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import random
import shutil
import struct
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from adapterbank.api.opened import open_bank
from adapterbank.errors import AdapterbankError, InputError
from adapterbank.inference.predictions import Prediction
from adapterbank.serving.service import task_info
from adapterbank.storage import files
from adapterbank.storage.bank import Bank
from small_data import FAST, answers, reviews, scores, tags
from trials import tiny
from trials.children import Outcome, in_child
from trials.frame import Case, Stage, Trial

SECONDS = 30
MEGABYTES = 256
TEXT = "the big red fox was good"
TASKS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "one": (reviews, {}),
    "lora": (reviews, {"method": "lora", "size": None}),
    "number": (scores, {}),
    "tags": (tags, {"text": "text", "label": "labels", "kind": "multilabel"}),
    "span": (answers, {"kind": "span"}),
}
"""The tasks that are forged: every kind, and two additions."""
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        1.5,
        -0.5,
        10**8,
        -(10**8),
        2**31,
        2**63,
        10**18,
        10**400,
        1e308,
        -1e308,
        1e-320,
    ),
    *("", "x", "../../etc", "classification", "span", "regression", "a" * 100_000, "\x00", "١", "1", "-1", "nan"),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": {"c": []}}}, [1, "a", None], ["x"] * 50_000, [0] * 50_000),
    *(["x", "x"], [1, 2], {"default": 1}, [[[[[[[[]]]]]]]]),
)


# --- forging ----------------------------------------------------------------------------------------------


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """Return a value with the right checksum, if it has one."""
    if "checksum" not in value:
        return value
    rest = {key: item for key, item in value.items() if key != "checksum"}
    return {**rest, "checksum": files.sha256_json(rest, parsed=True)}


def mutate(value: Any, draw: random.Random) -> str:
    """Change something inside a mapping or list, deeper or less deep; return what was changed."""
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    keys = [key for key in keys if key != "checksum"]
    if not keys:
        return "nothing"
    key = draw.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.7:
        return f"{key}.{mutate(value[key], draw)}"
    way = draw.randrange(8)
    if way == 0:
        del value[key]
        return f"{key} removed"
    if way == 1 and isinstance(value, dict):
        value[draw.choice(("more", "", "checksum2", "size", "rank", "layers"))] = copy.deepcopy(draw.choice(VALUES))
        return "more keys"
    if way == 2 and isinstance(value, list):
        value[key:key] = [value[key]] * draw.choice((1, 2, 1000))
        return f"{key} repeated"
    old = value[key]
    if way == 3 and isinstance(old, int | float) and not isinstance(old, bool):
        value[key] = draw.choice((-old, old + 1, old * 1000, old / 3, str(old), [old], float(old)))
    else:
        value[key] = copy.deepcopy(draw.choice(VALUES))
    return f"{key} = {str(value[key])[:60]}"


def forge_json(path: Path, draw: random.Random) -> str:
    """Change one to three things in a manifest or in pointers."""
    value = json.loads(path.read_bytes())
    while True:
        forged = copy.deepcopy(value)
        changes = [mutate(forged, draw) for _ in range(draw.choice((1, 1, 2, 3)))]
        try:
            path.write_bytes(json.dumps(sealed(forged)).encode())
        except (InputError, ValueError):  # no checksum covers such a value, or it has too many digits
            continue
        return f"{path.name}: {'; '.join(changes)}"


def forge_array(array: np.ndarray, draw: random.Random) -> tuple[str, np.ndarray]:
    """Return an array that no training writes."""
    way = draw.choice(("type", "value", "shape", "large", "zero"))
    if way == "type":
        name = draw.choice(("float64", "float16", "int8", "int32", "int64", "uint8", "bool"))
        return name, array.astype(name)
    if way == "value":
        number = draw.choice((math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45))
        made = array.copy().reshape(-1)
        made[: draw.choice((1, made.size))] = number
        return str(number), made.reshape(array.shape)
    if way == "shape":
        shapes = ((array.size,), (1, *array.shape), (0,), (), (*array.shape, 1), tuple(reversed(array.shape)), (2, 3))
        shape = draw.choice(shapes)
        return f"shape {shape}", np.resize(array, shape).astype(array.dtype)
    if way == "large":
        return "times 1e20", array * np.float32(1e20)
    return "zeros", np.zeros_like(array)


def forge_weights(folder: Path, draw: random.Random) -> str:
    """Change the weights, and the manifest so that its checksums and sizes are right."""
    path = folder / "weights.safetensors"
    tensors = dict(safetensors.numpy.load(path.read_bytes()))
    name = draw.choice(sorted(tensors))
    way = draw.choice(("array", "array", "array", "all", "missing", "more", "renamed", "none", "header"))
    data = b""
    if way == "array":
        told, tensors[name] = forge_array(tensors[name], draw)
        way = f"{name} is {told}"
    elif way == "all":
        seed = draw.random()
        tensors = {key: forge_array(array, random.Random(seed))[1] for key, array in tensors.items()}
    elif way == "missing":
        del tensors[name]
    elif way == "more":
        tensors |= {f"more.{n}": np.zeros(2, np.float32) for n in range(draw.choice((1, 5000)))}
    elif way == "renamed":
        tensors[draw.choice(("head.weight.x", "layer.99.x", "", "a/b", name.upper()))] = tensors.pop(name)
    elif way == "none":
        tensors = {}
    else:
        data = forge_header(path.read_bytes(), draw)
    data = data or safetensors.numpy.save({key: np.ascontiguousarray(array) for key, array in tensors.items()})
    path.write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest |= {"bytes": len(data), "weights_sha256": files.sha256_bytes(data)}
    (folder / "manifest.json").write_bytes(json.dumps(sealed(manifest)).encode())
    return f"weights: {way}"


def forge_header(data: bytes, draw: random.Random) -> bytes:
    """Return a safetensors file whose header lies."""
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = draw.choice([key for key in header if key != "__metadata__"])
    way = draw.randrange(5)
    if way == 0:
        return struct.pack("<Q", draw.choice((0, 2**62, 2**64 - 1, length - 1, length + 1))) + data[8:]
    if way == 1:
        header[name]["shape"] = draw.choice(([10**9, 10**9], [-1], [2**63], [1.5], "x", None, []))
    elif way == 2:
        header[name]["dtype"] = draw.choice(("F64", "I8", "BF16", "F8_E4M3", "X", None, 1))
    elif way == 3:
        header[name]["data_offsets"] = draw.choice(([0, 0], [0, 2**62], [-1, 4], [8, 4], [0, len(rest)], None))
    else:
        header["__metadata__"] = draw.choice(({"a": 1}, [], None, {"a": "b" * 10**6}))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


def forge(bank: Path, task: str, draw: random.Random) -> str:
    """Forge a package, or the pointers of its task; return what was done."""
    folder = bank / "tasks" / task
    way = draw.choices(("manifest", "pointers", "weights"), (6, 1, 3))[0]
    if way == "weights":
        return forge_weights(folder / "1", draw)
    return forge_json(folder / "task.json" if way == "pointers" else folder / "1" / "manifest.json", draw)


# --- asking -----------------------------------------------------------------------------------------------


def rows(task: str) -> list[Any]:
    """Return the texts that a task is asked."""
    return [("what was it", TEXT)] if task == "span" else [TEXT]


def predict(place: Path, task: str) -> list[Any]:
    """Predict with the forged task and the healthy one in one batch."""
    bank = open_bank(place / "bank", tiny.backbone(place / "encoder"), device="cpu")
    found = bank.predict([task, "good"], [*rows(task), TEXT])
    for one in found:
        check_finite(one)
    if task in ("one", "lora"):
        check_sum(found[0])
    return [json.loads(json.dumps(one.to_json())) for one in found[1:]]


def check_finite(prediction: Prediction) -> None:
    """Raise unless a prediction is JSON without NaN, and its probabilities, if any, are some."""
    value = prediction.to_json()
    json.dumps(value, allow_nan=False)
    found = value.get("probabilities")
    if found and not all(0 <= one <= 1 for one in found.values()):
        raise AssertionError(f"probabilities that are none: {found}")


def check_sum(prediction: Prediction) -> None:
    """Raise unless the probabilities of one label sum to 1."""
    found = prediction.to_json().get("probabilities") or {}
    if found and not math.isclose(sum(found.values()), 1, abs_tol=1e-4):
        raise AssertionError(f"probabilities that do not sum to 1: {found}")


def listed(place: Path, task: str) -> Any:
    """List the tasks as the server does, and describe each."""
    bank = Bank.open(place / "bank")
    for package in bank.listing()[0]:
        json.dumps(task_info.summary(package.manifest, resident=False), allow_nan=False)
        json.dumps(task_info.details(bank, package.manifest, resident=False), allow_nan=False)


def command(*words: str) -> Callable[[Path, str], None]:
    """Return a function that runs a command, whose JSON must be some."""

    def run(place: Path, task: str) -> None:
        filled = [word.format(task=task, text=TEXT) for word in words]
        if task == "span" and words[0] == "predict":
            filled += ["--text-pair", TEXT]
        printed = tiny.command(*filled, "--bank", place / "bank")
        if "Traceback" in printed.err:
            raise AssertionError(printed.err)
        if printed.status and not (printed.err + printed.out).strip():
            raise AssertionError(f"exit status {printed.status} without a word")
        if not printed.status and words[0] == "predict":
            for line in printed.out.splitlines():
                json.loads(line, parse_constant=refuse)
        if not printed.status and "--json" in words:
            json.loads(printed.out, parse_constant=refuse)

    return run


def refuse(name: str) -> None:
    """Refuse NaN and Infinity, which are no JSON."""
    raise AssertionError(f"{name} in JSON")


ASKS: dict[str, Callable[[Path, str], Any]] = {
    "tasks": command("tasks"),
    "tasks --json": command("tasks", "--json"),
    "show": command("show", "--task", "{task}"),
    "show --json": command("show", "--task", "{task}", "--json"),
    "predict": command("predict", "--task", "{task}", "--text", "{text}"),
    "audit": command("audit"),
    "audit --json": command("audit", "--json"),
    "gc": command("gc"),
    "rollback": command("rollback", "--task", "{task}"),
    "remove": command("remove", "--task", "{task}", "--yes"),
    "listed": listed,
}


def ask(names: list[str], place: Path, task: str) -> dict[str, str]:
    """Ask; return a trace for each crash. The healthy task answers alone, and beside the forged one if that loads."""
    wrong = {}
    for name in names:
        print(name, flush=True)  # the last one is the one that hangs
        try:
            ASKS[name](place, task)
        except AdapterbankError:
            pass
        except BaseException:
            wrong[name] = traceback.format_exc()[-3000:]
    print("the healthy task", flush=True)
    right = healthy(place)
    try:
        (beside,) = predict(place, task)
        if not close(beside, right):
            wrong["in one batch"] = f"The healthy task answered {beside} instead of {right}."
    except AdapterbankError:
        pass
    except BaseException:
        wrong["in one batch"] = traceback.format_exc()[-3000:]
    return wrong | {"right": right}


def healthy(place: Path) -> Any:
    """Return the healthy task's answer."""
    (found,) = open_bank(place / "bank", tiny.backbone(place / "encoder"), device="cpu").predict("good", [TEXT])
    return json.loads(json.dumps(found.to_json()))


def close(one: Any, other: Any) -> bool:
    """Return whether two answers are equal but for rounding: rows of one batch share products."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)
    return bool(one == other)


def make(stage: Stage) -> Path:
    """Create the bank that every case starts from."""
    template, encoder = stage.folder / "template", tiny.encoder(stage.folder)
    tiny.train(template, encoder, "good")
    for name, (data, options) in TASKS.items():
        given = {key: value for key, value in {**FAST, **options}.items() if value is not None}
        open_bank(template, str(encoder), device="cpu").train(name, data(), **given)
    return template


def run(stage: Stage) -> None:
    """Forge packages and ask."""
    template, place = make(stage), stage.folder
    with contextlib.redirect_stdout(io.StringIO()):
        right = healthy_at(template, place)
    for case in stage.cases():
        task = case.random.choice([*TASKS])
        shutil.rmtree(place / "bank", ignore_errors=True)
        shutil.copytree(template, place / "bank")
        what = forge(place / "bank", task, case.random)
        asks = draw(case)
        outcome = in_child(partial(ask, asks, place, task), seconds=SECONDS, megabytes=4 * MEGABYTES)
        if wrong := judge(outcome, right):
            evidence = {"task": task, "forged": what, "asks": asks, "traces": outcome.value or outcome.output}
            content = {path.name: path.read_bytes() for path in (place / "bank" / "tasks" / task).rglob("*.json")}
            stage.fail(case, f"{task}, {what}: {wrong[0]}"[:500], wrong=wrong, content=content, **evidence)


def draw(case: Case) -> list[str]:
    """Choose two questions; those that change the bank come last."""
    asks = case.random.sample([*ASKS], 2)
    return sorted(asks, key=lambda name: name in ("gc", "rollback", "remove"))


def healthy_at(template: Path, place: Path) -> Any:
    """Return the healthy task's answer in the bank that nobody forged; asking here also imports everything."""
    shutil.rmtree(place / "bank", ignore_errors=True)
    shutil.copytree(template, place / "bank")
    for task in TASKS:
        if problems := {key: text for key, text in ask([*ASKS], place, task).items() if key != "right"}:
            raise AssertionError(f"{task} fails in an intact bank: {problems}")
        shutil.rmtree(place / "bank")
        shutil.copytree(template, place / "bank")
    return healthy(place)


def judge(outcome: Outcome, right: Any) -> list[str]:
    """Return what is wrong with a case; a sentence each."""
    if outcome.unfinished:
        return outcome.unfinished
    found = dict(outcome.value)
    wrong = [] if close(found.pop("right"), right) else ["The healthy task gave another answer."]
    wrong += [f"{name} ended with {trace.strip().splitlines()[-1]}" for name, trace in found.items()]
    if outcome.megabytes > MEGABYTES:
        wrong.append(f"It took {outcome.megabytes:.0f} MiB.")
    return wrong


TRIAL = Trial(
    "forgery",
    "A forged package with right checksums crashes nothing, answers finitely if it loads, and disturbs no other task.",
    full=5000,
    run=run,
    weight=7,
)
