"""Claims about uploads: complete or absent, and private."""

from __future__ import annotations

import errno

import pytest

from adapterbank.errors import InputError, StorageError
from adapterbank.serving.jobs.queue import JobQueue, QueueLimits
from adapterbank.serving.jobs.uploads import TooLarge
from serving.training import left, new_bank


@pytest.fixture
def bank(tmp_path, bert):
    return new_bank(tmp_path / "bank", bert)


def test_an_upload_that_is_too_large_incomplete_or_empty_leaves_nothing(bank):
    jobs = JobQueue(bank, limits=QueueLimits(upload=100))
    with jobs.upload("csv") as upload:
        upload.write(b"x" * 100)
        with pytest.raises(TooLarge, match="larger than 100 bytes"):
            upload.write(b"x")
    with jobs.upload("csv") as upload:
        upload.write(b"text,la")
        assert len(left(jobs)) == 1
    with jobs.upload("csv") as upload, pytest.raises(InputError, match="no body"):
        jobs.submit("a", {}, upload)
    assert (jobs.list(), left(jobs)) == ([], [])


def test_an_upload_to_a_full_disk_leaves_nothing(idle):
    class FullDisk:
        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    upload = idle.upload("csv")
    upload.files["train"].close()
    upload.files["train"] = FullDisk()
    with pytest.raises(StorageError, match="the disk is full"), upload:
        pass
    assert left(idle) == []


def test_only_the_servers_user_can_read_uploads(idle):
    folder = idle.bank / "serving"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "data")] == [0o700, 0o700]
