"""Exact causal attention that never holds a matrix of all queries and keys.

Source: Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory"; backward as in Dao et al. 2022,
"FlashAttention", algorithm 4. Queries and keys are taken a chunk at a time; a running maximum and sum make the softmax
exact. Beyond the result and the gradients, memory is one tile of c x c scores, c about the square root of S.

B batch, H heads, S sequence, d head size, c chunk.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_MULTIPLE = 64


def chunked_attention(query: Tensor, key: Tensor, value: Tensor, chunk: int | None = None) -> Tensor:
    """softmax(query key^T / sqrt(d)) value, where a query sees the keys up to its own; all [B, H, S, d].

    Scores, sums and the products with them are float32 (float64 for float64), whatever the inputs' type and autocast.

    Args:
        chunk: rows of queries and keys at a time, at least 1; None: `default_chunk(S)`. It changes only rounding.

    Raises:
        ValueError: shapes or types differ, or chunk is below 1.
    """
    if query.ndim != 4 or not query.shape == key.shape == value.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key and value are {shapes}: must all be the same [B, H, S, d]")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value are {query.dtype}, {key.dtype}, {value.dtype}: must be of one type")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: must be at least 1")
    out: Tensor = _ChunkedAttention.apply(query, key, value, chunk or default_chunk(query.shape[2]))
    return out


def default_chunk(length: int) -> int:
    """The square root of a sequence's length, rounded up to a multiple of 64: below that, products are slow."""
    return CHUNK_MULTIPLE * max(1, math.ceil(math.sqrt(length) / CHUNK_MULTIPLE))


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, chunk: int) -> Tensor:
        work = _work_type(query)
        out = torch.empty_like(query)
        log_sums = torch.empty(query.shape[:3], device=query.device, dtype=work)
        with torch.autocast(query.device.type, enabled=False):
            for rows in _chunks(query.shape[2], chunk):
                q = query[:, :, rows].to(work)
                total = q.new_zeros(*q.shape[:3], 1)
                top = torch.full_like(total, -math.inf)
                mean = torch.zeros_like(q)
                for columns in _chunks(rows.stop, chunk):
                    scores = _scores(q, key[:, :, columns].to(work), is_diagonal=columns == rows)
                    # Never -inf: the first chunk of keys has one that every query sees.
                    higher = torch.maximum(top, scores.amax(-1, keepdim=True))
                    shrink = (top - higher).exp_()
                    weights = scores.sub_(higher).exp_()
                    total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
                    mean.mul_(shrink).add_(weights @ value[:, :, columns].to(work))
                    top = higher
                out[:, :, rows] = mean.div_(total)
                log_sums[:, :, rows] = total.log_().add_(top).squeeze(-1)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.chunk = chunk
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, log_sums = ctx.saved_tensors
        work = _work_type(query)
        scale = query.shape[3] ** -0.5
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=work) for x in (key, value))
        with torch.autocast(query.device.type, enabled=False):
            for rows in _chunks(query.shape[2], ctx.chunk):
                q, grad = query[:, :, rows].to(work), grad_out[:, :, rows].to(work)
                log_sum = log_sums[:, :, rows, None]
                along = (grad * out[:, :, rows]).sum(-1, keepdim=True)  # sum over keys of weight * grad_weight
                grad_q = torch.zeros_like(q)
                for columns in _chunks(rows.stop, ctx.chunk):
                    k = key[:, :, columns].to(work)
                    weights = _scores(q, k, is_diagonal=columns == rows).sub_(log_sum).exp_()
                    grad_value[:, :, columns] += weights.mT @ grad
                    grad_weights = grad @ value[:, :, columns].to(work).mT
                    grad_scores = weights.mul_(grad_weights.sub_(along)).mul_(scale)
                    grad_key[:, :, columns] += grad_scores.mT @ q
                    grad_q += grad_scores @ k
                grad_query[:, :, rows] = grad_q
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None


def _work_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _chunks(stop: int, chunk: int) -> Iterator[slice]:
    """[0, stop) in slices of `chunk`; the last may be shorter."""
    return (slice(start, min(start + chunk, stop)) for start in range(0, stop, chunk))


def _scores(query: Tensor, key: Tensor, *, is_diagonal: bool) -> Tensor:
    """[B, H, rows, columns], scaled; on the diagonal, keys after the query are -inf."""
    scores = (query @ key.mT).mul_(query.shape[3] ** -0.5)
    if is_diagonal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(future, -math.inf)
    return scores
