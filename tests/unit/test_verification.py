"""Accept rules: exact against a sequential oracle, and in distribution against the target."""

import pytest
import torch
from scipy.stats import chisquare

from aspire_sglang.sampling import (
    Coupling,
    DraftProbs,
    SamplingRows,
    draw,
    flat_draft_rows,
    gumbel_noise,
    sample_coupled,
    sample_draft,
    target_probs,
    uniforms,
    verify,
    verify_coupled,
    verify_greedy,
    verify_rejection,
)

VOCAB = 8
DEPTH = 3
RUNS = 40_000
P_LIMIT = 0.001


# --- sequential oracle ---------------------------------------------------------------------------


def oracle_greedy(target, drafts):
    """One request: its target tokens and its drafts, as lists."""
    out = []
    for draft, token in zip(drafts, target, strict=False):
        if draft != token:
            return [*out, token]
        out.append(draft)
    return [*out, target[len(drafts)]]


def oracle_draw(weights, u):
    total, mass, last = sum(weights), 0.0, None
    for token, weight in enumerate(weights):
        mass += weight
        if weight > 0:
            last = token
            if mass > u * total:
                return token
    return last


def oracle_rejection(p, q, drafts, u):
    """One request: rows of p (k + 1) and q (k), its drafts, its uniforms (G + 1)."""
    out = []
    for j, draft in enumerate(drafts):
        if not u[j] * q[j][draft] < p[j][draft]:
            residual = [max(a - b, 0.0) for a, b in zip(p[j], q[j], strict=True)]
            return [*out, oracle_draw(residual if sum(residual) > 1e-7 else p[j], u[-1])]
        out.append(draft)
    return [*out, oracle_draw(p[len(drafts)], u[-1])]


# --- batches -------------------------------------------------------------------------------------


def ragged(num_drafts):
    return torch.nn.functional.pad((num_drafts + 1).cumsum(0), (1, 0))


def rows_of(verified):
    return [t[:n] for t, n in zip(verified.tokens.tolist(), verified.accept_len, strict=True)]


def random_batch(seed, n=50, vocab=VOCAB, depth=5):
    g = torch.Generator().manual_seed(seed)
    num_drafts = torch.randint(0, depth + 1, (n,), generator=g)
    indptr = ragged(num_drafts)
    drafts = torch.randint(0, vocab, (n, depth), generator=g)
    drafts[torch.arange(depth) >= num_drafts.view(-1, 1)] = -1
    return g, drafts, num_drafts, indptr


@pytest.mark.parametrize("seed", range(5))
def test_greedy_equals_oracle(seed):
    g, drafts, num_drafts, indptr = random_batch(seed, vocab=2)
    target = torch.randint(0, 2, (int(indptr[-1]),), generator=g)
    expected = [
        oracle_greedy(target[indptr[i] : indptr[i + 1]].tolist(), drafts[i, :k].tolist())
        for i, k in enumerate(num_drafts.tolist())
    ]
    for rule in (verify_greedy, verify_coupled):
        result = rule(target, drafts, num_drafts, indptr)
        assert rows_of(result) == expected
        beyond = torch.arange(drafts.shape[1] + 1) >= result.accept_len.view(-1, 1)
        assert (result.tokens[beyond] == 0).all()


def test_rows_outside_the_ranges_do_not_matter():
    _, drafts, num_drafts, indptr = random_batch(3, vocab=2)
    target = torch.randint(0, 2, (int(indptr[-1]) + 9,), generator=torch.Generator())
    inner = verify_greedy(target[4:-5], drafts, num_drafts, indptr)
    outer = verify_greedy(target, drafts, num_drafts, indptr + 4)
    assert torch.equal(inner.tokens, outer.tokens)


def random_probs(shape, generator, zeros=0.3):
    probs = torch.rand(*shape, VOCAB, generator=generator)
    keep = torch.rand(probs.shape, generator=generator) > zeros
    keep[..., 0] = True
    probs = probs * keep
    return probs / probs.sum(-1, keepdim=True)


