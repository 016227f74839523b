"""The README says what the code does."""

from bench.readme import README, settings_table, with_block


def test_settings_table_is_current():
    text = README.read_text()
    assert with_block(text, "settings", settings_table()) == text, "run: python bench/readme.py"


def test_parameters_that_a_gpu_treats_in_its_own_way_are_listed():
    from aspire_sglang.runtime.plain_requests import FIELDS, SAMPLING
    from aspire_sglang.runtime.requests import REFUSED_ON_GPU

    text = README.read_text()
    names = (*SAMPLING, *FIELDS, *REFUSED_ON_GPU)
    assert [name for name in names if f"`{name}`" not in text] == []
