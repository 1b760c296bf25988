"""The quickstart learns more than which byte follows which."""

from pathlib import Path

import numpy as np
import pytest

from jaxrun import config as config_lib
from jaxrun.data import open_dataset

from .harness import REPOSITORY, Place, eval_lines, lines

QUICKSTART = REPOSITORY / "configs" / "quickstart.py"


def bigram_nats(counts: np.ndarray, inputs: np.ndarray, targets: np.ndarray) -> float:
    """Cross-entropy in nats per token of p(b | a) = (count(a, b) + 1) / (count(a) + V), on pairs (a, b)."""
    logp = np.log((counts + 1) / (counts.sum(1, keepdims=True) + len(counts)))
    return float(-logp[inputs, targets].mean())


@pytest.mark.slow
def test_its_held_out_loss_is_below_a_bigram_models(place: Place, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    options = [
        f"--config.data.cache_dir={cache}",
        "--config.train.num_steps=100",
        "--config.telemetry.tensorboard=false",
    ]
    with place.train(tmp_path / "run", *options, config=QUICKSTART) as trainer:
        trainer.finish()
    cfg = config_lib.load(tmp_path / "run" / "config.json")
    t = cfg.train
    dataset = open_dataset(cfg.data, seq_len=t.seq_len, vocab_size=cfg.model.vocab_size, seed=t.seed)

    trained = np.asarray(dataset.train_tokens()[:]).astype(np.int64)
    vocab_size = cfg.model.vocab_size
    pairs = np.bincount(trained[:-1] * vocab_size + trained[1:], minlength=vocab_size**2)
    counts = pairs.reshape(vocab_size, vocab_size)
    on_training_set = bigram_nats(counts, trained[:-1], trained[1:])
    # The very tokens that the run was evaluated on, and all that there are.
    evaluated = [dataset.eval_rows(j, range(t.batch_size), t.batch_size) for j in range(t.eval_batches)]
    assert all((rows.weights == 1).all() for rows in evaluated)
    on_evaluated = bigram_nats(
        counts, np.concatenate([r.inputs for r in evaluated]), np.concatenate([r.targets for r in evaluated])
    )
    held_out = np.asarray(dataset.eval_tokens()[:])
    on_held_out = bigram_nats(counts, held_out[:-1], held_out[1:])

    loss = eval_lines(tmp_path / "run")[-1]["eval_loss"]
    last = np.mean([line["loss"] for line in lines(tmp_path / "run")[-3:]])
    print(f"bigram: {on_evaluated:.3f} evaluated, {on_held_out:.3f} held out, {on_training_set:.3f} training set")
    print(f"quickstart after {t.num_steps} steps: {loss:.3f} held out, {last:.3f} training")
    assert loss < min(on_evaluated, on_held_out, on_training_set)
    assert last < on_training_set
