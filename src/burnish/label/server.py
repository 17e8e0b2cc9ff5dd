"""The page's server: it shows tasks to raters, stores their answers, and reports progress."""

from __future__ import annotations

import json
import math
import socket
import sqlite3
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, unquote

import jinja2
import pydantic
import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from burnish.errors import UserError
from burnish.label.access import Access, cookie_name, new_token
from burnish.label.export import MAKERS, rank_groups, rows
from burnish.label.store import Shown, Store
from burnish.label.tasks import Answer, Highlight, Task, parts
from burnish.math.agreement import interval_of_alpha, krippendorff_alpha
from burnish.terminal import visible
from burnish.types import Config

HERE = Path(__file__).parent
LONGEST_NAME = 64


class Mark(Config):
    """A highlight as the page sends it; ``completion`` counts the completions as they are shown."""

    completion: int = Field(ge=0)
    part: int = Field(ge=0)
    start: int = Field(ge=0)
    end: int


class Posted(Config):
    """An answer as the page sends it. Ranks are in the order in which the completions are shown."""

    task: str
    ranks: tuple[Annotated[int, Field(ge=1, le=1000)], ...] | None
    comment: str = Field("", max_length=10_000)
    highlights: tuple[Mark, ...] = Field((), max_length=200)


class Named(Config):
    """A rater's name as the page sends it."""

    name: str


class Refused(Exception):
    """A request that cannot be answered, with the reason for the person: ``Refused("type your name first")``."""


# --- requests -----------------------------------------------------------------------------------------------------


class Site:
    """The pages and their data.

    Args:
        store: tasks and answers.
        token: as in ``Access``.
        raters: how many raters rank or skip each task; None lets every rater answer every task.
        on_answer: called after each answer and each undo.
    """

    def __init__(self, store: Store, token: str, raters: int | None, on_answer: Callable[[], None]) -> None:
        self.store, self.raters, self.on_answer = store, raters, on_answer
        self.cookie = f"{cookie_name(token)}_rater"
        loader = jinja2.FileSystemLoader(HERE / "templates")
        self.templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
        self._progress: tuple[int, dict[str, Any]] = (-1, {})

    def routes(self) -> list[Route | Mount]:
        """Every address of the server."""
        return [
            Route("/", self.page),
            Route("/progress", self.progress_page),
            Route("/api/state", self.state),
            Route("/api/rater", self.name, methods=["POST"]),
            Route("/api/answer", self.answer, methods=["POST"]),
            Route("/api/undo", self.undo, methods=["POST"]),
            Route("/api/progress", self.progress),
            Route("/export/{kind}.jsonl", self.export),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ]

    async def page(self, request: Request) -> Response:
        """The page where people rank."""
        return self._html("rank.html.j2")

    async def progress_page(self, request: Request) -> Response:
        """The page with progress, agreement and exports."""
        return self._html("progress.html.j2")

    def _html(self, template: str) -> Response:
        return Response(self.templates.get_template(template).render(kinds=list(MAKERS)), media_type="text/html")

    async def state(self, request: Request) -> Response:
        """What the page shows now."""
        rater = self._rater(request)
        return JSONResponse({"rater": None} if rater is None else self._state(rater))

    async def name(self, request: Request) -> Response:
        """Note who rates in this browser."""
        named = Named.model_validate_json(await request.body())
        rater = clean_name(named.name)
        self.store.join(rater)
        response = JSONResponse(self._state(rater))
        response.set_cookie(self.cookie, quote(rater), httponly=True, samesite="strict")
        return response

    async def answer(self, request: Request) -> Response:
        """Store an answer, and send the next task."""
        rater = self._required_rater(request)
        posted = Posted.model_validate_json(await request.body())
        task = self.store.task(posted.task)
        order = self.store.shown_order(posted.task, rater)
        if task is None or order is None:
            raise Refused("this task was not shown to you: reload the page")
        self.store.record(as_answer(posted, task, order, rater))
        self.on_answer()
        return JSONResponse(self._state(rater))

    async def undo(self, request: Request) -> Response:
        """Take back the rater's last answer, and show its task again."""
        rater = self._required_rater(request)
        if self.store.undo(rater) is None:
            raise Refused("there is nothing to undo")
        self.on_answer()
        return JSONResponse(self._state(rater))

    async def progress(self, request: Request) -> Response:
        """Progress by rater, and agreement."""
        return JSONResponse(await run_in_threadpool(self._measures))

    async def export(self, request: Request) -> Response:
        """The answers so far as rows."""
        kind = request.path_params["kind"]
        if kind not in MAKERS:
            raise Refused(f"no export {kind!r}: expected one of {', '.join(MAKERS)}")
        text = await run_in_threadpool(lambda: lines(rows(kind, self.store.tasks(), self.store.answers())))
        headers = {"Content-Disposition": f'attachment; filename="{kind}.jsonl"'}
        return Response(text, media_type="application/x-ndjson", headers=headers)

    def _rater(self, request: Request) -> str | None:
        try:
            return clean_name(unquote(request.cookies.get(self.cookie, "")))
        except Refused:
            return None

    def _required_rater(self, request: Request) -> str:
        rater = self._rater(request)
        if rater is None:
            raise Refused("type your name first: reload the page")
        return rater

    def _state(self, rater: str) -> dict[str, Any]:
        shown = self.store.next(rater, self.raters)
        tasks, settled = self.store.counts(self.raters or 1)
        return {
            "rater": rater,
            "shared": self.raters is not None,
            "tasks": tasks,
            "answered": self.store.answered(rater),
            "settled": settled,
            "task": None if shown is None else as_shown(shown),
        }

    def _measures(self) -> dict[str, Any]:
        version = self.store.version()
        if version != self._progress[0]:
            groups = rank_groups(self.store.answers())
            alpha = krippendorff_alpha(groups)
            agreement = {
                "alpha": None if math.isnan(alpha) else alpha,
                "interval": interval_of_alpha(groups),
                "compared": sum(len(group[0]) > 1 for group in groups),
            }
            self._progress = (version, agreement)
        tasks, settled = self.store.counts(self.raters or 1)
        raters = [vars(progress) for progress in self.store.progress()]
        return {"tasks": tasks, "settled": settled, "wanted": self.raters, "raters": raters, **self._progress[1]}


