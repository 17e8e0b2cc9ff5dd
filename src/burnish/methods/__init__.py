"""The algorithms, one a file, named as recipes call them. This module does not import torch."""

from typing import get_args

from burnish.methods.settings import (
    DistillConfig,
    DPOConfig,
    EvalConfig,
    FilterConfig,
    GRPOConfig,
    JudgeConfig,
    PPOConfig,
    PretrainConfig,
    RankConfig,
    ReinforceConfig,
    ReviseConfig,
    RewardConfig,
    RLOOConfig,
    SampleConfig,
    ScoreConfig,
    SearchConfig,
    SFTConfig,
    StepValueConfig,
)
from burnish.protocols import MethodSpec, RowMethodSpec
from burnish.report.metrics import UNREVISED
from burnish.types import Conversation, Labelled, Preference, Prompt, Ranking, Row, Scored, Steps, Text

_SPECS = (
    MethodSpec(
        "pretrain",
        PretrainConfig,
        (Text,),
        streams=True,
        too_long="split",
        implementation="burnish.methods.pretrain:Pretrain",
    ),
    MethodSpec("sft", SFTConfig, (Conversation,), streams=True, implementation="burnish.methods.sft:SFT"),
    MethodSpec(
        "reward",
        RewardConfig,
        (Preference, Ranking),
        task="SEQ_CLS",
        streams=True,
        implementation="burnish.methods.reward:RewardModel",
    ),
    MethodSpec("dpo", DPOConfig, (Preference, Ranking, Labelled), implementation="burnish.methods.dpo:DPO"),
    MethodSpec(
        "reinforce",
        ReinforceConfig,
        (Scored, Prompt),
        environments=True,
        implementation="burnish.methods.policy_gradient:Reinforce",
    ),
    MethodSpec(
        "step_value",
        StepValueConfig,
        (Steps,),
        streams=True,
        implementation="burnish.methods.step_value:StepValue",
    ),
    MethodSpec(
        "distill",
        DistillConfig,
        (Prompt, Conversation),
        models=("teacher",),
        implementation="burnish.methods.distill:Distill",
    ),
    MethodSpec(
        "ppo",
        PPOConfig,
        (Prompt,),
        environments=True,
        implementation="burnish.methods.policy_gradient:PPO",
    ),
    MethodSpec(
        "rloo",
        RLOOConfig,
        (Prompt,),
        environments=True,
        implementation="burnish.methods.policy_gradient:RLOO",
    ),
    MethodSpec(
        "grpo",
        GRPOConfig,
        (Prompt,),
        environments=True,
        implementation="burnish.methods.policy_gradient:GRPO",
    ),
)

_SAMPLES = ("template", "precision", "trust_remote_code", "generation", "generator")
_ACTS = (*_SAMPLES, "reward", "tools", "environment")

_ROW_SPECS = (
    RowMethodSpec(
        "sample",
        SampleConfig,
        (Prompt,),
        outputs={"samples.jsonl": (Conversation, Scored), "ranked.jsonl": (Ranking,)},
        needs=("model",),
        takes=_ACTS,
        measures=("length", "stopped", "empty"),
        measures_with_rewards=("score", "length", "stopped", "empty", "ranked"),
        truncates=True,
        implementation="burnish.methods.sample:Sample",
    ),
    RowMethodSpec(
        "search",
        SearchConfig,
        (Prompt,),
        outputs={"steps.jsonl": (Steps,), "solutions.jsonl": (Conversation,), "trees.jsonl": ()},
        needs=("model",),
        takes=_SAMPLES,
        measures=("solved", "solutions", "value_error", "nodes", "depth", "sampled_tokens"),
        truncates=True,
        values=True,
        implementation="burnish.methods.search:Search",
    ),
    RowMethodSpec(
        "revise",
        ReviseConfig,
        (Prompt, Conversation),
        outputs={"revised.jsonl": (Conversation,), "pairs.jsonl": (Preference,), "revisions.jsonl": ()},
        needs=("model",),
        takes=_SAMPLES,
        files=("constitution",),
        measures=("length", "changed", "revisions", *(f"unrevised_{why}" for why in UNREVISED)),
        any_column=True,
        truncates=True,
        implementation="burnish.methods.revise:Revise",
    ),
    RowMethodSpec(
        "rank",
        RankConfig,
        (Ranking, Preference),
        outputs={"ranked.jsonl": (Ranking,), "pairs.jsonl": (Preference,), "answers.jsonl": ()},
        takes=("reward",),
        measures=("ranked", "raters", "rater_seconds", "rater_agreement"),
        measures_with_rewards=("ranked", "raters", "rater_seconds", "rater_agreement", "disagreement"),
        any_column=True,
        implementation="burnish.methods.rank:Rank",
    ),
    RowMethodSpec(
        "judge",
        JudgeConfig,
        (Preference, Ranking, Conversation),
        outputs={
            "pairs.jsonl": (Preference,),
            "scored.jsonl": (Conversation, Scored),
            "verdicts.jsonl": (),
            "failed.jsonl": (),
        },
        takes=("precision", "trust_remote_code"),
        models=("judge.model",),
        files=("principles",),
        measures=(
            *("position_bias", "ties", "mass_lost", "agreement", "kappa", "score"),
            *("calls", "cached", "judge_tokens", "cost", "judge_seconds", "failed"),
        ),
        any_column=True,
        implementation="burnish.methods.judge:Judge",
    ),
    RowMethodSpec(
        "score",
        ScoreConfig,
        (Conversation,),
        outputs={"scored.jsonl": (Conversation, Scored)},
        needs=("model", "reward"),
        takes=("template", "trust_remote_code"),
        measures=("score",),
        any_column=True,
        implementation="burnish.methods.score:Score",
    ),
    RowMethodSpec(
        "filter",
        FilterConfig,
        get_args(Row),
        outputs={"rows.jsonl": get_args(Row), "failed.jsonl": ()},
        measures=("passed",),
        any_column=True,
        implementation="burnish.methods.filter:Filter",
    ),
    RowMethodSpec(
        "eval",
        EvalConfig,
        (Text, Conversation, Preference, Ranking, Prompt),
        outputs={"measures.jsonl": (), "samples.jsonl": ()},
        needs=("model",),
        takes=_ACTS,
        models=("against", "reference"),
        kinds_with_rewards=(Prompt,),
        measures=("perplexity", "nll", "accuracy", "margin", "kl", "log_ratio", "win_rate", "length", "stopped"),
        measures_with_rewards=("score", "kl", "log_ratio", "win_rate", "length", "stopped"),
        held_out=True,
        truncates=True,
        implementation="burnish.methods.eval:Eval",
    ),
)

ROW_METHODS = {spec.name: spec for spec in _ROW_SPECS}
"""The methods that make rows."""

METHODS = {spec.name: spec for spec in _SPECS}
"""The methods that recipes call by their name alone."""
