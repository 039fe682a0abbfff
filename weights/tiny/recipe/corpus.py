"""Collect short functions with docstrings from permissively licensed Python packages.

Reads the wheels in one folder and the running Python's standard library, and writes
`functions.jsonl` (one {project, held_out, code} a line) and `data-card.md`, the table of sources.
Code is normalised by `ast.unparse`; a docstring is cut to its first line. Projects are held out
whole, and no held-out body equals a training body once names and docstrings are taken away.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import random
import re
import sys
import sysconfig
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 12
MAX_CHARS = 520
PER_PROJECT = 1200
HELD_OUT_SHARE = 0.12
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation)", re.IGNORECASE)
OTHER = re.compile(r"\b(L?A?GPL|MPL|Mozilla|GNU|CC-BY|CC0|EUPL)", re.IGNORECASE)


def licence(metadata: str) -> str:
    """The licence a wheel's METADATA names, or "" when it isn't clearly a permissive one."""
    head = metadata.split("\n\n", 1)[0]
    fields = re.findall(
        r"^(?:License-Expression|License|Classifier: License ::(?: OSI Approved ::)?)[: ] *(.+)$",
        head,
        re.MULTILINE,
    )
    named = "; ".join(dict.fromkeys(field.strip()[:60] for field in fields))
    return named if PERMISSIVE.search(named) and not OTHER.search(head) else ""


def tidy(code: str) -> str:
    """`ast.unparse` without the parentheses it adds around tuples and generators."""
    code = re.sub(r"( = )\(([^()\n]*,[^()\n]*)\)$", r"\1\2", code, flags=re.MULTILINE)
    at = 0
    while (at := code.find("((", at)) >= 0:
        depth, end = 1, at + 2
        while depth and end < len(code):
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        if code[at - 1 : at].isalnum() and " for " in code[at:end] and code[end : end + 1] == ")":
            code = code[: at + 1] + code[at + 2 : end - 1] + code[end:]
        at += 1
    return code


def shape(function: ast.FunctionDef) -> str:
    """A hash of the body with docstring, names and strings taken away: copies have one."""
    tree = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    tree.body = tree.body[1:]
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
        for field in ("id", "arg", "attr", "name"):
            if isinstance(value := getattr(node, field, None), str):
                setattr(node, field, names.setdefault(value, f"v{len(names)}"))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def functions(source: str) -> Iterator[tuple[str, str]]:
    """(code, shape) of every short documented function or method in a module."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        docstring = (ast.get_docstring(node) or "").strip().split("\n\n")[0].split("\n")[0].strip()
        if not 12 <= len(docstring) <= 80 or not docstring.isascii() or "`" in docstring:
            continue
        if node.end_lineno is None or node.end_lineno - node.lineno > 60:
            continue
        node.decorator_list, node.returns = [], None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        node.body[0] = ast.Expr(ast.Constant(docstring))
        code = tidy(ast.unparse(node))
        if code.count("\n") < MAX_LINES and len(code) <= MAX_CHARS and code.isascii():
            yield code, shape(node)


def sources(wheels: Path) -> Iterator[tuple[str, str, str, str, list[str]]]:
    """(project, version, licence, hash, module texts) of every usable source."""
    library = Path(sysconfig.get_path("stdlib"))
    modules = [p for p in sorted(library.rglob("*.py")) if usable(str(p.relative_to(library)))]
    texts = [p.read_text("utf-8", "ignore") for p in modules]
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    yield "cpython-stdlib", platform.python_version(), "PSF-2.0", digest, texts
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            metadata = next(n for n in names if n.endswith(".dist-info/METADATA"))
            terms = licence(wheel.read(metadata).decode("utf-8", "ignore"))
            if not terms:
                print("left out:", path.name, file=sys.stderr)
                continue
            project, version = path.name.split("-")[:2]
            texts = [
                wheel.read(n).decode("utf-8", "ignore")
                for n in sorted(names)
                if n.endswith(".py") and usable(n)
            ]
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            yield project, version, terms, digest, texts


def usable(name: str) -> bool:
    """False for tests, vendored copies and installed packages."""
    return not re.search(r"(^|/)(tests?|testing|_vendor|vendored|site-packages|idlelib)/", name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    rng = random.Random(0)
    kept: list[dict[str, object]] = []
    rows = ["| source | version | licence | held out | functions | sha256 |", "|" + "---|" * 6]
    seen: dict[str, bool] = {}
    collected = [
        (*entry[:4], [f for text in entry[4] for f in functions(text)])
        for entry in sources(options.wheels)
    ]
    held = {e[0]: rng.random() < HELD_OUT_SHARE and e[0] != "cpython-stdlib" for e in collected}
    for project, version, terms, digest, found in sorted(collected, key=lambda e: held[e[0]]):
        rng.shuffle(found)
        fresh = []
        for code, key in found:
            if len(fresh) < PER_PROJECT and key not in seen:
                seen[key] = True
                fresh.append({"project": project, "held_out": held[project], "code": code})
        kept += fresh
        mark = "yes" if held[project] else ""
        rows.append(f"| {project} | {version} | {terms} | {mark} | {len(fresh)} | {digest[:16]} |")
    options.out.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(json.dumps(entry) for entry in kept)
    (options.out / "functions.jsonl").write_text(lines + "\n")
    (options.out / "data-card.md").write_text("\n".join(rows) + "\n")
    print(len(kept), "functions,", sum(bool(entry["held_out"]) for entry in kept), "held out")


if __name__ == "__main__":
    main()
