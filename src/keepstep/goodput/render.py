"""The report for people: tables for a terminal of 80 columns or more, plain text elsewhere."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from keepstep.goodput.faults import Fault
from keepstep.goodput.report import Checkpoints, Heartbeat, Report, Spread

_BAR = 24
_BEATS = 8
_NAMES = {
    "productive": "productive",
    "lost_work": "lost work",
    "startup": "start-up",
    "detect": "detecting faults",
    "restart": "restarting",
    "restore": "restoring state",
    "checkpoint_stall": "waiting for saves",
    "idle": "idle",
}


def closing_table(report: Report) -> RenderableType:
    """Faults, goodput split and checkpoints, as shown at the end of a run."""
    return Group(
        _faults_table(report.faults),
        Text(),
        split_table(report),
        Text(),
        _checkpoints_line(report.checkpoints),
        *_heartbeat_lines(report.heartbeats),
    )


def full_report(report: Report) -> RenderableType:
    """``closing_table`` with a headline, and one line for each fault that left one."""
    starts = "" if report.launches == 1 else f", started {report.launches} times"
    head = Text(f"run {report.run}, engine {report.engine}{starts}", style="bold")
    lines = [Text(fault.line) for fault in report.faults if fault.line]
    return Group(head, Text(), closing_table(report), *([Text(), *lines] if lines else []))


def duration(seconds: float) -> str:
    """``seconds`` for people: 0.42 s, 12.3 s, 5 min 03 s, 2 h 05 min."""
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 119.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def _faults_table(faults: list[Fault]) -> RenderableType:
    if not faults:
        return Text("No faults.")
    table = plain_table("Faults", show_header=True)
    for name in ("fault", "rank", "step", "found as", "level"):
        table.add_column(name, justify="right" if name in ("rank", "step") else "left")
    for name in ("detect\n[s]", "recover\n[s]", "steps\nlost"):
        table.add_column(Text(name), justify="right")
    table.add_column("others\nkept")
    mixed = len({fault.injected for fault in faults}) > 1
    for fault in faults:
        table.add_row(*_fault_row(fault, starred=mixed and not fault.injected))
    return Group(table, Text("* not injected")) if mixed else table


def plain_table(title: str, *, show_header: bool) -> Table:
    """A table without lines, so that nothing breaks where a terminal or a log cannot show them."""
    return Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        show_header=show_header,
        header_style="dim",
    )


def _fault_row(fault: Fault, *, starred: bool) -> list[RenderableType]:
    kept = {None: "-", True: "yes", False: "no"}[fault.survivors_kept]
    return [
        f"{fault.kind} *" if starred else fault.kind,
        _count(fault.rank),
        _count(fault.step),
        Text(fault.cause or "missed", style="" if fault.cause else "bold red"),
        fault.level or "-",
        _seconds(fault.detect_s),
        _seconds(fault.recover_s),
        _count(fault.steps_lost),
        Text(kept, style="bold red" if kept == "no" else ""),
    ]


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def split_table(report: Report) -> RenderableType:
    """Seconds and share of the wall time by category."""
    wall = report.wall_s
    title = f"Goodput {report.goodput:.1%} of {duration(wall)}"
    table = plain_table(title, show_header=False)
    table.add_column(min_width=max(map(len, _NAMES.values())))
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(width=_BAR)
    for name, seconds in report.categories.items():
        if seconds > 0 or name == "productive":
            share = seconds / wall if wall else 0.0
            style = "green" if name == "productive" else "yellow"
            bar = ProgressBar(1.0, share, width=_BAR, complete_style=style, finished_style=style)
            label = Text(_NAMES.get(name, name.replace("section:", "section ", 1)))
            table.add_row(label, duration(seconds), f"{share:.1%}", bar)
    return table


def _checkpoints_line(checkpoints: Checkpoints) -> Text:
    if not checkpoints.committed and not checkpoints.failed and not checkpoints.skipped:
        return Text("No checkpoints.")
    parts = [f"{checkpoints.committed} committed ({decimal(checkpoints.bytes)})"]
    if checkpoints.failed:
        parts.append(f"{checkpoints.failed} failed")
    if checkpoints.last_step is not None:
        parts.append(f"last step {checkpoints.last_step}")
    text = Text.assemble(("Checkpoints", "bold"), " ", ", ".join(parts))
    times = _spread("save", checkpoints.save_s) + _spread("stall", checkpoints.stall_s)
    if times:
        text.append("\n" + "; ".join(times))
    return text.append("\n" + _skipped(checkpoints)) if checkpoints.skipped else text


def _skipped(checkpoints: Checkpoints) -> str:
    saves = "1 save" if checkpoints.skipped == 1 else f"{checkpoints.skipped} saves"
    wanted = checkpoints.every_steps_wanted
    if wanted is None:
        return f"{saves} skipped: storage slower than the schedule at times"
    return (
        f"{saves} skipped: storage slower than the schedule, raise checkpoint.every_steps to >= "
        f"{wanted}"
    )


def _spread(name: str, spread: Spread) -> list[str]:
    if spread.median is None or spread.max is None:
        return []
    return [f"{name} {duration(spread.median)}, at most {duration(spread.max)}"]


def _heartbeat_lines(heartbeats: list[Heartbeat]) -> list[RenderableType]:
    """The ranks that came closest to their launcher's limit, the closest first."""
    if not heartbeats:
        return []
    ordered = sorted(heartbeats, key=lambda one: one.age_s / (one.limit_s or 1.0), reverse=True)
    shown = [
        f"rank {one.rank} {duration(one.age_s)} of {duration(one.limit_s)} ({one.section})"
        for one in ordered[:_BEATS]
    ]
    more = len(ordered) - _BEATS
    tail = f", {more} more less close" if more > 0 else ""
    head = ("Heartbeats", "bold")
    return [Text(), Text.assemble(head, f" longest silence: {', '.join(shown)}{tail}")]
