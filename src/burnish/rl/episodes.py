"""Samples episodes: the policy and the environment take turns until one of them, or a limit, ends the episode.

Episodes advance in waves. A wave is one turn of every episode that is still open, submitted as one plan, so which
requests share a batch depends only on what is sampled. While the rest of a wave is still being decoded, environments
already answer. A completion without an environment is an episode of one turn.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

from burnish.errors import UserCodeError, UserError
from burnish.generate.protocol import Completion, Generator, Handle, Request, derived_seed
from burnish.render.renderer import Extension, History, Renderer
from burnish.rl.environment import Answer, Environment, Environments
from burnish.rl.trajectory import begin, with_context, with_rewritten_history, with_turn
from burnish.time_limit import TimeLimitExceeded
from burnish.types import Message, Messages, Prompt, ToolCall, Trajectory, Turn
from burnish.user_tasks import user_tasks

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""While coroutines of rewards or environments are running, they continue after this much sampling time."""
CUT = "\n[... cut off: {} more characters]"
"""What replaces the rest of a message of the environment that is too long."""
CHARACTERS = 32
"""No more characters per allowed token of a message are tokenized."""
OPEN_PER_SLOT = 4
"""Number of episodes per slot of the generator that are open together.

With several, slots stay in use when some turns of a wave end early. More would need more memory for environments and
for the keys and values that the generator keeps between turns.
"""
SYSTEMATIC = 4
"""If at least this many episodes are sampled and the environment fails in all of them, the run stops."""


Patience = Callable[[], float | None]
"""Returns the number of seconds that the next step may wait; None for no limit."""


class Episode:
    """An episode that is being sampled.

    ``messages`` is the conversation as the chat template sees it, and ``since`` the index of the first message that is
    not in the beginning of the current sequence of ids. ``turns`` counts the policy's turns, and ``spent`` the tokens
    after the prompt.
    """

    def __init__(self, index: int, row: Prompt, request: Request, environment: Environment) -> None:
        self.index, self.row, self.environment = index, row, environment
        self.request, self.seed = request, request.seed
        self.trajectory = begin(row, request.tokens)
        self.messages: Messages = row.messages
        self.since = len(row.messages)
        self.turns = self.spent = 0

    @property
    def ended(self) -> bool:
        """Whether the episode has a finish reason."""
        return bool(self.trajectory.finish_reason)

    def end(self, finish_reason: str) -> None:
        """End the episode."""
        self.trajectory = replace(self.trajectory, finish_reason=finish_reason)

    def continue_with(self, tokens: tuple[int, ...]) -> None:
        """Set the request of the next turn."""
        self.request = replace(self.request, tokens=tokens, seed=derived_seed(self.seed, self.turns))


