"""What all tests on a cluster share: their order and their time limit."""

import pytest

LONGEST = (
    "test_failures_of_tasks_do_not_change_a_sweep",
    "test_a_faulty_node_is_excluded",
    "test_events_do_not_change_a_run",
    "test_stopped_second_and_refused_jobs_are_not_requeued",
    "test_usr1_to_the_steps_requeues_but_scancel_does_not",
    "test_code_changes_do_not_change_a_run",
)
"""Two processes share the tests: each begins with two of these."""
HANGS_AFTER_S = 1800
"""The longest take 5 minutes, and three times as long beside other tests on a slow machine."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.name, len(LONGEST)))

    for item in items:
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.timeout(HANGS_AFTER_S))