@pytest.mark.parametrize("with_token_probs", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_rejection_equals_oracle(seed, with_token_probs):
    g, drafts, num_drafts, indptr = random_batch(seed)
    p = random_probs((int(indptr[-1]),), g)
    stored = random_probs((int(num_drafts.sum()),), g, zeros=0.0).bfloat16()
    rows = flat_draft_rows(num_drafts, drafts.shape[1])
    q = stored.double() / stored.double().sum(-1, keepdim=True)
    u = uniforms((len(num_drafts), drafts.shape[1] + 1), generator=g)
    token_probs = None
    if with_token_probs:
        token_probs = q[rows.clamp(max=len(q) - 1), drafts.clamp(min=0)].float()
    result = verify_rejection(
        p, DraftProbs(stored, rows, token_probs), drafts, num_drafts, indptr, u
    )
    p, q, u = p.double(), q.tolist(), u.tolist()
    for i, k in enumerate(num_drafts.tolist()):
        first = int(indptr[i])
        expected = oracle_rejection(
            p[first : first + k + 1].tolist(),
            [q[rows[i, j]] for j in range(k)],
            drafts[i, :k].tolist(),
            u[i],
        )
        assert rows_of(result)[i] == expected


def test_no_drafts_at_all():
    p = random_probs((4,), torch.Generator().manual_seed(0))
    drafts = torch.empty(4, 0, dtype=torch.int64)
    zero = torch.zeros(4, dtype=torch.int64)
    u = uniforms((4, 1), generator=torch.Generator().manual_seed(1))
    empty = DraftProbs(torch.empty(0, VOCAB), drafts)
    for draft_probs in (None, empty):
        result = verify_rejection(p, draft_probs, drafts, zero, ragged(zero), u)
        assert torch.equal(result.tokens.view(-1), draw(p, u[:, 0]))
        assert result.accept_len.tolist() == [1] * 4
    wide = torch.full((4, 2), -1)
    result = verify_rejection(p, DraftProbs(torch.empty(0, VOCAB), wide), wide, zero, ragged(zero))
    assert result.accept_len.tolist() == [1] * 4


def test_impossible_tokens_are_never_emitted():
    """Uniforms of exactly 0, NaN in foreign pool rows, and residuals without mass."""
    p = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.5]])
    stored = torch.tensor([[0.5, 0.5, 0.0], [float("nan")] * 3])
    drafts = torch.tensor([[0]])
    one = torch.tensor([1])
    for u in (0.0, 0.5, 1 - 2.0**-53):
        uniform = torch.full((1, 2), u, dtype=torch.float64)
        result = verify_rejection(
            p, DraftProbs(stored, torch.tensor([[0]])), drafts, one, ragged(one), uniform
        )
        assert rows_of(result) == [[2]]
    # A token that is (nearly) as likely under p as under q is rejected by rounding at most; then
    # (p - q)+ is empty and p takes over.
    p = torch.tensor([[0.5, 0.5, 0.0]] * 2)
    claimed = DraftProbs(
        torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0]]), torch.tensor([[0.6]])
    )
    uniform = torch.tensor([[0.99, 0.7]])
    assert rows_of(verify_rejection(p, claimed, drafts, one, ragged(one), uniform)) == [[1]]


def test_draw_edges():
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0]])
    for u, token in ((0.0, 1), (0.33, 1), (0.34, 3), (1 - 2.0**-53, 3), (1.0, 3)):
        assert draw(weights, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


# --- distributions -------------------------------------------------------------------------------


def chains():
    """Pairs of target and draft Markov chains ``[V, V]``."""
    g = torch.Generator().manual_seed(7)
    p = random_probs((VOCAB,), g, zeros=0.0)
    far = torch.softmax(3 * torch.randn(VOCAB, VOCAB, generator=g), -1)
    half = torch.arange(VOCAB) < VOCAB // 2
    disjoint_p = p * half / (p * half).sum(-1, keepdim=True)
    disjoint_q = p * ~half / (p * ~half).sum(-1, keepdim=True)
    logits = torch.randn(VOCAB, VOCAB, generator=g)
    top_k = target_probs(
        logits, SamplingRows.build([1.0] * VOCAB, [3] * VOCAB, [1.0] * VOCAB, [0.0] * VOCAB)
    )
    peaked = torch.softmax(torch.eye(VOCAB).roll(1, 0) * 6, -1)
    return {
        "same": (p, p),
        "far": (p, far),
        "disjoint": (disjoint_p, disjoint_q),
        "top-k": (top_k, p),
        "peaked": (peaked, p),
        "peaked draft": (p, peaked),
    }


CHAINS = chains()


def draft_from(q, n, generator):
    """Ancestral drafts of random length from state 0, in the module's layout."""
    num_drafts = torch.randint(0, DEPTH + 1, (n,), generator=generator)
    state, tokens, stored, probs = torch.zeros(n, dtype=torch.int64), [], [], []
    for _ in range(DEPTH):
        sample = sample_draft(q[state], generator=generator)
        state = sample.tokens
        tokens.append(sample.tokens)
        stored.append(sample.stored)
        probs.append(sample.token_probs)
    pool = torch.stack(stored, 1).flatten(0, 1)
    rows = torch.arange(n * DEPTH).view(n, DEPTH)
    drafts = torch.stack(tokens, 1)
    drafts[torch.arange(DEPTH) >= num_drafts.view(-1, 1)] = -1
    return drafts, num_drafts, DraftProbs(pool, rows, torch.stack(probs, 1))


def flat_states(drafts, num_drafts):
    """Chain state (last token) in front of every flat row."""
    states = torch.cat([torch.zeros(len(drafts), 1, dtype=torch.int64), drafts], 1)
    return states[torch.arange(DEPTH + 1) <= num_drafts.view(-1, 1)]


def completed(verified, p, generator):
    """The first ``DEPTH`` tokens of each run, extended by plain sampling from the target."""
    state = torch.zeros(len(verified.tokens), dtype=torch.int64)
    out = []
    for j in range(DEPTH):
        plain = torch.multinomial(p[state], 1, generator=generator).view(-1)
        state = torch.where(j < verified.accept_len, verified.tokens[:, j], plain)
        out.append(state)
    return torch.stack(out, 1)


def p_values(tokens, p):
    """Chi-square p-value of the token at each depth, and of the first two jointly."""
    marginal, result = torch.eye(VOCAB, dtype=torch.float64)[0], []
    for j in range(DEPTH):
        marginal = marginal @ p.double()
        result.append(goodness(torch.bincount(tokens[:, j], minlength=VOCAB), marginal))
    joint = (p.double()[0].view(-1, 1) * p.double()).flatten()
    pairs = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2)
    result.append(goodness(pairs, joint))
    return result


