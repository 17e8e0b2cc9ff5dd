"""The ranking page in a real browser: keys, mouse and touch, a killed server, hostile text, attacks, accessibility."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from burnish.label.export import rows
from burnish.label.store import Store

pytestmark = pytest.mark.acceptance

CHROMIUM = "/usr/bin/chromium"
PROMPTS = 20
HOSTILE = [
    "<script>window.owned = 1</script> quality 1",
    '<img src="x" onerror="window.owned = 1"><a href="javascript:window.owned=1">quality 2</a>',
    "long " * 20_000 + "quality 3",
    "שלום, זה טקסט מימין לשמאל. quality 4",
    "👩‍👩‍👧‍👦🎉 emoji \x00 and \u202ereversed quality 5",
]


class Server:
    """``burnish label`` in a process of its own, which can be killed and started again on the same port."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options, self.port = folder, options, "0"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "burnish", "label", "rows.jsonl", "--port", self.port, *self.options]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.address = next(match[1] for line in self.process.stdout if (match := re.search(r"rank at (\S+)", line)))
        self.base = self.address.partition("/?")[0]
        self.port = self.base.rpartition(":")[2]

    def kill(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def store(self) -> Store:
        return Store(self.folder / "rows.labels.sqlite")


StartServer = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartServer]:
    servers: list[Server] = []

    def run(prompts: list[dict[str, Any]] | None = None, *options: str) -> Server:
        given = prompts or [
            {"prompt": f"Prompt {i}", "completions": [f"text {i}, quality {q}" for q in (3, 1, 4, 2)]}
            for i in range(PROMPTS)
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given), "utf-8")
        servers.append(Server(tmp_path, *options))
        return servers[-1]

    yield run
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser: {CHROMIUM} does not exist")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def enter(browser: Browser, server: Server, name: str = "Ann", **settings: Any) -> Page:
    page = browser.new_context(**settings).new_page()
    page.set_default_timeout(15_000)
    page.goto(server.address)
    page.wait_for_url(f"{server.base}/")  # the token has left the address
    page.get_by_label("Your name").fill(name)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1, name=re.compile("Task|Rank"))).to_be_visible()
    return page


def qualities(page: Page) -> list[int]:
    """The quality of the completions, by their numbers."""
    cards = page.locator(".card").all()
    numbered = sorted((card.locator("h2").inner_text(), card.locator(".body").inner_text()) for card in cards)
    return [int(re.findall(r"quality (\d)", text)[-1]) for _, text in numbered]


def titled(page: Page, task: int, of: int = PROMPTS) -> None:
    expect(page.locator("#title:visible")).to_have_text(f"Task {task} of {of}")


def rank_by_keys(page: Page) -> None:
    """Press the numbers of the completions from best (the highest quality) to worst, and submit."""
    found = qualities(page)
    for best in sorted(range(len(found)), key=lambda i: -found[i])[: len(found) - 1]:
        page.keyboard.press(str(best + 1))
    page.keyboard.press("Enter")


def assert_ranked_by_quality(server: Server, rater: str = "Ann") -> None:
    with server.store() as store:
        answers = [answer for answer in store.answers() if answer.rater == rater]
        assert len(answers) == PROMPTS
        assert {answer.ranks for answer in answers} == {(2, 4, 1, 3)}  # of the qualities 3, 1, 4, 2


def test_twenty_prompts_by_keys_with_a_server_that_is_killed(start: StartServer, browser: Browser) -> None:
    server = start()
    page = enter(browser, server)
    for number in range(1, 8):
        titled(page, number)
        rank_by_keys(page)
    titled(page, 8)
    server.kill()
    rank_by_keys(page)
    expect(page.locator("#alert")).to_contain_text("This answer is not stored yet")
    server.start()
    page.keyboard.press("Enter")  # the new server does not know this page
    expect(page.locator("#alert")).to_contain_text("Open the address that burnish label printed last")
    page.context.close()
    page = enter(browser, server)
    for number in range(8, PROMPTS + 1):
        titled(page, number)
        rank_by_keys(page)
    expect(page.locator("#done-title")).to_have_text("All done")
    assert_ranked_by_quality(server)
    with server.store() as store:
        assert len(store.revisions()) == PROMPTS  # none is stored twice
        assert [row["scores"] for row in rows("ranking", store.tasks(), store.answers())] == [[2 / 3, 0, 1, 1 / 3]] * 20


