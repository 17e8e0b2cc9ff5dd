"""The algorithms, one a file, named as recipes call them. This module does not import torch."""

from burnish.methods.settings import (
    DPOConfig,
    GRPOConfig,
    PPOConfig,
    PretrainConfig,
    ReinforceConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    StepValueConfig,
)
from burnish.protocols import MethodSpec
from burnish.types import Conversation, Labelled, Preference, Prompt, Ranking, Scored, Steps, Text

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
        "reinforce", ReinforceConfig, (Scored, Prompt), implementation="burnish.methods.policy_gradient:Reinforce"
    ),
    MethodSpec(
        "step_value",
        StepValueConfig,
        (Steps,),
        streams=True,
        implementation="burnish.methods.step_value:StepValue",
    ),
    MethodSpec("ppo", PPOConfig, (Prompt,), implementation="burnish.methods.policy_gradient:PPO"),
    MethodSpec("rloo", RLOOConfig, (Prompt,), implementation="burnish.methods.policy_gradient:RLOO"),
    MethodSpec("grpo", GRPOConfig, (Prompt,), implementation="burnish.methods.policy_gradient:GRPO"),
)

METHODS = {spec.name: spec for spec in _SPECS}
"""The methods that recipes call by their name alone."""