def goodness(counts, probs):
    assert (counts[probs == 0] == 0).all()
    counts, expected = counts[probs > 0].double(), probs[probs > 0] * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum().view(1)])
        expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    expected = expected * (counts.sum() / expected.sum())
    return chisquare(counts.numpy(), expected.numpy()).pvalue if len(counts) > 1 else 1.0


@pytest.mark.parametrize("name", list(CHAINS))
def test_rejection_has_the_target_distribution(name):
    p, q = CHAINS[name]
    g = torch.Generator().manual_seed(11)
    drafts, num_drafts, draft_probs = draft_from(q, RUNS, g)
    states = flat_states(drafts, num_drafts)
    result = verify_rejection(
        p[states], draft_probs, drafts, num_drafts, ragged(num_drafts), generator=g
    )
    assert min(p_values(completed(result, p, g), p)) > P_LIMIT
    accepted = (result.accept_len - 1).sum() / num_drafts.sum()
    if name == "same":  # only the rounding of q costs acceptance
        assert accepted > 0.99
    if name == "disjoint":
        assert accepted == 0


def test_point_mass_drafts_have_the_target_distribution():
    p, q = CHAINS["far"]
    g = torch.Generator().manual_seed(12)
    best = q.argmax(-1)
    first = best[torch.zeros(RUNS, dtype=torch.int64)]
    drafts = torch.stack([first, best[first], best[best[first]]], 1)
    num_drafts = torch.full((RUNS,), DEPTH)
    states = flat_states(drafts, num_drafts)
    result = verify_rejection(p[states], None, drafts, num_drafts, ragged(num_drafts), generator=g)
    assert min(p_values(completed(result, p, g), p)) > P_LIMIT
    assert (result.accept_len > 1).any()


def equality_rule(p, draft_probs, drafts, num_drafts, indptr, generator):
    """Wrong: accept a draft that equals a target sample, else draw *again* from the target."""
    samples = torch.multinomial(p, 1, generator=generator).view(-1)
    result = verify_greedy(samples, drafts, num_drafts, indptr)
    at = indptr[:-1] + result.accept_len - 1
    fresh = torch.multinomial(p[at], 1, generator=generator)
    result.tokens.scatter_(1, (result.accept_len - 1).view(-1, 1), fresh)
    return result


def no_residual_rule(p, draft_probs, drafts, num_drafts, indptr, generator):
    """Wrong: after a rejection draw from p instead of (p - q)+."""
    result = verify_rejection(p, draft_probs, drafts, num_drafts, indptr, generator=generator)
    at = indptr[:-1] + result.accept_len - 1
    fresh = torch.multinomial(p[at], 1, generator=generator)
    result.tokens.scatter_(1, (result.accept_len - 1).view(-1, 1), fresh)
    return result


@pytest.mark.parametrize("rule", [equality_rule, no_residual_rule])
def test_the_test_detects_wrong_rules(rule):
    p, q = CHAINS["far"]
    g = torch.Generator().manual_seed(11)
    drafts, num_drafts, draft_probs = draft_from(q, RUNS, g)
    states = flat_states(drafts, num_drafts)
    result = rule(p[states], draft_probs, drafts, num_drafts, ragged(num_drafts), g)
    assert min(p_values(completed(result, p, g), p)) < 1e-6


