"""The model again, in plain NumPy and float64, written from the papers' formulas: loops and matrices, nothing shared
with the code under test. Dimension letters as in `jaxrun.models.transformer`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxrun.config import ModelConfig

Array = np.ndarray


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Zhang & Sennrich 2019."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def layer_norm(x: Array, scale: Array, bias: Array | float, eps: float) -> Array:
    """Ba, Kiros & Hinton 2016."""
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * scale + bias


def gelu(x: Array) -> Array:
    """Hendrycks & Gimpel 2016, with the tanh that GPT-2 uses."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def frequency(pair: int, head_dim: int, cfg: ModelConfig) -> float:
    """Radians per position; Llama 3.1's scaling branch by branch, as Meta's `apply_scaling` has it."""
    freq = cfg.rope_theta ** (-2 * pair / head_dim)
    if not cfg.rope_llama3_scaling:
        return freq
    wavelength = 2 * math.pi / freq
    if wavelength < 8192 / 4:
        return freq
    if wavelength > 8192 / 1:
        return freq / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * freq / 8 + smooth * freq


def rope(x_TH: Array, cfg: ModelConfig) -> Array:
    """Su et al. 2021: the pair (i, i + H/2), as a complex number, times exp(i t frequency)."""
    T, H = x_TH.shape
    frequencies = np.array([frequency(i, H, cfg) for i in range(H // 2)])
    z = (x_TH[:, : H // 2] + 1j * x_TH[:, H // 2 :]) * np.exp(1j * np.outer(np.arange(T), frequencies))
    return np.concatenate([z.real, z.imag], -1)


def attention(q_TNH: Array, k_TKH: Array, v_TKH: Array) -> Array:
    """Causal, one query at a time; query head n reads key head n // (N / K)."""
    T, N, H = q_TNH.shape
    K = k_TKH.shape[1]
    out = np.empty_like(q_TNH)
    for n in range(N):
        k_TH, v_TH = k_TKH[:, n // (N // K)], v_TKH[:, n // (N // K)]
        for t in range(T):
            scores = k_TH[: t + 1] @ q_TNH[t, n] / math.sqrt(H)
            out[t, n] = softmax(scores) @ v_TH[: t + 1]
    return out


def _linear(x: Array, p: dict[str, Array], dims: int = 1) -> Array:
    y = np.tensordot(x, p["kernel"], dims)
    return y + p["bias"] if "bias" in p else y


def _norm(x: Array, p: dict[str, Array], kind: str, eps: float) -> Array:
    if kind == "rmsnorm":
        return rms_norm(x, p["scale"], eps)
    return layer_norm(x, p["scale"], p.get("bias", 0.0), eps)


def _block(x_TD: Array, p: dict[str, Any], cfg: ModelConfig) -> Array:
    a = p["attention"]
    h_TD = _norm(x_TD, p["attention_norm"], cfg.norm, cfg.norm_eps)
    q, k, v = _linear(h_TD, a["query"]), _linear(h_TD, a["key"]), _linear(h_TD, a["value"])
    if cfg.qk_norm:
        q, k = rms_norm(q, a["query_norm"]["scale"], cfg.norm_eps), rms_norm(k, a["key_norm"]["scale"], cfg.norm_eps)
    if cfg.positions == "rope":
        q = np.stack([rope(q[:, n], cfg) for n in range(q.shape[1])], 1)
        k = np.stack([rope(k[:, n], cfg) for n in range(k.shape[1])], 1)
    x_TD = x_TD + _linear(attention(q, k, v), a["out"], 2)
    f = p["feed_forward"]
    h_TD = _norm(x_TD, p["feed_forward_norm"], cfg.norm, cfg.norm_eps)
    if cfg.mlp == "gelu":
        return x_TD + _linear(gelu(_linear(h_TD, f["up"])), f["down"])
    return x_TD + _linear(silu(_linear(h_TD, f["gate"])) * _linear(h_TD, f["up"]), f["down"])


def _layer(tree: Any, i: int) -> Any:
    return {k: _layer(v, i) for k, v in tree.items()} if isinstance(tree, dict) else tree[i]


def logits(params: dict[str, Any], tokens_BT: Array, cfg: ModelConfig) -> Array:
    """[B, T, V] in float64, after the soft cap."""
    out = []
    for tokens_T in tokens_BT:
        x_TD = params["embedding"][tokens_T]
        if cfg.positions == "learned":
            x_TD = x_TD + params["positions"][: len(tokens_T)]
        for i in range(cfg.num_layers):
            x_TD = _block(x_TD, _layer(params["layers"], i), cfg)
        h_TD = _norm(x_TD, params["norm"], cfg.norm, cfg.norm_eps)
        head_DV = params["embedding"].T if cfg.tied_embedding else params["head"]
        logits_TV = h_TD @ head_DV
        cap = cfg.logit_soft_cap
        out.append(logits_TV if cap is None else cap * np.tanh(logits_TV / cap))
    return np.stack(out)


def loss(params: dict[str, Any], tokens_BT: Array, targets_BT: Array, weights_BT: Array, cfg: ModelConfig) -> float:
    """What training minimises: weighted mean cross entropy in nats, plus z_loss times the mean of log(Z)^2."""
    logits_BTV = logits(params, tokens_BT, cfg)
    peak_BT1 = logits_BTV.max(-1, keepdims=True)
    log_z_BT = np.log(np.exp(logits_BTV - peak_BT1).sum(-1)) + peak_BT1[..., 0]
    target_BT = np.take_along_axis(logits_BTV, targets_BT[..., None], -1)[..., 0]
    return float((weights_BT * (log_z_BT - target_BT + cfg.z_loss * log_z_BT**2)).sum() / weights_BT.sum())
