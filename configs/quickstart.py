"""Two minutes on a laptop: a byte-level model of the Python standard library's own text."""

from jaxrun.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimConfig, TrainConfig


def get_config() -> Config:
    return Config(
        train=TrainConfig(num_steps=250, batch_size=16, seq_len=128, log_every=10, eval_every=100, eval_batches=8),
        model=ModelConfig(num_layers=4, d_model=128, num_heads=4, d_ff=384, vocab_size=256, scan_layers=False),
        optim=OptimConfig(peak_lr=3e-3, warmup_steps=30, weight_decay=0.1, clip_norm=1.0),
        data=DataConfig(source="stdlib"),
        checkpoint=CheckpointConfig(every=100, keep=3),
    )