def clean_name(name: str) -> str:
    """A rater's name with single spaces.

    Raises:
        Refused: it is empty, too long, or has characters that cannot be seen.
    """
    name = " ".join(unicodedata.normalize("NFC", name).split())
    if not 0 < len(name) <= LONGEST_NAME or visible(name) != name:
        raise Refused(f"a name has 1 to {LONGEST_NAME} visible characters")
    return name


def as_shown(shown: Shown) -> dict[str, Any]:
    """A task as the page receives it: texts with labels, in the order in which the rater sees the completions."""
    task, earlier = shown.task, shown.earlier
    place = {completion: position for position, completion in enumerate(shown.order)}
    prompt = parts(task.prompt)
    if task.tools:
        prompt.insert(0, ("tools", json.dumps(task.tools, indent=1, ensure_ascii=False)))
    marks = [] if earlier is None else earlier.highlights
    return {
        "id": task.id,
        "prompt": prompt,
        "completions": [parts(task.completions[i]) for i in shown.order],
        "ranks": None if earlier is None or earlier.ranks is None else [earlier.ranks[i] for i in shown.order],
        "comment": "" if earlier is None else earlier.comment,
        "highlights": [{**vars(mark), "completion": place[mark.completion]} for mark in marks],
    }


def as_answer(posted: Posted, task: Task, order: Sequence[int], rater: str) -> Answer:
    """The answer in the order of the task, with the text of its highlights.

    Raises:
        Refused: the ranks are not one for each completion, or a highlight is not inside a text.
    """
    if posted.ranks is not None and len(posted.ranks) != len(order):
        raise Refused(f"{len(posted.ranks)} ranks for {len(order)} completions")
    ranks = None if posted.ranks is None else [rank for _, rank in sorted(zip(order, posted.ranks, strict=True))]
    highlights = []
    for mark in posted.highlights:
        if mark.completion >= len(order):
            raise Refused("a highlight outside of the completions")
        completion = order[mark.completion]
        texts = [text for _, text in parts(task.completions[completion])]
        if mark.part >= len(texts) or not mark.start < mark.end <= len(texts[mark.part]):
            raise Refused("a highlight outside of the text")
        text = texts[mark.part][mark.start : mark.end]
        highlights.append(Highlight(completion, mark.part, mark.start, mark.end, text))
    given = None if ranks is None else tuple(ranks)
    return Answer(task.id, rater, given, posted.comment.strip(), tuple(highlights))


