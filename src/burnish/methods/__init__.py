"""The algorithms, one a file, named as recipes call them."""

METHODS = {
    "pretrain": "burnish.methods.pretrain:Pretrain",
    "sft": "burnish.methods.sft:SFT",
    "reward": "burnish.methods.reward:RewardModel",
    "dpo": "burnish.methods.dpo:DPO",
    "reinforce": "burnish.methods.reinforce:Reinforce",
    "step_value": "burnish.methods.step_value:StepValue",
    "ppo": "burnish.methods.ppo:PPO",
}
