"""When the model's linear weights are packed for the CPU, and when they must be packed anew."""

from __future__ import annotations

import logging
from typing import Any

# The packed linears are imported late: they bring kernels that numba compiles for this processor,
# and this module is imported on GPUs too.

logger = logging.getLogger(__name__)


def pack_loaded_model(result: None, runner: Any) -> None:
    """AFTER ``ModelRunner.load_model``: pack the linears where a measurement says it pays."""
    from aspire_sglang.cpu_platform.decoder_stack import compile_stack, stack_of
    from aspire_sglang.cpu_platform.packed_linear import (
        measure_packing,
        pack_model,
        packed_weights,
    )
    from aspire_sglang.cpu_platform.panel_forms import describe
    from aspire_sglang.cpu_platform.panel_linear import PanelLinear

    report = measure_packing(runner.dtype)
    layout = report.choice(stack=bool(stack_of(runner.model)))
    layers = pack_model(runner.model, layout) if layout else 0
    logger.info("aspire-cpu: packed %d linear layers (%s)", layers, report)
    if layout is PanelLinear:
        packed = packed_weights(runner.model)
        forms = [weight.form for weight in packed if isinstance(weight, PanelLinear)]
        logger.info("aspire-cpu: weights are kept, without rounding, as %s", describe(forms))
    logger.info("aspire-cpu: %d decoder layers in one program", compile_stack(runner.model))


def repack_updated_model(result: Any, updater: Any, *_: Any, **__: Any) -> None:
    """AFTER each ``WeightUpdater.update_weights_*``: packed copies follow the new weights."""
    from aspire_sglang.cpu_platform.packed_linear import repack

    repack(updater.get_model())
