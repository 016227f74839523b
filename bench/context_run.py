"""Draft and verify loops in plain PyTorch: rows of prompts in lockstep under one draft context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aspire_sglang.context.selection import SelectionConfig, token_scores_to_page_scores
from aspire_sglang.context.sparse import RefreshConfig, SparseContext
from bench.llama import Llama


@dataclass(frozen=True)
class Setting:
    """One draft context.

    Attributes:
        source: as in the configuration.
        page: tokens per page.
        tokens: budget.
        sink, last: tokens at either end that are always read.
        own_share, list_layers, group_layers, full_layers: see ``RefreshConfig``.
    """

    source: str
    page: int
    tokens: int
    sink: int = 16
    last: int = 128
    own_share: float = 0.5
    list_layers: int = 1
    group_layers: tuple[int, ...] = ()
    full_layers: int = 0

    def context(self, model: Llama, rows: int, length: int) -> SparseContext:
        """Empty lists for ``rows`` requests."""
        size = self.page
        return SparseContext(
            SelectionConfig(
                page_size=size,
                min_pages=self.tokens // size,
                ratio=0.0,
                sink_pages=max(self.sink // size, 1),
                last_pages=max(self.last // size, 1),
            ),
            RefreshConfig(
                self.source,  # type: ignore[arg-type]
                layer=(model.num_layers - 1) // 2,
                same_step=True,
                own_share=self.own_share,
                list_layers=self.list_layers,
                group_layers=self.group_layers,
                full_layers=self.full_layers,
            ),
            num_layers=model.num_layers,
            num_slots=rows,
            context_len=length,
            device=model.device,
        )


@dataclass
class Record:
    """What happened, one entry per verify of a row, in order.

    Attributes:
        accepted: ``[rounds, rows]`` drafts accepted.
        features: by name ``[rounds, rows, gamma]`` of every draft token.
    """

    accepted: list[Tensor] = field(default_factory=list)
    features: dict[str, list[Tensor]] = field(default_factory=dict)

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything as arrays."""
        found = {name: torch.stack(parts).cpu().numpy() for name, parts in self.features.items()}
        return {"accepted": torch.stack(self.accepted).cpu().numpy(), **found}


class Loops:
    """Rows of prompts in lockstep.

    Args:
        model: the model.
        prompts: equally many or fewer tokens each; a row per prompt and repeat.
        repeats: rows per prompt.
        room: tokens behind the longest prompt, drafts included.
    """

    def __init__(
        self, model: Llama, prompts: Sequence[Sequence[int]], repeats: int, room: int
    ) -> None:
        self.model = model
        self.rows = len(prompts) * repeats
        self.width = max(map(len, prompts)) + room
        shape = (self.rows, model.num_kv_heads, self.width, model.head_dim)
        self.cache = [
            (torch.zeros(shape, device=model.device), torch.zeros(shape, device=model.device))
            for _ in range(model.num_layers)
        ]
        self.lens = torch.tensor([len(p) for p in prompts for _ in range(repeats)])
        self.lens = self.lens.to(model.device)
        self.first = torch.zeros(self.rows, model._head.shape[0], device=model.device)
        # Scores of the prompt's last token by layer, for the first lists.
        self.votes = torch.zeros(model.num_layers, self.rows, self.width, device=model.device)
        for number, prompt in enumerate(prompts):
            self._prefill(prompt, slice(number * repeats, (number + 1) * repeats))

    def _prefill(self, prompt: Sequence[int], rows: slice) -> None:
        model, length = self.model, len(prompt)
        group = model.num_heads // model.num_kv_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache[layer]
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            keys[rows, :, :length], values[rows, :, :length] = k, v
            last = q[0, -1].unflatten(0, (-1, group))
            scores = torch.einsum("hgd,hld->hgl", last, k[0]) * model.head_dim**-0.5
            self.votes[layer, rows, :length] = scores.softmax(-1).amax((0, 1))
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, is_causal=True
            )
            return out.transpose(1, 2)

        tokens = torch.tensor([prompt], device=model.device)
        positions = torch.arange(length, device=model.device)[None]
        self.first[rows] = model.logits(model.forward(tokens, positions, attend)[:, -1])

    def run(
        self, setting: Setting, gamma: int, temperature: float, rounds: int, seed: int
    ) -> Record:
        """Draft and verify ``rounds`` times and record every verify."""
        run = _Run(self, setting, gamma, temperature, seed)
        for _ in range(rounds):
            run.round()
        return run.record


