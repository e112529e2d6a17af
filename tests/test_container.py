"""Promise: the container and the service unit are as docs/deploy.md describes them."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DEPLOY = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


def instructions(text):
    """Return the instructions as (word, rest), with continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


FOUND = instructions(DOCKERFILE)
LAST = FOUND[max(i for i, (word, _) in enumerate(FOUND) if word == "FROM") :]
"""The stage that runs."""


def only(word):
    (value,) = [rest for name, rest in LAST if name == word]
    return value


def test_the_container_does_not_run_as_root():
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", only("USER"))
    after = [name for name, _ in LAST[[name for name, _ in LAST].index("USER") :]]
    assert "RUN" not in after
    assert "nologin" in only("RUN")


def test_the_container_has_a_health_check():
    check = only("HEALTHCHECK")
    assert "/readyz" in check
    assert "--timeout=" in check
    assert "--start-period=" in check
    code = re.search(r'CMD \["python", "-c", "(.*)"\]', check)[1]
    compile(code, "health check", "exec")
    assert only("EXPOSE") in code


def test_the_bank_is_a_volume_that_the_user_owns():
    assert only("VOLUME") == '["/bank"]'
    assert re.search(r"install .*--owner 10001 .*/bank /cache", only("RUN"))
    assert '"--bank", "/bank"' in only("CMD")
    assert only("ENTRYPOINT") == '["adapterbank"]'


def test_versions_are_pinned_and_the_encoder_is_checked_by_its_hash():
    installs = re.findall(r"pip install (.*?)(?:&&|$)", " ".join(rest for name, rest in FOUND if name == "RUN"))
    assert all("--constraint constraints.txt" in one or "--require-hashes" in one for one in installs)
    assert "--require-hashes" in DOCKERFILE
    pinned = re.search(r"grep '(\^[^']*)'", DOCKERFILE)[1]
    lines = (ROOT / "requirements-demo.txt").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if re.match(pinned, line)]) == 1


def test_every_copied_file_exists_and_is_sent_to_the_builder():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [name for word, rest in FOUND if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, name
    assert ignored[1] == "*"


def test_the_compose_file_keeps_the_bank_and_drops_all_rights():
    (service,) = COMPOSE["services"].values()
    assert "bank:/bank" in service["volumes"]
    assert {"bank", "cache"} == set(COMPOSE["volumes"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "privileged" not in service


def test_the_unit_runs_as_its_own_user_and_may_write_only_to_its_folders():
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    unit.optionxform = str
    unit.read_string(re.search(r"```ini\n(.*?)```", DEPLOY, re.DOTALL)[1])
    service = unit["Service"]
    assert service["User"] == "adapterbank"
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"
    command = shlex.split(service["ExecStart"])
    assert command[command.index("--bank") + 1].startswith("/var/lib/" + service["StateDirectory"])


@pytest.mark.parametrize("name", ["deploy.md", "serving-curl.md"])
def test_the_curl_commands_in_the_documents_have_valid_addresses_and_bodies(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("curl "):
                words = shlex.split(line)
                assert any(word.startswith("http://127.0.0.1:8000/") for word in words), line
                if "--json" in words:
                    assert isinstance(yaml.safe_load(words[words.index("--json") + 1]), dict)