def order_of(page: Page) -> list[int]:
    return [int(re.findall(r"quality (\d)", text)[-1]) for text in page.locator(".card .body").all_inner_texts()]


def test_twenty_prompts_by_mouse(start: StartServer, browser: Browser) -> None:
    server = start()
    page = enter(browser, server)
    for number in range(1, PROMPTS + 1):
        titled(page, number)
        moved = False
        for place, quality in enumerate((4, 3, 2, 1)):
            at = order_of(page).index(quality)
            if at != place or not moved:
                handle = page.locator(".card .handle").nth(at).bounding_box()
                target = page.locator(".card").nth(place).bounding_box()
                assert handle is not None and target is not None
                page.mouse.move(handle["x"] + 8, handle["y"] + 8)
                page.mouse.down()
                page.mouse.move(handle["x"] + 8, target["y"] + 30, steps=3)
                page.mouse.move(handle["x"] + 8, target["y"] + 4, steps=3)
                page.mouse.up()
                moved = True
        assert order_of(page) == [4, 3, 2, 1]
        assert page.locator(".card .rank").all_inner_texts() == ["1st", "2nd", "3rd", "4th"]
        page.get_by_role("button", name="Submit").click()
    expect(page.locator("#done-title")).to_have_text("All done")
    assert_ranked_by_quality(server)


