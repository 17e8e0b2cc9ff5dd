"""The longest sequence, and what happens to longer ones."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from burnish.types import Config


class Truncation(Config):
    """The longest sequence, and what happens to longer ones; each change is counted with its row.

    What a row is cut to never gets an end token that it did not have. Of preferences, rankings, labelled answers and
    prompts only the prompt is cut, and only by ``truncate_left``: its oldest turns first, then the beginning of its
    last one; never a system message or an answer. Of a solution in steps only whole steps are left out, by
    ``truncate_right``.
    """

    max_length: int | None = Field(default=None, ge=2, description="tokens of the longest sequence; none: any length")
    too_long: Literal["error", "drop", "truncate_left", "truncate_right", "split"] | None = Field(
        default=None,
        description="error stops; drop leaves the row out; truncate_left and truncate_right keep its end and its "
        "beginning; split makes pieces that overlap by one token, so that every token is still a target; default: "
        "error, and split for pretraining",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="error stops at a row that cannot be read or encoded; skip leaves it out and names it",
    )
