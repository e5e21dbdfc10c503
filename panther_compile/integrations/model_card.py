"""A model card: the README.md that `save_pretrained` of transformers leaves beside a sketched model."""

import re
from pathlib import Path
from typing import Any

from panther_compile.report import SketchReport, sketch_report

CARD = "README.md"
OURS = "<!-- Written by panther_compile, and written again unless this line is taken out. -->"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def write_model_card(model: Any, folder: Path) -> None:
    """Write the card of a sketched model into its folder; leave one that is not ours."""
    file = folder / CARD
    if file.exists() and OURS.encode() not in file.read_bytes():
        return
    sketch = model.config.quantization_config
    file.write_text(model_card(sketch_report(model), sketch.model, sketch.base), encoding="utf-8")


def model_card(report: SketchReport, kind: str, base: str) -> str:
    """The card as Markdown.

    Args:
        report: of the model.
        kind: its class.
        base: the name of the dense model, of the hub if it has a slash; empty if unknown.
    """
    on_hub = f"base_model: {base}\n" if _HUB_NAME.fullmatch(base) else ""
    dense = f"`{base}`" if base else f"a {kind}"
    count = f"{len(report.sketched)} weights"
    quality = "not compared with the dense model" if report.closeness is None else str(report.closeness)
    return f"""---
library_name: transformers
{on_hub}tags:
- panther_compile
- low-rank
---
{OURS}

# {dense}, sketched

Low-rank layers by panther_compile in the place of {count}.

| | dense | here |
|---|--:|--:|
| parameters and buffers | {report.dense_numbers:,} | {report.stored_numbers:,} |
| bytes | {report.dense_bytes:,} | {report.stored_bytes:,} |
| of the replaced weights | {report.replaced_dense_numbers:,} | {report.replaced_stored_numbers:,} |

Ratio asked for: {report.ratio_asked}; found: {report.achieved_ratio:.4f}.

Quality when it was made, {quality}.

```python
import panther_compile  # pip install "panther-compile[transformers]"; before the model is loaded
from transformers import {kind}

model = {kind}.from_pretrained("this folder")
print(panther_compile.sketch_report(model))  # each layer
```
"""
