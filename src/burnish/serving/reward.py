"""The service of ``burnish serve reward``: trajectories in, scores out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from burnish.errors import UserError
from burnish.rewards.functions import NamedReward
from burnish.rewards.model import ModelReward
from burnish.rewards.protocol import VERSION, ScoreRequest
from burnish.rewards.scoring import score
from burnish.serving.http import Limits, Service, ServiceError, answer, application, parsed, read_body
from burnish.serving.worker import Worker
from burnish.types import Trajectory

Score = float | list[float]
"""A number for a trajectory, or a number for each of its tokens."""


class RowError(UserError):
    """A trajectory that cannot be scored: ``RowError("prompts.jsonl:3: too long", row=2)``, with its index."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


def reward_service(
    reward: NamedReward, token: str, *, digest: str = "", joins: bool = False, limits: Limits | None = None
) -> Service[Trajectory, Score]:
    """The service of a reward.

    Args:
        reward: a reward model or a function.
        token: the bearer token of every request.
        digest: identifies the reward's model and settings, so that a run notices if they change.
        joins: whether requests that wait may be scored in one call. Scores then depend on other requests by rounding,
            except those of requests with ``alone``.
        limits: limits of requests.

    Raises:
        UserError: if the token is too short.
    """
    limits = limits or Limits()
    worker: Worker[Trajectory, Score] = Worker(_scorer(reward))

    async def scored(request: Request) -> Response:
        asked, trajectories = _received(await read_body(request, limits))
        scores = await answer(request, worker.submit(trajectories, joins and not asked.alone))
        return JSONResponse({"version": VERSION, "scores": scores})

    about = {"service": "reward", "version": VERSION, "name": reward.name, "digest": digest or None}
    app = application([Route("/score", scored, methods=["POST"])], about, token, limits)
    return Service(worker, app)


def _scorer(reward: NamedReward) -> Callable[[list[Trajectory]], list[Score]]:
    def scores(trajectories: list[Trajectory]) -> list[Score]:
        try:
            found = score(trajectories, [reward], _seed(trajectories))
        except UserError:
            if isinstance(reward.function, ModelReward):
                _name_row(reward, trajectories)
            raise
        if found.tokens is not None:
            return [values.tolist() for values in found.tokens]
        return list(found.by_name[reward.name])

    return scores


def _name_row(reward: NamedReward, trajectories: list[Trajectory]) -> None:
    """Raise the error of the first trajectory that a model cannot score, with its index."""
    for row, trajectory in enumerate(trajectories):
        try:
            score([trajectory], [reward])
        except UserError as error:
            raise RowError(str(error), row) from error


def _seed(trajectories: list[Trajectory]) -> tuple[int, ...]:
    """A seed of the random numbers of a function, the same for equal trajectories."""
    text = repr([(t.prompt, t.messages, t.source) for t in trajectories]).encode()
    return (int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big"),)


def _received(body: bytes) -> tuple[ScoreRequest, list[Trajectory]]:
    """What a request asks for.

    Raises:
        ServiceError: if it does not follow the protocol.
    """
    asked = parsed(ScoreRequest, body, "trajectories")
    trajectories = []
    for row, sent in enumerate(asked.trajectories):
        try:
            trajectories.append(sent.trajectory())
        except (ValueError, OverflowError) as error:
            raise ServiceError(400, "invalid", f"trajectories.{row}: {error}", row) from error
    return asked, trajectories
