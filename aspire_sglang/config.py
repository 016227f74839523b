"""The one typed configuration schema of ASPIRE, and how a YAML file becomes it.

Every field has a default, so an empty file is valid. Unknown keys and values out of range are
refused with one sentence that names the key and the nearest valid one.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

ENV_CONFIG = "ASPIRE_CONFIG"
"""Environment variable that carries ``--aspire-config`` into SGLang's worker processes."""

# From this similarity on, a name of another section is likelier meant than one of the same.
_NEARLY_SO = 0.75

Positive = Annotated[int, Field(ge=1)]


class ConfigError(ValueError):
    """The configuration cannot be used.

    Attributes:
        faults: one sentence for the user each.
    """

    def __init__(self, *faults: str) -> None:
        super().__init__(" ".join(faults))
        self.faults = faults


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ContextConfig(_Section):
    """The sparse context of draft rows (pages a draft row may read)."""

    selection: Literal[
        "refresh", "last_verify", "window", "hybrid", "last_verify_per_layer", "delta"
    ] = Field(
        "refresh",
        description="where the page list comes from. refresh: the refresh layer at every draft "
        "step; last_verify: the refresh layer at verify steps only; window: sink plus recent "
        "pages; last_verify_per_layer: every layer at verify steps, for itself; hybrid: a part "
        "from there, the rest from refresh; delta: refresh by several layers, each for the layers "
        "up to the next",
    )
    page_size: Positive = Field(16, description="tokens per page of the sparse context")
    min_pages: Positive = Field(32, description="least pages a draft row reads")
    ratio: float = Field(
        0.07,
        ge=0,
        le=1,
        description="share of the context's pages a draft row reads; 0: min_pages for any context",
    )
    sink_pages: Annotated[int, Field(ge=0)] = Field(1, description="first pages, always read")
    last_pages: Positive = Field(8, description="last pages, always read")
    reduction: Literal["max", "mean", "sum"] = Field(
        "max", description="how query heads vote on a token"
    )
    refresh_layer: Annotated[int, Field(ge=0)] | None = Field(
        None, description="layer whose attention chooses the pages; default the middle layer"
    )
    refresh_applies: Literal["same_step", "next_step"] = Field(
        "same_step", description="layers above the refresh layer use its new list at once, or not"
    )

    own_share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.5,
        description="hybrid: part of the budget, less sink and last pages, that every layer's own "
        "pages of the last verify take",
    )
    list_layers: Positive = Field(
        1,
        description="hybrid, last_verify_per_layer: neighbouring layers that share a list of own "
        "pages, which one of them chooses; 1: every layer its own",
    )
    refresh_layers: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="delta: layers that choose pages; default three, evenly spaced"
    )
    full_layers: Annotated[int, Field(ge=0)] = Field(
        0, description="delta: first layers whose draft rows read everything"
    )

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> ContextConfig:
        for name, selections in (
            ("own_share", ("hybrid",)),
            ("list_layers", ("hybrid", "last_verify_per_layer")),
            ("refresh_layers", ("delta",)),
            ("full_layers", ("delta",)),
        ):
            if name in self.model_fields_set and self.selection not in selections:
                wanted = " or ".join(selections)
                raise ValueError(f"{name} needs selection {wanted}, not {self.selection}")
        if self.refresh_layers is not None and (
            not self.refresh_layers or sorted(set(self.refresh_layers)) != self.refresh_layers
        ):
            raise ValueError("refresh_layers must be distinct layers in ascending order")
        return self

    @model_validator(mode="after")
    def _budget_holds_forced_pages(self) -> ContextConfig:
        if self.min_pages < self.sink_pages + self.last_pages:
            raise ValueError(
                f"min_pages ({self.min_pages}) must hold sink_pages + last_pages "
                f"({self.sink_pages} + {self.last_pages})"
            )
        return self


class AcceptanceConfig(_Section):
    """The per-request estimate of the draft acceptance rate."""

    kind: Literal["ema", "beta"] = Field(
        "beta",
        description="beta: discounted Beta posterior, unbiased by the draft length; "
        "ema: the paper's average, which reads low for long drafts",
    )
    prior: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.9, description="rate assumed before the first verify"
    )


