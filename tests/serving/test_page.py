"""The service of one's own in docs/serving.md runs, and a run can use it."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.rewards.remote import RemoteReward
from burnish.types import Trajectory

PAGE = (Path(__file__).parent.parent.parent / "docs/serving.md").read_text("utf-8")


def test_the_service_of_the_page(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 22
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "mine.py").write_text(code.replace("8001", str(port)))
    rows = [
        Trajectory.from_text(text, ({"role": "user", "content": "12+30="},), columns={"answer": "42"}, source=f"p:{i}")
        for i, text in enumerate(("42", " 42\n", "41"))
    ]
    process = subprocess.Popen([sys.executable, tmp_path / "mine.py"], stderr=subprocess.DEVNULL)
    reward = RemoteReward(f"http://127.0.0.1:{port}", "token-of-the-reader", batch=2)
    try:
        for _ in range(100):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        else:
            pytest.fail("the service does not listen")
        assert asyncio.run(reward(rows)) == [1.0, 1.0, 0.0]  # type: ignore[arg-type]
        assert reward.digest() is None
    finally:
        reward.close()
        process.terminate()
        process.wait(10)
