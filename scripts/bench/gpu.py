"""Llama-shaped models in bfloat16 on one GPU: tokens/s, MFU and memory by attention and remat, next to PyTorch.

    python scripts/bench/gpu.py [--models 125M,1B,3B] [--steps 20] [--torch-python PYTHON] [--dry-run]

Every row is a process of its own, one after another: jaxrun's compiled step with each attention and each remat policy,
and a PyTorch Llama (transformers; SDPA, torch.compile, bfloat16 autocast). MFU counts as jaxrun does (`telemetry.flops`)
for both. A row that does not fit is reported as out of memory. --dry-run: shapes and programs are lowered here for a
tiny batch and nothing is run, which needs no GPU. At the end cost.py measures what guard and telemetry cost real runs of
the 125M shape on text of the standard library (--cost-steps 0: not at all).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _measure

# layers, width, heads, key/value heads, feed-forward, vocabulary, context, sequences a step
MODELS = {
    "125M": (12, 768, 12, 12, 2048, 32_000, 2048, 32),
    "1B": (16, 2048, 32, 8, 8192, 128_256, 4096, 8),
    "3B": (28, 3072, 24, 8, 8192, 128_256, 4096, 4),
}
VARIANTS = [(a, r) for a in ("cudnn", "blocked", "reference") for r in ("none", "dots", "attention", "full")]


def config_of(model: str, attention: str, remat: str) -> Any:
    from jaxrun.config import Config, ModelConfig, TrainConfig

    layers, width, heads, kv_heads, d_ff, vocab, context, batch = MODELS[model]
    return Config(
        train=TrainConfig(batch_size=batch, seq_len=context),
        model=ModelConfig(
            num_layers=layers, d_model=width, num_heads=heads, num_kv_heads=kv_heads, d_ff=d_ff, vocab_size=vocab,
            tied_embedding=True, dtype="bfloat16", attention=attention, remat=remat,
        ),
    )  # fmt: skip


def jaxrun_row(model: str, attention: str, remat: str, steps: int, dry_run: bool) -> dict[str, float]:
    if not dry_run:
        from jaxrun import launch

        launch.start()  # XLA's flags
    import jax
    import jax.numpy as jnp

    from jaxrun import sharding, step
    from jaxrun.config import MeshConfig
    from jaxrun.telemetry.flops import analytic_flops
    from jaxrun.telemetry.peaks import peak

    config = config_of(model, attention, remat)
    t = config.train
    mesh = sharding.make_mesh(sharding.resolve(MeshConfig(), 1), jax.devices()[:1])
    fns = step.build(config)
    if dry_run:
        text = step.lower_train_step(fns, t, mesh).as_text()
        return {"lines": len(text.splitlines())}
    compiled = step.compile_train_step(fns, t, mesh)
    state = step.initial_state(fns, mesh, 0)
    ids = jax.random.randint(jax.random.key(1), (t.batch_size, t.seq_len), 0, config.model.vocab_size, jnp.int32)
    batch = step.Batch(ids, jnp.roll(ids, -1, 1), jnp.ones(ids.shape, jnp.float32))
    placed = jax.device_put(batch, sharding.batch_sharding(ids.shape, mesh))
    controls = step.Controls(*jax.device_put((jnp.float32(1), jnp.float32(jnp.inf))))
    took = []
    for _ in range(steps + 3):
        started = time.perf_counter()
        state, metrics = compiled(state, placed, controls)
        jax.block_until_ready(metrics.loss)
        took.append(time.perf_counter() - started)
    step_s, of = statistics.median(took[3:]), peak(jax.devices()[0], "bfloat16", None)
    flops = analytic_flops(config.model, t.seq_len, t.batch_size * t.seq_len)
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {"tokens_per_s": t.batch_size * t.seq_len / step_s, "mfu": flops / step_s / of.flops if of else float("nan"), "peak_gb": memory / 1e9, "peak_flops": of.flops if of else float("nan")}  # fmt: skip


def torch_row(model: str, steps: int, flops: float, peak_flops: float) -> dict[str, float]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, heads, kv_heads, d_ff, vocab, context, batch = MODELS[model]
    network = LlamaForCausalLM(LlamaConfig(hidden_size=width, intermediate_size=d_ff, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=True, use_cache=False, max_position_embeddings=context, attn_implementation="sdpa")).cuda()  # fmt: skip
    forward = torch.compile(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    ids = torch.randint(vocab, (batch, context + 1), device="cuda")
    took = []
    for _ in range(steps + 3):
        started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            logits = forward(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - started)
    step_s = statistics.median(took[3:])
    return {"tokens_per_s": batch * context / step_s, "mfu": flops / step_s / peak_flops, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}  # fmt: skip


def child(python: str, row: dict[str, Any]) -> dict[str, float] | str:
    done = subprocess.run([python, __file__, "--one", json.dumps(row)], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    full = any(word in done.stderr for word in ("RESOURCE_EXHAUSTED", "OutOfMemoryError", "out of memory"))
    return "out of memory" if full else f"failed: {(done.stderr.strip().splitlines() or ['no word'])[-1][:100]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch and transformers")
    parser.add_argument("--cost-steps", type=int, default=200, help="of each run with and without guard, or telemetry")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a row, in a process of its own
    args = parser.parse_args()
    if args.one:
        row = json.loads(args.one)
        print(json.dumps((torch_row if row.pop("torch", False) else jaxrun_row)(**row)))
        return
    if args.dry_run:
        for model in args.models.split(","):
            for attention, remat in VARIANTS:
                if attention != "cudnn":  # refuses to be lowered where there is no GPU
                    found = jaxrun_row(model, attention, remat, 0, True)
                    print(f"{model} {attention} {remat}: {found['lines']:.0f} lines of StableHLO")
        return
    # This process keeps off the GPU: one that holds it leaves no memory to the others.
    from jaxrun.telemetry.flops import analytic_flops

    print(_measure.conditions(), flush=True)
    for model in args.models.split(","):
        rows, peak_flops = [], float("nan")
        for attention, remat in VARIANTS:
            found = child(sys.executable, {"model": model, "attention": attention, "remat": remat, "steps": args.steps, "dry_run": False})  # fmt: skip
            rows.append(cells(f"jaxrun, {attention}, remat {remat}", found))
            peak_flops = peak_flops if isinstance(found, str) else found["peak_flops"]
        config = config_of(model, "auto", "none")
        t = config.train
        flops = analytic_flops(config.model, t.seq_len, t.batch_size * t.seq_len)
        found = child(args.torch_python, {"torch": True, "model": model, "steps": args.steps, "flops": flops, "peak_flops": peak_flops})  # fmt: skip
        rows.append(cells("PyTorch Llama, SDPA, compiled", found))
        print(f"\n{model}\n\n{_measure.table(['', 'tokens/s', 'MFU', 'peak memory (GB)'], rows)}", flush=True)

    if args.cost_steps:
        cost(args.cost_steps)


def cost(steps: int) -> None:
    """The quickstart's data and schedule, in the shape of the 125M model."""
    here = Path(__file__).parent
    layers, width, heads, _, d_ff, vocab, context, batch = MODELS["125M"]
    shape = {
        "model.num_layers": layers, "model.d_model": width, "model.num_heads": heads, "model.d_ff": d_ff, "model.vocab_size": vocab,
        "model.dtype": "bfloat16", "model.scan_layers": "true", "train.seq_len": context, "train.batch_size": batch,
    }  # fmt: skip
    for what in ("guard", "telemetry"):
        command = [
            sys.executable, here / "cost.py", what, here.parents[1] / "configs/quickstart.py", f"--steps={steps}", "--rounds=4",
            *(f"--config.{path}={value}" for path, value in shape.items()),
        ]  # fmt: skip
        print(flush=True)
        subprocess.run([str(word) for word in command], check=False)  # a table less is no reason to lose the others


def cells(name: str, found: dict[str, float] | str) -> list[str]:
    if isinstance(found, str):
        return [name, found, "", ""]
    return [name, f"{found['tokens_per_s']:,.0f}", f"{found['mfu']:.1%}", f"{found['peak_gb']:.1f}"]


if __name__ == "__main__":
    main()
