from __future__ import annotations

import msgspec
import pytest

from keepstep import events
from keepstep.testing import FakeClock, LineSink


def test_it_keeps_lines_in_order_and_decodes_them() -> None:
    sink = LineSink()
    recorder = events.Recorder(sink, run="demo", src="agent", clock=FakeClock())
    recorder.emit(events.NodeBegin(pid=1, local_world=2))
    recorder.emit(events.StopNotice(signal="SIGTERM"), step=3)
    assert sink.kinds == ["node.begin", "stop.notice"]
    assert [event.step for event in sink.events] == [None, 3]
    assert all(line.endswith(b"\n") for line in sink.lines)


def test_a_line_that_is_no_event_is_an_error() -> None:
    sink = LineSink()
    sink(b"{\n")
    with pytest.raises(msgspec.DecodeError):
        _ = sink.events
