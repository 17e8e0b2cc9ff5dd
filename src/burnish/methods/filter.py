"""Keeps the rows that pass a function of the user."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

from burnish import user_functions
from burnish.errors import UserError
from burnish.generate.protocol import request_seed
from burnish.methods import ROW_METHODS
from burnish.methods.settings import FilterConfig
from burnish.protocols import Made, RowMethod, RowRun
from burnish.types import Row
from burnish.user_code import user_code


class Filter(RowMethod):
    """Writes ``rows.jsonl``, the rows that pass, and ``failed.jsonl``, the others, each with the reason."""

    spec = ROW_METHODS["filter"]

    def __init__(self, **settings: Any) -> None:
        self.settings = FilterConfig(**settings)
        self.function = user_functions.load(self.settings.function)

    def make(self, rows: list[Row], records: list[Mapping[str, Any]], first: int, run: RowRun) -> Made:
        """Call the function on the columns of every row."""
        passed, failed = [], []
        counts: Counter[str] = Counter()
        for index, (row, record) in enumerate(zip(rows, records, strict=True), start=first):
            own = copy.deepcopy(dict(record))
            with user_code(
                f"filter {self.settings.function}", f"on {row.source}", seed=request_seed(run.seed, index, 0, 0)
            ):
                verdict = self.function(own)
            if not isinstance(verdict, bool | str):
                raise UserError(
                    f"filter {self.settings.function} returned {type(verdict).__name__} on {row.source}: expected "
                    "True, False or the reason as a string"
                )
            if verdict is True:
                passed.append(dict(record))
            else:
                if "reason" in record:
                    raise UserError(
                        f"{row.source}: did not pass, but its column 'reason' would be lost, because failed.jsonl has "
                        "the reason there: rename the column"
                    )
                failed.append({**record, "reason": verdict or "did not pass"})
            counts["made" if verdict is True else f"failed: {verdict or 'did not pass'}"] += 1
        measured = {"passed": [1.0] * len(passed) + [0.0] * len(failed)}
        return Made({"rows.jsonl": passed, "failed.jsonl": failed}, counts, measured, [])
