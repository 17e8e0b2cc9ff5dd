"""Burnish post-trains language models, from continued pre-training to PPO, each method by one recipe."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.errors import UserError
    from burnish.methods.distill import Distill
    from burnish.methods.dpo import DPO
    from burnish.methods.policy_gradient import GRPO, PPO, RLOO, Reinforce
    from burnish.methods.pretrain import Pretrain
    from burnish.methods.reward import RewardModel
    from burnish.methods.sft import SFT
    from burnish.methods.step_value import StepValue
    from burnish.training.trainer import Trainer
    from burnish.types import Observation

__version__ = "0.1.0"
__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "RLOO",
    "SFT",
    "Distill",
    "Observation",
    "Pretrain",
    "Reinforce",
    "RewardModel",
    "StepValue",
    "Trainer",
    "UserError",
    "__version__",
]

_HOMES = {
    "DPO": "burnish.methods.dpo",
    "Distill": "burnish.methods.distill",
    "GRPO": "burnish.methods.policy_gradient",
    "Observation": "burnish.types",
    "PPO": "burnish.methods.policy_gradient",
    "Pretrain": "burnish.methods.pretrain",
    "RLOO": "burnish.methods.policy_gradient",
    "Reinforce": "burnish.methods.policy_gradient",
    "RewardModel": "burnish.methods.reward",
    "SFT": "burnish.methods.sft",
    "StepValue": "burnish.methods.step_value",
    "Trainer": "burnish.training.trainer",
    "UserError": "burnish.errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds to import and ``burnish --help`` needs none."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
