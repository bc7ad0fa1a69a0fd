#!/usr/bin/env python3
"""Tests which tests run_test.py runs: with a seed one in ONE_IN of them, over all seeds each of them, also beside the
choice of cases by the same seed, and without a seed all."""

import itertools
import unittest

from run_test import SEEDS_OF_A_SHARE, shares_of


def indices(count, one_in, seed):
    """Returns the shards that GoogleTest runs, and into how many it divides the tests."""
    shares = shares_of(count, one_in, seed)
    if shares == [{}]:
        return [0], 1
    totals = {share["GTEST_TOTAL_SHARDS"] for share in shares}
    assert len(totals) == 1, totals
    return [int(share["GTEST_SHARD_INDEX"]) for share in shares], int(totals.pop())


class SharesTest(unittest.TestCase):
    def test_seeds_run_every_shard_once(self):
        for count, one_in in itertools.product(range(1, 5), range(1, 5)):
            seen = []
            for seed in range(one_in):
                chosen, total = indices(count, one_in, str(1234567 + seed * SEEDS_OF_A_SHARE))
                self.assertEqual((len(chosen), total), (count, count * one_in))
                seen += chosen
            self.assertEqual(sorted(seen), list(range(count * one_in)))

    def test_the_share_does_not_depend_on_which_cases_run(self):
        """A program runs the cases whose index has the residue of the seed, so each shard must occur with each."""
        for one_in, cases_one_in in itertools.product((2, 3), (4, 6, 8, 11)):
            pairs = {(indices(1, one_in, str(seed))[0][0], seed % cases_one_in)
                     for seed in range(one_in * SEEDS_OF_A_SHARE)}
            self.assertEqual(len(pairs), one_in * cases_one_in)

    def test_without_a_seed_everything_runs(self):
        for count, one_in in itertools.product(range(1, 5), range(1, 5)):
            chosen, total = indices(count, one_in, None)
            self.assertEqual(sorted(chosen), list(range(total)))
            self.assertEqual(total, count)


if __name__ == "__main__":
    unittest.main()
