"""Foreign chat templates: none hangs, fills the memory, or ends in anything but one message that names the row."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jinja2
import jinja2.filters
import jinja2.tests
import pytest
from hypothesis import strategies as st

from builders import CHATML, PLAIN_CHATML
from burnish.errors import UserError
from burnish.render import worker
from burnish.render.encode import encode
from burnish.render.renderer import Renderer
from burnish.render.templates import ChatTemplate, Unrendered
from burnish.render.truncate import Truncation
from burnish.terminal import visible
from burnish.time_limit import TimeLimitExceeded, time_limit
from burnish.types import Conversation, Example, Messages
from hostile import examples, try_all

LOOP = "{% for i in range(10**5) %}"
END = "{% endfor %}"
LIMIT = "took more than 0.3 s of CPU time|needed more than 1 GB of memory|wrote .* characters for messages of "

# Parts of templates, with what the message says. They apply only to messages that contain "BAD".
HOSTILE = {
    "division by zero": ("{{ 1 / 0 }}", "failed: ZeroDivisionError: division by zero"),
    "modulo zero": ("{{ 1 % 0 }}", "failed: ZeroDivisionError"),
    "large range": ("{{ range(10**9) | list }}", "failed: OverflowError: Range too big"),
    "number plus list": ("{{ 1 + messages }}", "failed: TypeError"),
    "text plus number": ("{{ messages[0].content + 1 }}", "failed: TypeError"),
    "call of a text": ("{{ messages[0].content() }}", "failed: TypeError: 'str' object is not callable"),
    "loop over a number": ("{% for x in 5 %}{% endfor %}", "failed: TypeError"),
    "include": ("{% include 'secrets.txt' %}", "failed: TypeError: no loader"),
    "import": ("{% import '/etc/passwd' as x %}", "failed: TypeError: no loader"),
    "extends": ("{% extends 'base' %}", "failed: TypeError: no loader"),
    "endless recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed: RecursionError"),
    "recursion of two": (
        "{% macro f(g, f) %}{{ g(f, g) }}{% endmacro %}{% macro g(f, g) %}{{ f(g, f) }}{% endmacro %}{{ f(g, f) }}",
        "failed: RecursionError",
    ),
    "recursive loop": ("{% for x in [messages] recursive %}{{ loop([x]) }}{% endfor %}", "failed: RecursionError"),
    "class of a text": ("{{ messages[0].content.__class__.__mro__ }}", "refuses .*unsafe"),
    "globals of a function": ("{{ raise_exception.__globals__.os }}", "refuses .*unsafe"),
    "format of a class": ("{{ '{0.__class__}'.format(messages).x.y }}", "refuses .*has no attribute"),
    "changed messages": ("{{ messages.append(1) }}", "refuses .*unsafe"),
    "underscore in a namespace": ("{% set n = namespace(_x=1) %}", "refuses .*underscore"),
    "namespace of a number": ("{% set n = namespace(5) %}", "failed: TypeError"),
    "undefined namespace": ("{% set nothing.x = 1 %}", "refuses .*(namespace|undefined)"),
    "undefined variable": ("{{ nothing.to.say }}", "refuses .*'nothing' is undefined"),
    "missing message": ("{{ messages[7].content }}", "refuses .*has no element 7"),
    "xmlattr": ("{{ {'a b': 1} | xmlattr }}", "failed: ValueError: Invalid character in attribute name"),
    "tojson of a function": ("{{ raise_exception | tojson }}", "failed: TypeError: .*not JSON serializable"),
    "time of nothing": ("{{ strftime_now(none) }}", "failed: TypeError"),
    "unsortable list": ("{{ [1, 'a'] | sort }}", "failed: TypeError"),
    "refusal": (
        "{{ raise_exception('roles must\n alternate') }}",
        r"refuses .*\(user, assistant\): roles must alternate$",
    ),
    "long refusal": ("{{ raise_exception('no ' * 10**6) }}", "refuses .*: (no )+no...$"),
    "text of 3 MB": ("{{ messages[0].content * 10**6 }}", "wrote 3,000,066 characters for messages of 5"),
    "nested loops": (LOOP * 2 + END * 2, "took more than 0.3 s of CPU time"),
    "large power": ("{{ (messages | length) ** (10**10) }}", LIMIT),
    "repeated text": ("{{ messages[0].content * 10**10 }}", "needed more than 1 GB of memory"),
}
# More of those that end a child. The next template then waits for a new one.
SLOW = {
    "repeated constant": ("{% if messages | length == 2 %}{{ 'a' * 10**10 }}{% endif %}", LIMIT),
    "repeated list": ("{% set x = messages * 10**10 %}", LIMIT),
    "loops with output": (LOOP * 3 + "{{ i }}" + END * 3, LIMIT),
    "loops with continue": (LOOP * 3 + "{% if i %}{% continue %}{% else %}{% break %}{% endif %}" + END * 3, LIMIT),
    "doubled text": ("{% set n = namespace(x='ab') %}" + LOOP + "{% set n.x = n.x + n.x %}" + END, LIMIT),
    "doubled list": ("{% set n = namespace(x=[1, 2]) %}" + LOOP + "{% set n.x = n.x + n.x %}" + END, LIMIT),
    "joined list": ("{% set n = namespace(x=['a']) %}" + LOOP + "{% set n.x = [n.x | join] + n.x %}" + END, LIMIT),
    "joined text": ("{{ ([messages[0].content * 10**6] * 10**6) | join }}", LIMIT),
    "replaced text": ("{{ (messages[0].content * 10**6).replace('A', 'b' * 10**6) }}", LIMIT),
    "text of 50 MB in pieces": ("{% for i in range(500) %}{{ 'a' * 10**5 }}{% endfor %}", LIMIT),
    "text of 300 MB": ("{{ messages[0].content * 10**8 }}", LIMIT),
    "centered text": ("{{ messages[0].content | center(10**10) }}", LIMIT),
    "indented text": ("{{ (messages[0].content ~ '\n') * 10**6 | indent(10**6) }}", "failed: TypeError|" + LIMIT),
    "wide format": ("{{ '%1000000000000d' % (messages | length) }}", "failed: (ValueError|OverflowError)|" + LIMIT),
    "wide format method": ("{{ '{:>10000000000}'.format(messages) }}", "failed: (ValueError|TypeError)|" + LIMIT),
    "filled batches": ("{{ messages | batch(10**10, 'x') | list }}", LIMIT),
    "lorem ipsum": ("{{ lipsum(n=10**5, min=10**5, max=10**6) }}", LIMIT),
    "generation in a loop": (LOOP * 2 + "{% generation %}a{% endgeneration %}" + END * 2, LIMIT),
}

INVALID = {
    "unknown tag": "{% bad %}",
    "open block": "{% for m in messages %}",
    "open generation": "{% generation %}{{ messages }}",
    "open expression": "{{ messages",
    "unknown filter": "{{ messages | nothing }}",
    "nested expression": "{{ " + "(" * 10**5 + "1" + ")" * 10**5 + " }}",
    "nested blocks": "{% if true %}" * 10**4 + "{% endif %}" * 10**4,
    "unmatched end": "{% endfor %}",
}


def says(content: str) -> Messages:
    return ({"role": "user", "content": content}, {"role": "assistant", "content": "Yo"})


GOOD, BAD = says("Hi"), says("BAD")


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Less time, and no memory of what other tests rendered."""
    monkeypatch.setattr(worker, "LIMITS", worker.Limits(seconds=0.3))
    worker._worker._excesses.clear()
    yield
    worker._worker._excesses.clear()