class SchedulerConfig(_Section):
    """When a request stops drafting and verifies."""

    policy: Literal[
        "aspire",
        "shadow_price",
        "global",
        "ar",
        "fixed",
        "staggered",
        "feedback",
        "constant_cost",
    ] = Field(
        "aspire",
        description="aspire: per-request length from acceptance and cost, the paper's objective; "
        "shadow_price: the same for the throughput of the whole batch; global: one length for all "
        "from the same rule; fixed: one length, all requests in step; staggered: one length, "
        "phases spread; ar: never draft; feedback: per-request length that follows the last "
        "verify; constant_cost: the paper's objective with a fixed cost ratio",
    )
    gamma: Positive | None = Field(
        None, description="draft length of the policies fixed and staggered; default gamma_max"
    )
    cost_ratio: Annotated[float, Field(gt=0.0)] = Field(
        0.2, description="constant_cost: time of a draft step over that of a verify step"
    )
    first_draft: Positive = Field(3, description="drafts before a request's first verify")
    probe_interval: Positive = Field(
        32, description="a request that does not draft tries a short draft every this many steps"
    )
    confidence: bool = Field(
        True,
        description="aspire, shadow_price: end a greedy draft early at a token its own "
        "probability makes doubtful, and let a sure run go on; calibrated online",
    )
    sampled_confidence: bool = Field(
        False, description="do so for sampled drafts too; on a CPU only"
    )
    predictor: Literal["bins", "regression"] = Field(
        "bins",
        description="how doubt is measured. bins: the token's probability, in bins; regression: "
        "also the gap to the second best token, its place in the draft and the recent rate of its "
        "request; on a CPU only",
    )
    clock_check: bool = Field(
        True,
        description="aspire, on a GPU: where drafting commits less per second of the clock than "
        "plain steps would, as a slow host can make it, nobody drafts for a while",
    )
    acceptance: AcceptanceConfig = AcceptanceConfig()


class AspireConfig(_Section):
    """All settings of ASPIRE; see ``configs/`` for measured files."""

    gamma_max: Annotated[int, Field(ge=1, le=64)] = Field(
        16, description="most drafts before a verify; --speculative-num-steps overrides it"
    )
    context: ContextConfig = ContextConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cost_profile: bool = Field(
        True, description="fit the step-cost model at start-up by a short profile, or read the fit"
    )
    cost_file: str | None = Field(
        None,
        description="file of the fitted step-cost model; one of another device, model or setting "
        "is refused and fitted again; default: one file per setting in the cache folder on a GPU, "
        "none on a CPU",
    )
    requests_kept: Positive = Field(
        256, description="finished requests whose statistics stay readable in /server_info"
    )


def _options(model: type[BaseModel] = AspireConfig, section: str = "") -> list[str]:
    """Dotted names of all options and sections."""
    names = []
    for name, field in model.model_fields.items():
        names.append(section + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += _options(field.annotation, f"{section}{name}.")
    return names


def _nearest(dotted: str) -> str:
    """The option that was probably meant: one of any section that is spelled nearly so, else the
    most similar one of the same section."""
    section, _, wanted = dotted.rpartition(".")

    def likeness(option: str) -> float:
        return difflib.SequenceMatcher(None, wanted, option.rpartition(".")[2]).ratio()

    siblings = [option for option in _options() if _in(option, section)]
    # Siblings first: `max` keeps the first of equals.
    best = max(siblings + _options(), key=likeness)
    return best if likeness(best) >= _NEARLY_SO else max(siblings, key=likeness)


def _sentence(error: Any) -> str:
    location = tuple(error["loc"])
    dotted = ".".join(map(str, location)) or "the file"
    if error["type"] == "extra_forbidden":
        section = dotted.rpartition(".")[0]
        valid = [name.removeprefix(f"{section}.") for name in _options() if _in(name, section)]
        return (
            f"unknown option '{dotted}'; did you mean '{_nearest(dotted)}'? "
            f"(valid{f' in {section}' if section else ''}: {', '.join(sorted(valid))})"
        )
    message = error["msg"].removeprefix("Value error, ")
    return f"option '{dotted}': {message} (got {error['input']!r})"


def _in(option: str, section: str) -> bool:
    return option.rpartition(".")[0] == section


def parse_config(data: Any, origin: str) -> AspireConfig:
    """Validate a mapping as :class:`AspireConfig`.

    Raises:
        ConfigError: naming ``origin`` and every fault, with the nearest valid name.
    """
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}: expected a mapping of options, found {type(data).__name__}.")
    try:
        return AspireConfig.model_validate(data)
    except ValidationError as fault:
        raise ConfigError(*(f"{origin}: {_sentence(e)}." for e in fault.errors())) from None


def load_config(source: str | None = None) -> AspireConfig:
    """Read the configuration from ``source`` (a YAML file, or an inline mapping starting with
    ``{``), by default from the environment variable ``ASPIRE_CONFIG``; defaults if neither is set.

    Raises:
        ConfigError: unreadable file, invalid YAML, unknown key or invalid value.
    """
    source = source if source is not None else os.environ.get(ENV_CONFIG, "")
    if not source.strip():
        return AspireConfig()
    inline = source.lstrip().startswith("{")
    origin = "--aspire-config" if inline else f"--aspire-config {source}"
    try:
        text = source if inline else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        raise ConfigError(f"{origin}: cannot be read ({reason}).") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as fault:
        raise ConfigError(f"{origin}: not valid YAML ({' '.join(str(fault).split())}).") from None
    return parse_config(data, origin)


def describe(config: AspireConfig) -> str:
    """The resolved values on one line, as printed at start-up."""

    def flat(prefix: str, section: BaseModel) -> list[str]:
        parts: list[str] = []
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                parts += flat(f"{prefix}{name}.", value)
            else:
                parts.append(f"{prefix}{name}={value}")
        return parts

    return ", ".join(flat("", config))
