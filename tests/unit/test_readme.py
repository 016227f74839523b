"""The README says what the code does."""

from bench.readme import README, settings_table, with_block


def test_settings_table_is_current():
    text = README.read_text()
    assert with_block(text, "settings", settings_table()) == text, "run: python bench/readme.py"


def test_refused_parameters_are_listed():
    from aspire_sglang.runtime.requests import refused_sampling

    text = README.read_text()
    assert [name for name in refused_sampling(on_cpu=False) if f"`{name}`" not in text] == []