def bad_if_asked(hostile: str) -> str:
    """ChatML that includes a hostile part for messages that contain "BAD"."""
    chatml = CHATML if "generation" in hostile else PLAIN_CHATML
    return "{% if 'BAD' in messages[0].content %}" + hostile + "{% endif %}" + chatml


def rows_of(*contents: Messages) -> list[Conversation]:
    return [Conversation(messages, None, f"chat.jsonl:{line}") for line, messages in enumerate(contents, start=1)]


def batch(template: str, *conversations: Messages) -> worker.Batch:
    return worker.Batch(template, {"eos_token": "</s>"}, False, [(messages, False, ()) for messages in conversations])


def encoded(tokenizer: Any, rows: list[Conversation], on_bad_row: Any) -> Any:
    renderer = Renderer(tokenizer)
    to_examples = lambda rows: [Example((sequence,)) for sequence in renderer.conversations(rows)]  # noqa: E731
    return encode(list(rows), to_examples, Truncation(on_bad_row=on_bad_row))


@pytest.fixture(scope="module", autouse=True)
def _memory() -> Iterator[None]:
    """No child takes more than 1 GB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    yield
    worker._worker.close()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if sys.platform == "linux":  # where it is in KiB
        assert peak <= max(before, 10**9 // 1024)


@pytest.mark.parametrize("name", [*HOSTILE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_hostile_template_loses_only_its_row(byte_tokenizer: Any, name: str) -> None:
    hostile, reason = (HOSTILE | SLOW)[name]
    tokenizer, rows, start = byte_tokenizer(bad_if_asked(hostile)), rows_of(GOOD, BAD, GOOD), time.monotonic()
    result = encoded(tokenizer, rows, "skip")
    assert time.monotonic() - start < 30  # the limit and the start of a child, on a busy machine
    assert [example.source for example in result.examples] == ["chat.jsonl:1", "chat.jsonl:3"]
    ((source, message),) = result.changed
    assert source == "chat.jsonl:2" and re.search(f"the chat template ({reason})", message), message
    assert "\n" not in message and len(message) < 700
    with pytest.raises(UserError) as caught:
        encoded(tokenizer, rows, "error")
    assert str(caught.value) == f"chat.jsonl:2: {message.removeprefix('skip: ')}"


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_template_is_refused_at_its_first_row(byte_tokenizer: Any, name: str) -> None:
    tokenizer = byte_tokenizer(INVALID[name])
    with pytest.raises(UserError, match=r"^chat.jsonl:1: the chat template (is not valid: line \d+: |failed: )"):
        encoded(tokenizer, rows_of(GOOD, GOOD), "error")
    with pytest.raises(UserError, match=r"all 2 rows were skipped, the first as chat.jsonl:1: the chat template"):
        encoded(tokenizer, rows_of(GOOD, GOOD), "skip")


def test_a_template_that_always_exceeds_limits_is_given_up(
    byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would otherwise take the limit each. A row that exceeded a limit is not rendered a second time."""
    started: list[worker._Child] = []

    class Counted(worker._Child):
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    worker._worker.close()
    monkeypatch.setattr(worker, "_Child", Counted)
    monkeypatch.setattr(worker, "EXCESSES", 2)
    rows = rows_of(*[GOOD] * 3, *(says(f"BAD {i}") for i in range(20)))
    result = encoded(byte_tokenizer(bad_if_asked(LOOP * 3 + END * 3)), rows, "skip")
    assert len(result.examples) == 3 and len(result.changed) == 20
    assert "took more than 0.3 s of CPU time" in result.changed[1].reason
    assert "exceeded limits in 2 rows in a row and is not run again" in result.changed[2].reason
    assert len(started) <= 4  # good rows are rendered in between


