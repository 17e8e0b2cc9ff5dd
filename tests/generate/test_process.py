"""The generator in a child process gives the same bytes as the local one, whenever the child dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from burnish.errors import UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.process import ProcessGenerator
from burnish.generate.protocol import Request, complete
from burnish.models.heads import SharedCritic
from generating import PAD, check_adapters, environment_with_tests, llama, plain, requests


class Mortal(ProcessGenerator):
    """Kills its child once, before message number ``dies_at`` of a weight update."""

    dies_at: int | None = None
    died = 0

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        start = self._place.start
        self._place.start = lambda index: self._mortal(start(index))  # type: ignore[method-assign]

    @property
    def child(self) -> Any:
        return self._posts[0].worker

    def kill(self) -> None:
        self._kill(self.child)

    def _kill(self, child: Any) -> None:
        child.process.kill()
        child.process.join()
        self.died += 1

    def _mortal(self, child: Any) -> Any:
        send = child.send

        def counted(messages: Any) -> None:
            if messages[0][0] == "update" and self.dies_at is not None:
                send(messages[: self.dies_at])
                messages, self.dies_at = messages[self.dies_at :], None
                self._kill(child)
            send(messages)

        child.send = counted
        return child


@pytest.fixture(scope="module")
def head() -> SharedCritic:
    head = SharedCritic(32)
    torch.nn.init.normal_(head.score.weight)
    return head


@pytest.fixture(scope="module")
def generator(head: SharedCritic) -> Iterator[Mortal]:
    made = Mortal(llama(), PAD, head, slots=4)
    yield made
    made.close()


def test_the_bytes_are_those_of_the_local_generator_whenever_the_child_dies(generator: Mortal, head: Any) -> None:
    wanted = requests(values=True)
    expected = complete(LocalGenerator(llama(), PAD, head, slots=4), wanted)
    assert plain(complete(generator, wanted)) == plain(expected)
    assert len({c.finish_reason for c in expected}) == 2

    # in the middle of a weight update
    generator.dies_at = 5
    other = llama(seed=1)
    generator.update_weights(1, other.named_parameters())
    assert generator.died == 1
    local = LocalGenerator(other, PAD, head, slots=4)
    local.update_weights(1, other.named_parameters())
    changed = complete(local, wanted, 1)
    assert plain(changed) != plain(expected) and {c.version for c in changed} == {1}
    # in the middle of a poll: received completions are kept, the others are sampled again
    handles = generator.submit(wanted, 1)
    done = dict(generator.poll(None))
    assert 0 < len(done) < len(wanted)
    generator.kill()
    while len(done) < len(wanted):
        arrived = dict(generator.poll(None))
        assert not arrived.keys() & done.keys()
        done |= arrived
    assert generator.died == 2
    assert plain([done[handle] for handle in handles]) == plain(changed)
    assert generator.poll(None) == []


def test_errors_of_the_child_are_raised_with_their_message(generator: Mortal) -> None:
    start = dict(llama().named_parameters())
    broken = start["lm_head.weight"].detach().clone()
    broken[3] = torch.nan
    generator.update_weights(7, [("lm_head.weight", broken)])
    with pytest.raises(UserError, match=r"logits are not numbers \(NaN\)"):
        complete(generator, requests(2), 7)
    with pytest.raises(RuntimeError, match="LlamaForCausalLM: nonsense: no such parameter"):
        generator.update_weights(8, [("nonsense", broken)])
    with pytest.raises(ValueError, match="requests for weights of version 3: the generator holds version 8"):
        generator.submit(requests(1), 3)
    with pytest.raises(UserError, match="the prompt is empty"):
        generator.submit([Request((), 0)], 8)


def test_a_child_that_always_dies_is_an_error() -> None:
    class Doomed(Mortal):
        def _mortal(self, child: Any) -> Any:
            self._kill(child)
            return child

    # the child is killed right after its start, before it imports torch for seconds
    generator = Doomed(llama(), PAD)
    with pytest.raises(RuntimeError, match=r"3 workers of the generator died in a row, the last one: exit code -9"):
        generator.submit(requests(1), 0)
        generator.poll(None)
    generator.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_sent_as_tensors_or_as_a_folder(tmp_path: Any) -> None:
    check_adapters(lambda model: ProcessGenerator(model, PAD), tmp_path)


SCRIPT = """
from burnish.generate.process import ProcessGenerator
from burnish.generate.protocol import Request
from burnish.generate.sampling import Sampling
from generating import PAD, llama
if __name__ == "__main__":
    generator = ProcessGenerator(llama(), PAD)
    long = Sampling(max_new_tokens=100, min_new_tokens=100)
    wanted = [Request((9, 10), i, long) for i in range(64)]
    generator.submit(wanted, 0)
    print(generator._posts[0].worker.process.pid, flush=True)
    while True:
        generator.poll(None) or generator.submit(wanted, 0)
"""


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_child_ends_with_its_parent(number: signal.Signals, tmp_path: Any) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    job = subprocess.Popen(
        [sys.executable, str(tmp_path / "job.py")],
        env=environment_with_tests(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert job.stdout is not None
    child = int(job.stdout.readline())
    time.sleep(1)
    if number == signal.SIGINT:
        os.killpg(job.pid, number)  # as Ctrl-C in a terminal does
    else:
        job.send_signal(number)
    _, errors = job.communicate(timeout=60)
    assert gone(child)
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert "burnish-generator" not in errors and "leaked" not in errors
