"""Llama 3.2 3B's shape (28 layers, tied embedding), as Meta released it."""

from jaxrun.config import CheckpointConfig, Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig


def get_config() -> Config:
    return Config(
        train=TrainConfig(num_steps=100_000, batch_size=256, seq_len=8192, accum_steps=1, eval_every=1000, eval_batches=16),
        model=ModelConfig(
            num_layers=28, d_model=3072, num_heads=24, num_kv_heads=8, d_ff=8192, vocab_size=128_256, rope_theta=500_000.0, tied_embedding=True,
            dtype="bfloat16", remat="dots",
        ),
        optim=OptimConfig(peak_lr=3e-4, warmup_steps=2000, final_lr_ratio=0.01, b2=0.95, weight_decay=0.1, clip_norm=1.0),
        mesh=MeshConfig(data=1, fsdp=-1),
        data=DataConfig(source="data/tokens/*.bin", token_dtype="uint32", eval_split="tail", eval_fraction=0.0005),
        checkpoint=CheckpointConfig(every=500, keep=6),
    )  # fmt: skip
