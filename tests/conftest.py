"""Shared fixtures. Nothing in the tests reaches for the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
# The threads of one operation wait for each other: on a busy machine that costs a time slice an operation.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_collection_modifyitems(items):
    """Several pytest workers take whole files; files with peers, whose rounds are timed, follow each other."""
    for item in items:
        group = "swarm" if item.get_closest_marker("swarm") else f"{item.path.parent.name}/{item.path.name}"
        item.add_marker(pytest.mark.xdist_group(group))
