"""Tests that take minutes, and run when they are asked for."""

from __future__ import annotations

import os

import pytest


def takes_minutes(reason: str, limit: int = 7200) -> list[pytest.MarkDecorator]:
    """Marks of a module of such tests.

    Args:
        reason: why they take long.
        limit: seconds that one may take.
    """
    asked = os.environ.get("ISOEXEC_TEST_TRAINING")
    return [pytest.mark.timeout(limit), pytest.mark.skipif(not asked, reason=f"{reason}; ISOEXEC_TEST_TRAINING=1 runs it")]
