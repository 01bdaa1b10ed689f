"""From what ranks measured to the figures and ratios of the benchmark of checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.checkpoint_figures import Figures, copies, figures, noise, ratios


def rank(**values: object) -> dict[str, Any]:
    found: dict[str, Any] = {
        "state_bytes": 1000,
        "tensors": 8,
        "copy_s": {"one": [0.3, 0.3], "training": [0.2, 0.2]},
        "first_call_s": 0.5,
        "step_s": 0.4,
        "quiet_s": [[0.4, 0.5], [0.3, 0.4]],
        "call_s": [0.1, 0.1],
        "window_steps": [2, 2],
        "done_in_training_s": [0.9, 1.1],
        "lost_s": [0.1, 0.3],
        "durable_s": [0.6, 0.6],
        "file_bytes": 1010,
        "load_s": 0.8,
        "wrong_tensors": 0,
    }
    return found | values


def run(*ranks: dict[str, Any], error: str = "", memory: int | None = 5) -> dict[str, Any]:
    return {"ranks": list(ranks), "error": error, "memory_bytes": memory, "seconds": 9.0}


def scenario(cpus: str = "saturated", **systems: dict[str, Any]) -> dict[str, Any]:
    runs = {name.replace("_", "-"): [one] for name, one in systems.items()}
    pairs = {"write_s": [0.5, 0.4], "durable_s": [0.55, 0.6], "read_s": [1.0, 1.0]}
    pairs["load_s"] = [1.2, 1.4]
    return {
        "cpus": cpus,
        "ranks": 2,
        "threads": 1,
        "runs": runs,
        "pairs": run({"pairs": pairs, "raw_tool": "fio", "raw_bytes": 1024}),
    }


def by_name(found: dict[str, Any]) -> dict[str, object]:
    return {one.name: (one.value, one.met) for one in ratios(found)}


def test_a_call_takes_as_long_as_on_the_slowest_rank_and_the_rest_is_of_rank_0() -> None:
    found = figures([run(rank(call_s=[0.1, 0.4]), rank(call_s=[0.2, 0.3], lost_s=[9.0, 9.0]))])
    assert found.call_s == [0.2, 0.4]
    assert found.lost_s == [0.1, 0.3]


def test_wrong_tensors_of_all_ranks_are_counted() -> None:
    found = figures([run(rank(), rank(wrong_tensors=3))])
    assert found.wrong == [3] and not found.right


def test_a_job_that_failed_gives_an_error_and_no_figures() -> None:
    assert figures([run(error="rank 0 ended with -11")]) == Figures(
        errors=["rank 0 ended with -11"]
    )


def test_a_copy_takes_as_long_as_on_the_slowest_rank() -> None:
    slow = rank(copy_s={"one": [0.7, 0.1], "training": [0.0]})
    assert copies(scenario(dcp=run(rank(), slow)), "one") == [0.7, 0.3]


def test_noise_is_what_steps_without_a_save_lose() -> None:
    found = noise(scenario(dcp=run(rank(), rank())), 2)
    assert found == pytest.approx([0.1, -0.1])


def test_time_lost_is_compared_by_its_mean() -> None:
    found = scenario(keepstep=run(rank()), dcp=run(rank(lost_s=[3.0, 1.0])))
    assert by_name(found)["time lost / blocking memory copy"] == (pytest.approx(1.0), True)
    assert by_name(found)["time lost / best peer's"] == (pytest.approx(0.1), True)


def test_with_a_core_to_spare_less_may_be_lost() -> None:
    found = scenario("spare", keepstep=run(rank()))
    assert by_name(found)["time lost / blocking memory copy"] == (pytest.approx(1.0), False)


def test_a_peer_whose_values_are_wrong_is_not_the_best() -> None:
    wrong = rank(lost_s=[0.01], durable_s=[0.01], load_s=0.01, wrong_tensors=1)
    found = scenario(keepstep=run(rank()), dcp=run(rank(load_s=1.6)), dcp_thread=run(wrong))
    assert by_name(found)["load / best peer's"] == (pytest.approx(0.5), True)


def test_only_dcp_counts_where_dcp_is_compared() -> None:
    fast = rank(durable_s=[0.1])
    found = scenario(keepstep=run(rank()), torch_save=run(fast), dcp=run(rank(durable_s=[1.0])))
    assert by_name(found)["durable / best DCP's"] == (pytest.approx(0.6), False)


def test_pairs_are_compared_one_by_one() -> None:
    found = by_name(scenario(keepstep=run(rank())))
    assert found["durable / raw direct write"] == (pytest.approx(1.3), False)
    assert found["load / raw direct read"] == (pytest.approx(1.3), False)


def test_where_there_is_nothing_to_compare_with_no_target_is_met() -> None:
    found = scenario(dcp=run(error="it failed"))
    found["pairs"] = None
    assert set(by_name(found).values()) == {(None, None)}
