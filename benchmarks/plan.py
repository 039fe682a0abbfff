"""`mlx-mtp plan` beside what others published of their programs, and the fit of its constants.

    python -m benchmarks.plan

Speeds of 12B behind 1,000 positions; an MTP round's tokens from the published acceptance, and its
drafter in bf16, as the programs had it. Ratios are those of one 4-bit matrix. The plain speeds and
the ratios are what `mlx_mtp.measure.plan`'s constants are fitted to (least squares of logarithms);
MTP speeds are not, so their errors are those of predictions, nor are rounds, but that floats count
a tile of rows was put in for those of E4B. None of it was measured by us.
"""

from __future__ import annotations

import math
from unittest import mock

from mlx_mtp.measure import plan
from mlx_mtp.measure.machine import CHIPS
from mlx_mtp.measure.plan import Weights, converted, pass_s, round_s
from mlx_mtp.weights.published import configs

CONTEXT = 1000
# what, bits, chip, tok/s
PLAIN = (
    ("12B 4 bits", 4, "M1 Ultra", 35.0),
    ("12B 4 bits, Rapid-MLX", 4, "M3 Ultra", 66.4),
    ("12B 4 bits", 4, "M5 Max", 43.0),
    ("12B nvfp4, Ollama", 4, "M5 Max", 50.0),
    ("12B 8 bits", 8, "M4 Pro", 18.4),
)
# what, chip, (drafts of the rounds), share of the drafts accepted, tok/s
MTP = (
    ("12B 4 bits, code, 4 drafts", "M1 Ultra", (4,), 0.78, 44.0),
    ("12B 4 bits, prose, 4 drafts", "M1 Ultra", (4,), 0.49, 33.0),
    ("12B 4 bits, Rapid-MLX, 1 or 2 drafts", "M3 Ultra", (1, 2), 0.66, 62.2),
    ("12B 4 bits, code, 4 drafts", "M5 Max", (4,), 0.78, 121.0),
    ("12B 4 bits, prose, 4 drafts", "M5 Max", (4,), 0.49, 82.0),
)
# chip, {rows: cost against one row}
RATIOS = (
    ("M3 Max", {4: 1.28, 6: 2.04, 8: 2.5}),
    ("M4 Pro", {4: 1.43, 5: 1.75, 8: 2.84}),
    ("M3 Ultra", {4: 1.00, 8: 1.57}),
    ("M5 Max", {4: 1.29, 8: 2.46}),
)
# (drafts, tokens a round, tok/s, plain tok/s) of mlx-vlm 0.5.0, its issue 1121, on a MacBook Pro of
# 48 GB, whose chip is not told: by its plain speeds an M4 Pro.
ROUNDS = {
    ("e4b", 16): ((1, 1.24, 12.61, 24.47), (3, 1.43, 14.09, 24.47)),
    ("31b", 4): ((2, 2.10, 13.47, 13.50), (3, 2.76, 13.49, 13.50), (5, 2.65, 8.81, 13.50)),
}
CHIP = {chip.name: chip for chip in CHIPS}
SIZES = {bits: converted("12b", "", *configs("12b"), bits, 16) for bits in (4, 8)}
MATRIX = Weights(0, 4.5 / 8 * 1e9, 0, 0, 1e9, 0, 0)
Row = tuple[str, str, float, float]  # what, chip, published, planned


def plain() -> list[Row]:
    return [
        (f"plain, {what}", chip, told, 1 / round_s(SIZES[bits], CHIP[chip], 0, CONTEXT))
        for what, bits, chip, told in PLAIN
    ]


def mtp() -> list[Row]:
    rows = []
    for what, chip, drafts, accepted, told in MTP:
        tokens = sum(1 + accepted * k for k in drafts)
        seconds = sum(round_s(SIZES[4], CHIP[chip], k, CONTEXT) for k in drafts)
        rows.append((f"MTP, {what}", chip, told, tokens / seconds))
    return rows


def rounds() -> list[Row]:
    rows, chip = [], CHIP["M4 Pro"]
    for (name, bits), told in ROUNDS.items():
        sizes = converted(name, "", *configs(name), bits, 16)
        for k, tokens, mtp_tps, plain_tps in told:
            cost = round_s(sizes, chip, k, CONTEXT) / round_s(sizes, chip, 0, CONTEXT)
            what = f"a round of {k} against a plain one, {name} {bits} bits, mlx-vlm"
            rows.append((what, "M4 Pro?", round(tokens / mtp_tps * plain_tps, 2), cost))
    return rows


def ratios() -> list[Row]:
    def cost(chip: str, rows: int) -> float:
        return pass_s(MATRIX, CHIP[chip], rows, 0, 0)

    return [
        (f"{rows} rows against one", chip, told, cost(chip, rows) / cost(chip, 1))
        for chip, by_rows in RATIOS
        for rows, told in by_rows.items()
    ]


def error(rows: list[Row]) -> float:
    """Root mean square of logarithms."""
    return math.sqrt(sum(math.log(row[3] / row[2]) ** 2 for row in rows) / len(rows))


def fit() -> dict[str, float]:
    """The constants that fit best: a launch's seconds to the plain speeds, FLOPS to the ratios."""
    best = {}
    for name, rows in {"LAUNCH": plain, "LAUNCH_BEFORE_M3": plain, "FLOPS": ratios}.items():
        missed, step = {}, 0.01 if name == "FLOPS" else 5e-7
        for value in (n * step for n in range(1, 101)):
            with mock.patch.object(plan, name, value):
                missed[value] = error(rows())
        best[name] = min(missed, key=missed.__getitem__)
    return best


def main() -> None:
    print(fit())
    print("| | chip | published | plan | error |\n|---|---|---|---|---|")
    for rows in (plain(), mtp(), rounds(), ratios()):
        for what, chip, told, planned in rows:
            print(f"| {what} | {chip} | {told:g} | {planned:.3g} | {planned / told - 1:+.0%} |")
        print(f"| root mean square | | | | {math.expm1(error(rows)):.0%} |")


if __name__ == "__main__":
    main()
