"""The order of the tests on a cluster: two processes share them, the longest ones first."""

import pytest

LONGEST = (
    "test_failures_of_tasks_do_not_change_a_sweep",
    "test_a_faulty_node_is_excluded",
    "test_events_do_not_change_a_run",
    "test_stopped_second_and_refused_jobs_are_not_requeued",
    "test_usr1_to_the_steps_requeues_but_scancel_does_not",
    "test_code_changes_do_not_change_a_run",
)
"""Each process begins with two of them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.name, len(LONGEST)))