def test_dragging_and_tapping_by_touch(start: StartServer, browser: Browser) -> None:
    server = start()
    page = enter(browser, server, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    before = order_of(page)
    box, target = page.locator(".card .handle").nth(3).bounding_box(), page.locator(".card").nth(0).bounding_box()
    assert box is not None and target is not None
    x, y, end = box["x"] + 8, box["y"] + 8, target["y"] + 4
    session = page.context.new_cdp_session(page)
    session.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for part in (0.3, 0.6, 0.9, 1.0):
        points = [{"x": x, "y": y + (end - y) * part}]
        page.wait_for_timeout(60)  # as a finger; after a quick movement the next tap would only stop its momentum
        session.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": points})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert order_of(page) == [before[3], *before[:3]]
    page.wait_for_timeout(700)
    page.get_by_role("button", name="Submit").tap()
    titled(page, 2)
    found = qualities(page)
    for i in sorted(range(4), key=lambda i: -found[i])[:3]:  # from best to worst; the last one is clear then
        page.locator(".card", has=page.get_by_role("heading", name=f"Completion {i + 1}")).locator(".rank").tap()
    page.get_by_role("button", name="Submit").tap()
    titled(page, 3)
    with server.store() as store:
        first, second = store.answers()
        assert first.ranks is not None and second.ranks == (2, 4, 1, 3)
        assert [first.ranks[(3, 1, 4, 2).index(quality)] for quality in (before[3], *before[:3])] == [1, 2, 3, 4]


def test_two_raters_at_once(start: StartServer, browser: Browser) -> None:
    server = start()
    ann, ben = enter(browser, server, "Ann"), enter(browser, server, "Ben")
    for number in range(1, PROMPTS + 1):
        for page in (ann, ben):
            titled(page, number)
            rank_by_keys(page)
    for page in (ann, ben):
        expect(page.locator("#done-title")).to_have_text("All done")
    assert_ranked_by_quality(server, "Ann")
    assert_ranked_by_quality(server, "Ben")
    ann.goto(f"{server.base}/progress")
    expect(ann.locator("#alpha")).to_contain_text("alpha = 1.00 [1.00, 1.00], from 20 tasks")
    with ann.expect_download() as download:
        ann.get_by_role("link", name="preference.jsonl").click()
    made = [json.loads(line) for line in Path(download.value.path()).read_text("utf-8").splitlines()]
    assert len(made) == 20 * 6 and {row["p_chosen"] for row in made} == {1.0} and made[0]["meta"]["raters"] == 2


def test_one_rater_per_task_shares_the_work_and_ends(start: StartServer, browser: Browser) -> None:
    server = start(None, "--raters", "1")
    pages = [enter(browser, server, name) for name in ("Ann", "Ben")]
    for i in range(PROMPTS - 1):
        with server.store() as store:
            assert store.counts()[1] == i
        rank_by_keys(pages[i % 2])
        expect(pages[i % 2].locator("#count")).to_have_text(f"{i + 1} of {PROMPTS} answered")
    expect(pages[0].locator("#done-text")).to_contain_text("Other people are working on the remaining tasks")
    rank_by_keys(pages[1])
    assert server.process.wait(20) == 0  # every task has its answer
    with server.store() as store:
        assert len({answer.task for answer in store.answers()}) == len(store.revisions()) == PROMPTS


def test_hostile_text_is_shown_as_text(start: StartServer, browser: Browser) -> None:
    server = start([{"prompt": HOSTILE[0], "completions": HOSTILE}])
    page = enter(browser, server)
    problems: list[str] = []
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.on("pageerror", lambda error: problems.append(str(error)))
    assert page.locator("main img, main script, main .text a").count() == 0
    assert page.evaluate("window.owned") is None
    cards = {text[-1]: card for card in page.locator(".card").all() if (text := card.locator(".body").inner_text())}
    expect(page.locator(".text", has_text="onerror")).to_have_text(HOSTILE[1])
    expect(page.locator("#prompt .text")).to_have_text(HOSTILE[0])
    hebrew = page.locator(".text", has_text="שלום")
    assert hebrew.evaluate("element => getComputedStyle(element).direction") == "rtl"
    long = page.locator(".card", has_text="long long")
    assert len(long.inner_text()) < 3000
    long.get_by_role("button", name="Show all 100,009 characters").click()
    assert long.locator(".text").inner_text() == HOSTILE[2]
    long.get_by_role("button", name="Show less").click()
    # a highlight is stored in characters, although JavaScript counts the family as 11 units
    for attempt in (1, 2):
        page.locator(".text", has_text="emoji").evaluate(
            "element => { const range = document.createRange(); const node = element.firstChild;"
            "const at = node.data.indexOf('emoji'); range.setStart(node, at); range.setEnd(node, at + 5);"
            "const selection = document.getSelection(); selection.removeAllRanges(); selection.addRange(range); }"
        )
        page.keyboard.press("h")
        expect(page.locator("mark")).to_have_text("emoji")
        if attempt == 1:
            page.keyboard.press("x")
            expect(page.locator("mark")).to_have_count(0)
    page.keyboard.press("o")
    page.keyboard.press("Enter")
    expect(page.locator("#done-title")).to_be_visible()
    with server.store() as store:
        (answer,) = store.answers()
    (mark,) = answer.highlights
    assert (mark.completion, mark.text, HOSTILE[4][mark.start : mark.end]) == (4, "emoji", "emoji")
    assert problems == [] and len(cards) == 5


EVIL = """<script>
for (const path of ["api/answer", "api/undo", "api/rater"])
  fetch("BASE/" + path, {method: "POST", mode: "no-cors", credentials: "include", body: "{}"}).catch(() => {});
fetch("BASE/api/state", {credentials: "include"}).then(r => r.text()).then(t => document.title = "read " + t)
  .catch(() => document.title = "refused");
</script>"""


def test_attacks_are_refused(start: StartServer, browser: Browser) -> None:
    server = start()
    page = enter(browser, server)
    rank_by_keys(page)
    titled(page, 2)

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(EVIL.replace("BASE", server.base).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil) as evil:
        thread = threading.Thread(target=evil.serve_forever, daemon=True)
        thread.start()
        sent: list[str] = []
        page.context.on("request", lambda request: sent.append(request.url.removeprefix(server.base)))
        tab = page.context.new_page()  # with the cookies
        tab.goto(f"http://127.0.0.1:{evil.server_port}/")
        expect(tab).to_have_title("refused")
        tab.wait_for_timeout(500)
        evil.shutdown()
    assert {"/api/answer", "/api/undo", "/api/rater"} <= set(sent)
    with server.store() as store:
        assert len(store.revisions()) == 1
    assert [cookie.get("sameSite") for cookie in page.context.cookies()] == ["Strict", "Strict"]
    assert page.evaluate("document.cookie") == ""
    stranger: BrowserContext = browser.new_context()
    response = stranger.new_page().goto(server.base)
    assert response is not None and response.status == 403 and "Prompt" not in response.text()
    token = {cookie.get("name", ""): cookie.get("value", "") for cookie in page.context.cookies()}
    forged = httpx2.get(f"{server.base}/api/state", headers={"Host": "evil.example"}, cookies=token)
    assert forged.status_code == 403
    assert httpx2.get(f"{server.base}/api/state", cookies=token).json()["rater"] == "Ann"


def test_everything_works_by_keyboard_alone(start: StartServer, browser: Browser) -> None:
    server = start([{"prompt": "p", "completions": ["a", "b", "c"]}, {"prompt": "q", "completions": ["a", "b"]}])
    page = enter(browser, server)
    press = page.keyboard.press
    ranks = page.locator(".card .rank")
    press("Enter")
    expect(page.locator("#status")).to_contain_text("Rank every completion first: 3 left")
    press("ArrowDown")
    assert page.evaluate("document.activeElement.className").startswith("card")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"  # focus can be seen
    press("2")
    press("3")
    expect(ranks).to_have_text(["1st", "2nd", "3rd"])
    expect(page.locator("#status")).to_have_text("completion 2 1st, completion 3 2nd, completion 1 3rd")
    press("1")  # has the last rank already
    expect(ranks).to_have_text(["1st", "2nd", "3rd"])
    press("1")  # starts over
    expect(ranks).to_have_text(["1st", "Rank", "Rank"])
    press("r")
    press("2")
    press("3")
    press("t")  # completion 3 with 2
    expect(ranks).to_have_text(["=1st", "=1st", "2nd"])
    press("t")
    expect(ranks).to_have_text(["1st", "2nd", "3rd"])
    press("ArrowDown")
    press("Shift+ArrowUp")  # completion 1 moves above 3
    assert [title.split()[1] for title in page.locator(".card h2").all_inner_texts()] == ["2", "1", "3"]
    press("c")
    page.keyboard.type("first try")  # its letters are no shortcuts
    press("Escape")
    press("Enter")
    titled(page, 2, 2)
    press("1")
    expect(ranks).to_have_text(["Better", "Worse"])
    press("2")
    expect(ranks).to_have_text(["Worse", "Better"])
    press("t")
    expect(ranks).to_have_text(["Tie", "Tie"])
    press("Enter")
    expect(page.locator("#done-title")).to_be_focused()
    press("u")
    expect(ranks).to_have_text(["Tie", "Tie"])
    press("u")
    titled(page, 1, 2)
    expect(page.get_by_label("Comment")).to_have_value("first try")
    press("s")
    titled(page, 2, 2)
    press("Enter")
    expect(page.locator("#done-title")).to_be_focused()
    press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_label("Use keys of a single letter").press("Space")
    press("Escape")
    press("u")  # is switched off
    expect(page.locator("#done-title")).to_be_visible()
    with server.store() as store:
        assert [answer.ranks for answer in store.answers()] == [None, (1, 1)]
    # everything can be reached by Tab as well
    page.goto(server.base)
    reached = set()
    for _ in range(12):
        press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.trim().split(/\\s+/)[0]"))
    assert {"Progress", "Keys", "Undo"} <= reached


def test_another_person_in_the_same_browser(start: StartServer, browser: Browser) -> None:
    server = start([{"prompt": "p", "completions": ["a", "b"]}])
    page = enter(browser, server)
    page.keyboard.press("1")
    page.keyboard.press("Enter")
    expect(page.locator("#done-title")).to_be_visible()
    page.get_by_role("button", name="Ann: change the name").click()
    page.get_by_label("Your name").fill("Ben")
    page.keyboard.press("Enter")
    titled(page, 1, 1)
    page.keyboard.press("s")
    expect(page.locator("#done-title")).to_be_visible()
    with server.store() as store:
        assert [(answer.rater, answer.ranks is None) for answer in store.answers()] == [("Ann", False), ("Ben", True)]


def test_pairs(start: StartServer, browser: Browser) -> None:
    server = start([{"prompt": "p", "completions": ["quality 1", "quality 3", "quality 2"]}], "--pairwise")
    page = enter(browser, server)
    for number in (1, 2, 3):
        titled(page, number, 3)
        rank_by_keys(page)
    expect(page.locator("#done-title")).to_be_visible()
    with server.store() as store:
        made = rows("preference", store.tasks(), store.answers())
    assert [(row["chosen"], row["rejected"]) for row in made] == [
        ("quality 3", "quality 1"),
        ("quality 2", "quality 1"),
        ("quality 3", "quality 2"),
    ]


# --- accessibility and looks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm, which brings axe-core")
    folder = tmp_path_factory.mktemp("axe")
    packed = subprocess.run([npm, "pack", "axe-core", "--silent"], cwd=folder, capture_output=True, text=True)
    if packed.returncode:
        pytest.skip(f"npm pack axe-core failed: {packed.stderr[-200:]}")
    subprocess.run(["tar", "xzf", packed.stdout.strip()], cwd=folder, check=True)
    return (folder / "package" / "axe.min.js").read_text("utf-8")


LOOKS = [
    {
        "prompt": "Explain what a hash table is to a child.",
        "completions": [f"{'A hash table is a box. ' * n}" for n in (3, 9, 6, 14)],
    },
    {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}],
        "completions": ["Paris.", "Lyon, I think. " * 12],
    },
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_accessibility_and_no_sideways_scrolling(
    start: StartServer, browser: Browser, axe: str, tmp_path: Path, scheme: str, width: int
) -> None:
    server = start(LOOKS)
    shots = Path(os.environ.get("BURNISH_SCREENSHOTS", tmp_path))
    settings: dict[str, Any] = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    page = browser.new_context(**settings).new_page()

    def check(name: str) -> None:
        page.wait_for_timeout(300)
        page.screenshot(path=shots / f"{name}-{width}-{scheme}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        page.evaluate(axe)
        found = page.evaluate("axe.run()")["violations"]
        bad = [f"{v['id']} ({v['impact']}): {v['nodes'][0]['html']}" for v in found if v["impact"] != "minor"]
        assert not bad, f"{name}: {bad}"

    page.goto(server.address)
    page.wait_for_url(f"{server.base}/")
    expect(page.get_by_label("Your name")).to_be_focused()
    check("name")
    page.keyboard.type("Ann")
    page.keyboard.press("Enter")
    titled(page, 1, 2)
    check("unranked")
    for key in ("3", "1", "t", "2"):
        page.keyboard.press(key)
    check("ranked")
    page.keyboard.press("?")
    check("help")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    titled(page, 2, 2)
    page.keyboard.press("1")
    check("pair")
    page.keyboard.press("Enter")
    check("done")
    page.get_by_role("link", name="Progress and exports").click()
    expect(page.locator("#raters td").first).to_have_text("Ann")
    check("progress")
    server.kill()
    expect(page.locator("#alert")).to_contain_text("The server does not answer", timeout=8000)
    check("error")
