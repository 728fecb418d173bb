"""The tests of `make quick`: the properties on small files, and a dozen proofs.

Tests that go through all models of the zoo and all architectures run on a few of them only.
"""

from __future__ import annotations

import pytest

FILES = (
    "tests/analysis/",
    "tests/attribution/",
    "tests/batch/test_jobs.py",
    "tests/capture/test_trace.py",
    "tests/cli/test_read_commands.py",
    "tests/extraction/test_every_module.py",
    "tests/extraction/test_order.py",
    "tests/extraction/test_partition.py",
    "tests/graphml/test_bad_files.py",
    "tests/graphml/test_changed_files.py",
    "tests/graphml/test_memory.py",
    "tests/graphml/test_round_trip.py",
    "tests/modules/",
    "tests/retag/test_retag.py",
    "tests/tagged/test_wire.py",
    "tests/test_layering.py",
    "tests/test_no_hardcoding.py",
    "tests/test_public_api.py",
    "tests/test_value.py",
    "tests/verification/",
    "tests/viewing/",
)
MODELS = (
    "block_three_times",
    "conditional_bodies",
    "conv_batch_norm",
    "ln_twice_beside_ln_1",
    "norm_before_dropout",
    "same_object_two_names",
)


def is_quick(item: pytest.Item) -> bool:
    """Return whether `make quick` runs a test."""
    from exports import NAMES

    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    model = parameters.get("name")
    return item.nodeid.startswith(FILES) and (model not in NAMES or model in MODELS)
