"""How many bits each matrix of a pair is stored in: pure decisions on names and widths.

The default is made for Gemma 4 with MTP. Per-layer embeddings and routers ruin the model below
8 bits; the table is the head, too; a drafter is small, and what it loses costs acceptance, above
all where its head chooses the tokens that are scored at all.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mlx_mtp.errors import UsageError

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
DRAFTER = "drafter."  # before the paths of a drafter's matrices, in patterns


@dataclass(frozen=True)
class Scheme:
    """A packing that MLX knows. Raises UsageError for another."""

    bits: int
    group_size: int = 64
    mode: str = "affine"

    def __post_init__(self) -> None:
        if self.mode in FLOATS:
            if (self.bits, self.group_size) != FLOATS[self.mode]:
                bits, group = FLOATS[self.mode]
                raise UsageError(f"{self.mode} has {bits} bits in groups of {group}, nothing else")
        elif self.mode != "affine":
            raise UsageError(f"mode is {self.mode}; it must be affine, {', '.join(FLOATS)}")
        elif self.bits not in AFFINE_BITS:
            raise UsageError(f"bits are {self.bits}; they must be one of {AFFINE_BITS}")
        elif self.group_size not in AFFINE_GROUPS:
            raise UsageError(f"group size is {self.group_size}; it must be one of {AFFINE_GROUPS}")

    def as_dict(self) -> dict[str, Any]:
        """As configs of MLX conversions state it."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits and group size


@dataclass(frozen=True)
class Recipe:
    """`base` for every matrix, but where a rule's pattern matches its path: the first that does
    counts. A rule's bits are affine in groups of the base's size, or 64; 0 leaves floats. own: how
    many rules, from the first, are the user's."""

    base: Scheme
    rules: tuple[tuple[str, int], ...] = ()
    own: int = 0
    used: set[str] = field(default_factory=set, compare=False)

    def scheme(self, path: str, width: int) -> Scheme | None:
        """For a matrix of so many columns; None leaves it in floats."""
        found = self.base
        for pattern, bits in self.rules:
            if fnmatchcase(path, pattern):
                self.used.add(pattern)
                if bits == 0:
                    return None
                group = self.base.group_size if self.base.mode == "affine" else 64
                found = self.base if bits == self.base.bits else Scheme(bits, group)
                break
        if width % found.group_size == 0:
            return found
        # As MLX packs a narrow matrix: by the largest group that divides it.
        narrow = next((g for g in reversed(AFFINE_GROUPS) if width % g == 0), None)
        return None if narrow is None or found.mode != "affine" else Scheme(found.bits, narrow)

    def as_dict(self) -> dict[str, Any]:
        return {"base": self.base.as_dict(), "rules": [list(rule) for rule in self.rules]}

    def check_used(self) -> None:
        """Raises UsageError for a rule of the user's that decided nothing, as a typo does."""
        for pattern, _ in self.rules[: self.own]:
            if pattern not in self.used:
                raise UsageError(
                    f"the recipe's pattern {pattern!r} matches no matrix that the lines before it "
                    "leave"
                )


def default_rules(bits: int) -> tuple[tuple[str, int], ...]:
    """For a pair whose other matrices take `bits`."""
    eight = ("embed_tokens_per_layer", "per_layer_model_projection", "*.per_layer_*", "*.router.*")
    return (
        (f"{DRAFTER}masked_embedding.*", 0),
        (f"{DRAFTER}*", 8),
        *((pattern, 8) for pattern in eight),
        ("embed_tokens", max(bits, 6)),
        ("lm_head", max(bits, 6)),
    )


def make(
    bits: int | None, mode: str = "affine", group_size: int | None = None, file: Path | None = None
) -> Recipe | None:
    """The recipe that options ask for, None for none. file: TOML, lines of "pattern" = bits that
    come before the default rules. Raises UsageError."""
    if bits is None and mode in FLOATS:
        bits = FLOATS[mode][0]
    if bits is None:
        for what, given in (("a recipe", file), ("a group size", group_size)):
            if given is not None:
                raise UsageError(f"{what} says how to quantise: give the bits, too (-q)")
        if mode != "affine":
            raise UsageError(f"mode is {mode}; it must be affine, {', '.join(FLOATS)}")
        return None
    usual = FLOATS[mode][1] if mode in FLOATS else 64
    base = Scheme(bits, usual if group_size is None else group_size, mode)
    own = tuple(_read(file)) if file else ()
    return Recipe(base, (*own, *default_rules(bits)), len(own))


def _read(file: Path) -> Iterable[tuple[str, int]]:
    try:
        rules = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f'{file} is no recipe, lines of "pattern" = bits: {error}') from None
    for pattern, bits in rules.items():
        if type(bits) is not int or bits not in (0, *AFFINE_BITS):
            raise UsageError(f"{file}: {pattern!r} is {bits!r}; it must be 0 or {AFFINE_BITS}")
        yield pattern, bits
