"""The algorithms, one a file, named as recipes call them."""

METHODS = {
    "pretrain": "burnish.methods.pretrain:Pretrain",
    "sft": "burnish.methods.sft:SFT",
    "reward": "burnish.methods.reward:RewardModel",
    "reinforce": "burnish.methods.reinforce:Reinforce",
    "ppo": "burnish.methods.ppo:PPO",
}
