"""The configuration schema: defaults, files, and how faults are reported."""

from pathlib import Path

import pytest
import yaml

from aspire_sglang.config import AspireConfig, ConfigError, describe, load_config, parse_config

CONFIGS = sorted(Path(__file__).parents[2].joinpath("configs").glob("*.yaml"))


def test_empty_source_gives_the_defaults(monkeypatch):
    monkeypatch.delenv("ASPIRE_CONFIG", raising=False)
    assert load_config() == AspireConfig()


def test_environment_and_inline_mapping(monkeypatch):
    monkeypatch.setenv("ASPIRE_CONFIG", "{gamma_max: 8, context: {ratio: 0.1}}")
    config = load_config()
    assert (config.gamma_max, config.context.ratio) == (8, 0.1)


def test_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("scheduler: {policy: fixed, gamma: 4}\n")
    assert load_config(str(file)).scheduler.gamma == 4


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_shipped_files_are_valid_and_say_where_they_come_from(path):
    parse_config(yaml.safe_load(path.read_text()), str(path))
    assert path.read_text().startswith("#")


def test_there_are_shipped_files():
    assert CONFIGS


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{gama_max: 8}", ["unknown option 'gama_max'", "did you mean 'gamma_max'"]),
        ("{context: {budjet: 1}}", ["unknown option 'context.budjet'", "did you mean 'context."]),
        ("{min_pages: 40}", ["unknown option 'min_pages'", "did you mean 'context.min_pages'"]),
        ("{scheduler: {ratio: 1}}", ["'scheduler.ratio'", "did you mean 'context.ratio'"]),
        ("{scheduler: {acceptance: {king: ema}}}", ["did you mean 'scheduler.acceptance.kind'"]),
        ("{gamma_max: 0}", ["option 'gamma_max'", "got 0"]),
        ("{gamma_max: many}", ["option 'gamma_max'", "'many'"]),
        ("{context: {ratio: 1.5}}", ["option 'context.ratio'"]),
        ("{context: {selection: magic}}", ["option 'context.selection'", "refresh"]),
        ("{context: {min_pages: 2}}", ["min_pages (2) must hold sink_pages + last_pages"]),
        ("{gamma_max: [", ["not valid YAML"]),
        ("{1, 2}", ["option '1'", "Keys should be strings"]),
    ],
)
def test_faults_are_one_sentence_that_names_the_option(text, parts):
    with pytest.raises(ConfigError) as fault:
        load_config(text)
    message = str(fault.value)
    assert "\n" not in message
    assert all(part in message for part in parts)


def test_all_faults_are_reported_at_once():
    with pytest.raises(ConfigError) as found:
        load_config("{gama_max: 8, context: {ratio: 2, budget: 1}, scheduler: {first_draft: 0}}")
    faults = found.value.faults
    assert len(faults) == 4
    for option in ("'gama_max'", "'context.ratio'", "'context.budget'", "'scheduler.first_draft'"):
        assert sum(option in fault.split(";")[0] for fault in faults) == 1
    assert all(fault.startswith("--aspire-config: ") for fault in faults)


def test_a_list_is_not_a_configuration(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="expected a mapping of options, found list"):
        load_config(str(file))


def test_missing_file():
    with pytest.raises(ConfigError, match=r"no-such\.yaml: cannot be read"):
        load_config("no-such.yaml")


def test_describe_names_every_leaf():
    text = describe(AspireConfig())
    for name in ("gamma_max=16", "context.refresh_layer=None", "scheduler.acceptance.kind="):
        assert name in text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{context: {own_share: 0.3}}", ["own_share needs selection hybrid, not refresh"]),
        ("{context: {selection: hybrid, full_layers: 1}}", ["full_layers needs selection delta"]),
        ("{context: {list_layers: 2}}", ["list_layers needs selection hybrid or last_ver"]),
        ("{context: {selection: hybrid, list_layers: 0}}", ["option 'context.list_layers'"]),
        ("{context: {selection: delta, refresh_layers: [9, 3]}}", ["ascending order"]),
        ("{context: {selection: delta, refresh_layers: []}}", ["ascending order"]),
        ("{context: {selection: hybrid, own_share: 0}}", ["option 'context.own_share'"]),
    ],
)
def test_options_without_an_effect_are_refused(text, parts):
    with pytest.raises(ConfigError) as fault:
        load_config(text)
    assert all(part in str(fault.value) for part in parts)
