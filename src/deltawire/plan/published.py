"""Compares published training shapes with what the resolver computes, and explains the rest."""

from __future__ import annotations

from dataclasses import dataclass

from deltawire.plan.accelerators import shipped_accelerators
from deltawire.plan.catalogue import PublishedShape, catalogue, published_shapes
from deltawire.plan.resolver import (
    DEFAULT_RANK,
    GIB,
    Accelerators,
    Wish,
    best_layout,
    smallest_count,
    summarize,
)

COLUMNS = (
    "published shape",
    "mode",
    "context",
    "published",
    "we compute",
    "our layout on the published number",
    "GiB per accelerator",
    "why they differ",
)


@dataclass(frozen=True)
class PublishedComparison:
    """Compares one published configuration with the resolver's."""

    published: PublishedShape
    smallest: int | None
    """Fewest of the same accelerators that suffice by our computation, in powers of two."""
    layout: str
    """Our layout on the published number, or why there is none."""
    peak_gib: float
    """Predicted device memory of that layout, allowance included."""
    fits: bool

    @property
    def line(self) -> str:
        """The row of the Markdown table."""
        shape = self.published
        ours = f"{self.smallest} x {shape.accelerator}" if self.smallest else "none"
        return (
            f"| {shape.shape} | {shape.mode} | {shape.context:,} | {shape.accelerators} x "
            f"{shape.accelerator} | {ours} | {self.layout} | {self.peak_gib:.0f} | "
            f"{self.explanation} |"
        )

    @property
    def explanation(self) -> str:
        """Say why the two numbers differ, or that they agree."""
        row = self.published
        if self.smallest == row.accelerators:
            return "agree"
        if not self.fits:
            return (
                "We keep masters, gradients and Adam moments in fp32 (16 B/parameter, all on the "
                "host under full offload) and assume the host memory of our table. The published "
                "number needs moments below fp32, or more host memory."
            )
        least = "Ours is the least that holds one sequence, at any speed"
        reasons = [f"{least}; how theirs was chosen is not published"]
        if "offload" in self.layout:
            reasons.append("ours offloads")
        if "packing" in self.layout:
            reasons.append("experts stay packed")
        if row.mode == "reference":
            reasons.append("a forward pass keeps neither activations nor optimizer")
        return "; ".join(reasons) + "."


def compare_row(row: PublishedShape) -> PublishedComparison:
    """Resolves one published shape on its own accelerators."""
    entry, kind = catalogue()[row.model], shipped_accelerators()[row.accelerator]
    model = entry.describe()
    wish = Wish(
        mode=row.mode,
        context=min(row.context, model.context),
        packing=entry.native_packing if row.mode != "full" else "none",
        lora_rank=DEFAULT_RANK if row.mode == "lora" else 0,
    )
    best, least = best_layout(model, wish, Accelerators(kind, row.accelerators))
    return PublishedComparison(
        published=row,
        smallest=smallest_count(model, wish, kind),
        layout=summarize(best.layout) if best is not None else least.obstacle(),
        peak_gib=(best or least).peak.with_allowance / GIB,
        fits=best is not None,
    )


def published_table() -> str:
    """Returns the comparison of every published shape as a Markdown table."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*head, *(compare_row(row).line for row in published_shapes())])
