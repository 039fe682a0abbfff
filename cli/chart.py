"""The picture of a `bench` report: four panels, of its first drafter, batch and temperature."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_mtp.errors import MtpError

if TYPE_CHECKING:
    from mlx_mtp.measure.bench import Report

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def draw(report: Report, path: Path) -> None:
    """Needs matplotlib. Raises MtpError where the file cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    from mlx_mtp.cli.bench import title

    groups = report.groups()
    (drafter, batch, temp), cells = next(iter(groups.items()))
    by_kind: dict[str, dict[str, Any]] = {}
    for cell in cells:
        by_kind.setdefault(cell.kind, {})[cell.way] = cell
    if len(by_kind) > 1:
        del by_kind["all"]
    figure = Figure(figsize=(11, 8), layout="constrained")
    speed, accepted, parts, rows = figure.subplots(2, 2).flat
    others = f" (1 of {len(groups)}; the others are in the table)" if len(groups) > 1 else ""
    figure.suptitle(
        f"{report.model} with {drafter}, batch {batch}, temperature {temp:g}{others}\n"
        f"{title(report)}",
        fontsize=10,
    )
    for colour, (kind, ways) in zip(COLOURS, by_kind.items(), strict=False):
        lengths = sorted(int(way) for way in ways if way.isdigit())
        medians = [ways[str(n)].tps[1] for n in lengths]
        speed.plot(lengths, medians, "o-", color=colour, label=kind)
        speed.axhline(ways["0"].tps[1], color=colour, linestyle=":", linewidth=1)
        if "auto" in ways:
            speed.plot([lengths[-1] + 1], ways["auto"].tps[1], "D", color=colour)
        longest = ways[str(lengths[-1])].acceptance
        accepted.plot(range(1, len(longest) + 1), longest, "o-", color=colour, label=kind)
    ticks = {str(n): n for n in lengths} | ({"auto": lengths[-1] + 1} if "auto" in ways else {})
    speed.set_xticks([*ticks.values()], [*ticks])
    speed.set(
        title="Speed (dotted: plain decoding)",
        xlabel="draft length (tokens a round, bonus not counted)",
        ylabel="tokens/s, median",
    )
    accepted.set(
        title=f"Acceptance with {lengths[-1]} drafts a round",
        xlabel="position of the draft in its round",
        ylabel="share of rounds that accept it",
        ylim=(0, 1.02),
        xticks=range(1, lengths[-1] + 1),
    )
    costs = [cost for cost in report.rounds if cost.drafter == drafter]
    below = [0.0] * len(costs)
    for part, colour in zip(("verify", "draft", "host"), COLOURS, strict=False):
        heights = [1000 * getattr(cost, part) for cost in costs]
        parts.bar([c.drafts for c in costs], heights, bottom=below, color=colour, label=part)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    parts.set(
        title="Time of a round, part by part",
        xlabel="draft length (tokens a round)",
        ylabel="milliseconds",
        xticks=[cost.drafts for cost in costs],
    )
    verified = [1000 * cost.verify for cost in costs]
    rows.plot([cost.drafts + 1 for cost in costs], verified, "o-", color=COLOURS[0])
    rows.axhline(verified[0], color="gray", linestyle=":", linewidth=1)
    rows.set(
        title="Cost of the verify pass (dotted: one row)",
        xlabel="rows (drafts + 1)",
        ylabel="milliseconds",
        xticks=[cost.drafts + 1 for cost in costs],
    )
    for panel in (speed, accepted, parts, rows):
        panel.set_ylim(bottom=0)
        panel.grid(axis="y", alpha=0.3)
    for panel in (speed, accepted, parts):
        # Between title and plot: inside it would lie on figures.
        panel.legend(
            fontsize=8, ncols=6, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 0.99)
        )
        panel.set_title(panel.get_title(), pad=22)
    matplotlib.rcParams["svg.hashsalt"] = "mlx-mtp"
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    except OSError as error:
        raise MtpError(f"{path} cannot be written: {error.strerror}") from None