class _Run:
    def __init__(
        self, loops: Loops, setting: Setting, gamma: int, temperature: float, seed: int
    ) -> None:
        self.loops, self.model, self.gamma = loops, loops.model, gamma
        self.temperature = temperature
        self.context = setting.context(self.model, loops.rows, loops.width)
        self.slots = torch.arange(loops.rows, device=self.model.device)
        self.generator = torch.Generator(self.model.device).manual_seed(seed)
        self.committed = loops.lens.clone()
        self.bonus = self._draw(loops.first)[0]
        self.record = Record()
        self.own: list[Tensor] = []
        for layer in range(self.model.num_layers):
            if self.context.full_rows_vote(layer):
                self._vote(layer, loops.votes[layer][:, None], self.committed, full=True)

    def _probs(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return (logits / self.temperature).softmax(-1)

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        probs = self._probs(logits)
        return torch.multinomial(probs, 1, generator=self.generator)[:, 0], probs

    def round(self) -> None:
        """Draft ``gamma`` tokens in every row and verify them."""
        rows, gamma = self.loops.rows, self.gamma
        chain, dists = [self.bonus], []
        known: dict[str, list[Tensor]] = {}
        for k in range(gamma):
            logits = self._forward(chain[-1][:, None], k, self._draft_attention(k))[:, 0]
            token, probs = self._draw(logits)
            self._note(known, logits, token, probs)
            chain.append(token)
            dists.append(probs)
        chain_t = torch.stack(chain, dim=1)
        hidden = self._forward(chain_t, 0, self._verify_attention())
        target = self._probs(hidden)
        q, p = torch.stack(dists, dim=1), target[:, :gamma]
        drafts = chain_t[:, 1:, None]
        ratio = p.gather(-1, drafts)[..., 0] / q.gather(-1, drafts)[..., 0]
        kept = torch.rand(ratio.shape, generator=self.generator, device=ratio.device) < ratio
        accepted = kept.long().cumprod(dim=1).sum(dim=1)
        # The next token: from the residual at the first rejection, or from the target behind all.
        at = accepted.clamp(max=gamma - 1)[:, None, None].expand(-1, 1, q.shape[-1])
        residual = (p.gather(1, at) - q.gather(1, at))[:, 0].clamp(min=0)
        whole = accepted == gamma
        residual = torch.where(whole[:, None], target[:, gamma], residual)
        empty = residual.sum(-1) <= 0
        residual[empty] = p.gather(1, at)[empty, 0]
        self.bonus = torch.multinomial(residual, 1, generator=self.generator)[:, 0]
        self.committed = self.committed + accepted + 1
        self.record.accepted.append(accepted)
        overlap = torch.minimum(p, q).sum(-1)
        for name, parts in {**known, "overlap": list(overlap.unbind(1))}.items():
            self.record.features.setdefault(name, []).append(torch.stack(parts, dim=1))
        assert chain_t.shape == (rows, gamma + 1)

    def _note(
        self, known: dict[str, list[Tensor]], logits: Tensor, token: Tensor, probs: Tensor
    ) -> None:
        """What a server could know of a draft token when it is drawn."""
        scale = self.temperature or 1.0
        plain = (logits / scale).log_softmax(-1)
        top = plain.topk(2, dim=-1).values
        for name, value in {
            "token_prob": plain.gather(-1, token[:, None])[:, 0].exp(),
            "top_prob": top[:, 0].exp(),
            "gap": top[:, 0] - top[:, 1],
            "entropy": -(plain.exp() * plain).sum(-1),
            "mass": self.mass,
        }.items():
            known.setdefault(name, []).append(value)

    def _forward(self, tokens: Tensor, pending: int, attend: Any) -> Tensor:
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = self.committed[:, None] + pending + steps
        return self.model.logits(self.model.forward(tokens, positions, attend))

    def _write(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = self.loops.cache[layer]
        at = positions[:, None, :, None].expand(-1, k.shape[2], -1, k.shape[3])
        keys.scatter_(2, at, k.transpose(1, 2))
        values.scatter_(2, at, v.transpose(1, 2))

    def _attend(self, layer: int, q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Output ``[B, n, Hq, D]`` and probabilities ``[B, n, Hkv, group, W]``."""
        keys, values = self.loops.cache[layer]
        grouped = q.unflatten(2, (keys.shape[1], -1))
        scores = torch.einsum("bnhgd,bhld->bnhgl", grouped, keys) * q.shape[-1] ** -0.5
        probs = scores.masked_fill(~mask[:, :, None, None], -torch.inf).softmax(-1)
        return torch.einsum("bnhgl,bhld->bnhgd", probs, values).flatten(2, 3), probs

    def _draft_attention(self, pending: int) -> Any:
        positions = self.committed + pending
        seen = torch.arange(self.loops.width, device=positions.device) <= positions[:, None]
        masks: dict[int, Tensor] = {}
        self.mass = torch.ones(self.loops.rows, device=positions.device)

        def mask_of(layer: int) -> Tensor:
            layered = self.context.layer_lists is not None
            key = -1 if layered else self.context.group(layer)
            if key not in masks:
                masks[key] = self._masks(layer, positions)
            mask = masks[key][:, self.context.own_list(layer)] if layered else masks[key]
            return mask & seen

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._write(layer, positions[:, None], k, v)
            if not self.context.draft_rows_read_all(layer):
                return self._attend(layer, q, mask_of(layer)[:, None])[0]
            out, probs = self._attend(layer, q, seen[:, None])
            if self.context.draft_rows_vote(layer):
                tokens = probs[:, 0].flatten(1, 2).amax(1)
                if layer == self.context.refresh.layer:
                    # Attention that the list of the step before would have covered.
                    self.mass = (probs[:, 0] * mask_of(layer)[:, None, None]).sum(-1).mean((1, 2))
                self._vote(layer, tokens[:, None], positions + 1, full=False)
                masks.clear()
            return out

        return attend

    def _masks(self, layer: int, positions: Tensor) -> Tensor:
        """Positions listed for draft rows: ``[B, W]``, or ``[B, lists, W]``."""
        context, size = self.context, self.context.selection.page_size
        if context.layer_lists is not None:
            pages, counts = context.layer_lists.draft_pages(self.slots, positions)
            counts = counts[:, None].expand(-1, pages.shape[1])
        else:
            groups = len(context.refresh.voting_layers) or 1
            entries = self.slots * groups + context.group(layer)
            pages, counts = context.lists.draft_pages(entries, positions)
        valid = torch.arange(pages.shape[-1], device=pages.device) < counts[..., None]
        num_pages = -(-self.loops.width // size)
        listed = torch.zeros(
            *pages.shape[:-1], num_pages + 1, dtype=torch.bool, device=pages.device
        )
        listed.scatter_(-1, torch.where(valid, pages, num_pages), True)
        return listed[..., :num_pages].repeat_interleave(size, -1)[..., : self.loops.width]

    def _verify_attention(self) -> Any:
        steps = torch.arange(self.gamma + 1, device=self.committed.device)
        positions = self.committed[:, None] + steps
        seen = torch.arange(self.loops.width, device=steps.device) <= positions[..., None]
        self.own = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._write(layer, positions, k, v)
            out, probs = self._attend(layer, q, seen)
            if self.context.full_rows_vote(layer):
                voters = probs[:, [0, -1]].flatten(2, 3).amax(2)
                self._vote(layer, voters, positions[:, -1] + 1, full=True)
            return out

        return attend

    def _vote(self, layer: int, tokens: Tensor, lens: Tensor, *, full: bool) -> None:
        """Lists from token scores ``[B, voters, W]``."""
        context = self.context
        scores = token_scores_to_page_scores(
            tokens.mean(1)[:, None], context.selection.page_size, "max"
        )
        if context.shares_votes(layer):
            context.vote(self.slots, scores, lens, layer)
        if context.layer_lists is not None and full:
            self.own.append(scores)
            if context.completes_own(layer):
                context.layer_lists.set_own(self.slots, torch.stack(self.own, dim=1), lens)
                self.own = []
