"""The environment that runs Python: results, sessions, attacks, and what is left behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from burnish.errors import UserError
from burnish.generate.protocol import Request, request_seed
from burnish.generate.sampling import Sampling
from burnish.render.renderer import Renderer
from burnish.rl.collect import sample_and_score, with_tools
from burnish.rl.environment import Environments
from burnish.rl.python import Python
from burnish.rl.sandbox.client import enforced
from burnish.types import Prompt
from chat_families import FAMILIES
from scripted import ScriptedGenerator


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> None:
    if "protection" in (missing := enforced()):
        pytest.skip(missing["protection"])


def started(**settings) -> Python:
    environment = Python(**{"preload": ["math"], "seconds": 1} | settings)
    assert environment.reset(answer="42", prompt=[]) is None
    return environment


def test_a_session_keeps_its_variables():
    environment = started()
    assert environment.python("x = 6") == "(no output)"
    assert environment.python("print('six')\nx * 7") == "six\n42"
    assert environment.python("print('before')\nx / 0") == "before\nerror: ZeroDivisionError: division by zero"
    assert environment.python("x") == "6"
    assert started().python("x") == "error: NameError: name 'x' is not defined"
    environment.reset()
    assert environment.python("x") == "error: NameError: name 'x' is not defined"


def test_the_model_sees_no_addresses():
    environment = started()
    assert environment.python("print(object())\nlambda: 1") == "<object object at 0x...>\n<function <lambda> at 0x...>"
    assert environment.python("hex(2**40)") == "'0x10000000000'"


def test_the_tool_has_a_schema():
    schema = get_json_schema(started().python)["function"]
    assert schema["name"] == "python" and schema["description"].startswith("Run Python code. Returns what it prints")
    assert schema["parameters"] == {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to run."}},
        "required": ["code"],
    }


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("while True:\n    pass", "cpu: took more than 1 s of CPU time"),
        ("x = bytearray(10**10)", "memory: MemoryError"),
        ("print('a' * 20000)", "a" * 10_000 + "... [cut after 10,000 bytes]\noutput: printed more than 10,000 bytes"),
        ("open('/etc/hostname')", "denied: PermissionError: [Errno 13] Permission denied: '/etc/hostname'"),
        ("import os\nos._exit(1)", "crash: its process ended: exit code 1"),
    ],
)
def test_code_that_fails_is_answered_with_the_reason_and_the_session_continues(code, shown):
    environment = started()
    environment.python("x = 6")
    assert environment.python(code) == shown
    assert environment.python("x") == "6"


def test_episodes_share_one_sandbox_which_says_once_what_it_enforces(caplog):
    with caplog.at_level(logging.WARNING, logger="burnish.rl.python"):
        environments = [started(preload=["math", "statistics"]) for _ in range(3)]
    assert len({environment._sandbox for environment in environments}) == 1
    (message,) = caplog.messages
    assert message.startswith("how the Python that the model runs is limited: files: Landlock (version ")
    with caplog.at_level(logging.WARNING, logger="burnish.rl.python"):
        unprotected = started(sandbox="none")
    assert "limited: files: not enforced; network: not enforced" in caplog.messages[-1]
    assert unprotected.python("import os\nlen(os.listdir('/')) > 1") == "True"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"second": 1}, "second: unknown key .*seconds"),
        ({"seconds": 0}, "seconds: .* 1"),
        ({"sandbox": "landlok"}, "sandbox: .*landlock"),
        ({"preload": "math"}, "preload: .*list"),
        ({"preload": ["nosuch"]}, "cannot preload nosuch: ModuleNotFoundError"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Python(**settings)


@pytest.mark.parametrize("threads", [0, 2])
def test_episodes_run_code_and_failed_code_ends_no_episode(threads):
    tokenizer = FAMILIES["qwen 2.5"].tokenizer()
    codes = {"first": ["x = 6", "x * 7"], "second": ["x = 1", "open('/etc/hostname')"], "third": ["x", "while True: 0"]}
    environments = Environments({"": Python}, arguments={"preload": ["math"], "seconds": 1}, threads=threads)
    rows = [Prompt(({"role": "user", "content": name},), {}, f"p:{i}") for i, name in enumerate(codes)]
    rows = with_tools(rows, environments, tokenizer)

    def script(prompt: str) -> str:
        turn = prompt.count("<tool_response>")
        name = next(name for name in codes if f"user\n{name}<" in prompt)
        if turn == 2:
            return "Done.<|im_end|>"
        call = {"name": "python", "arguments": {"code": codes[name][turn]}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"

    ends = frozenset([tokenizer.convert_tokens_to_ids("<|im_end|>")])
    sampling = Sampling(max_new_tokens=500)
    prompts = Renderer(tokenizer).prompts(rows)
    requests = [Request(ids, request_seed(0, i, 0, 0), sampling, ends) for i, ids in enumerate(prompts)]
    generator = ScriptedGenerator(tokenizer, script)
    trajectories = sample_and_score(rows, requests, environments.rewards([]), generator, tokenizer, environments)
    results = [[m["content"] for m in trajectory.messages if m["role"] == "tool"] for trajectory in trajectories]
    assert results == [
        ["(no output)", "42"],
        ["(no output)", "denied: PermissionError: [Errno 13] Permission denied: '/etc/hostname'"],
        ["error: NameError: name 'x' is not defined", "cpu: took more than 1 s of CPU time"],
    ]
    assert [(trajectory.finish_reason, len(trajectory.turns)) for trajectory in trajectories] == [("stop", 3)] * 3


@pytest.mark.parametrize("number", [None, signal.SIGKILL])
def test_nothing_is_left_behind(number, tmp_path):
    code = (
        "import os, sys\nfrom burnish.rl.python import Python\nenvironment = Python(preload=[])\n"
        "environment.python('x = 6')\nprint(environment._sandbox._server._process.pid, flush=True)\ninput()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        server = Path("/proc") / process.stdout.readline().decode().strip()
        assert server.exists() and list(tmp_path.iterdir())
        if number is None:
            process.stdin.write(b"\n")
        else:
            process.send_signal(number)
    deadline = time.monotonic() + 10
    while server.exists() or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
