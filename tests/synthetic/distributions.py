"""Tests that two generators have one distribution."""

from collections import Counter

import numpy as np
import pytest
from scipy import stats


def assert_same(ours, theirs):
    """Assert that no feature differs, by Holm's test at 1 %; both are a dict per instance."""
    p_values = {
        key: p_value([instance[key] for instance in ours], [instance[key] for instance in theirs])
        for key in ours[0]
    }
    # Holm's test rejects none if and only if it does not reject the first
    assert min(p_values.values()) * len(p_values) > 0.01, p_values


def p_value(ours, theirs):
    """Return the p value of equal distributions, by chi-square, or by KS for many numbers."""
    counts = [Counter(ours), Counter(theirs)]
    total = counts[0] + counts[1]
    if len(total) > 60 and isinstance(ours[0], int):
        return stats.ks_2samp(ours, theirs, method="asymp").pvalue

    # Values that occur less than 20 times are one column.
    frequent = [value for value, number in total.items() if number >= 20]
    table = np.array([[count[value] for value in frequent] for count in counts])
    rest = len(ours) - table.sum(axis=1, keepdims=True)
    if rest.sum() >= 20:
        table = np.hstack([table, rest])
    return stats.chi2_contingency(table).pvalue if table.shape[1] > 1 else 1.0


def counted(*values):
    """Return parameters that end in a count: as it is in the tier `system`, 5 times in `long`."""
    *settings, count = values
    return [
        pytest.param(*settings, count, marks=pytest.mark.system),
        pytest.param(*settings, 5 * count, marks=pytest.mark.long),
    ]
