"""Tries out a checkpoint folder; a process of its own that ``node.CheckpointFolder`` starts.

A frozen disk blocks whoever touches it and cannot be interrupted, so nobody but this process does.
It uses the standard library alone and writes one JSON object to standard output. Only an answer
means something: silence is a failure.
"""

from __future__ import annotations

import json
import os
import sys

TEXT = b"keepstep probe\n" * 256


def probe(folder: str) -> dict[str, object]:
    """Make ``folder`` if it is missing, write, fsync, rename, read back; returns what was found.

    Returns:
        ``error`` (empty if all went well), ``stage`` where it happened, ``free_bytes``.
    """
    stage, name = "make the folder", ""
    try:
        os.makedirs(folder, exist_ok=True)
        stage = "look for free space"
        space = os.statvfs(folder)
        free = space.f_bavail * space.f_frsize
        stage = "write a file"
        name = os.path.join(folder, f".probe-{os.uname().nodename}-{os.getpid()}")
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            left = memoryview(TEXT)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        stage = "rename a file"
        os.rename(name, name + ".done")
        name += ".done"
        stage = "read back what was written"
        with open(name, "rb") as file:
            same = file.read() == TEXT
        return {
            "error": "" if same else "other bytes came back",
            "stage": stage,
            "free_bytes": free,
        }
    except OSError as error:
        return {"error": error.strerror or str(error), "stage": stage, "free_bytes": 0}
    finally:
        if name:
            _remove(name)


def _remove(name: str) -> None:
    try:
        os.unlink(name)
    except OSError:
        return  # the verdict is known already, and the name says whose the file is


if __name__ == "__main__":
    os.write(1, json.dumps(probe(sys.argv[1])).encode())
