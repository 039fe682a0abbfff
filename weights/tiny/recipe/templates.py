"""Fill the function templates of `functions.txt` with slot words.

A block starts with `# sentence`, then code. `{{a|b}}` is a choice, the same one wherever it is
repeated. Slots: $n a whole number's name, $x one thing, $seq many of them, $X its class name,
$v and $u attributes. Words come from the names in the corpus, so that the model has to copy them.
"""

from __future__ import annotations

import ast
import collections
import keyword
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

from corpus import tidy

BLOCKS = [
    "# " + b.strip("# \n")
    for b in re.split(r"\n\n(?=# )", Path(__file__).with_name("functions.txt").read_text("utf-8"))
]
ASKED = re.compile("fibonacci|factorial|gcd|prime|y_search|bubble|flatten|count_w|palin|string")
WEIGHTS = [3 if ASKED.search(b) else 1 for b in BLOCKS]
PAIRS = [("number", "numbers"), ("value", "values"), ("item", "items"), ("num", "nums")]
COUNTS = ["n"] * 7 + ["number", "num", "k", "count", "limit", "size"]
NAME = re.compile(r"(?<![a-zA-Z\\])[a-z]{3,11}(?![a-zA-Z])")
SYLLABLES = [c + v for c in "bcdfghjklmnprstvwz" for v in "aeiou"]
RESERVED = {
    *keyword.kwlist,
    "self",
    "cls",
    "sum",
    "max",
    "min",
    "set",
    "list",
    "dict",
    "str",
    "int",
    "len",
    "sorted",
    "zip",
    "range",
    "print",
    "item",
    "value",
    "number",
    "seen",
    "total",
    "result",
    "counts",
    "groups",
    "count",
    "path",
    "file",
    "key",
    "limit",
    "target",
    "best",
    "current",
    "mean",
    "pivot",
    "middle",
    "match",
}


def harvest(codes: list[str]) -> list[str]:
    """The simple lower-case names of the given functions, most frequent first."""
    words = collections.Counter(w for code in codes for w in NAME.findall(code))
    return [
        w for w, n in words.most_common() if n > 1 and w not in RESERVED and not w.endswith("s")
    ]


@dataclass(frozen=True)
class Words:
    """Where slot words come from: a list of names, or made-up ones from a set of syllables."""

    names: list[str]
    syllables: list[str]

    def one(self, rng: random.Random) -> str:
        kind = rng.random()
        if kind < 0.12:
            return "".join(rng.choices(self.syllables, k=rng.randint(2, 3)))
        if kind < 0.27:
            return f"{rng.choice(self.names)}_{rng.choice(self.names)}"
        common = min(len(self.names), 600) if kind < 0.6 else len(self.names)
        return self.names[rng.randrange(common)]


def split_words(train: list[str], held_out: list[str]) -> tuple[Words, Words]:
    """Slot words for training, and for evaluation ones that no training text has."""
    known = set(re.findall(r"[a-z]+", "\n".join(train)))
    unseen = [w for w in harvest(held_out) if w not in known]
    return Words(harvest(train), SYLLABLES[::2]), Words(unseen, SYLLABLES[1::2])


@dataclass(frozen=True)
class Function:
    """A function or class with the sentence that describes it."""

    name: str
    sentence: str
    code: str
    source: str = ""

    def documented(self) -> Function:
        tree = ast.parse(self.code)
        definition = tree.body[0]
        assert isinstance(definition, (ast.FunctionDef, ast.ClassDef))
        definition.body.insert(0, ast.Expr(ast.Constant(self.sentence)))
        return replace(self, code=tidy(ast.unparse(tree)))

    def renamed(self, old: str, new: str) -> Function:
        code = re.sub(rf"\b{old}\b", new, self.code)
        return replace(self, code=code, name=new if old == self.name else self.name)

    def does(self) -> str:
        """The sentence in the third person: "It returns the mean of prices."."""
        verb, _, rest = self.sentence.partition(" ")
        if verb == "A":
            return f"It is a {rest}"
        ending = "es" if verb.endswith(("ch", "sh", "ss", "x")) else "s"
        stem = verb.lower()
        if stem == "multiply":
            stem, ending = "multipli", "es"
        return f"It {stem}{ending} {rest}"


def fill(block: str, words: Words, rng: random.Random, classic: float = 0.3) -> Function:
    """One function from a template; `classic` is how often it is about plain numbers or items."""
    choices: dict[str, str] = {}
    text = re.sub(
        r"\{\{([^{}]*\|[^{}]*)\}\}",
        lambda m: choices.setdefault(m[1], rng.choice(m[1].split("|"))),
        block,
    )
    one = words.one(rng)
    x, seq = rng.choice(PAIRS) if rng.random() < classic else (one, one + "s")
    v, u = words.one(rng), words.one(rng)
    slots = {
        "n": rng.choice(COUNTS),
        "x": x,
        "seq": seq,
        "v": v,
        "u": u,
        "X": x.title().replace("_", ""),
    }
    text = re.sub(r"\$(seq|[nxvuX])", lambda m: slots[m[1]], text)
    sentence, _, code = text[2:].partition("\n")
    found = re.search(r"(?:def|class) (\w+)", code)
    assert found
    source = block.split("\n", 1)[0][2:]
    return Function(found[1], sentence, tidy(ast.unparse(ast.parse(code))), source)


def sample(words: Words, rng: random.Random, classic: float = 0.3) -> Function:
    return fill(rng.choices(BLOCKS, WEIGHTS)[0], words, rng, classic)


def real(code: str) -> Function:
    """A documented function of the corpus, with the docstring taken out of the code."""
    definition = ast.parse(code).body[0]
    assert isinstance(definition, ast.FunctionDef)
    sentence = ast.get_docstring(definition) or ""
    definition.body.pop(0)
    return Function(definition.name, sentence, tidy(ast.unparse(definition)))