class Rollouts:
    """Samples a trajectory for each request, and yields those that have ended after each poll of the generator.

    >>> for ended in Rollouts(rows, requests, generator, tokenizer, environments):
    ...     for index, trajectory in ended: ...

    The trajectories are not scored yet. They depend only on the requests and on what the environments answer. ``waits``
    says that the last step brought nothing new, because the generator or an environment is still busy.

    Args:
        rows: the row of each request.
        requests: the requests of the first turns.
        generator: a generator with nothing else in flight.
        tokenizer: decodes and parses completions.
        environments: the environments; None for completions of one turn.
        version: version of the generator's weights.
        context: the model's context window; None if it has no limit.
        patience: returns the number of seconds that the next step may wait; None for no limit.

    Raises:
        UserError, UserCodeError: if the chat template rejects messages, or the environment fails in all of many
            episodes.
    """

    def __init__(
        self,
        rows: list[Prompt],
        requests: list[Request],
        generator: Generator,
        tokenizer: Any,
        environments: Environments | None = None,
        version: int = 0,
        context: int | None = None,
        patience: Patience = lambda: None,
    ) -> None:
        self.rows, self.requests, self.generator, self.tokenizer = rows, requests, generator, tokenizer
        self.environments, self.version, self.context, self.patience = environments, version, context, patience
        self.waits = False
        self.tasks: dict[asyncio.Task[Any], Episode] = {}
        self.failures: list[UserError | UserCodeError] = []

    def __iter__(self) -> Iterator[list[tuple[int, Trajectory]]]:
        if self.environments is None:
            yield from self._completions()
            return
        self.limits, self.renderer = self.environments.limits, Renderer(self.tokenizer)
        try:
            block = OPEN_PER_SLOT * self.generator.slots
            for start in range(0, len(self.requests), block):
                yield from self._episodes(self.environments, range(start, min(start + block, len(self.requests))))
        finally:
            user_tasks().cancel(self.tasks)
        if len(self.failures) == len(self.requests) >= SYSTEMATIC:
            logger.error("the environment failed in all %d episodes", len(self.failures))
            raise self.failures[0]

    def _completions(self) -> Iterator[list[tuple[int, Trajectory]]]:
        """Trajectories of one turn."""
        handles = self.generator.submit(self.requests, self.version)
        in_flight = dict(zip(handles, range(len(self.requests)), strict=True))
        while in_flight:
            ended = []
            for handle, completion in self._poll():
                index = in_flight.pop(handle)
                trajectory = begin(self.rows[index], self.requests[index].tokens)
                ended.append((index, with_turn(trajectory, completion, self._turn(completion, self.requests[index]))))
            yield ended

    def _poll(self) -> list[tuple[Handle, Completion]]:
        timeout = self.patience()
        if self.tasks:
            timeout = POLL_SECONDS if timeout is None else min(timeout, POLL_SECONDS)
        completions = self.generator.poll(timeout)
        if not completions and timeout is None:
            raise RuntimeError("the generator has nothing in flight: someone else has polled its completions")
        self.waits = not completions
        return completions

    def _turn(self, completion: Completion, request: Request) -> Turn:
        return Turn(
            self.tokenizer.decode(completion.tokens, skip_special_tokens=True).strip(),
            completion.finish_reason,
            tokens=len(completion.tokens),
            prompt_tokens=len(request.tokens),
            cached_tokens=completion.cached_tokens,
        )

    # --- episodes -------------------------------------------------------------------------------------------------

    def _episodes(self, environments: Environments, block: range) -> Iterator[list[tuple[int, Trajectory]]]:
        """The trajectories of a block of episodes."""
        every = [
            Episode(
                i,
                self.rows[i],
                self.requests[i],
                environments.open(self.rows[i], derived_seed(self.requests[i].seed, -1)),
            )
            for i in block
        ]
        for episode in every:
            self._ask(episode, episode.environment.reset())
        yield from self._answered()
        self._begin(list(self._answers()))
        while wave := [episode for episode in every if not episode.ended]:
            handles = self.generator.submit([self._limit(episode) for episode in wave], self.version)
            in_flight = dict(zip(handles, wave, strict=True))
            while in_flight:
                for handle, completion in self._poll():
                    self._sampled(in_flight.pop(handle), completion)
                user_tasks().advance()
                yield []
            yield from self._answered()
            self._extend([episode for episode, answer in self._answers() if self._goes_on(episode, answer)])
        for episode in every:
            if environments.turns:
                reward = math.fsum(turn.reward for turn in episode.trajectory.turns)
                episode.trajectory = replace(episode.trajectory, environment_reward=reward)
            elif episode.trajectory.finish_reason != "error":
                self._ask(episode, episode.environment.reward())
        yield from self._answered()
        for episode, reward in self._answers():
            episode.trajectory = replace(episode.trajectory, environment_reward=reward)
        yield [(episode.index, episode.trajectory) for episode in every]

    def _begin(self, opened: list[tuple[Episode, Messages]]) -> None:
        """Begin the trajectories with what the environments say first."""
        changed = [(episode, messages) for episode, messages in opened if messages != episode.row.messages]
        rows = [replace(episode.row, messages=messages) for episode, messages in changed]
        try:
            prompts: list[tuple[int, ...] | None] = [*self.renderer.prompts(rows)]
        except UserError:
            prompts = [self._prompt(episode, row) for (episode, _), row in zip(changed, rows, strict=True)]
        for (episode, _), row, tokens in zip(changed, rows, prompts, strict=True):
            if tokens is None:
                continue
            episode.trajectory = begin(row, tokens)
            episode.messages, episode.since = row.messages, len(row.messages)
            episode.request = replace(episode.request, tokens=tokens)
            if self.context is not None and len(tokens) >= self.context:
                episode.end("context")

    def _prompt(self, episode: Episode, row: Prompt) -> tuple[int, ...] | None:
        """The ids of a prompt with what ``reset`` added; None if the template rejects it, which ends the episode."""
        try:
            return self.renderer.prompts([row])[0]
        except UserError as error:
            self._failed(episode, error)
            return None

    def _sampled(self, episode: Episode, completion: Completion) -> None:
        """Add a turn of the policy, and let the environment answer it."""
        environments, template = episode.environment.environments, self.renderer.template
        turn = self._turn(completion, episode.request)
        schemas = () if environments.turns else environments.tools_of(episode.row)
        message, error = self.renderer.parse(episode.request.tokens, completion.tokens, schemas)
        calls: list[ToolCall] = []
        if environments.turns:
            error = ""
        else:  # some chat templates require ids, of nine characters
            for k, call in enumerate(message.get("tool_calls", ())):
                own, used = call.get("id", "").strip(), {other.get("id") for other in calls}
                calls.append({**call, "id": own if own and own not in used else f"{episode.turns:04d}{k:05d}"})
            if calls:
                message["tool_calls"] = calls
        readable = all(template.reads(key) for key in ("tool_calls", "reasoning_content") if key in message)
        if not readable or (environments.turns and "tool_calls" in message):
            message = Message(role="assistant", content=turn.text)
        turn = turn._replace(message=message, calls=tuple(calls))
        episode.trajectory = with_turn(episode.trajectory, completion, turn)
        episode.messages = (*episode.messages, message)
        episode.turns += 1
        episode.spent += turn.tokens
        cut = completion.finish_reason != "stop"
        if completion.finish_reason != "context" and (environments.turns or calls or (error and not cut)):
            episode.end("")
            self._ask(episode, episode.environment.answer(message, calls, error))

    def _goes_on(self, episode: Episode, answer: Answer) -> bool:
        """Add the environment's answer to an episode. Returns whether it goes on."""
        replies = tuple(self._reply(reply) for reply in answer.replies)
        *before, last = episode.trajectory.turns
        turn = last._replace(replies=replies, reward=answer.reward, errors=answer.errors)
        episode.trajectory = replace(episode.trajectory, turns=(*before, turn))
        if answer.done:
            episode.end("done")
        elif episode.turns >= self.limits.max_turns:
            episode.end("turns")
        return not episode.ended

    def _reply(self, reply: Message) -> Message:
        """A message of the environment that is not too long, and in a role that the chat template reads."""
        content = self._cut(reply["content"])
        if reply["role"] == "tool" and not self.renderer.template.reads("tool_calls"):
            return Message(role="user", content=content)
        return {**reply, "content": content}

    def _cut(self, text: str) -> str:
        limit = self.limits.max_tool_tokens
        (ids,) = self.renderer.encode_text([text[: limit * CHARACTERS]])
        if len(ids) <= limit and len(text) <= limit * CHARACTERS:
            return text
        kept = self.tokenizer.decode(ids[:limit], skip_special_tokens=False)
        return kept + CUT.format(f"{len(text) - len(kept):,}")

    def _extend(self, episodes: list[Episode]) -> None:
        """Append the environments' answers to the ids of their episodes, or end those that have no room for them."""
        try:
            extensions = self.renderer.extend([_history(episode) for episode in episodes])
        except UserError:
            extensions = [self._extension(episode) for episode in episodes]
        for episode, extension in zip(episodes, extensions, strict=True):
            if extension is None:
                continue
            before = 0 if extension.rewrites else len(episode.trajectory.sequences[-1])
            new = 0 if extension.rewrites else len(extension.ids)
            if self.context is not None and before + len(extension.ids) >= self.context:
                episode.end("context")
            elif self.limits.max_tokens is not None and episode.spent + new >= self.limits.max_tokens:
                episode.end("length")
            else:
                add = with_rewritten_history if extension.rewrites else with_context
                episode.trajectory = add(episode.trajectory, extension.ids)
                episode.messages = (*episode.messages, *episode.trajectory.turns[-1].replies)
                episode.since = len(episode.messages) if extension.rewrites else episode.since
                episode.spent += new
                episode.continue_with(tuple(episode.trajectory.sequences[-1].tokens.tolist()))

    def _extension(self, episode: Episode) -> Extension | None:
        """What follows the last turn of an episode; None if the chat template rejects it, which ends the episode.

        Templates may reject what a model wrote, such as two calls in one turn. Then the turn and its answers become
        plain text. If roles must alternate, the answers become one message.
        """
        *before, turn = episode.trajectory.turns
        plain = Message(role="assistant", content=turn.text)
        texts = [reply["content"] for reply in turn.replies]
        forms = [
            turn,
            turn._replace(message=plain, replies=tuple(Message(role="user", content=text) for text in texts)),
            turn._replace(message=plain, replies=(Message(role="user", content="\n".join(texts)),)),
        ]
        problem: UserError | None = None
        for form in forms:
            assert form.message is not None
            episode.trajectory = replace(episode.trajectory, turns=(*before, form))
            episode.messages = (*episode.messages[:-1], form.message)
            try:
                return self.renderer.extend([_history(episode)])[0]
            except UserError as error:
                problem = error
        assert problem is not None
        self._failed(episode, problem)
        return None

    def _limit(self, episode: Episode) -> Request:
        """The request of the next turn, for no more tokens than the episode has left."""
        request = replace(episode.request, keep_cache=episode.turns + 1 < self.limits.max_turns)
        sampling = request.sampling
        left = sampling.longest if self.limits.max_tokens is None else self.limits.max_tokens - episode.spent
        if left >= sampling.longest:
            return request
        shortest = min(sampling.min_new_tokens, left)
        shorter = {"max_new_tokens": left, "length_range": None, "min_new_tokens": shortest}
        return replace(request, sampling=sampling.model_copy(update=shorter))

    # --- calls of the user's code ---------------------------------------------------------------------------------

    def _ask(self, episode: Episode, call: Coroutine[Any, Any, Any]) -> None:
        """Start a call of an episode's environment. What is not async also runs to its end."""
        environment = episode.environment
        task = user_tasks().start(
            call,
            what=environment.name,
            during=f"on {episode.row.source}",
            seed=environment.next_seed(),
            timeout=self.limits.timeout,
        )
        self.tasks[task] = episode
        user_tasks().advance()

    def _answered(self) -> Iterator[list[tuple[int, Trajectory]]]:
        """Wait for all calls, in steps without trajectories."""
        while not all(task.done() for task in self.tasks):
            user_tasks().advance(wait=self.patience() != 0)
            self.waits = not all(task.done() for task in self.tasks)
            yield []

    def _answers(self) -> Iterator[tuple[Episode, Any]]:
        """The episodes with what the calls returned, without those that failed."""
        ended, self.tasks = sorted(self.tasks.items(), key=lambda item: item[1].index), {}
        for task, episode in ended:
            try:
                answer = task.result()
            except (UserError, UserCodeError) as error:
                self._failed(episode, error)
            except TimeLimitExceeded:  # just when the call had ended
                limit = f"{episode.environment.name} exceeded its time limit of {self.limits.timeout:g} seconds"
                self._failed(episode, UserError(f"{limit} on {episode.row.source}"))
            else:
                yield episode, answer

    def _failed(self, episode: Episode, error: UserError | UserCodeError) -> None:
        """End an episode whose environment failed. The first failure of a stage is shown."""
        self.failures.append(error)
        episode.end("error")
        environments = episode.environment.environments
        if not environments.failed:
            environments.failed = True
            logger.warning("an episode ends with finish reason error, as others may: %s", error)


def _history(episode: Episode) -> History:
    """The conversation of an episode, and the answers to its last turn."""
    last, turn = int(episode.trajectory.sequences[-1].tokens[-1]), episode.trajectory.turns[-1]
    ended_by = last if turn.finish_reason == "stop" and last in episode.request.stop_ids else None
    return History(episode.messages, turn.replies, ended_by, episode.since, episode.row.source, episode.row.tools)


def first_prompt(environments: Environments, row: Prompt, seed: int) -> Prompt:
    """The prompt of an episode whose first request has this seed, with what the environment says first.

    Raises:
        UserError, UserCodeError: if the environment fails.
    """
    environment = environments.open(row, derived_seed(seed, -1))
    call = environment.reset()
    during, limit = f"on {row.source}", environments.limits.timeout
    task = user_tasks().start(call, what=environment.name, during=during, seed=environment.next_seed(), timeout=limit)
    while not task.done():
        user_tasks().advance(wait=True)
    return replace(row, messages=task.result())
