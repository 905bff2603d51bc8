"""The page on requests tells every code, every wish and every number that there is."""

import re
from pathlib import Path

import grpc

from gateway import fields, metrics
from scheduler.contracts import errors, requests

PAGE = (Path(__file__).parents[3] / "docs/requests.md").read_text(encoding="utf-8")


def test_every_error_stands_with_its_statuses() -> None:
    for code, kind in errors.BY_CODE.items():
        (row,) = [
            line for line in PAGE.splitlines() if line.startswith("|") and f"`{code}`" in line
        ]
        assert f"| {kind.status} | {kind.grpc_status} |" in row
        assert grpc.StatusCode[kind.grpc_status]


def test_every_route_wish_and_number_is_named() -> None:
    named = set(re.findall(r"`([^`]+)`", PAGE))
    assert {endpoint.value for endpoint in requests.Endpoint} <= named
    assert fields._WISHES - {"forebay_resume"} <= named  # that one is the batch runner's alone
    numbers = {
        family.name
        for family in metrics.Metrics().registry.collect()
        if family.name.startswith("forebay_")
    }
    assert numbers
    assert numbers <= named
