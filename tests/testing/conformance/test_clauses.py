from __future__ import annotations

import pytest

from keepstep.testing.conformance import Clause, Result, require, run


def _keep(subject: list[int]) -> None:
    subject.append(1)


def _break(subject: list[int]) -> None:
    raise AssertionError("it is 3, not 4")


def _crash(subject: list[int]) -> None:
    raise OSError("no space")


CLAUSES = [
    Clause("keeps", "it counts", _keep),
    Clause("breaks", "it adds", _break),
    Clause("crashes", "it writes", _crash),
]


def _results(**differences: str) -> dict[str, Result]:
    return {one.name: one for one in run(CLAUSES, list, differences)}


def test_a_broken_clause_is_told_with_its_sentence_and_what_was_found() -> None:
    results = _results()
    assert [one.ok for one in results.values()] == [True, False, False]
    assert str(results["keeps"]) == "keeps: holds"
    assert str(results["breaks"]) == "breaks: broken: it adds. it is 3, not 4"
    assert str(results["crashes"]) == "crashes: broken: it writes. OSError: no space"
    with pytest.raises(AssertionError) as caught:
        require(results.values())
    assert str(caught.value) == f"{results['breaks']}\n{results['crashes']}"


def test_a_documented_difference_must_be_one() -> None:
    results = _results(breaks="by design", crashes="a bug of 0.4.1")
    require(results.values())
    assert str(results["breaks"]) == "breaks: does not hold, as documented: by design"
    results = _results(breaks="by design", crashes="a bug of 0.4.1", keeps="it was so once")
    with pytest.raises(AssertionError, match=r"keeps: holds, .* \(it was so once\).* out of date"):
        require(results.values())


def test_a_difference_at_a_clause_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such clause: beeps; known: keeps, breaks, crashes"):
        _results(beeps="by design")


def test_a_single_clause_can_be_checked_and_each_gets_its_own_subject() -> None:
    assert [one.name for one in run(CLAUSES, list, {}, only=["keeps"])] == ["keeps"]
    subjects: list[list[int]] = []

    def subject() -> list[int]:
        subjects.append([])
        return subjects[-1]

    run([CLAUSES[0], CLAUSES[0]], subject, {})
    assert subjects == [[1], [1]]
    with pytest.raises(ValueError, match="no such clause: all"):
        run(CLAUSES, list, {}, only=["all"])
