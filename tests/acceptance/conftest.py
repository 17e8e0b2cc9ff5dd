"""The table at the end of `make acceptance`: tests, outcomes, times and recorded figures."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail if every test was skipped."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if asked(session.config) and exitstatus == pytest.ExitCode.OK and terminal and not terminal.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a row for each acceptance test, wherever in tests/ it lies."""
    if not asked(config):
        return
    reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind if hasattr(report, "when")]
    rows = [("item", "result", "seconds", "figures")]
    for item in dict.fromkeys(report.nodeid for report in reports):
        parts = [report for report in reports if report.nodeid == item]
        # set-up, call and tear-down; what failed or was skipped is the item's result
        result = next((part.outcome for part in parts if part.outcome != "passed"), "passed")
        figures = [f"{name}: {value}" for name, value in parts[-1].user_properties]
        figures += [part.longrepr[2].removeprefix("Skipped: ") for part in parts if part.outcome == "skipped"]
        seconds = sum(part.duration for part in parts)
        rows.append((item.removeprefix("tests/"), result, f"{seconds:.0f}", ", ".join(figures)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminalreporter.section("acceptance")
    for row in rows:
        terminalreporter.line("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def asked(config: pytest.Config) -> bool:
    """Whether the acceptance tests were selected by their marker."""
    return config.getoption("markexpr") == "acceptance"
