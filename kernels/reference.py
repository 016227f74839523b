"""What the kernels compute, in plain torch, slowly and in float64: for tests."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from aspire_sglang.context.layer_lists import LayerLists
from aspire_sglang.context.page_lists import PageLists
from aspire_sglang.context.selection import Reduction
from aspire_sglang.kernels.vote_rows import VOTERS, VoteRows


def logits_of(
    q: Tensor, k: Tensor, req_to_token: Tensor, slot: int, length: int, scale: float, cap: float
) -> Tensor:
    """Attention logits of one query ``q [Hq, D]`` over the first ``length`` positions of a request,
    ``[Hq, length]`` float64."""
    keys = k[req_to_token[slot, :length].long()].double()
    keys = keys.repeat_interleave(q.shape[0] // k.shape[1], dim=1)
    logits = torch.einsum("hd,nhd->hn", q.double(), keys) * scale
    return cap * torch.tanh(logits / cap) if cap else logits


def query_lse(
    q: Tensor, k: Tensor, req_to_token: Tensor, rows: VoteRows, scale: float, cap: float = 0.0
) -> Tensor:
    """Log-sum-exp of every voter over its visible context, ``[T, Hq]`` float32; 0 elsewhere."""
    lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
    for slot, voters in zip(rows.slots.tolist(), rows.voters.tolist(), strict=True):
        for voter in voters if slot >= 0 else []:
            if voter >= 0:
                seen = int(rows.positions[voter]) + 1
                logits = logits_of(q[voter], k, req_to_token, slot, seen, scale, cap)
                lse[voter] = logits.logsumexp(-1).float()
    return lse


def page_scores(
    q: Tensor,
    lse: Tensor,
    k: Tensor,
    req_to_token: Tensor,
    rows: VoteRows,
    out: Tensor,
    *,
    page_size: int,
    scale: float,
    reduction: Reduction = "max",
    logit_cap: float = 0.0,
) -> Tensor:
    """:func:`aspire_sglang.kernels.page_scores.page_scores`."""
    for row, (slot, voters) in enumerate(
        zip(rows.slots.tolist(), rows.voters.tolist(), strict=True)
    ):
        voters = [voter for voter in voters if voter >= 0 and slot >= 0]
        if not voters:
            continue
        length = max(int(rows.positions[voter]) + 1 for voter in voters)
        pages = -(-length // page_size)
        tokens = torch.zeros(pages * page_size, dtype=torch.float64, device=q.device)
        for voter in voters:
            seen = int(rows.positions[voter]) + 1
            logits = logits_of(q[voter], k, req_to_token, slot, seen, scale, logit_cap)
            probs = (logits - lse[voter].double()[:, None]).exp()
            merged = {"max": probs.amax(0), "mean": probs.mean(0), "sum": probs.sum(0)}[reduction]
            tokens[:seen] += merged / len(voters)
        out[row, :pages] = tokens.view(pages, page_size).sum(-1).float()
    return out


def page_lse(
    q: Tensor,
    k: Tensor,
    req_to_token: Tensor,
    rows: VoteRows,
    out: Tensor,
    *,
    page_size: int,
    scale: float,
    lse: Tensor | None = None,
    logit_cap: float = 0.0,
) -> Tensor:
    """:func:`aspire_sglang.kernels.page_lse.page_lse`."""
    for row, slot in enumerate(rows.slots.tolist()):
        voters: list[int] = rows.voters[row].tolist()
        if slot < 0 or max(voters) < 0:
            continue
        length = max(int(rows.positions[voter]) + 1 for voter in voters if voter >= 0)
        pages = -(-length // page_size)
        for side in range(VOTERS):
            if voters[side] < 0:
                continue
            seen = int(rows.positions[voters[side]]) + 1
            logits = logits_of(q[voters[side]], k, req_to_token, slot, seen, scale, logit_cap)
            padded = torch.nn.functional.pad(logits, (0, pages * page_size - seen), value=-math.inf)
            values = padded.unflatten(-1, (pages, page_size)).logsumexp(-1)
            if lse is not None:
                values -= lse[voters[side]].double()[:, None]
            values = values.unflatten(0, (out.shape[2], -1)).amax(1)
            out[row, side, :, :pages] = values.float()
    return out


def select_pages(
    page_scores: Tensor, context_lens: Tensor, slots: Tensor, lists: PageLists
) -> None:
    """:func:`aspire_sglang.kernels.page_selection.select_pages`."""
    config = lists.config
    greatest = torch.finfo(torch.float32).max
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        pages = config.num_pages(int(context_lens[row]))
        scores = page_scores[row, :pages].nan_to_num(-greatest, greatest, -greatest).tolist()
        forced = {
            p for p in range(pages) if p < config.sink_pages or p >= pages - config.last_pages
        }
        # A stable sort: of equal scores the lowest page comes first.
        ranked = sorted((p for p in range(pages) if p not in forced), key=lambda p: -scores[p])
        count = min(config.budget_pages(pages), pages)
        chosen = sorted(forced | set(ranked[: count - len(forced)]))
        lists.pages[slot] = -1
        lists.pages[slot, :count] = torch.tensor(chosen, dtype=torch.int32)
        lists.counts[slot] = count
        lists.built_for[slot] = int(context_lens[row])


def select_shared(
    page_scores: Tensor, context_lens: Tensor, slots: Tensor, lists: LayerLists
) -> None:
    """:func:`aspire_sglang.kernels.layer_selection.select_shared`."""
    config, width = lists.config, lists.ranked.shape[1]
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        pages = config.num_pages(int(context_lens[row]))
        free, forced = _ranked_pages(page_scores[row], pages, lists)
        total = min(config.budget_pages(pages), pages)
        best = [*forced, *free][: min(total, width)]
        lists.ranked[slot, : len(best)] = torch.tensor(best, dtype=torch.int32)
        lists.ranked_counts[slot], lists.totals[slot] = len(best), total
        lists.built_for[slot] = int(context_lens[row])


def select_own(page_scores: Tensor, context_lens: Tensor, slots: Tensor, lists: LayerLists) -> None:
    """:func:`aspire_sglang.kernels.layer_selection.select_own`."""
    config = lists.config
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        pages = config.num_pages(int(context_lens[row]))
        spare = config.budget_pages(pages) - config.sink_pages - config.last_pages
        # Python rounds halves to even as well.
        wanted = min(round(lists.own_share * spare), lists.own.shape[2])
        for number in range(lists.num_lists):
            free, _ = _ranked_pages(page_scores[number, row], pages, lists)
            best = torch.tensor(free[:wanted], dtype=torch.int32)
            lists.own[slot, number, : len(best)] = best
            lists.own_counts[slot] = len(best)


def _ranked_pages(scores: Tensor, pages: int, lists: LayerLists) -> tuple[list[int], list[int]]:
    """The free pages of a context, best first, and the others in order."""
    config, greatest = lists.config, torch.finfo(torch.float32).max
    values = scores[:pages].nan_to_num(-greatest, greatest, -greatest).tolist()
    free = [p for p in range(pages) if config.sink_pages <= p < pages - config.last_pages]
    forced = [page for page in range(pages) if page not in free]
    # A stable sort: of equal scores the lowest page comes first.
    return sorted(free, key=lambda page: -values[page]), forced


def build_tables(
    req_to_token: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    draft: Tensor,
    lists: PageLists,
    table: Tensor,
    cache_seqlens: Tensor,
    *,
    kv_page_size: int = 1,
    padding_len: int = 0,
) -> None:
    """:func:`aspire_sglang.kernels.page_tables.build_tables`."""
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            cache_seqlens[row] = padding_len
            table[row, : min(padding_len, 1)] = 0
            continue
        positions = torch.arange(int(context_lens[row]), device=table.device)
        if draft[row]:
            found, lens = lists.draft_positions(
                torch.tensor([slot], device=table.device), context_lens[row : row + 1] - 1
            )
            positions = found[0, : int(lens[0])]
        entries = req_to_token[slot, positions][::kv_page_size] // kv_page_size
        table[row, : entries.shape[0]] = entries
        cache_seqlens[row] = positions.shape[0]


def accept_greedy(
    target_tokens: Tensor,
    qo_indptr: Tensor,
    slots: Tensor,
    draft: Tensor,
    drafts: Tensor,
    pending: Tensor,
    bonus: Tensor,
    seq_lens: Tensor,
    tokens: Tensor,
    accept_len: Tensor,
) -> None:
    """:func:`aspire_sglang.kernels.greedy_accept.accept_greedy`."""
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        target = target_tokens[int(qo_indptr[row]) :].tolist()
        known = int(pending[slot])
        tokens[row] = 0
        if draft[row]:
            accept_len[row] = 0
            if known < drafts.shape[1]:
                drafts[slot, known] = target[0]
                pending[slot] += 1
            continue
        accepted = 0
        while accepted < known and int(drafts[slot, accepted]) == target[accepted]:
            accepted += 1
        tokens[row, : accepted + 1] = torch.tensor(target[: accepted + 1])
        accept_len[row] = accepted + 1
        seq_lens[row] += accepted + 1
        bonus[slot] = target[accepted]
        pending[slot] = 0


def philox(key: int, counter: np.ndarray) -> np.ndarray:
    """Philox4x32-10 of Salmon et al. 2011: ``[..., 4]`` uint32 words of 128-bit counters
    ``[..., 4]`` uint32."""
    words = counter.astype(np.uint64)
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        right = words[..., 0] * np.uint64(0xD2511F53)
        left = words[..., 2] * np.uint64(0xCD9E8D57)
        mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
        words = np.stack(
            [
                (left >> shift) ^ words[..., 1] ^ np.uint64(low),
                left & mask,
                (right >> shift) ^ words[..., 3] ^ np.uint64(high),
                right & mask,
            ],
            axis=-1,
        )
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return words.astype(np.uint32)


def exponentials(key: int, position: int, vocab: int) -> np.ndarray:
    """``[V]`` float64 Exp(1) variates of :mod:`aspire_sglang.kernels.sample_tokens`."""
    token = np.arange(vocab)
    block, lane = token // 2048, token % 2048
    counter = np.zeros((vocab, 4), dtype=np.uint32)
    counter[:, 0] = block * 1024 + lane % 1024
    counter[:, 1] = position
    words = philox(key, counter).astype(np.float64)
    far = lane >= 1024
    high = np.where(far, words[:, 2], words[:, 0])
    low = np.where(far, words[:, 3], words[:, 1])
    uniform = np.clip(high * 2.0**-32 + low * 2.0**-64, 5e-20, 0.99999994)
    return -np.log1p(-uniform)


def sample_scores(logits: Tensor, temperature: float, key: int, position: int) -> Tensor:
    """``[V]`` float64 whose argmax :func:`sample_tokens` chooses for one query token."""
    if temperature == 0.0:
        return logits.double()
    noise = torch.from_numpy(exponentials(key, position, logits.shape[0]))
    return logits.double() / temperature - noise.log()
