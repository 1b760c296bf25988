"""The peer: a plain PyTorch GPT with nanoGPT's recipe for tiny Shakespeare on a CPU.

    python scripts/bench/shakespeare_torch.py TEXT [--steps 2000] [--seed 1337] [--metrics FILE]

Characters as tokens, the last tenth held out; 4 layers of 4 heads, width 128, context 64; pre-norm blocks with
LayerNorm without bias, GELU, learned positions, tied head; GPT-2's initialisation; AdamW, betas 0.9 and 0.99,
weight decay 0.1 on all matrices (embeddings too), gradients clipped at 1; 100 steps of warm-up to 1e-3, half a
cosine down to 1e-4 at the last step; batches of 12 windows at random offsets. Not compiled, as nanoGPT's README has
it for a CPU; --compile compiles.

What differs from configs/shakespeare_cpu.py: positions, decay of the embedding, and how windows are drawn. The
held-out loss is taken over the same windows: all of the held-out text, one after another.

--metrics FILE gets JSON lines with jaxrun's keys: step, time (unix seconds), loss, tokens_per_sec, step_time_s; and
step, time, eval_loss.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
PEAK_LR, FINAL_LR, WARMUP_STEPS = 1e-3, 1e-4, 100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, bias=False)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH, bias=False)
        self.mlp_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.mlp_out = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        qkv = self.query_key_value(self.attention_norm(x_BTD)).view(B, T, 3, HEADS, D // HEADS)
        q_BNTH, k_BNTH, v_BNTH = qkv.permute(2, 0, 3, 1, 4)
        mixed_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        x_BTD = x_BTD + self.attention_out(mixed_BNTH.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.mlp_out(F.gelu(self.mlp_up(self.mlp_norm(x_BTD))))


class GPT(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def loss(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Cross entropy in nats per token."""
        x_BTD = self.tokens(inputs_BT) + self.positions.weight[: inputs_BT.shape[1]]
        logits_BTV = self.norm(self.blocks(x_BTD)) @ self.tokens.weight.T
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction=reduction)


def learning_rate(step: int, num_steps: int) -> float:
    """Of update `step`, the first being 1."""
    if step < WARMUP_STEPS:
        return PEAK_LR * step / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return FINAL_LR + (PEAK_LR - FINAL_LR) * (1 + math.cos(math.pi * done)) / 2


def read_characters(path: Path) -> tuple[torch.Tensor, int]:
    """The text as ids of its sorted characters, int64 [n], and how many there are."""
    text = path.read_text()
    characters = sorted(set(text))
    ids = {character: i for i, character in enumerate(characters)}
    return torch.tensor([ids[c] for c in text]), len(characters)


@torch.no_grad()
def held_out_loss(model: GPT, held_out: torch.Tensor) -> float:
    """Nats per token over all whole windows of `held_out`."""
    windows = (len(held_out) - 1) // CONTEXT
    inputs = held_out[: windows * CONTEXT].view(windows, CONTEXT)
    targets = held_out[1 : windows * CONTEXT + 1].view(windows, CONTEXT)
    pairs = zip(inputs.split(BATCH), targets.split(BATCH), strict=True)
    return sum(model.loss(x, y, "sum").item() for x, y in pairs) / targets.numel()


def train(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a line for every logged step and every evaluation."""
    torch.manual_seed(args.seed)
    tokens, vocab_size = read_characters(args.text)
    split = int(len(tokens) * 0.9)
    training, held_out = tokens[:split], tokens[split:]
    model = GPT(vocab_size)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.99))
    training_loss = torch.compile(model.loss) if args.compile else model.loss
    offsets_T = torch.arange(CONTEXT)

    logged, since = 0, time.perf_counter()
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        where_BT = torch.randint(len(training) - CONTEXT, (BATCH, 1)) + offsets_T
        loss = training_loss(training[where_BT], training[where_BT + 1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % args.log_every == 0 or step in (1, args.steps):
            step_time_s = (time.perf_counter() - since) / (step - logged)
            yield {"step": step, "time": time.time(), "loss": loss.item(), "step_time_s": step_time_s, "tokens_per_sec": BATCH * CONTEXT / step_time_s}  # fmt: skip
            logged, since = step, time.perf_counter()
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            paused = time.perf_counter()
            yield {"step": step, "time": time.time(), "eval_loss": held_out_loss(model, held_out)}
            since += time.perf_counter() - paused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="tiny Shakespeare's text file")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--log-every", type=int, default=20, help="steps between logged lines")
    parser.add_argument("--eval-every", type=int, default=250, help="steps between evaluations; 0: at the end only")
    parser.add_argument("--metrics", type=Path, help="file that gets a JSON line for each logged step")
    parser.add_argument("--compile", action="store_true", help="torch.compile the loss")
    args = parser.parse_args()
    started = time.perf_counter()
    with open(args.metrics or os.devnull, "w", buffering=1) as metrics:
        for line in train(args):
            metrics.write(json.dumps(line) + "\n")
            print("  ".join(f"{k} {v:.5g}" for k, v in line.items() if k != "time"), flush=True)
    print(f"{time.perf_counter() - started:.1f} s with PyTorch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
