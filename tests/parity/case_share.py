"""The share of a test's cases that one run takes."""

import os


def share_of(cases, one_in):
    """One in `one_in` of a list, which the number in CADRE_CASES_SEED (default 1) picks."""
    return cases[int(os.environ.get("CADRE_CASES_SEED", "1")) % one_in::one_in]
