"""Environments: the user's classes and functions that answer a model, one instance for each episode.

There are two kinds. The methods of a class in TRL's contract are tools that the model calls. A turn environment has a
method ``respond`` that receives whole messages. Functions can be tools of any episode, and keep no state.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from burnish.errors import UserError, did_you_mean
from burnish.generate.protocol import derived_seed
from burnish.rewards.functions import NamedReward
from burnish.rl.settings import Limits
from burnish.time_limit import TimeLimitExceeded
from burnish.types import Message, Messages, Observation, Prompt, Tools, Trajectory
from burnish.user_code import last_line, user_code
from burnish.user_tasks import time_limit_paused

COLUMN = "environment"
"""The column of a row that names its environment, if there are several."""
RESERVED = ("reset", "get_reward", "respond")
"""Public methods of an environment that are no tools."""
ERRORS = ("unparsable", "unknown", "arguments", "raised", "timeout", "result")
"""The kinds of errors of tool calls: a call that cannot be read, an unknown tool, arguments that do not fit, an
exception, a time limit, and a result that is not text or JSON."""
LINE = 500
"""Maximum number of characters of an error that the model sees."""


class Answer(NamedTuple):
    """What an environment answers to a turn: ``Answer(({"role": "tool", "content": "42"},))``."""

    replies: Messages = ()
    done: bool = False
    reward: float = 0.0
    errors: tuple[str, ...] = ()
    """The kinds of errors of the tool calls."""


@dataclass(frozen=True)
class Kind:
    """An environment's class, as one instance showed it."""

    reference: str
    make: Callable[..., Any]
    schemas: Tools
    has_reward: bool


