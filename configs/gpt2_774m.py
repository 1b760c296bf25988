"""GPT-2 large, 774M: the shape of Radford et al. 2019, with GPT-2 124M's recipe (0.5M tokens a step).

`jaxrun plan` aside, this wants one accelerator or more; set data.source to GPT-2 token shards (`*.bin`).
"""

from jaxrun.config import CheckpointConfig, Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig


def get_config() -> Config:
    return Config(
        train=TrainConfig(num_steps=19_560, batch_size=512, seq_len=1024, accum_steps=8, eval_every=250, eval_batches=20),
        model=ModelConfig(
            num_layers=36, d_model=1280, num_heads=20, d_ff=5120, vocab_size=50_257, norm="layernorm", positions="learned",
            mlp="gelu", bias=True, tied_embedding=True, init="gpt2", dtype="bfloat16", remat="dots",
        ),
        optim=OptimConfig(peak_lr=3e-4, warmup_steps=700, final_lr_ratio=0.0, b2=0.95, weight_decay=0.1, clip_norm=1.0),
        mesh=MeshConfig(data=1, fsdp=-1),
        data=DataConfig(source="data/fineweb10B/*.bin", eval_split="tail", eval_fraction=0.001),
        checkpoint=CheckpointConfig(every=500, keep=6),
    )  # fmt: skip