@pytest.mark.parametrize("template", [CHATML, PLAIN_CHATML, "{{ messages | tojson }}", "{{ messages[0].content }}"])
def test_the_child_renders_what_this_process_would(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BATCH", 3)
    contents = ["Hi", "", "a\nb\r\n", "\u2028 \x85 \x00", "😀 é", "\ud800", '"\\', "\U000f0000", "x" * 200_000]
    conversations = [(says(content), True, ()) for content in contents]
    whole = worker.Batch(template, {"bos_token": "<s>", "eos_token": "</s>"}, template == CHATML, conversations)
    assert worker.render(whole) == worker.render_here(whole)


def test_an_error_names_its_row_in_a_large_batch(byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BATCH", 2)
    for hostile in ("{{ 1 / 0 }}", LOOP * 3 + END * 3):
        template = ChatTemplate(byte_tokenizer(bad_if_asked(hostile)))
        rows = [Unrendered(messages, False, f"a:{i}") for i, messages in enumerate([*[GOOD] * 5, BAD, GOOD])]
        with pytest.raises(UserError, match="a:5: the chat template"):
            template.render_many(rows)


# --- generated ----------------------------------------------------------------------------------------------------

WORDS = [
    "messages",
    "messages[0]",
    "messages[0].content",
    "messages[-1]['role']",
    "message",
    "bos_token",
    "eos_token",
    "add_generation_prompt",
    "tools",
    "nothing",
    "x",
    "loop",
    "loop.index",
    "loop.cycle",
    "self",
    "caller",
    "varargs",
    "range",
    "range(3)",
    "dict(a=1)",
    "namespace(a=1)",
    "joiner(',')",
    "cycler(1,2)",
    "lipsum",
    "raise_exception",
    "raise_exception('no')",
    "strftime_now('%Y')",
    "true",
    "none",
    "'a'",
    "''",
    "'{0.x}'",
    "'%d'",
    "[]",
    "{}",
    "()",
]
NUMBERS = ["0", "1", "-1", "2", "0.5", "7", "10**3", "1e308", "10**19"]
FILTERS = sorted(set(jinja2.filters.FILTERS) - {"random"})  # whose results differ from call to call
TESTS = sorted(set(jinja2.tests.TESTS) - {"filter", "test"})
OPERATORS = ["+", "-", "*", "/", "//", "%", "~", "==", "<", "in", "not in", "and", "or"]


def expressions() -> st.SearchStrategy[str]:
    """Expressions of the template language. Most of them are errors when they run."""

    def larger(e: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        names = st.sampled_from(
            ["content", "role", "x", "__class__", "items", "append", "format", "upper", "join", "0"]
        )
        return st.one_of(
            st.builds("({} {} {})".format, e, st.sampled_from(OPERATORS), e),
            st.builds("{}.{}".format, e, names),
            st.builds("{}[{}]".format, e, e),
            st.builds("{}[{}:{}]".format, e, e, e),
            st.builds("{}({})".format, e, e),
            st.builds("({} | {})".format, e, st.sampled_from(FILTERS)),
            st.builds("({} | {}({}))".format, e, st.sampled_from(FILTERS), e),
            st.builds("({} | {}({}, {}))".format, e, st.sampled_from(FILTERS), e, e),
            st.builds("({} is {})".format, e, st.sampled_from(TESTS)),
            st.builds("({} if {} else {})".format, e, e, e),
            st.builds("[{}, {}]".format, e, e),
            st.builds("{{{}: {}}}".format, e, e),
        )

    return st.recursive(st.sampled_from(WORDS) | st.sampled_from(NUMBERS), larger, max_leaves=4)


def often(usual: st.SearchStrategy[str], other: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Half of the time one, half of the time the other."""
    return st.booleans().flatmap(lambda choice: usual if choice else other)


def templates() -> st.SearchStrategy[str]:
    """Templates of statements inside of each other, some of them cut off, before or after a template that is right."""
    e = often(st.sampled_from(["messages", "messages[0].content", "bos_token", "1", "true"]), expressions())

    def larger(body: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.builds("{}{}".format, body, body),
            st.builds("{{% for x in {} %}}{}{{% endfor %}}".format, e, body),
            st.builds("{{% for x in messages %}}{}{{% endfor %}}".format, body),
            st.builds("{{% for x in range(10**5) %}}{}{{% endfor %}}".format, body),
            st.builds("{{% for x in {} recursive %}}{}{{{{ loop({}) }}}}{{% endfor %}}".format, e, body, e),
            st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, e, body, body),
            st.builds("{{% set x %}}{}{{% endset %}}".format, body),
            st.builds("{{% macro f(x) %}}{}{{{{ f({}) }}}}{{% endmacro %}}{{{{ f(1) }}}}".format, body, e),
            st.builds("{{% macro f(x=1) %}}{}{{% endmacro %}}{{{{ f({}) }}}}".format, body, e),
            st.builds("{{% call(x) {} %}}{}{{% endcall %}}".format, e, body),
            st.builds("{{% filter {} %}}{}{{% endfilter %}}".format, st.sampled_from(FILTERS), body),
            st.builds("{{% with x = {} %}}{}{{% endwith %}}".format, e, body),
            st.builds("{{% block b %}}{}{{% endblock %}}".format, body),
            st.builds("{{% generation %}}{}{{% endgeneration %}}".format, body),
        )

    statements = st.one_of(
        st.builds("{{{{ {} }}}}".format, e),
        st.builds("{{% set x = {} %}}".format, e),
        st.builds("{{% set x.y = {} %}}".format, e),
        st.builds("{{% include {} %}}".format, e),
        st.builds("{{% import {} as x %}}".format, e),
        st.builds("{{% extends {} %}}".format, e),
        st.sampled_from(["{% break %}", "{% continue %}", "{% raw %}", "{#", "{%", "}}", "{% endfor %}", "<|im_end|>"]),
        st.text(max_size=3),
    )
    harmless = ["{{ bos_token }}", "{{ messages | length }}", "{% set x = messages[0].content %}{{ x | trim }}", "a"]
    parts = st.recursive(often(st.sampled_from(harmless), statements), larger, max_leaves=5)
    chatml = st.sampled_from([CHATML, PLAIN_CHATML])
    return st.one_of(parts, *(st.builds(both.format, parts, chatml) for both in ("{}{}", "{1}{0}", "{}{}")))


@examples(few=60, many=200)
def test_any_template_renders_or_is_refused_with_the_row(
    byte_tokenizer: Any, examples: int, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    tokenizer, rows = byte_tokenizer(), rows_of(GOOD, BAD)
    rendered = 0

    def check(template: str) -> None:
        nonlocal rendered
        worker._worker._excesses.clear()
        tokenizer.chat_template = template
        try:
            result = encoded(tokenizer, rows, "error")
        except UserError as error:
            message = str(error)
            assert message.startswith(("chat.jsonl:1: ", "chat.jsonl:2: ")) and len(message) < 1000, message
            visible(message).encode()
        else:
            assert len(result.examples) == 2
            rendered += 1

    try_all(templates(), check, examples, record_property)
    assert examples // 20 <= rendered < examples


# --- the process --------------------------------------------------------------------------------------------------

SOON = "{% for i in range(3 * 10**4) %}{% for j in range(40) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


def child_pid() -> int:
    assert worker._worker._child is not None
    return worker._worker._child._process.pid


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie that only waits to be collected."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.05)


def test_a_child_that_is_killed_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker.render(batch("a", GOOD))
    os.kill(child_pid(), signal.SIGKILL)  # while it waits
    assert worker.render(batch("{{ messages[0].content }}", GOOD)) == [("Hi", ())]
    render, killed = worker._Child.render, list[int]()

    def killed_first(child: Any, given: worker.Batch) -> list[worker.Text]:
        if len(killed) < kills:
            killed.append(child._process.pid)
            os.kill(killed[-1], signal.SIGKILL)
        return render(child, given)

    monkeypatch.setattr(worker._Child, "render", killed_first)
    kills = 1
    assert worker.render(batch("{{ messages[0].content }}", GOOD)) == [("Hi", ())]
    kills = 3
    with pytest.raises(worker.RenderingError, match=r"ended the process that renders it \(SIGKILL\)"):
        worker.render(batch("{{ messages[0].content }}", BAD))
    assert len(set(killed)) == 3 and not any(map(is_running, killed))


def test_a_child_that_is_killed_while_it_renders_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LIMITS", worker.Limits(seconds=1))
    worker.render(batch("a", GOOD))
    assert worker._worker._child is not None
    killed, begun = child_pid(), worker._worker._child._progress

    def kill() -> None:
        select.select([begun], [], [], 60)  # the child writes there when it begins a row
        os.kill(killed, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(worker.RenderingError, match=r"took more than 1 s of CPU time"):  # in the second child
        worker.render(batch("{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}", BAD))
    thread.join()
    assert not is_running(killed)


def test_an_interrupted_batch_does_not_answer_the_next() -> None:
    worker.render(batch("a", GOOD))
    before = child_pid()
    with pytest.raises(TimeLimitExceeded), time_limit(0.05):
        worker.render(batch(SOON, GOOD))
    assert not is_running(before)
    assert worker.render(batch("{{ messages[0].content }}", BAD, GOOD)) == [("BAD", ()), ("Hi", ())]


def test_threads_share_the_child() -> None:
    texts: dict[int, str] = {}

    def render(number: int) -> None:
        for _ in range(20):
            texts[number] = worker.render(batch(f"{{{{ messages[0].content }}}} {number}", GOOD))[0].text

    threads = [threading.Thread(target=render, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: f"Hi {number}" for number in range(4)}


PARENT = """\
import os, signal, sys, time
from burnish.render import worker
worker.LIMITS = worker.Limits(seconds=float(sys.argv[2]))
def batch(template):
    return worker.Batch(template, {}, False, [(({"role": "user", "content": "Hi"},), False, ())])
assert worker.render(batch("{{ messages[0].content }}")) == [("Hi", ())]
child = worker._worker._child._process.pid
print(child, flush=True)
if sys.argv[1] == "hangs":
    worker.render(batch("{% for i in range(10**5) %}" * 3 + "{% endfor %}" * 3))
if sys.argv[1] == "waits":
    time.sleep(60)
if sys.argv[1] == "forks":
    pid = os.fork()
    assert worker.render(batch("{{ messages[0].content }}")) == [("Hi", ())]
    if pid == 0:
        print(worker._worker._child._process.pid, flush=True)
        sys.exit(0 if worker._worker._child._process.pid != child else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert worker._worker._child._process.pid == child
"""


def start_parent(way: str, *, before: str = "", seconds: int = 2) -> subprocess.Popen[str]:
    """A program that renders with a child of its own, prints the child's id, and then ends in its own way.

    ``seconds`` is the limit on the child's CPU time.
    """
    command = ["sh", "-c", f'{before} exec "$0" "$@"', sys.executable, "-c", PARENT, way, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("way", ["ends", "forks"])
def test_no_child_is_left_when_its_parent_ends(way: str) -> None:
    parent = start_parent(way, before="exec <&-;")  # without standard input
    out, err = parent.communicate(timeout=60)
    assert (parent.returncode, err) == (0, "")
    pids = [int(line) for line in out.split()]
    assert len(pids) == (2 if way == "forks" else 1)
    for pid in pids:
        wait_for_end(pid)


@pytest.mark.parametrize("way", ["hangs", "waits"])
def test_no_child_is_left_when_its_parent_is_killed(way: str) -> None:
    parent = start_parent(way)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    assert parent.communicate(timeout=60) == ("", "")
    wait_for_end(child)


def test_ctrl_c_prints_nothing_of_the_child() -> None:
    parent = start_parent("hangs", seconds=60)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.killpg(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=60)
    assert err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt")
    wait_for_end(child)
