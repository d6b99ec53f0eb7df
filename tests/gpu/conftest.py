"""The option of the GPU tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the hashes of PTX that ran right to tests/gpu/proven.json")
