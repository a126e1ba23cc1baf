"""Predictions → scores."""

from collections.abc import Iterator
from typing import Any

Judgement = tuple[dict[str, float], Iterator[dict[str, Any]]]
"""Metrics by name, and a row for each example, to be consumed once: what was predicted, and its score."""
