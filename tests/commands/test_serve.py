"""`burnish serve`: what it loads, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from burnish.cli import app
from burnish.commands import serve
from burnish.errors import UserError
from burnish.serving.http import Service
from services import TOKEN, get, model_reward, post, running

FUNCTION = "def brevity(trajectories):\n    return [-float(len(t.text)) for t in trajectories]\n"
ROW = {"prompt": [{"role": "user", "content": "Hi"}], "messages": [{"role": "assistant", "content": "Hello"}]}
HEADERS = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def home(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a language model, a reward model with two labels, and a function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    monkeypatch.setenv("SHORT", "short")
    Path("base").symlink_to(tiny_folder)
    reward = model_reward()
    reward.model.save_pretrained("classifier")  # type: ignore[operator]
    reward.tokenizer.save_pretrained("classifier")
    Path("my_rewards.py").write_text(FUNCTION)
    return tmp_path


def about(service: Service[Any, Any]) -> dict[str, Any]:
    with running(service) as url:
        return get(f"{url}/health", headers=HEADERS).json()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reward", "clasifier"], "clasifier"),
        (["reward", "my_reward.py:brevity"], "my_reward.py"),
        (["reward", "my_rewards.py:brevty"], "defines no 'brevty' (did you mean 'brevity'?)"),
        (["reward", "my_rewards.py:brevity", "--normalize", "--label", "1"], "--label, --normalize: only for a model"),
        (["reward", "classifier", "--normalize"], "normalize: the reward model has no stored score_mean"),
        (["reward", "classifier", "--label", "good"], "label: the reward model has no label 'good'"),
        (
            ["reward", "classifier", "--token-env", "NO_SUCH"],
            "--token-env: the environment variable NO_SUCH is not set",
        ),
        (["reward", "classifier", "--token-env", "SHORT"], "the token in SHORT has 5 characters: expected at least 16"),
        (["reward", "my_rewards.py:brevity", "--host", "no.such.host.invalid"], "--host no.such.host.invalid: not an"),
        (["judge", "classifier"], "classifier is a reward model, which writes no text: use burnish serve reward"),
        (["reward", "base"], "base is a language model, which gives no score: use burnish serve judge base"),
        (["judge", "bas"], "bas"),
    ],
)
def test_mistakes(home: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2 and message in result.output, result.output
    assert "short" not in result.output.replace("SHORT", "")


def test_the_digest_says_what_scores_depend_on(home: Path) -> None:
    digests = [
        about(serve.reward(*arguments, **options))["digest"]
        for arguments, options in [
            (("classifier", TOKEN), {}),
            (("classifier", TOKEN), {"precision": "bf16"}),
            (("classifier", TOKEN), {"template": "text"}),
            (("my_rewards.py:brevity", TOKEN), {}),
        ]
    ]
    assert len(set(digests)) == 4
    Path("classifier").rename("moved")
    Path("my_rewards.py").write_text(FUNCTION.replace("-", "+"))
    assert about(serve.reward("moved", TOKEN))["digest"] == digests[0]
    assert about(serve.reward("my_rewards.py:brevity", TOKEN))["digest"] not in digests


def test_a_label_by_name_and_by_index(home: Path) -> None:
    names = ("LABEL_0", "0", None)
    scores = []
    for name in names:
        with running(serve.reward("classifier", TOKEN, label=name)) as url:
            body = {"version": 1, "trajectories": [ROW]}
            scores.append(post(f"{url}/score", json=body, headers=HEADERS).json()["scores"])
    assert scores[0] == scores[1] == scores[2]


def test_a_token_is_made_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(serve.token_in(None)) >= 32 and serve.token_in(None) != serve.token_in(None)
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    assert serve.token_in("REWARD_TOKEN") == TOKEN
    with pytest.raises(UserError, match="NO_SUCH"):
        serve.token_in("NO_SUCH")