class Environments:
    """The environments and tools of a stage: ``Environments({"": Guess}, [calculator], max_turns=4)``.

    Each class is instantiated once to see its tools, and then once for each episode.

    Args:
        classes: classes, or functions that return an instance, by the name in a row's column ``environment``. A single
            one may have the name ``""``, and serves all rows.
        functions: functions that are tools of every episode.
        turns: whether the classes are turn environments.
        arguments: keyword arguments of the classes.
        limits: settings of ``Limits``, such as ``max_turns``.

    Raises:
        UserError: if a class does not follow its contract, a tool has no schema, or two tools have the same name.
        UserCodeError: if a class raises an exception.
    """

    def __init__(
        self,
        classes: Mapping[str, Callable[..., Any]] | None = None,
        functions: list[Callable[..., Any]] | None = None,
        turns: bool = False,
        arguments: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        self.limits = Limits(**limits)
        self.turns, self.arguments = turns, dict(arguments or {})
        self.failed = False  # whether an episode has failed, which is shown once
        self.functions: dict[str, Callable[..., Any]] = {}
        for function in functions or []:
            if inspect.isclass(function):
                raise UserError(f"tools: {function.__name__} is a class, not a function: set environment.class")
            if not _is_function(function):
                raise UserError(f"tools: {function!r:.80} is no function: expected functions, which def defines")
            if function.__name__ in self.functions:
                raise UserError(f"two tools are named {function.__name__}: rename one of them")
            self.functions[function.__name__] = function
        self.schemas: Tools = tuple(_schema(function, name) for name, function in self.functions.items())
        self.kinds = {name: self._kind(name, make) for name, make in (classes or {}).items()}
        if not self.kinds and not self.functions:
            raise UserError("no environment and no tools: set environment.class, environment.turns or tools")

    @property
    def has_reward(self) -> bool:
        """Whether the environments give rewards."""
        return any(kind.has_reward for kind in self.kinds.values())

    def rewards(self, others: list[NamedReward]) -> list[NamedReward]:
        """The environments' own reward, if they give one, and others."""
        if not self.has_reward:
            return others
        return [NamedReward("environment", 1.0, EnvironmentReward(self.limits.reward_at, alone=not others)), *others]

    def _kind(self, name: str, make: Callable[..., Any]) -> Kind:
        reference = getattr(make, "__name__", type(make).__name__)
        try:
            inspect.signature(make).bind(**self.arguments)
        except TypeError as error:
            raise UserError(f"environment {reference}: {error}: check environment.arguments") from error
        with user_code(f"environment {reference}", "when it was created", seed=0, timeout=self.limits.timeout):
            instance = make(**self.arguments)
        where = f"environment {reference}"
        responds = callable(getattr(instance, "respond", None))
        if self.turns and not responds:
            raise UserError(f"{where}: a turn environment needs a method respond(message); for tools, set class:")
        if self.turns and (hasattr(instance, "reward") or callable(getattr(instance, "get_reward", None))):
            raise UserError(
                f"{where}: turn environments give rewards as Observation(reward=...): remove its own reward"
            )
        if not self.turns and responds:
            raise UserError(f"{where}: has a method respond, as turn environments have: set turns: instead of class:")
        if not self.turns and not callable(getattr(instance, "reset", None)):
            raise UserError(f"{where}: needs a method reset(**columns), which begins an episode")
        methods = {} if self.turns else _methods(instance)
        if "reward" in methods and not hasattr(instance, "get_reward"):
            raise UserError(f"{where}: reward is a method: expected an attribute, or a method named get_reward")
        schemas = tuple(_schema(method, name) for name, method in methods.items())
        if twice := sorted({schema["function"]["name"] for schema in schemas} & self.functions.keys()):
            raise UserError(f"{where}: its method {twice[0]} has the name of a function in tools:: rename one of them")
        if not self.turns and not schemas and not self.functions:
            raise UserError(f"{where}: has no public method besides reset that the model could call")
        return Kind(reference, make, schemas, self.turns or _gives_reward(instance))

    def kind_of(self, row: Prompt) -> Kind | None:
        """The environment of a row; None if there are only functions.

        Raises:
            UserError: the row names none of the environments.
        """
        if not self.kinds:
            return None
        if list(self.kinds) == [""]:
            return self.kinds[""]
        name = row.columns.get(COLUMN)
        if not isinstance(name, str) or name not in self.kinds:
            named = "has no column" if name is None else f"{name!r} is not a known"
            hint = did_you_mean(str(name), self.kinds) if name is not None else ""
            raise UserError(f"{row.source}: {named} {COLUMN}{hint}; environments are {', '.join(self.kinds)}")
        return self.kinds[name]

    def tools_of(self, row: Prompt) -> Tools:
        """The schemas of all tools of an episode: those of the row, of the stage, and of the environment.

        Raises:
            UserError: the row names none of the environments, or a tool of the row has the name of another one.
        """
        kind = self.kind_of(row)
        own = (*self.schemas, *(kind.schemas if kind else ()))
        names = {schema["function"]["name"] for schema in own}
        for schema in row.tools:
            if schema["function"]["name"] in names and schema not in own:
                name = schema["function"]["name"]
                raise UserError(f"{row.source}: tools: the stage has another tool {name}: rename one of them")
        return (*(schema for schema in row.tools if schema not in own), *own)

    def open(self, row: Prompt, seed: int) -> Environment:
        """The environment of an episode. Call ``reset`` next."""
        return Environment(self, self.kind_of(row), row, seed)


class Environment:
    """The environment of one episode.

    Its methods are coroutines that call the user's code. They must run as ``UserTasks``, which isolate that code, give
    it the random numbers of ``seed``, and interrupt it at its time limit.
    """

    def __init__(self, environments: Environments, kind: Kind | None, row: Prompt, seed: int) -> None:
        self.environments, self.kind, self.row, self.seed = environments, kind, row, seed
        self.instance: Any = None
        self.answered = 0

    @property
    def name(self) -> str:
        """The name of the class, for messages."""
        return f"environment {self.kind.reference}" if self.kind else "tools"

    def next_seed(self) -> int:
        """The seed of the next call. It depends only on the episode and the number of calls before."""
        self.answered += 1
        return derived_seed(self.seed, self.answered)

    async def reset(self) -> Messages:
        """Begin the episode. Returns the messages of the prompt, with what ``reset`` adds to them."""
        if self.kind is None:
            return self.row.messages
        self.instance = self.kind.make(**_copied(self.environments.arguments))
        reset = getattr(self.instance, "reset", None)
        if reset is None:
            return self.row.messages
        observed = await self._call(reset, **_copied(self._columns_for(reset)))
        if observed is None:
            return self.row.messages
        if isinstance(observed, str):
            *before, last = self.row.messages
            if last["role"] != "user":
                return (*self.row.messages, Message(role="user", content=_unicode(observed)))
            return (*before, {**last, "content": last["content"] + _unicode(observed)})
        return (*self.row.messages, *_messages(observed, "reset"))

    async def answer(self, message: Message, calls: list[Any], error: str) -> Answer:
        """Answer a message of the policy. ``error`` says why its tool calls cannot be read."""
        if self.environments.turns:
            return await self._respond(message)
        if error:
            return Answer((Message(role="tool", content=f"Error: {error}"),), errors=("unparsable",))
        replies, errors = [], []
        for call in calls:
            content, kind = await self._result(call["function"]["name"], call["function"]["arguments"])
            reply = Message(role="tool", content=content, name=call["function"]["name"])
            if "id" in call:
                reply["tool_call_id"] = call["id"]
            replies.append(reply)
            errors += [kind] if kind else []
            if kind == "timeout":  # nothing else can run in this turn
                replies += [_not_run(other) for other in calls[len(replies) :]]
                break
        done = getattr(self.instance, "done", False)  # or a tool of this name
        return Answer(tuple(replies), not callable(done) and bool(done), errors=tuple(errors))

    async def reward(self) -> float | None:
        """The reward at the end of the episode, if the environment gives one."""
        if self.instance is None:
            return None
        get = getattr(self.instance, "get_reward", None)
        reward = await self._call(get) if callable(get) else getattr(self.instance, "reward", None)
        return None if reward is None else self._number(reward)

    async def _respond(self, message: Message) -> Answer:
        observed = await self._call(self.instance.respond, _copied(message))
        if not isinstance(observed, Observation):
            raise UserError(
                f"{self.name}: respond returned {type(observed).__name__}: expected burnish.Observation(messages, "
                "done, reward)"
            )
        messages = observed.messages
        if isinstance(messages, str):
            messages = [Message(role="user", content=messages)] if messages else []
        replies = _messages(messages, "respond")
        return Answer(replies, bool(observed.done) or not replies, self._number(observed.reward))

    def _number(self, reward: Any) -> float:
        """A reward of the user's code.

        Raises:
            UserError: it is not a finite number.
        """
        try:
            number = float(reward)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.name}: its reward is {type(reward).__name__}: expected a number") from error
        if not math.isfinite(number):
            raise UserError(f"{self.name}: its reward is {number}: expected a finite number")
        return number

    async def _result(self, name: str, arguments: dict[str, Any]) -> tuple[str, str]:
        """The result of a tool call as text, and the kind of its error if there is one."""
        tools = self.environments.functions | (_methods(self.instance) if self.instance is not None else {})
        if name not in tools:
            return (
                f"Error: there is no tool {name!r}{did_you_mean(name, tools)}; tools are {', '.join(tools)}",
                "unknown",
            )
        try:
            inspect.signature(tools[name]).bind(**arguments)
        except TypeError as error:
            return f"Error: {name}: {error}", "arguments"
        try:
            result = await self._call(tools[name], **_copied(arguments))
        except (TimeLimitExceeded, asyncio.CancelledError):
            return f"Error: {name} exceeded its time limit of {self.environments.limits.timeout:g} seconds", "timeout"
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # also SystemExit
            name, text = type(error).__name__, last_line(error)
            return _unicode(f"Error: {f'{name}: {text}' if text else name}"[:LINE]), "raised"
        if isinstance(result, str):
            return _unicode(result), ""
        if result is None:
            return "", ""
        try:
            return _unicode(json.dumps(result, ensure_ascii=False, default=_plain)), ""
        except (TypeError, ValueError, RecursionError):
            return f"Error: {name} returned {type(result).__name__}, which is not text or JSON", "result"

    async def _call(self, function: Callable[..., Any], /, *values: Any, **arguments: Any) -> Any:
        """Call the user's function, and await its result if it is a coroutine."""
        if self.environments.limits.threads and not inspect.iscoroutinefunction(function):
            result = await _in_thread(lambda: function(*values, **arguments), self.environments.limits.threads)
        else:
            result = function(*values, **arguments)
        return await result if inspect.isawaitable(result) else result

    def _columns_for(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The columns of the row, its prompt and the seed, as far as a function takes them.

        ``**columns`` takes everything but the seed.
        """
        takes = inspect.signature(function).parameters
        columns = {"prompt": list(self.row.messages), **self.row.columns}
        if not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
            columns = {name: value for name, value in columns.items() if name in takes}
        return {"seed": self.seed % 2**32, **columns} if "seed" in takes else columns


class EnvironmentReward:
    """The environments' own rewards of trajectories: at the end of each, or at the ends of their turns."""

    def __init__(self, at: str, alone: bool) -> None:
        self.at, self.alone = at, alone

    def __call__(self, trajectories: list[Trajectory]) -> list[float] | list[list[float]]:
        """One number for each trajectory, or one for each of its sampled tokens.

        Raises:
            UserError: an episode ended without a reward, and nothing else scores it.
        """
        if self.at == "turns":
            return [
                [reward for turn in t.turns for reward in [0.0] * (turn.tokens - 1) + [turn.reward]]
                for t in trajectories
            ]
        for t in trajectories:
            if t.environment_reward is None and self.alone and t.finish_reason != "error":
                raise UserError(
                    f"{t.source}: the environment ended an episode without a reward: set self.reward, or set reward: "
                    "in the recipe"
                )
        return [0.0 if t.environment_reward is None else t.environment_reward for t in trajectories]


def _methods(instance: Any) -> dict[str, Callable[..., Any]]:
    """The methods of an environment that are tools."""
    found = inspect.getmembers(type(instance), _is_function)  # of an instance, this would run its properties
    return {name: getattr(instance, name) for name, _ in found if not name.startswith("_") and name not in RESERVED}


def _is_function(value: Any) -> bool:
    """Whether it was defined by ``def``, also if ``functools.cache`` and the like, or a class, wraps it."""
    return inspect.ismethod(value) or inspect.isfunction(inspect.unwrap(value))


def _copied(value: Any) -> Any:
    """A copy of JSON values, so that the user's code can change it."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy for JSON."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError


def _gives_reward(instance: Any) -> bool:
    """Whether an environment has a reward, or a method that sets one, such as ``reset``."""
    if hasattr(type(instance), "reward") or hasattr(instance, "reward"):  # a property may need reset first
        return True
    if callable(getattr(instance, "get_reward", None)):
        return True
    found = inspect.getmembers(type(instance), inspect.isfunction)
    return any("reward" in method.__code__.co_names for _, method in found)


def _schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # type hints are the user's code
        reason = " ".join(str(error).split())
        raise UserError(
            f"tool {name}: {reason} (a tool needs type hints, and a docstring that describes it and, in a section "
            "Args:, each parameter)"
        ) from error
    schema["function"]["name"] = name  # a method may have been defined by another one
    return schema


def _messages(value: Any, method: str) -> Messages:
    """Messages that the user's code returned.

    Raises:
        UserError: they are not messages.
    """
    messages: list[Any] | None = list(value) if isinstance(value, list | tuple) else None
    if messages is None or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        raise UserError(f"{method} returned {type(value).__name__}: expected text, or messages with role and content")
    for message in messages:
        for key, one in message.items():
            if key != "tool_calls" and not isinstance(one, str):
                raise UserError(f"{method} returned a message whose {key} is {type(one).__name__}: expected text")
    readable: list[Any] = [{**_copied(message), "content": _unicode(message["content"])} for message in messages]
    return tuple(readable)


def _unicode(text: str) -> str:
    """The text without halves of surrogate pairs, which no tokenizer reads."""
    return text.encode("utf-8", "backslashreplace").decode()


def _not_run(call: Any) -> Message:
    reply = Message(role="tool", content="Error: not run", name=call["function"]["name"])
    return {**reply, "tool_call_id": call["id"]} if "id" in call else reply


_slots: dict[int, asyncio.Semaphore] = {}


async def _in_thread(function: Callable[[], Any], threads: int) -> Any:
    """The result of a function that runs in a thread, one of at most ``threads`` at the same time.

    The thread is a daemon, so that one that hangs does not keep the process from ending. After its time limit, it no
    longer counts as one of them.
    """
    loop, slots = asyncio.get_running_loop(), _slots.setdefault(threads, asyncio.Semaphore(threads))
    future = loop.create_future()

    def run() -> None:
        try:
            result, error = function(), None
        except BaseException as raised:
            result, error = None, raised
        loop.call_soon_threadsafe(lambda: None if future.done() else _settle(future, result, error))

    with time_limit_paused():
        await slots.acquire()
    try:
        threading.Thread(target=run, daemon=True).start()
        return await future
    finally:
        slots.release()


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(
            error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {last_line(error)}")
        )
