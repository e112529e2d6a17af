"""Claims about `adapterbank.storage.requirements`: forged lists of requirements cost little and block nothing.

What stands on something is tested with tasks that were trained, in `training/test_bases.py`.
"""

from __future__ import annotations

import json

import pytest

from adapterbank.errors import InputError, PackageDamaged, PackageRequired
from adapterbank.storage import reading, requirements
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import MOST_REQUIRED
from packages import BACKBONE, TENSORS, draft, put


@pytest.fixture
def bank(tmp_path):
    bank = Bank.open(tmp_path / "bank", BACKBONE, create=True)
    put(bank, "a", "b", "c", "d", "e", "f")
    return bank


def reference(bank, name):
    return requirements.reference(bank.get(name))


def forge(bank, name, *names):
    """Let a package stand on others, with a right checksum."""
    file = bank.get(name).path / "manifest.json"
    value = {key: item for key, item in json.loads(file.read_text()).items() if key != "checksum"}
    value |= {"format": 2, "requires": [reference(bank, one) for one in names]}
    file.write_text(json.dumps(reading.seal(value)))


def test_a_package_that_is_reached_in_many_ways_is_walked_once(bank, monkeypatch):
    for upper, lower in zip("abcde", "bcdef", strict=True):
        forge(bank, upper, *[lower] * MOST_REQUIRED)
    read, walked = requirements.read_manifest, []
    monkeypatch.setattr(requirements, "read_manifest", lambda folder: walked.append(folder) or read(folder))
    found = requirements.foundation(bank.get("a"))
    assert [package.ref for package in found] == ["f@1", "e@1", "d@1", "c@1", "b@1"]
    assert len(walked) == 5 * MOST_REQUIRED  # one by one they would be 16 ** 5


def test_a_manifest_requires_no_endless_list(bank):
    wanted = [reference(bank, "b")] * (MOST_REQUIRED + 1)
    with pytest.raises(InputError, match=r"'new' cannot be stored: requires has 17 packages, more than 16"):
        bank.put(draft("new", requires=wanted), TENSORS)
    forge(bank, "a", *["b"] * (MOST_REQUIRED + 1))
    with pytest.raises(PackageDamaged, match=r"requires has 17 packages, more than 16; restore it"):
        bank.get("a")


def test_packages_in_a_circle_can_be_removed_but_not_what_others_stand_on(bank):
    for upper, lower in zip("abc", "bca", strict=True):
        forge(bank, upper, lower)
    forge(bank, "d", "e")
    with pytest.raises(PackageDamaged, match=r"a@1 stands in a circle: a@1 on b@1 on c@1 on a@1; remove it"):
        requirements.foundation(bank.get("a"))
    with pytest.raises(PackageRequired, match=r"e@1 cannot be removed, because d@1 stands on it; remove it first"):
        bank.remove("e")
    for name in "abc":
        bank.remove(name)
    assert bank.names() == ["d", "e", "f"]
