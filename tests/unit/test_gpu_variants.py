"""Engines of GPU measurements: their settings are valid, and what is said of them is right."""

from __future__ import annotations

import pytest

from aspire_sglang.config import load_config
from bench.gpu_contexts import accept_length, shown
from bench.gpu_profile import _group
from bench.gpu_variants import CONTEXTS, SETTINGS, VARIANTS


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v[1]])
def test_settings_of_engines_are_valid(name):
    arguments, text, _ = VARIANTS[name]
    context = load_config(text).context
    assert context.page_size % arguments.get("page_size", 1) == 0


@pytest.mark.parametrize("name", [n for n, text in SETTINGS.items() if text])
def test_settings_that_a_running_engine_is_given_are_valid(name):
    load_config(SETTINGS[name])


def test_contexts_that_are_compared_read_equally_much():
    read = {
        (c.min_pages * c.page_size, c.last_pages * c.page_size, c.ratio)
        for c in (load_config(VARIANTS[name][1]).context for name in CONTEXTS)
    }
    assert read == {(512, 128, 0.07)}


def test_kernels_are_counted_where_they_belong():
    groups = {
        "_page_scores_kernel": "page scores",
        "_select_own_kernel": "page lists",
        "_select_shared_kernel": "page lists",
        "_refresh_tables_kernel": "page lists",
        "_layer_tables_kernel": "page tables",
        "_build_tables_kernel": "page tables",
        "void cutlass::device_kernel<flash::enable_sm90": "attention",
    }
    assert {name: _group(name) for name in groups} == groups


def test_accept_lengths_count_the_targets_own_token():
    assert accept_length({"accepted_drafts": 30, "verify_rows": 10}) == 4.0
    assert accept_length({"plain_graph_steps": 10}) is None
    entry = {"repeats": [], "counters": {}, "tokens_per_verify": 4.0}
    assert shown(entry) == "[], steady [], 4.00 tokens per verify"