def lines(made: Sequence[Any]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)


def app(
    store: Store,
    token: str,
    host: str = "127.0.0.1",
    raters: int | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> Starlette:
    """The ASGI application; the arguments are those of ``Site`` and ``Access``."""
    return Starlette(
        routes=Site(store, token, raters, on_answer).routes(),
        middleware=[Middleware(Access, token=token, host=host)],
        exception_handlers={Refused: _refused, pydantic.ValidationError: _refused, sqlite3.Error: _not_stored},
    )


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, pydantic.ValidationError):
        found = error.errors(include_url=False, include_input=False)
        reason = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'the request'}: {one['msg']}" for one in found[:3])
    else:
        reason = str(error)
    return JSONResponse({"error": reason}, 400)


async def _not_stored(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"the answer cannot be stored: {error}"}, 507)


# --- the server ---------------------------------------------------------------------------------------------------


class Page:
    """A running page. ``serve`` starts it."""

    def __init__(self, store: Store, server: uvicorn.Server, listener: socket.socket, address: str) -> None:
        self.store, self.address = store, address
        self.enough = threading.Event()
        self._server = server
        self._thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        while not server.started and self._thread.is_alive():
            time.sleep(0.01)
        assert server.started

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every task has enough answers, or for so many seconds, and return whether it has."""
        return self.enough.wait(timeout)

    def close(self) -> None:
        """Stop the server and close the database. Every answer is on disk already."""
        self._server.should_exit = True
        self._thread.join(10)
        self.store.close()

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    tasks: Sequence[Task] | None,
    database: str | Path,
    *,
    raters: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, tasks: None,
) -> Page:
    """Start the page in a thread of this process.

    Args:
        tasks: what to rank, in this order. Other tasks of the database are not shown; None shows the same ones as last
            time.
        database: the SQLite file. It is created if it does not exist; if it does, raters continue where they stopped.
        raters: how many raters rank or skip each task. Then ``Page.wait`` returns. None lets every rater answer every
            task, and ``Page.wait`` never returns.
        host: the address to listen at.
        port: the port; 0 takes a free one.
        seed: determines the order in which each rater sees the completions of each task.
        on_progress: called at the start, and after each answer and each undo in the server's thread, with the number of
            tasks that need no more answers and the number of tasks.

    Returns:
        The page. ``Page.address`` has the token that lets people in.

    Raises:
        UserError: the database cannot be used, or the port is taken.
    """
    store, token = Store(database, seed), new_token()
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        store.close()
        raise UserError(f"cannot listen at {host}, port {port}: {error}: choose another --port") from error
    if tasks is not None:
        store.show_only(tasks)
    page: Page | None = None

    def after_answer() -> None:
        total, done = store.counts(raters or 1)
        on_progress(done, total)
        if page is not None and raters is not None:
            (page.enough.set if done == total else page.enough.clear)()

    config = uvicorn.Config(
        app(store, token, host, raters, after_answer),
        log_config=None,
        log_level="error",
        access_log=False,  # it would have the token
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    name = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listener.getsockname()[1]}/?token={token}"
    page = Page(store, uvicorn.Server(config), listener, address)
    after_answer()
    return page
