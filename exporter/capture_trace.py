"""Traces a model with torch.export: positions from the cache's length, the head for the wanted rows only."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from specexport.exporter.capture_error import CaptureError

if TYPE_CHECKING:
    import torch

_ROWS = "specexport_logits_rows"
_LOGGERS = ("torch.onnx", "torch.export", "transformers", "onnxscript", "onnx_ir")


def trace(module: torch.nn.Module) -> torch.export.ExportedProgram:
    """The program of ``(input_ids, past_length, logits_rows) -> logits``, batch, sequence and rows dynamic."""
    import torch

    accepted = inspect.signature(module.forward).parameters
    if "position_ids" not in accepted:
        raise CaptureError("its forward takes no position_ids, so a cached prefix cannot be placed")
    # Attributes that would add outputs or losses to the graph.
    options = {"use_cache": False, **({"output_router_logits": False} if "output_router_logits" in accepted else {})}

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, input_ids: Any, past_length: Any, logits_rows: Any) -> Any:
            steps = torch.arange(input_ids.shape[1], dtype=torch.int64)
            module.__dict__[_ROWS] = logits_rows
            try:
                positions = past_length[:, None] + steps[None]
                return self.model(input_ids=input_ids, position_ids=positions, **options).logits
            finally:
                del module.__dict__[_ROWS]

    batch, sequence, rows = (torch.export.Dim(n, min=1, max=1 << 30) for n in ("batch", "sequence", "rows"))
    example = (
        torch.zeros(2, 7, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(5, dtype=torch.int64),
    )
    with head_of_rows(module):
        return torch.export.export(
            Decoder().eval(), example, dynamic_shapes=({0: batch, 1: sequence}, {0: batch}, {0: rows}), strict=False
        )


@contextlib.contextmanager
def head_of_rows(module: torch.nn.Module) -> Iterator[None]:
    """While open, the output head sees only the wanted rows of the flattened batch."""
    head: Any = module.get_output_embeddings()  # type: ignore[operator]

    def forward(hidden: Any) -> Any:
        return type(head).forward(head, hidden.flatten(0, -2).index_select(0, module.__dict__[_ROWS]))

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's and Transformers' warnings and log lines off stderr."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)
