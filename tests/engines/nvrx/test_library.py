"""The one file that imports NVRx: its calls are there; a bad installation is explained."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from keepstep.engines.nvrx import library
from keepstep.errors import EngineUnavailable, ExitCode
from tests.engines.nvrx import standins

SELF = object()
_REPOSITORY = Path(__file__).parents[3]


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


WRAPPER: dict[str, Any] = {
    "store_kwargs": {},
    "initialize": None,
    "abort": None,
    "finalize": None,
    "health_check": None,
    "monitor_thread_interval": _seconds(0.1),
    "monitor_process_interval": _seconds(0.1),
    "heartbeat_interval": _seconds(1),
    "progress_watchdog_interval": _seconds(1),
    "soft_timeout": _seconds(10),
    "hard_timeout": _seconds(15),
    "heartbeat_timeout": _seconds(10),
    "barrier_timeout": _seconds(60),
    "completion_timeout": _seconds(60),
    "last_call_wait": _seconds(0.1),
    "termination_grace_time": _seconds(5),
}
"""What the restarter passes, besides the classes."""


def checkpointings() -> list[Any]:
    return [
        pytest.param(library.checkpointing, id="installed"),
        pytest.param(standins.checkpointing_06, id="0.6 to main"),
    ]


def inprocesses() -> list[Any]:
    return [
        pytest.param(library.inprocess, id="installed"),
        pytest.param(standins.inprocess_05, id="0.5 to main"),
    ]


def clients() -> list[Any]:
    return [
        pytest.param(library.rank_monitor_client, id="installed"),
        pytest.param(lambda: standins.RankMonitorClient06, id="0.6 to main"),
    ]


def takes(function: Any, *args: object, **kwargs: object) -> None:
    """Fails if ``function`` cannot be called in this way."""
    inspect.signature(function).bind(*args, **kwargs)


def test_the_installed_release_is_one_that_keepstep_was_written_for() -> None:
    assert library.version() == importlib.metadata.version("nvidia-resiliency-ext")


@pytest.mark.parametrize("names", inprocesses())
def test_the_wrapper_takes_what_the_restarter_gives(
    names: Callable[[], library.InProcess],
) -> None:
    nvrx = names()
    assignment = nvrx.Compose(nvrx.ActivateAllRanks(), nvrx.ShiftRanks())
    wrapper = nvrx.Wrapper(
        store_factory=type("Store", (nvrx.StoreMixin,), {}),
        rank_assignment=assignment,
        **WRAPPER,
    )
    assert wrapper.soft_timeout == _seconds(10)


@pytest.mark.parametrize("names", inprocesses())
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hard_timeout", _seconds(10)),
        ("barrier_timeout", _seconds(15)),
        ("heartbeat_interval", _seconds(10)),
        ("monitor_process_interval", _seconds(10)),
        ("monitor_thread_interval", _seconds(10)),
        ("progress_watchdog_interval", _seconds(10)),
    ],
)
def test_limits_that_do_not_fit_together_are_refused_by_nvrx(
    names: Callable[[], library.InProcess], name: str, value: timedelta
) -> None:
    with pytest.raises(ValueError, match=name):
        names().Wrapper(**(WRAPPER | {name: value}))


@pytest.mark.parametrize("names", inprocesses())
@pytest.mark.parametrize("hook", ["Abort", "Finalize", "Initialize", "HealthCheck"])
def test_a_hook_is_abstract_and_takes_the_state(
    names: Callable[[], library.InProcess], hook: str
) -> None:
    base = getattr(names(), hook)
    assert base.__abstractmethods__ == {"__call__"}
    takes(base.__call__, SELF, object())


def test_hooks_are_composed_from_right_to_left() -> None:
    nvrx = library.inprocess()
    seen: list[str] = []

    def hook(name: str) -> Any:
        def call(_: object, state: object) -> object:
            seen.append(name)
            return state

        return type(name, (nvrx.HealthCheck,), {"__call__": call})()

    composed = nvrx.Compose(hook("second"), hook("first"))
    composed(object())
    assert isinstance(composed, nvrx.HealthCheck)
    assert seen == ["first", "second"]


def test_what_unwinds_the_main_thread_is_no_exception_that_a_script_catches() -> None:
    nvrx = library.inprocess()
    for name in (nvrx.RankShouldRestart, nvrx.RestartAbort):
        assert issubclass(name, BaseException)
        assert not issubclass(name, Exception)


def test_the_call_wrapper_has_what_is_asked_of_it() -> None:
    call_wrapper = library.inprocess().CallWrapper
    assert isinstance(inspect.getattr_static(call_wrapper, "iteration"), property)
    takes(call_wrapper.ping, SELF)
    takes(call_wrapper.atomic, SELF)


def test_the_call_wrapper_is_given_to_an_annotation_that_is_the_class_itself() -> None:
    nvrx = library.inprocess()
    substitute = importlib.import_module(
        "nvidia_resiliency_ext.inprocess.param_utils"
    ).substitute_param_value

    def turn(call):  # type: ignore[no-untyped-def]
        return call

    turn.__annotations__ = {"call": nvrx.CallWrapper}
    assert substitute(turn, (), {"call": None}, {nvrx.CallWrapper: "it"}) == (("it",), {})


def test_the_store_asks_of_its_class_what_torch_has() -> None:
    mixin = library.inprocess().StoreMixin
    assert mixin().critical_ranks == ()
    store = importlib.import_module("torch.distributed").PrefixStore
    for call in ("set", "get", "multi_get", "append", "add", "wait", "check"):
        assert callable(getattr(store, call)), call


@pytest.mark.parametrize("names", checkpointings())
def test_checkpoint_calls_are_taken_as_the_writers_make_them(
    names: Callable[[], library.Checkpointing],
) -> None:
    nvrx = names()
    takes(nvrx.TorchAsyncCheckpoint, persistent_queue=True)
    takes(nvrx.TorchAsyncCheckpoint.async_save, SELF, {}, "file")
    takes(nvrx.TorchAsyncCheckpoint.finalize_async_save, SELF, blocking=False, no_dist=True)
    takes(nvrx.AsyncCallsQueue, persistent=True)
    takes(nvrx.AsyncCallsQueue._get_async_caller, SELF)
    takes(nvrx.AsyncCallsQueue.schedule_async_request, SELF, object())
    takes(nvrx.AsyncCallsQueue.maybe_finalize_async_calls, SELF, blocking=False, no_dist=True)
    takes(nvrx.AsyncCallsQueue.get_num_unfinalized_calls, SELF)
    takes(nvrx.FileSystemWriterAsync, "folder")
    takes(nvrx.FileSystemWriterAsync.finish, SELF, object(), [])
    opener = (
        (open,)
        if "open_file"
        in inspect.signature(nvrx.FileSystemWriterAsync.write_preloaded_data).parameters
        else ()
    )
    bucket: object = ("path", "key", ([], []))
    takes(
        nvrx.FileSystemWriterAsync.write_preloaded_data,
        [],
        *opener,
        0,
        bucket,
        object(),
        object(),
        True,
    )


@pytest.mark.parametrize("names", checkpointings())
def test_a_request_is_made_of_a_function_its_arguments_and_what_finalizes_it(
    names: Callable[[], library.Checkpointing],
) -> None:
    request = names().AsyncRequest(print, (1, 2), [], {"sep": ","})
    assert request.async_fn is print
    assert request.async_fn_args == (1, 2)
    assert request.finalize_fns == []
    assert request.async_fn_kwargs == {"sep": ","}
    assert request.preload_fn is None


@pytest.mark.process
def test_a_queue_shows_its_worker() -> None:
    # In a process of its own: a queue starts Python's resource tracker, which stays.
    lines = _run(
        "from keepstep.engines.nvrx.library import checkpointing\n"
        "from tests.engines.nvrx.standins import checkpointing_06\n"
        "for names in (checkpointing(), checkpointing_06()):\n"
        "    queue = names.AsyncCallsQueue(persistent=True)\n"
        "    caller = queue._get_async_caller()\n"
        "    print(len(queue.async_calls), queue.persistent_caller is caller, caller.process)\n"
        "    for channel in (caller.queue, caller.preload_q, caller.comp_q):\n"
        "        channel.close()"
    )
    assert lines == ["0 True None"] * 2


@pytest.mark.parametrize("client", clients())
def test_the_heartbeat_client_takes_what_it_is_told(client: Callable[[], Any]) -> None:
    nvrx = client()
    takes(nvrx)
    for call in (
        "init_workload_monitoring",
        "shutdown_workload_monitoring",
        "send_heartbeat",
        "state_dict",
    ):
        takes(getattr(nvrx, call), SELF)
    for call in ("start_section", "end_section"):
        takes(getattr(nvrx, call), SELF, "section")
    takes(nvrx.load_state_dict, SELF, {})


def test_time_outs_are_given_to_the_client_in_the_form_that_it_saves() -> None:
    client = library.rank_monitor_client()()
    told = {"initial": 600.0, "subsequent": 12.5, "were_calculated": True}
    client.load_state_dict({"current_timeouts": {"heartbeat": told}})
    assert dataclasses.asdict(client.loaded_hb_timeouts) == told


@pytest.mark.parametrize("ask", [library.inprocess, library.checkpointing, library.version])
def test_a_missing_package_is_an_error_that_says_what_to_install(
    ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(EngineUnavailable, match=r"not installed") as caught:
        ask()
    assert "with pip install 'keepstep[nvrx]'" in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize("found", ["0.4.0", "0.4", "0.3.9.post1", "0.0.0", "unknown", ""])
def test_a_package_that_is_too_old_is_refused_with_both_versions(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(EngineUnavailable, match=r"needs 0\.4\.1 or newer") as caught:
        library.rank_monitor_client()
    assert found in str(caught.value)


@pytest.mark.parametrize(
    "found", ["0.4.1", "0.4.1+cu13", "0.4.1rc2", "0.5.0", "0.6.0.dev3+g12ab", "0.7", "1", "10.0.0"]
)
def test_newer_packages_and_builds_of_them_are_taken(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    assert library.version() == found


def test_a_package_that_cannot_be_imported_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(EngineUnavailable, match="No module named 'numpy'") as caught:
        library.checkpointing()
    assert "checkpointing.async_ckpt" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_package_without_a_name_that_is_needed_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(
        importlib.import_module("nvidia_resiliency_ext.inprocess.rank_assignment"), "ShiftRanks"
    )
    with pytest.raises(EngineUnavailable, match="ShiftRanks") as caught:
        library.inprocess()
    assert "0.4.1 to 0.7" in str(caught.value)


def test_an_import_of_a_part_by_another_thread_waits_for_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other thread would hold the lock of the part and wait for the package, which needs the
    # part: Python ends such a circle by an error in one of the two.
    folder = tmp_path / "circle" / "package"
    folder.mkdir(parents=True)
    (folder / "part.py").write_text("Part = object()\n")
    (folder / "__init__.py").write_text("from circle.package.part import Part\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(library, "_ROOT", "circle")
    found: list[object] = []
    other = threading.Thread(target=lambda: found.append(library._name("package.part", "Part")))

    class Loader(importlib.machinery.SourceFileLoader):
        def create_module(self, spec: object) -> None:
            """The package is about to be made: the other thread comes along."""
            other.start()
            other.join(0.3)  # it is waiting by now

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> Any:
            if name != "circle.package":
                return None
            loader = Loader(name, str(folder / "__init__.py"))
            return importlib.util.spec_from_file_location(
                name, loader.path, loader=loader, submodule_search_locations=[str(folder)]
            )

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    try:
        found.append(library._name("package", "Part"))
    finally:
        other.join()
    assert len(found) == 2
    assert found[0] is found[1]


def _run(code: str) -> list[str]:
    """What ``code`` prints in an interpreter of its own, by line."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(_REPOSITORY)])},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _imported_by(code: str) -> str:
    """What of NVRx is loaded after ``code`` has run."""
    shown = (
        "import sys\n"
        "print(sorted(name for name in sys.modules if name.startswith('nvidia_resiliency_ext')))"
    )
    return _run(f"{code}\n{shown}")[-1]


@pytest.mark.process
@pytest.mark.parametrize(
    "code",
    [
        "import keepstep; keepstep.run, keepstep.Checkpointer\n"
        "import keepstep.engines.nvrx.library",
        "from keepstep.cli.main import main; main(['run', '--help'])",
    ],
    ids=["import keepstep", "keepstep run --help"],
)
def test_nothing_of_nvrx_is_imported_before_it_is_asked_for(code: str) -> None:
    assert _imported_by(code) == "[]"


@pytest.mark.process
def test_a_group_of_names_that_is_not_asked_for_is_not_imported() -> None:
    loaded = _imported_by(
        "from keepstep.engines.nvrx import library; library.rank_monitor_client()"
    )
    assert "fault_tolerance.rank_monitor_client" in loaded
    assert "checkpointing" not in loaded
