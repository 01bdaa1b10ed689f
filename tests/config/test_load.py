"""Settings from files, environment, --set and arguments: precedence, and problems all at once."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.config import Config
from keepstep.config.load import decode, encode, environment_name, load, override
from keepstep.config.rules import RULES, broken, value_of
from keepstep.errors import InternalError, UsageError

SETTINGS: dict[str, object] = {
    f"{section.name}.{key}": kind
    for section in dataclasses.fields(Config)
    for key, kind in typing.get_type_hints(
        typing.get_type_hints(Config)[section.name],
    ).items()
}


def load_some(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    sets: Sequence[str] = (),
    arguments: Mapping[str, object] | None = None,
) -> Config:
    return load(file=file, environ=environ or {}, sets=sets, arguments=arguments or {})


def message(**sources: typing.Any) -> str:
    with pytest.raises(UsageError) as caught:
        load_some(**sources)
    assert caught.value.exit_code == 64
    return caught.value.what


@pytest.fixture
def toml(tmp_path: Path) -> typing.Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "keepstep.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


Toml = typing.Callable[[str], Path]


def test_without_sources_every_setting_has_its_default() -> None:
    assert load_some() == Config()


def test_each_source_is_stronger_than_the_one_before(toml: Toml) -> None:
    file = toml("[checkpoint]\nevery_steps = 1\n")
    environ = {"KEEPSTEP_CHECKPOINT__EVERY_STEPS": "2"}
    sets = ["checkpoint.every_steps=3"]
    arguments = {"checkpoint.every_steps": 4}
    assert load_some(file=file).checkpoint.every_steps == 1
    assert load_some(file=file, environ=environ).checkpoint.every_steps == 2
    assert load_some(file=file, environ=environ, sets=sets).checkpoint.every_steps == 3
    everything = load_some(file=file, environ=environ, sets=sets, arguments=arguments)
    assert everything.checkpoint.every_steps == 4


def test_the_last_set_of_a_setting_counts() -> None:
    config = load_some(sets=["checkpoint.keep_last=5", "checkpoint.keep_last=7"])
    assert config.checkpoint.keep_last == 7


def test_an_argument_that_is_none_is_not_given() -> None:
    config = load_some(sets=["run.id=a"], arguments={"run.id": None})
    assert config.run.id == "a"


def test_variables_that_are_not_settings_are_not_looked_at() -> None:
    environ = {"KEEPSTEP_FAULTS": "x", "KEEPSTEP_RUN_DIR": "/x", "CHECKPOINT__EVERY_STEPS": "1"}
    assert load_some(environ=environ) == Config()


def test_no_file_is_read_unless_it_is_named(toml: Toml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(toml("[checkpoint]\nkeep_last = 9\n").parent)
    assert load_some() == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("False", False), ("0", False), (" TRUE ", True)],
)
def test_a_truth_value_is_true_false_1_or_0(text: str, value: bool) -> None:
    assert load_some(sets=[f"checkpoint.at_end={text}"]).checkpoint.at_end is value


@pytest.mark.parametrize(("text", "value"), [("1_000", 1000), ("+7", 7), ("0", 0)])
def test_a_whole_number_may_have_underscores(text: str, value: int) -> None:
    assert load_some(sets=[f"checkpoint.every_steps={text}"]).checkpoint.every_steps == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a@1:0", ("a@1:0",)),
        ("a@1:0, b@2:1", ("a@1:0", "b@2:1")),
        ('["a,b", "c"]', ("a,b", "c")),
        ("", ()),
        ("[]", ()),
    ],
)
def test_a_list_is_separated_by_commas_or_is_json(text: str, value: tuple[str, ...]) -> None:
    assert load_some(sets=[f"faults.inject={text}"]).faults.inject == value
    assert load_some(environ={"KEEPSTEP_FAULTS__INJECT": text}).faults.inject == value


def test_a_file_may_give_a_whole_number_for_seconds_and_a_list(toml: Toml) -> None:
    config = load_some(
        file=toml('[run]\ngrace_s = 30\n[faults]\ninject = ["kill@3:1"]\n[rank]\nspares = 0\n')
    )
    assert config.run.grace_s == 30.0
    assert isinstance(config.run.grace_s, float)
    assert config.faults.inject == ("kill@3:1",)
    assert config.rank.spares == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("checkpoint.every_steps=ten", "expected a whole number, not 'ten'"),
        ("checkpoint.every_steps=1.5", "expected a whole number, not '1.5'"),
        ("checkpoint.every_steps=1__0", "expected a whole number, not '1__0'"),
        (f"checkpoint.every_steps={10**30}", "is too large"),
        ("checkpoint.at_end=yes", "expected true or false, not 'yes'"),
        ("run.grace_s=soon", "expected a number, not 'soon'"),
        ("run.grace_s=inf", "expected a finite number"),
        ("run.grace_s=nan", "expected a finite number"),
        ("rank.start_method=spwan", "expected fork or spawn, not 'spwan' (did you mean spawn?)"),
        ("engine.name=x", "expected native or nvrx, not 'x'"),
        ("engine.restart=nvr", "expected native or nvrx or nothing, not 'nvr' (did you mean nvrx"),
        ("faults.inject=[1]", "expected a list of texts"),
        ("faults.inject=[", "expected a JSON list of texts"),
        ("run.id=\udc80", "is not valid UTF-8"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_was_expected(given: str, said: str) -> None:
    text = message(sets=[given])
    assert text.startswith("1 problem in the configuration: --set " + given.partition("=")[0])
    assert said in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('[checkpoint]\nevery_steps = "5"', "expected a whole number, not '5'"),
        ("[checkpoint]\nevery_steps = true", "expected a whole number, not True"),
        ("[checkpoint]\nat_end = 1", "expected true or false, not 1"),
        ("[run]\nid = 5", "expected a text, not 5"),
        ("[run]\ngrace_s = inf", "expected a finite number, not inf"),
        ('[faults]\ninject = "kill@1:0"', "expected a list of texts, not 'kill@1:0'"),
        ("[checkpoint\n", "is not TOML"),
        ("checkpoint = 5", "is a section, not a setting; its settings are dir, every_steps"),
        ("every_steps = 5", "no such setting (did you mean checkpoint.every_steps?)"),
        ("[chekpoint]\nevery_steps = 5", "no such section (did you mean checkpoint?)"),
        (
            "[restart]\nkeep_last = 5",
            "restart.keep_last: no such setting (did you mean checkpoint.k",
        ),
        ("[zzz]\nqqq = 5", "no such section; the sections are run, engine"),
        ("[checkpoint]\nzzz = 5", "no such setting; section checkpoint has dir, every_steps"),
    ],
)
def test_a_file_is_read_strictly(toml: Toml, line: str, said: str) -> None:
    assert said in message(file=toml(line))


def test_a_file_that_is_missing_or_not_text_is_a_problem(tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory)" in message(file=tmp_path / "none.toml")
    assert "cannot be read (Is a directory)" in message(file=tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in message(file=tmp_path / "bytes.toml")


def test_a_misspelt_variable_is_an_error_that_names_the_right_one() -> None:
    text = message(environ={"KEEPSTEP_CHECKPOINT__EVERY_STEP": "5"})
    assert text == (
        "1 problem in the configuration: KEEPSTEP_CHECKPOINT__EVERY_STEP: no such setting "
        "(did you mean KEEPSTEP_CHECKPOINT__EVERY_STEPS?)"
    )


def test_a_set_without_a_value_says_how_to_write_it() -> None:
    assert "--set run.id: has no value; write --set SECTION.KEY=VALUE" in message(sets=["run.id"])


def test_all_problems_of_all_sources_are_in_one_message(toml: Toml) -> None:
    file = toml("[checkpoint]\nevery_step = 5\nkeep_last = 0\n")
    with pytest.raises(UsageError) as caught:
        load(
            file=file,
            environ={"KEEPSTEP_RUN__GRACE_S": "x"},
            sets=["heartbeat.min_limit_s=soon"],
            arguments={"rank.spares": -1},
        )
    assert str(caught.value) == (
        f"5 problems in the configuration: "
        f"{file}: checkpoint.every_step: no such setting (did you mean every_steps?); "
        "KEEPSTEP_RUN__GRACE_S: expected a number, not 'x'; "
        "--set heartbeat.min_limit_s: expected a number, not 'soon'; "
        "checkpoint.keep_last is 0: it must be at least 1, or the last good checkpoint would be "
        "removed; "
        "rank.spares is -1: it must be at least 0 (0: a dead rank waits for a new process). "
        "Nothing was started."
    )


def test_labels_say_what_the_person_wrote() -> None:
    with pytest.raises(UsageError, match="--on-hang: expected restart or report, not 'x'"):
        load(
            file=None,
            environ={},
            sets=(),
            arguments={"heartbeat.on_hang": "x"},
            labels={"heartbeat.on_hang": "--on-hang"},
        )


def test_a_value_that_cannot_be_read_does_not_break_rules_by_its_default() -> None:
    text = message(sets=["heartbeat.min_limit_s=4000", "heartbeat.start_limit_s=5000x"])
    assert "heartbeat.start_limit_s: expected a number" in text
    assert "cannot be above the upper bound for the start" not in text
    assert "cannot be above the upper bound for a section" in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["run.grace_s=0"], "run.grace_s is 0.0: it must be above 0"),
        (["checkpoint.every_steps=-1"], "checkpoint.every_steps is -1: it must be at least 0"),
        (["checkpoint.keep_last=0"], "checkpoint.keep_last is 0: it must be at least 1"),
        (["checkpoint.keep_every_steps=-1"], "checkpoint.keep_every_steps is -1"),
        (["checkpoint.retries=-1"], "checkpoint.retries is -1: it must be at least 0"),
        (["checkpoint.rated_mb_s=-1"], "checkpoint.rated_mb_s is -1.0: it must be at least 0"),
        (["checkpoint.stall_s=0"], "checkpoint.stall_s is 0.0: it must be above 0"),
        (["checkpoint.max_failures=-1"], "checkpoint.max_failures is -1"),
        (["checkpoint.slots=0"], "checkpoint.slots is 0: it must be at least 1"),
        (["checkpoint.write_limit_s=0"], "checkpoint.write_limit_s is 0.0"),
        (["restart.max_restarts=-2"], "restart.max_restarts is -2: it must be at least -1"),
        (["restart.max_without_progress=0"], "restart.max_without_progress is 0"),
        (["restart.settle_s=-1"], "restart.settle_s is -1.0"),
        (["restart.save_wait_s=-1"], "restart.save_wait_s is -1.0"),
        (["restart.abort_limit_s=0"], "restart.abort_limit_s is 0.0"),
        (["restart.join_limit_s=-3"], "restart.join_limit_s is -3.0"),
        (["restart.signal_after_s=0"], "restart.signal_after_s is 0.0"),
        (["restart.pg_timeout_s=0"], "restart.pg_timeout_s is 0.0"),
        (["heartbeat.interval_s=0"], "heartbeat.interval_s is 0.0"),
        (["heartbeat.min_limit_s=-1"], "heartbeat.min_limit_s is -1.0: it must be above 0"),
        (["heartbeat.start_limit_s=0"], "heartbeat.start_limit_s is 0.0"),
        (["heartbeat.section_limit_s=0"], "heartbeat.section_limit_s is 0.0"),
        (["rank.spares=-1"], "rank.spares is -1"),
        (
            ["restart.signal_after_s=10"],
            "restart.signal_after_s is 10.0 and restart.abort_limit_s is 3.0: the signal must",
        ),
        (
            ["heartbeat.start_limit_s=20"],
            "heartbeat.min_limit_s is 30.0 and heartbeat.start_limit_s is 20.0: the lower bound",
        ),
        (
            ["heartbeat.section_limit_s=29"],
            "heartbeat.min_limit_s is 30.0 and heartbeat.section_limit_s is 29.0: the lower bound",
        ),
        (
            ["heartbeat.interval_s=3.1"],
            "heartbeat.interval_s is 3.1 and heartbeat.min_limit_s is 30.0: ten intervals",
        ),
        (["nvrx.soft_limit_s=-1"], "nvrx.soft_limit_s is -1.0: it must be at least 0"),
        (["nvrx.safety_factor=0.5"], "nvrx.safety_factor is 0.5: it must be at least 1"),
        (
            ["engine.launcher=nvrx", "engine.restart=native"],
            "engine.launcher is nvrx and engine.restart is native: keepstep's in-process restart",
        ),
        (
            ["engine.name=nvrx", "engine.restart=native"],
            "engine.launcher is empty and engine.restart is native: keepstep's in-process restart",
        ),
        (
            ["engine.restart=nvrx", "restart.pg_timeout_s=90"],
            "restart.pg_timeout_s is 90.0 and nvrx.soft_limit_s is 0.0 and heartbeat.min_limit_s "
            "is 30.0: with NVRx's in-process restart a collective must not time out before",
        ),
        (
            ["engine.name=nvrx", "nvrx.soft_limit_s=400"],
            "restart.pg_timeout_s is 600.0 and nvrx.soft_limit_s is 400.0 and",
        ),
        (
            ["engine.launcher=nvrx", "heartbeat.on_hang=report"],
            "heartbeat.on_hang is report: NVRx ends a rank that hangs",
        ),
    ],
)
def test_each_rule_is_checked_with_its_reason(given: list[str], said: str) -> None:
    assert said in message(sets=given)


def test_the_table_above_breaks_every_rule() -> None:
    """A rule without a case there would be a rule that no test has seen at work."""
    marks = getattr(test_each_rule_is_checked_with_its_reason, "pytestmark")  # noqa: B009
    cases = "\n".join(said for _, said in marks[0].args[1])
    for rule in RULES:
        assert " and ".join(f"{name} is" for name in rule.settings[:1]) in cases
        assert all(f"{name} is" in cases for name in rule.settings)


def test_every_number_and_some_choices_have_a_rule() -> None:
    ruled = {name for rule in RULES for name in rule.settings}
    numbers = {name for name, kind in SETTINGS.items() if kind in (int, float)}
    assert ruled - {"engine.launcher", "engine.restart", "heartbeat.on_hang"} == numbers


def test_the_bounds_themselves_are_allowed() -> None:
    config = load_some(
        sets=[
            "heartbeat.interval_s=3",
            "heartbeat.start_limit_s=30",
            "heartbeat.section_limit_s=30",
            "checkpoint.keep_last=1",
            "restart.settle_s=0",
            "restart.max_restarts=-1",
            "nvrx.safety_factor=1",
            "engine.name=nvrx",
            "restart.pg_timeout_s=90.1",
        ]
    )
    assert broken(config) == []


@pytest.mark.parametrize(
    "sets",
    [
        ["restart.pg_timeout_s=10", "heartbeat.on_hang=report"],
        ["engine.launcher=nvrx", "restart.pg_timeout_s=10"],
        ["engine.checkpoint=nvrx", "restart.pg_timeout_s=10", "engine.restart=native"],
    ],
)
def test_limits_of_nvrx_concern_only_who_uses_its_restart(sets: list[str]) -> None:
    load_some(sets=sets)


@pytest.mark.parametrize(
    ("sets", "checkpoint", "restart", "launcher"),
    [
        ([], "native", "native", "native"),
        (["engine.name=nvrx"], "nvrx", "nvrx", "nvrx"),
        (["engine.checkpoint=nvrx"], "nvrx", "native", "native"),
        (["engine.restart=nvrx"], "native", "nvrx", "native"),
        (["engine.launcher=nvrx"], "native", "none", "nvrx"),
        (["engine.launcher=nvrx", "engine.restart=nvrx"], "native", "nvrx", "nvrx"),
        (["engine.name=nvrx", "engine.checkpoint=native"], "native", "nvrx", "nvrx"),
        (["engine.name=nvrx", "engine.launcher=native"], "nvrx", "nvrx", "native"),
        (["engine.name=nvrx", "engine.launcher="], "nvrx", "nvrx", "nvrx"),
        (
            ["engine.name=nvrx", "engine.launcher=native", "engine.restart=native"],
            "nvrx",
            "native",
            "native",
        ),
    ],
)
def test_a_part_that_is_left_open_follows_the_engine(
    sets: list[str], checkpoint: str, restart: str, launcher: str
) -> None:
    parts = load_some(sets=sets).engine.parts
    assert (parts.checkpoint, parts.restart, parts.launcher) == (checkpoint, restart, launcher)
    assert parts.any_nvrx == ("nvrx" in (checkpoint, restart, launcher))


def test_override_changes_some_settings_and_checks_all() -> None:
    base = load_some(sets=["checkpoint.keep_last=5"])
    assert override(base, {"checkpoint.every_steps": 7}).checkpoint == dataclasses.replace(
        base.checkpoint, every_steps=7
    )
    with pytest.raises(UsageError, match=r"argument checkpoint\.evry_steps: no such setting"):
        override(base, {"checkpoint.evry_steps": 7})
    with pytest.raises(UsageError, match="the signal must come before"):
        override(base, {"restart.abort_limit_s": 0.1})


def test_settings_of_another_version_are_refused() -> None:
    with pytest.raises(InternalError, match="cannot be read"):
        decode(b'{"checkpoint":{"every_steps":"five"}}')
    with pytest.raises(InternalError, match="cannot be read"):
        decode(b"{")


# --- any settings at all --------------------------------------------------------------------------


def values(kind: object) -> st.SearchStrategy[typing.Any]:
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if kind is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if kind is str:
        return st.text()
    return st.lists(st.text()).map(tuple)


def build(given_values: Mapping[str, typing.Any]) -> Config:
    config = Config()
    for name, value in given_values.items():
        section, _, key = name.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{key: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


@given(st.fixed_dictionaries({}, optional={name: values(kind) for name, kind in SETTINGS.items()}))
def test_decode_gives_back_what_was_encoded(given_values: dict[str, typing.Any]) -> None:
    config = build(given_values)
    assert decode(encode(config)) == config


@given(st.data())
def test_a_value_written_as_text_is_read_as_the_same_value(data: st.DataObject) -> None:
    """Environment and --set agree with an argument of the right type, problems included."""
    name = data.draw(st.sampled_from(sorted(SETTINGS)))
    value = data.draw(values(SETTINGS[name]))
    text = json.dumps(value) if isinstance(value, tuple) else str(value)
    outcomes = []
    for sources in (
        {"arguments": {name: value}},
        {"sets": [f"{name}={text}"]},
        {"environ": {environment_name(name): text}},
    ):
        try:
            outcomes.append((value_of(load_some(**typing.cast(typing.Any, sources)), name), ""))
        except UsageError as error:
            outcomes.append((None, error.what))
    assert outcomes[0] == outcomes[1] == outcomes[2]
