"""The text is the text of plain decoding."""

import pytest

from aspire_sglang.cli.texts import real_texts
from tests.server.conftest import DRAFTING, FULL, TINY, speculated
from tests.server.prompts import COUNT, IDS, LOOP, PROSE, SHORT
from tests.server.scoring import assert_all_greedy, assert_greedy, gaps


def test_tau_is_calibrated_on_plain_decoding(plain):
    from tests.server.scoring import TAU

    answers = plain.generate_all(SHORT[:8], max_new_tokens=32)
    worst = max(
        max(gaps(plain, plain.ids(p), a["output_ids"]))
        for p, a in zip(SHORT[:8], answers, strict=True)
    )
    assert worst * 1.5 <= TAU


@pytest.fixture(scope="module")
def forty(servers):
    """What plain decoding answers to 40 prompts."""
    return servers[0].generate_all(SHORT, max_new_tokens=48)


def test_both_servers_run_all_layers_as_one_program(plain, aspire):
    """Else the texts below would say nothing about it."""
    for client in (plain, aspire):
        log = client.server.log.read_text(errors="replace")
        assert "aspire-cpu: 30 decoder layers in one program" in log


# Where most drafts are wrong each token costs a step or two, so extremes take half of the prompts.
@pytest.mark.parametrize(
    ("context", "every"), [({}, 1), (FULL, 2), (TINY, 2)], ids=["normal", "full", "tiny"]
)
def test_greedy_40_prompts(plain, aspire, forty, context, every):
    """B01: greedy-consistent always, identical ids for at least 95 % of the prompts."""
    aspire.configure(DRAFTING, context)
    prompts = SHORT[::every]
    found = aspire.generate_all(prompts, max_new_tokens=48)
    speculated(found)
    assert_all_greedy(plain, [plain.ids(prompt) for prompt in prompts], found)
    pairs = zip(forty[::every], found, strict=True)
    same = sum(a["output_ids"] == b["output_ids"] for a, b in pairs)
    assert same >= 0.95 * len(prompts), f"{same} of {len(prompts)} identical"


def test_greedy_long_contexts_of_mixed_length(plain, aspire):
    """Real texts: rows draft and verify beside each other."""
    aspire.configure(DRAFTING)
    prompts = real_texts(aspire.tokenizer, [400, 800, 1600], seed=3)
    ids = [list(p.input_ids) for p in prompts]
    found = aspire.generate_all(ids, max_new_tokens=48, ignore_eos=True)
    speculated(found)
    assert_all_greedy(plain, ids, found)
    assert aspire.aspire()["mixed_steps"] > 0


def test_repeated_runs_and_warm_prefix_agree(aspire):
    """B01, B33d: the second run finds its prompt in the radix cache."""
    aspire.configure(DRAFTING)
    aspire.flush()
    cold = aspire.generate_all([PROSE, LOOP, COUNT, IDS], max_new_tokens=40)
    warm = aspire.generate_all([PROSE, LOOP, COUNT, IDS], max_new_tokens=40)
    speculated(cold)
    assert [a["output_ids"] for a in cold] == [a["output_ids"] for a in warm]
    assert all(a["meta_info"]["cached_tokens"] > 0 for a in warm)


def test_budget_over_context_means_draft_equals_target(aspire):
    """B33a: a free proof that draft rows read the right KV at the right positions."""
    aspire.configure(DRAFTING, FULL)
    prompts = real_texts(aspire.tokenizer, [300, 900], seed=5)
    answers = aspire.generate_all(
        [list(p.input_ids) for p in prompts] + [PROSE, COUNT], max_new_tokens=60, ignore_eos=True
    )
    speculated(answers)
    proposed = sum(a["meta_info"]["spec_num_proposed_drafts"] for a in answers)
    correct = sum(a["meta_info"]["spec_num_correct_drafts"] for a in answers)
    assert correct >= 0.99 * proposed, f"{correct} of {proposed} drafts accepted"


def test_tiny_budget_rejects_and_recovers(plain, aspire):
    """B33b: the other regime; most drafts are wrong, the text is not."""
    aspire.configure(DRAFTING, TINY)
    answer = aspire.generate(PROSE, max_new_tokens=64, ignore_eos=True)
    meta = answer["meta_info"]
    assert meta["spec_num_correct_drafts"] < 0.6 * meta["spec_num_proposed_drafts"]
    assert_greedy(plain, plain.ids(PROSE), answer["output_ids"])


def test_fragmented_pool(plain, aspire):
    """B33c: a prompt whose KV slots are scattered over the pool."""
    aspire.configure(DRAFTING)
    filler = [f"{i} {PROSE * 8}" for i in range(16)]
    aspire.generate_all(filler, max_new_tokens=30, ignore_eos=True)
    aspire.generate_all(filler[::2], max_new_tokens=60, ignore_eos=True)
    prompt = LOOP + PROSE * 20
    answer = aspire.generate(prompt, max_new_tokens=40, ignore_eos=True)
    speculated(answer)
    assert_greedy(plain, plain.ids(prompt), answer["output_ids"])


def test_copies_of_one_prompt_agree(aspire):
    """B32: n greedy copies are identical, sampled ones differ."""
    aspire.configure(DRAFTING)
    greedy = aspire.generate(PROSE, n=4, max_new_tokens=24, ignore_eos=True)
    speculated(greedy)
    assert len({a["text"] for a in greedy}) == 1
    sampled = aspire.generate(PROSE, n=4, max_new_tokens=24, temperature=1.0, ignore_eos=True)
    assert len({a["text"] for a in sampled}) > 1


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 17])
def test_batch_sizes(plain, aspire, batch):
    aspire.configure(DRAFTING)
    prompts = [f"{i}. {COUNT}" for i in range(batch)]
    answers = aspire.generate_all(prompts, max_new_tokens=24, ignore_eos=True)
    speculated(answers)
    assert_all_greedy(plain, [plain.ids(prompt) for prompt in prompts], answers)
