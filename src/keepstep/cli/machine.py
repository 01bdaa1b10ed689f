"""What ``keepstep run`` asks of this machine: CPUs, GPUs, addresses, folders. No torch."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from keepstep.clock import SYSTEM, Clock
from keepstep.errors import UsageError
from keepstep.health import CheckpointFolder

RUN_FILE = "run.json"
_NOTHING_STARTED = "Nothing was started"
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
_NVIDIA_SMI_LIMIT_S = 60


class _RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``: which run a folder holds. ``v`` is the form's version."""

    v: int
    run: str


class ThisMachine:
    """The machine that this process runs on.

    Args:
        environ: For PATH and CUDA_VISIBLE_DEVICES.
        clock: Where a new run's id takes its time from.
        gpu_folder: Where the NVIDIA driver lists its GPUs, one folder each.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        clock: Clock = SYSTEM,
        gpu_folder: Path = _GPU_FOLDER,
    ) -> None:
        self._environ = environ
        self._clock = clock
        self._gpu_folder = gpu_folder

    def cpu_count(self) -> int:
        """CPUs that this process may use."""
        return len(os.sched_getaffinity(0))

    def gpu_count(self) -> int:
        """NVIDIA GPUs that this process may use; CUDA_VISIBLE_DEVICES counts as it does in CUDA."""
        try:
            present = len(list(self._gpu_folder.iterdir()))
        except OSError:
            present = self._listed_gpus()
        return visible(present, self._environ.get("CUDA_VISIBLE_DEVICES"))

    def _listed_gpus(self) -> int:
        program = shutil.which("nvidia-smi", path=self._environ.get("PATH"))
        if program is None:
            return 0
        try:
            listed = subprocess.run(
                [program, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return 0
        lines = listed.stdout.splitlines() if listed.returncode == 0 else []
        return sum(line.startswith("GPU ") for line in lines)

    def new_run_id(self) -> str:
        """An id made of the time (UTC) and four random digits: ``20261129-164502-ab12``."""
        now = datetime.datetime.fromtimestamp(self._clock.wall(), tz=datetime.UTC)
        return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"

    def stored_run_id(self, run_dir: Path) -> str:
        """The id of the run that the folder holds; empty: none yet.

        Raises:
            UsageError: the folder's ``run.json`` cannot be read.
        """
        return _stored_run_id(run_dir)


def _stored_run_id(run_dir: Path) -> str:
    file = run_dir / RUN_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=_RunFile).run
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"{file} cannot be read: {error}",
            done=_NOTHING_STARTED,
            advice="Choose another --run-dir, or remove that file to start a run anew there",
        ) from error


def visible(present: int, variable: str | None) -> int:
    """How many of ``present`` GPUs CUDA shows with this value of CUDA_VISIBLE_DEVICES.

    Entries count up to the first that is no GPU; an index given twice makes all invisible. Names
    (``GPU-...``, ``MIG-...``) are taken on trust.
    """
    if variable is None:
        return present
    indices: list[int] = []
    names: list[str] = []
    for entry in (part.strip() for part in variable.split(",")):
        if entry.startswith(("GPU-", "MIG-")):
            names.append(entry)
        elif entry.isdecimal() and int(entry) < present:
            indices.append(int(entry))
        else:
            break
    if len(set(indices)) != len(indices) or len(set(names)) != len(names):
        return 0
    return len(indices) + len(names) if present else 0


def check_address(host: str, port: int) -> None:
    """That ``host`` is this machine and ``port`` is free on it; port 0 is always free.

    Raises:
        UsageError: the name is unknown, the address is another machine's, or the port is in use.
    """
    own = socket.gethostname()
    if own in (host, host.partition(".")[0]):
        host = ""  # our own name may not be in any directory yet, as when a pod has just started
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(
            f"the address {host} of the ranks' rendezvous is not known: {error}",
            done=_NOTHING_STARTED,
            advice="Use an address of this machine, or leave --master-addr and --rdzv-endpoint out",
        ) from error
    family, kind, protocol, _, address = found[0]
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        elsewhere = error.errno == errno.EADDRNOTAVAIL
        raise UsageError(
            f"{host} is not an address of this machine"
            if elsewhere
            else f"port {port} of {host or own} cannot be used: {error.strerror}",
            done=_NOTHING_STARTED,
            advice="Leave --master-addr, --local-addr and --rdzv-endpoint out"
            if elsewhere
            else "Leave the port out (each round then gets a free one), or use another",
        ) from error


def prepare_folders(run_dir: Path, log_dir: Path, run_id: str, limit_s: float) -> None:
    """Make the run's folders and note in the run folder which run it holds.

    Args:
        run_dir, log_dir: The folders. run_id: the run.
        limit_s: How long storage may take to answer.

    Raises:
        UsageError: a folder cannot be made or written to.
    """
    for folder, flag in ((run_dir, "--run-dir"), (log_dir, "--log-dir")):
        if flag == "--run-dir" or not folder.is_relative_to(run_dir):
            _refuse_silent(folder, flag, limit_s)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"x")
        except OSError as error:
            raise UsageError(
                f"the folder {folder} cannot be written to: {error.strerror}",
                done=_NOTHING_STARTED,
                advice=f"Choose another one with {flag}",
            ) from error
    try:
        _note_run(run_dir, run_id)
    except OSError as error:
        raise UsageError(
            f"{run_dir / RUN_FILE} cannot be written: {error.strerror}",
            done=_NOTHING_STARTED,
            advice="Choose another folder with --run-dir",
        ) from error
    stored = _stored_run_id(run_dir)
    if stored != run_id:
        raise UsageError(
            f"{run_dir} was taken by another run, {stored}, in this moment",
            done=_NOTHING_STARTED,
            advice="Choose another folder with --run-dir",
        )


def _refuse_silent(folder: Path, flag: str, limit_s: float) -> None:
    """Try ``folder`` in another process first: frozen storage would block this one for good."""
    if CheckpointFolder(folder, limit_s=limit_s).answer() is None:
        raise UsageError(
            f"no answer from the disk of {folder} in {limit_s:g} s",
            done=_NOTHING_STARTED,
            advice=f"Choose another one with {flag}",
        )


def _note_run(run_dir: Path, run_id: str) -> None:
    """Write ``run.json`` unless it is there; a reader never sees half of it."""
    with tempfile.NamedTemporaryFile(dir=run_dir, prefix=f".{RUN_FILE}-", delete=False) as made:
        made.write(msgspec.json.encode(_RunFile(v=1, run=run_id)) + b"\n")
        made.flush()
        os.fsync(made.fileno())
    os.chmod(made.name, 0o644)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(made.name, run_dir / RUN_FILE)
    finally:
        os.unlink(made.name)