def test_draft_is_drawn_from_what_is_stored():
    """float8-like coarse storage: the draw follows the stored weights, not the given ones."""
    probs = torch.tensor([[0.30, 0.27, 0.24, 0.19]]).expand(RUNS, -1)
    sample = sample_draft(
        probs, generator=torch.Generator().manual_seed(3), store_dtype=torch.float8_e5m2
    )
    true = sample.stored[0].double() / sample.stored[0].double().sum()
    counts = torch.bincount(sample.tokens, minlength=4)
    assert goodness(counts, true) > P_LIMIT
    assert goodness(counts, probs[0].double()) < 1e-6
    torch.testing.assert_close(sample.token_probs, true.float()[sample.tokens])


# --- coupled noise -------------------------------------------------------------------------------


def murmur_reference(seed, position, column):
    h = 0
    for k in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, position, column):
        k = k * 0xCC9E2D51 & 0xFFFFFFFF
        k = (k << 15 | k >> 17) & 0xFFFFFFFF
        h ^= k * 0x1B873593 & 0xFFFFFFFF
        h = (h << 13 | h >> 19) & 0xFFFFFFFF
        h = (h * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= 16
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_noise_is_the_reference_hash():
    keys = [(0, 0), (1, 5), (2**40 + 3, 70_000), (-7, 2**31 - 1), (2**63 - 1, 1)]
    noise = gumbel_noise(*map(torch.tensor, zip(*keys, strict=True)), 200)
    x = torch.tensor(
        [[murmur_reference(s, p, c) for c in range(200)] for s, p in keys], dtype=torch.float64
    )
    torch.testing.assert_close(noise, -(-(x / 0xFFFFFFFF).log()).log(), rtol=1e-12, atol=1e-12)
    assert noise.isfinite().all()


def test_coupled_sample_has_the_distribution_over_seeds_and_positions():
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
    expanded = probs.expand(RUNS, -1)
    count = torch.arange(RUNS)
    for seed, position in ((count, torch.full_like(count, 9)), (torch.full_like(count, 9), count)):
        tokens = sample_coupled(expanded, gumbel_noise(seed, position, 5))
        assert goodness(torch.bincount(tokens, minlength=5), probs.double()) > P_LIMIT


def test_coupled_text_does_not_depend_on_the_drafts():
    """Speculation off, good drafts and bad drafts: one text per seed, the target's distribution."""
    p, _ = CHAINS["far"]
    n = 4000
    seed = torch.arange(n)

    def step(chain, state, position):
        noise = gumbel_noise(seed, torch.full_like(seed, position), VOCAB)
        return sample_coupled(chain[state], noise)

    zero = torch.zeros(n, dtype=torch.int64)
    plain, state = [], zero
    for j in range(DEPTH + 1):
        state = step(p, state, j)
        plain.append(state)
    plain = torch.stack(plain, 1)
    assert min(p_values(plain, p)) > P_LIMIT

    lengths = {}
    for name, q in (("good", 0.9 * p + 0.1 / VOCAB), ("bad", CHAINS["far"][1])):
        drafts, state = [], zero
        for j in range(DEPTH):
            state = step(q, state, j)
            drafts.append(state)
        drafts = torch.stack(drafts, 1)
        num_drafts = torch.full((n,), DEPTH)
        states = flat_states(drafts, num_drafts)
        positions = torch.arange(DEPTH + 1).repeat(n)
        noise = gumbel_noise(seed.repeat_interleave(DEPTH + 1), positions, VOCAB)
        result = verify_coupled(
            sample_coupled(p[states], noise), drafts, num_drafts, ragged(num_drafts)
        )
        kept = torch.arange(DEPTH + 1) < result.accept_len.view(-1, 1)
        assert torch.equal(result.tokens[kept], plain[kept])
        lengths[name] = result.accept_len.double().mean()
    assert lengths["good"] > 3.5 > lengths["bad"]


# --- mixed batches -------------------------------------------------------------------------------


def mixed_batch():
    g, drafts, num_drafts, indptr = random_batch(21, n=60)
    logits = torch.randn(int(indptr[-1]), VOCAB, generator=g)
    kinds = torch.arange(60) % 3  # greedy, sampled, coupled
    rows = SamplingRows.build(
        torch.where(kinds == 0, 0.0, 0.8), [4] * 60, torch.full((60,), 0.9), [0.0] * 60
    )
    stored = random_probs((int(num_drafts.sum()),), g, zeros=0.0).bfloat16()
    draft_probs = DraftProbs(stored, flat_draft_rows(num_drafts, drafts.shape[1]))
    u = uniforms((60, drafts.shape[1] + 1), generator=g)
    return kinds, logits, rows, drafts, num_drafts, indptr, draft_probs, u


def test_mixed_batch_equals_each_rule_alone():
    kinds, logits, rows, drafts, num_drafts, indptr, draft_probs, u = mixed_batch()
    coupling = Coupling(kinds == 2, torch.arange(60), torch.arange(len(logits)))
    before = logits.clone()
    result = rows_of(
        verify(
            logits,
            rows,
            drafts,
            num_drafts,
            indptr,
            draft_probs,
            uniform=u,
            coupling=coupling,
        )
    )
    assert torch.equal(logits, before)
    flat_rows = rows.expand(num_drafts + 1)
    probs = target_probs(logits, flat_rows)
    seeds = torch.arange(60).repeat_interleave(num_drafts + 1)
    samples = sample_coupled(probs, gumbel_noise(seeds, torch.arange(len(logits)), VOCAB))
    layout = (drafts, num_drafts, indptr)
    alone = (
        rows_of(verify_greedy(logits.argmax(-1), *layout)),
        rows_of(verify_rejection(probs, draft_probs, *layout, uniform=u)),
        rows_of(verify_coupled(samples, *layout)),
    )
    assert result == [alone[kind][i] for i, kind in enumerate(kinds.tolist())]


def test_mixed_batch_without_coupling_or_sampling():
    kinds, logits, rows, drafts, num_drafts, indptr, draft_probs, u = mixed_batch()
    result = verify(logits, rows, drafts, num_drafts, indptr, draft_probs, uniform=u)
    greedy = verify_greedy(logits.argmax(-1), drafts, num_drafts, indptr)
    assert torch.equal(result.tokens[kinds == 0], greedy.tokens[kinds == 0])
    n = len(rows)
    all_greedy = SamplingRows.build([0.0] * n, [-1] * n, [1.0] * n, [0.0] * n)
    result = verify(logits, all_greedy, drafts, num_drafts, indptr)
    assert torch.equal(result.tokens, greedy.tokens)
    # The host flags only save work: without them the result is the same.
    vague = SamplingRows(
        all_greedy.temperature,
        all_greedy.top_k,
        all_greedy.top_p,
        all_greedy.min_p,
        greedy=kinds >= 0,
    )
    result = verify(logits, vague, drafts, num_drafts, indptr, uniform=u)
    assert torch.equal(result.tokens, greedy.tokens)


def test_batch_of_sampled_requests_only():
    kinds, logits, rows, drafts, num_drafts, indptr, draft_probs, u = mixed_batch()
    n = len(rows)
    sampled = SamplingRows.build([0.8] * n, [4] * n, [0.9] * n, [0.0] * n)
    probs = target_probs(logits, sampled.expand(num_drafts + 1))
    for point_mass in (None, kinds == 1):
        result = verify(
            logits,
            sampled,
            drafts,
            num_drafts,
            indptr,
            draft_probs,
            uniform=u,
            point_mass=point_mass,
        )
        alone = verify_rejection(
            probs, draft_probs, drafts, num_drafts, indptr, u, point_mass=point_mass
        )
        assert torch.equal(result.tokens, alone.tokens)
        assert torch.equal(result.accept_len, alone.accept_len)


def test_flat_rows_around_the_batch_are_ignored():
    _, logits, rows, drafts, num_drafts, indptr, draft_probs, u = mixed_batch()
    inner = verify(logits, rows, drafts, num_drafts, indptr, draft_probs, uniform=u)
    padded = torch.nn.functional.pad(logits, (0, 0, 3, 4), value=1.0)
    outer = verify(padded, rows, drafts, num_drafts, indptr + 3, draft_probs, uniform=u)
    assert torch.equal(inner.tokens, outer.tokens)
    assert torch.equal(inner.accept_len, outer.accept_len)


def test_bad_shapes_are_refused():
    _, logits, rows, drafts, num_drafts, indptr, draft_probs, u = mixed_batch()
    with pytest.raises(ValueError, match="do not describe one batch"):
        verify_greedy(logits.argmax(-1), drafts, num_drafts, indptr[:-1])
    with pytest.raises(ValueError, match="uniforms are"):
        verify_rejection(logits, draft_probs, drafts, num_drafts, indptr, u[:, 1:])
    with pytest.raises(ValueError, match="sampling rows"):
        verify(logits, rows.take(torch.arange(3)), drafts, num_drafts, indptr)
