"""Metrics in Prometheus's text format, as Prometheus's own parser reads them."""

from __future__ import annotations

import prometheus_client.parser

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Samples by name and labels."""


def parsed(text: str) -> Values:
    """Returns all samples; asserts that no two have the same name and labels."""
    found: Values = {}
    for family in prometheus_client.parser.text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found
