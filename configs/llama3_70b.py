"""Llama 3 70B (The Llama 3 Herd of Models, arXiv:2407.21783, table 3)."""

from jaxrun.config import CheckpointConfig, Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig


def get_config() -> Config:
    return Config(
        train=TrainConfig(num_steps=1_200_000, batch_size=1024, seq_len=8192, accum_steps=1, eval_every=1000, eval_batches=16),
        model=ModelConfig(
            num_layers=80, d_model=8192, num_heads=64, num_kv_heads=8, d_ff=28672, vocab_size=128_256, rope_theta=500_000.0,
            dtype="bfloat16", remat="full",
        ),
        optim=OptimConfig(peak_lr=1.5e-4, warmup_steps=8000, final_lr_ratio=0.01, b2=0.95, weight_decay=0.1, clip_norm=1.0),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=8),
        data=DataConfig(source="data/tokens/*.bin", token_dtype="uint32", eval_split="tail", eval_fraction=0.0005),
        checkpoint=CheckpointConfig(every=500, keep=6),
    )  # fmt: skip
