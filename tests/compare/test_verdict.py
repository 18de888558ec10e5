"""Verdicts on numbers made by hand, each threshold from both sides."""

import math

import pytest

from halfstep.compare.verdict import Thresholds, Verdict, judge, worst

LIMITS = Thresholds(same_relative=0.1, same_absolute=0.0)


def verdict(metric, *, reference=0.040, constant=0.080, moved=0.9, finite=True, limits=LIMITS):
    return judge(metric, reference=reference, constant=constant, moved_share=moved, is_finite=finite, limits=limits)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (0.040, Verdict.MATCHES),
        (0.010, Verdict.MATCHES),  # better than fp32 is no fault
        (0.0439, Verdict.MATCHES),
        (0.0441, Verdict.WORSE),
        (0.0759, Verdict.WORSE),
        (0.0761, Verdict.STALLS),
        (0.081, Verdict.STALLS),
        (0.319, Verdict.STALLS),
        (0.321, Verdict.DIVERGES),
        (math.nan, Verdict.DIVERGES),
        (math.inf, Verdict.DIVERGES),
    ],
)
def test_each_threshold_from_both_sides(metric, expected):
    assert verdict(metric) is expected


def test_a_run_whose_weights_never_moved_stalls_however_good_its_start():
    assert verdict(0.040, moved=0.0) is Verdict.STALLS
    assert verdict(0.040, moved=1e-9) is Verdict.MATCHES


def test_a_weight_that_is_not_finite_diverges_even_if_the_error_looks_fine():
    assert verdict(0.040, finite=False) is Verdict.DIVERGES
    assert verdict(0.040, finite=False, moved=0.0) is Verdict.DIVERGES


def test_an_absolute_tolerance_serves_where_fp32_is_next_to_exact():
    limits = Thresholds(same_relative=0.1, same_absolute=0.02)
    assert verdict(0.019, reference=1e-7, constant=1.0, limits=limits) is Verdict.MATCHES
    assert verdict(0.021, reference=1e-7, constant=1.0, limits=limits) is Verdict.WORSE


def test_a_reference_that_is_nan_matches_nothing():
    assert verdict(0.040, reference=math.nan) is Verdict.WORSE


def test_worst_is_worst():
    assert worst([Verdict.DIVERGES, Verdict.MATCHES]) is Verdict.DIVERGES
    assert worst([Verdict.MATCHES, Verdict.WORSE]) is Verdict.WORSE
    assert worst([Verdict.MATCHES]) is Verdict.MATCHES
