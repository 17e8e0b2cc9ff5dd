"""The grades of a judge as a reward: d-RLAIF, which needs no reward model (Lee et al. 2023)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from statistics import fmean

from burnish.errors import UserError
from burnish.judges.combine import expected_grade
from burnish.judges.protocol import NoVerdictError
from burnish.judges.questions import score_question
from burnish.judges.store import StoredJudge
from burnish.types import Trajectory


class JudgeReward:
    """Scores completions in [-1, 1]: the expected grade from 1 to 10, rescaled, and averaged over principles.

    ``JudgeReward(judge)([Trajectory.from_text("Hello!", ({"role": "user", "content": "Hi"},))])`` returns ``[0.3]``.
    The same completion of the same prompt is graded once in a run.

    Args:
        judge: who grades.
        principles: what to judge by; () for the default of the question.
        waits: whether the judge mostly waits for a network. Then calling the reward returns a coroutine, and other
            work goes on meanwhile.
    """

    def __init__(self, judge: StoredJudge, principles: Sequence[str] = (), *, waits: bool = False) -> None:
        self.judge, self.principles, self.waits = judge, tuple(principles) or (None,), waits

    def __call__(self, trajectories: list[Trajectory], /) -> list[float] | Awaitable[list[float]]:
        """Return one score per trajectory, in their order.

        Raises:
            UserError: the judge has no verdict on a completion, or cannot work. The message names the row.
        """
        return asyncio.to_thread(self.scores, trajectories) if self.waits else self.scores(trajectories)

    def scores(self, trajectories: list[Trajectory]) -> list[float]:
        """Return one score per trajectory, in their order, and wait for it."""
        questions = [score_question(t.prompt, t.messages, one) for t in trajectories for one in self.principles]
        each = len(self.principles)
        try:
            grades = [expected_grade(verdict.probabilities) for verdict in self.judge.ask(questions)]
        except NoVerdictError as error:
            trajectory = trajectories[error.index // each]
            raise UserError(
                f"{trajectory.source}: no verdict on the completion {trajectory.text!r:.80}: {error}; every verdict so "
                "far is stored: run the same command again to resume"
            ) from error
        return [fmean(grades[k : k + each]) for k in range(0, len(grades), each)]

    def close(self) -> None:
        """Close the judge."""
        self.judge.close()
