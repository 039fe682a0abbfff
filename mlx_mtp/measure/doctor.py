"""A self-test whose report can be pasted into an issue: what is here, what is wrong with it, and
what to do.

A check that raises is a finding. MLX and what is built on it are imported by the checks that need
them, for a broken installation is one of the things to be told. Lines hold no personal data: no
home folder, user, host, token, prompt or text.
"""

from __future__ import annotations

import getpass
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from mlx_mtp.errors import MtpError

if TYPE_CHECKING:
    from mlx_mtp.engine.requests import Stats
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.kernels.race import Contest
    from mlx_mtp.pair import Pair
    from mlx_mtp.weights.checkpoint import Progress

OK, WARNING, WRONG, SKIPPED = "ok", "warning", "wrong", "skipped"
HUB_S = 4.0  # for the hub's answer
KERNELS_S = 20.0
TOKENS, DRAFTS = 48, 4  # of the texts that are compared
LEAST_ACCEPTED = 0.8  # tokens a round
# In bf16 scores of about 30 are apart by steps of 0.125, and several roundings add up.
NEAR_TIE = 0.5

Found = tuple[str, str, str]  # state, what was found, what to do about it


@dataclass(frozen=True)
class Check:
    """name: what was looked at. state: OK, WARNING, WRONG or SKIPPED. found: a line. advice:
    another, where there is something to do."""

    name: str
    state: str
    found: str
    advice: str = ""


def examine(
    model: str | None = None, *, offline: bool = False, progress: Progress | None = None
) -> Iterator[Check]:
    """All checks, each as soon as it is made; `model` as `load_pair` takes it. offline: do not ask
    the hub whether it is there. WAITS for the device."""
    clean = anonymous(model)
    pairs: list[Pair] = []
    stats: list[Stats] = []
    alone: dict[str, Callable[[], Found]] = {
        "machine": machine,
        "python": python,
        "versions": versions,
        "install": backends,
        "metal": metal,
        "compiler": compiler,
        "data folder": data,
        "hub cache": cache,
        "hub": partial(hub, offline),
        "pair": partial(load, pairs, model, progress),
    }
    of_pair: dict[str, Callable[[Pair], Found]] = {
        "weights": weights,
        "memory": memory,
        "exactness": exactness,
        "texts": partial(texts, stats),
        "acceptance": lambda _: acceptance(stats),
        # Last, for contests leave the pair's modules with other ways than it was loaded with.
        "kernels": kernels_of,
    }
    for name, look in alone.items():
        yield run(name, look, clean)
    for name, look_at in of_pair.items():
        if pairs:
            yield run(name, partial(look_at, pairs[0]), clean)
        else:
            yield Check(name, SKIPPED, "there is no pair to look at")


def run(name: str, look: Callable[[], Found], clean: Callable[[str], str]) -> Check:
    try:
        state, found, advice = look()
    except MtpError as error:
        state, found, advice = WRONG, str(error), "mend this and run doctor again"
    except Exception as error:
        state, found = WRONG, f"{type(error).__name__}: {error}"
        advice = "if versions and install are ok, open an issue with this report"
    return Check(name, state, clean(found), clean(advice))


def anonymous(model: str | None = None) -> Callable[[str], str]:
    """Makes one line of a text and takes out what says whose machine it is, and where the folder
    `model` lies."""
    secrets = {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_HOME"}
    secrets |= {"XDG_CACHE_HOME", "XDG_DATA_HOME"}
    hidden = [(str(Path.home()), "~"), (str(Path.home().resolve()), "~")]
    if model is not None and Path(model).expanduser().exists():
        hidden.append((str(Path(model).expanduser().absolute().parent), "..."))
    hidden += [(os.environ.get(name, ""), f"${name}") for name in secrets]
    with suppress(OSError, KeyError):
        hidden.append((getpass.getuser(), "USER"))
    hidden += [(platform.node(), "HOST"), (platform.node().partition(".")[0], "HOST")]
    patterns = [
        (re.compile(rf"(?<![^\W_]){re.escape(value)}(?![^\W_])", re.IGNORECASE), name)
        for value, name in hidden
        if value not in ("", "/")
    ]

    def clean(text: str) -> str:
        line = " ".join(text.split())
        for pattern, name in patterns:
            line = pattern.sub(name, line)
        return line

    return clean


def machine() -> Found:
    from mlx_mtp.measure.machine import this_machine

    here = this_machine()
    system = platform.mac_ver()[0] or platform.release()
    return OK, f"{here.name}, {here.memory / 2**30:.0f} GiB, {platform.system()} {system}", ""


def python() -> Found:
    found = f"Python {platform.python_version()} for {platform.machine()}"
    if sys.platform == "darwin":
        if platform.machine() != "arm64":
            return WRONG, f"{found}, but MLX needs arm64", "install a native arm64 Python"
        if int(platform.mac_ver()[0].partition(".")[0]) < 14:
            return WRONG, f"{found}, macOS {platform.mac_ver()[0]}", "MLX needs macOS 14 or newer"
    return OK, found, ""


def installed() -> dict[str, str]:
    """Versions by name of what is installed; of several, the one that is imported."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        with suppress(KeyError, AttributeError, TypeError):  # a folder that is half deleted
            found.setdefault(re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(), one.version)
    return found


def versions() -> Found:
    from packaging.requirements import Requirement

    there = installed()
    needed = [Requirement(line) for line in metadata.requires("mlx-mtp") or ()]
    wrong = [
        n
        for n in needed
        if (n.marker is None or n.marker.evaluate({"extra": ""}))
        and not (n.name in there and n.specifier.contains(there[n.name], prereleases=True))
    ]
    shown = ("mlx-mtp", "mlx", "mlx-lm", "tokenizers", "huggingface-hub")
    found = ", ".join(f"{name} {there.get(name, 'missing')}" for name in shown)
    if wrong:
        lacking = (f"{n.name} is {there.get(n.name, 'missing')}" for n in wrong)
        for n in wrong:
            n.marker = None
        wanted = " ".join(f'"{n}"' for n in wrong)
        return WRONG, f"{found}; {', '.join(lacking)}", f"pip install -U {wanted}"
    import mlx.core as mx

    if mx.__version__ != there["mlx"]:
        found += f"; but the MLX that is imported is {mx.__version__}"
        return WRONG, found, "pip install --force-reinstall mlx"
    return OK, found, ""


def backends() -> Found:
    """MLX's backends share file names: of two that lie on top of each other, neither is whole."""
    there = installed()
    found = [name for name in there if re.fullmatch("mlx-(metal|cpu|cuda.*)", name)]
    kind = "cuda13" if any("cuda" in name for name in found) else "cpu"
    extra = "" if "mlx-metal" in found else f"[{kind}]"
    advice = f'pip uninstall -y mlx {" ".join(found)} && pip install "mlx{extra}"'
    if len(found) > 1:
        return WRONG, f"{' and '.join(found)} lie on top of each other", advice
    for name in found:
        if there[name] != there.get("mlx"):
            told = f"mlx is {there.get('mlx', 'missing')}, but {name} is {there[name]}"
            return WRONG, told, advice
    return OK, f"MLX's backend is {' '.join(found) or 'its own'}", ""


def metal() -> Found:
    import mlx.core as mx

    if not mx.metal.is_available():
        device = f"MLX runs on the {mx.default_device().type.name}"
        if sys.platform == "darwin":
            return WARNING, f"MLX finds no Metal device; {device}", "run it outside virtual machines"
        return SKIPPED, f"no Metal here; {device}", ""
    info = mx.device_info()
    named = re.search(r"g(\d+)", str(info["architecture"]))
    generation = f"GPU generation {named[1]}" if named else "of an unknown GPU generation"
    return (
        OK,
        f"{info['device_name']}, {info['architecture']}, {generation}, working set "
        f"{_gb(int(info['max_recommended_working_set_size']))}, largest buffer "
        f"{_gb(int(info['max_buffer_length']))}",
        "",
    )


def compiler() -> Found:
    if sys.platform != "linux":
        return SKIPPED, "only used on Linux", ""
    return OK, f"g++ is {'there' if shutil.which('g++') else 'not there; only --compile needs it'}", ""


def data() -> Found:
    """What is kept there is read as the program itself does."""
    from mlx_mtp.folders import data_folder
    from mlx_mtp.kernels.profile import Profile
    from mlx_mtp.measure import tuned

    folder = data_folder()
    if fault := unwritable(folder):
        return WRONG, fault, "choose another by XDG_DATA_HOME, or mend its place or permissions"
    profile, ignored = Profile.load(folder)
    notices = [ignored] if ignored else []
    return OK, f"{folder}", ""


def cache() -> Found:
    from mlx_mtp.weights.checkpoint import cache_root

    folder = cache_root()
    if fault := unwritable(folder):
        return WRONG, fault, "choose another by HF_HOME, or mend its place or permissions"
    return OK, f"{folder}", ""


def unwritable(folder: Path) -> str | None:
    """Why nothing could be written into a folder, which need not exist."""
    at = folder
    while not os.path.lexists(at):
        at = at.parent
    if not at.is_dir():
        return f"{folder} cannot be written: {at} is no folder"
    if not os.access(at, os.W_OK | os.X_OK):
        return f"{folder} cannot be written: {at} may not be changed"
    return None


def hub(offline: bool) -> Found:
    """Asks for the pinned commit of one published model, without a token."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    from mlx_mtp.weights.known import SHORT

    if offline or constants.HF_HUB_OFFLINE:
        return SKIPPED, "offline", ""
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    one = SHORT["e2b"]
    url = f"{endpoint}/api/models/{one.target}/revision/{one.target_revision}"
    answers: list[str] = []

    def ask() -> None:
        try:
            status = get_session().get(url, timeout=HUB_S).status_code
            answers.append("" if status == 200 else f"{endpoint} answered {status}")
        except Exception as error:
            answers.append(f"{endpoint} cannot be reached ({type(error).__name__})")

    # A name's look-up knows no timeout, so it is left behind.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_S)
    fault = (answers or [f"{endpoint} gives no answer within {HUB_S:.0f} s"])[0]
    if fault:
        return WARNING, fault, "models that are not cached need it: check network, proxy, HF_ENDPOINT"
    return OK, f"{endpoint} answers", ""


def load(pairs: list[Pair], model: str | None, progress: Progress | None) -> Found:
    """Puts the pair into `pairs`."""
    from mlx_mtp.weights.load import load_pair

    pair = load_pair(model, calibrate=False, progress=progress)
    pairs.append(pair)
    kind = str(pair.target.dtype).removeprefix("mlx.core.")
    drafter = f"drafter {pair.drafter_name}" if pair.drafter else "no drafter"
    told = "; ".join([f"{pair.name} in {kind}, {drafter}, loaded in {pair.load_s:.1f} s", *pair.notices])
    if pair.drafter is None:
        return WARNING, told, "without a drafter this is plain decoding: name one by --drafter"
    return OK, told, ""


def weights(pair: Pair) -> Found:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    models = {"target": pair.target, "drafter": pair.drafter}
    floats = [
        (f"{part} {name}", weight)
        for part, module in models.items()
        if module is not None
        for name, weight in tree_flatten(module.parameters())
        if mx.issubdtype(weight.dtype, mx.floating)
    ]
    bad = [name for name, w in floats if not math.isfinite(float(w.max()) + float(w.min()))]
    if bad:
        told = f"{len(bad)} of {len(floats)} tensors hold NaN or infinity: {bad[0]}"
        return WRONG, told, "fetch or convert the model again; `mlx-mtp verify` compares hashes"
    return OK, f"{len(floats)} tensors of floats are finite", ""


def memory(pair: Pair) -> Found:
    from mlx_mtp.weights.fit import POSITIONS, device_bytes, kv_bytes

    limit, taken = device_bytes(), pair.weights_bytes
    kv = kv_bytes(pair.target.config.text, pair.target.dtype)
    return (
        OK,
        f"{_gb(limit)} for weights and KV, weights take {_gb(taken)}, {_gb(limit - taken)} are "
        f"left for KV, of which {POSITIONS} positions take {_gb(kv)}",
        "",
    )


def exactness(pair: Pair) -> Found:
    from mlx_mtp.engine.kv import KVLayout
    from mlx_mtp.measure.exact import probe

    text, dtype = pair.target.config.text, pair.target.dtype
    ways = pair.calibration.attention(text, dtype, None) if pair.calibration else {}
    return exact(probe(pair.target, KVLayout(text, dtype, full_ways=ways)))


def exact(differences: dict[int, float]) -> Found:
    """differences: by rows of a pass, from one-row passes."""
    if not all(map(math.isfinite, differences.values())):
        return WRONG, "a verify pass gives numbers that are not finite", "see weights; report this"
    equal = [str(rows - 1) for rows, apart in differences.items() if apart == 0]
    others = {rows - 1: apart for rows, apart in differences.items() if apart != 0}
    told = f"bit-equal to plain decoding: draft lengths {', '.join(equal) or 'none'}"
    if others:
        told += "; largest differences: " + ", ".join(f"{n}: {x:.1e}" for n, x in others.items())
    return OK, told, ""


def texts(stats: list[Stats], pair: Pair) -> Found:
    """Greedy answers to the built-in code prompts, with drafts and with auto against plain ones.
    Adds what drafting took to `stats`."""
    from mlx_mtp.generation import Options, generate
    from mlx_mtp.measure.prompts import prompts
    from mlx_mtp.models.layers import on_cpu

    if pair.drafter is None:
        return SKIPPED, "there is no drafter", ""
    asked, raw = prompts()["code"], pair.template is None
    differences: list[Difference] = []
    engine = pair.engine()
    try:
        for number, prompt in enumerate(asked, 1):
            plain, drafted, auto = (
                generate(pair, prompt, Options(TOKENS, 0.0, draft_len=n, raw=raw), engine=engine)
                for n in (0, DRAFTS, None)
            )
            stats.append(drafted.stats)
            for how, result in ((str(DRAFTS), drafted), ("auto", auto)):
                at = first_difference(plain.token_ids, result.token_ids)
                if at is not None:
                    before = plain.prompt_token_ids + plain.token_ids[:at]
                    differences.append(Difference(number, how, at, gap(engine, before)))
    finally:
        engine.close()
    exact = on_cpu() and str(pair.target.dtype).endswith("float32")
    return compared(len(asked), differences, 0.0 if exact else NEAR_TIE)


@dataclass(frozen=True)
class Difference:
    """A text that was another than by plain decoding. apart: the two best logprobs there."""

    prompt: int
    draft_len: str
    position: int
    apart: float


def compared(count: int, differences: list[Difference], near_tie: float) -> Found:
    lines = [
        f"prompt {one.prompt} with draft length {one.draft_len} from token {one.position}, where "
        f"the two best scores are {one.apart:.2g} apart"
        for one in differences
    ]
    if any(one.apart > near_tie for one in differences):
        found = f"drafting changes the text: {'; '.join(lines)}"
        return WRONG, found, "this is no near-tie: use --draft-len 0 and open an issue"
    if differences:
        return OK, f"differ at near-ties: {'; '.join(lines)}", ""
    found = f"{count} greedy texts are the same with draft lengths 0, {DRAFTS} and auto"
    return OK, found, ""


def first_difference(one: list[int], other: list[int]) -> int | None:
    pairs = enumerate(zip_longest(one, other))
    return next((i for i, (a, b) in pairs if a != b), None)


def gap(engine: Engine, before: list[int]) -> float:
    """Between the logprobs of the two likeliest tokens behind these."""
    from mlx_mtp.engine.requests import Request

    request = Request(before, 1, draft_len=0, logprobs=2)
    engine.add(request)
    while engine.busy:
        engine.step()
    (_, best), (_, second) = request.token_logprobs[0].likeliest
    return best - second


def acceptance(stats: list[Stats]) -> Found:
    rounds = sum(one.rounds for one in stats)
    if not rounds:
        return SKIPPED, "nothing was drafted", ""
    accepted = sum(one.accepted for one in stats) / rounds
    found = f"{accepted:.2f} of {DRAFTS} drafted tokens accepted a round on code"
    if accepted < LEAST_ACCEPTED:
        advice = "check that the drafter is this model's own (`mlx-mtp inspect`), not another's"
        return WARNING, f"{found}, {LEAST_ACCEPTED} are expected at least", advice
    return OK, found, ""


def kernels_of(pair: Pair) -> Found:
    from mlx_mtp.engine.calibrate import attention_site, contest, sites
    from mlx_mtp.engine.kv import KVLayout
    from mlx_mtp.kernels.launch import on_metal

    if not on_metal():
        return SKIPPED, "they run on Metal only", ""
    found = [attention_site(KVLayout(pair.target.config.text, pair.target.dtype))]
    for model in (pair.target, pair.drafter):
        found += sites(model) if model is not None else ()
    alike = {site.key: site for site in found}
    return kernels(
        partial(contest, [site], rows) for site in alike.values() for rows in site.rows if site.ways
    )


def kernels(contests: Iterable[Callable[[], Contest]]) -> Found:
    """Each kernel against MLX's operations on the same numbers, for KERNELS_S at most."""
    from mlx_mtp.kernels.race import race

    outcome = race(contests, KERNELS_S)
    told = f"{sum(map(len, outcome.wins.values()))} shapes compared with MLX's operations"
    told += f", no time for {outcome.left}" if outcome.left else ""
    if outcome.wrong:
        told += f": {len(outcome.wrong)} are wrong: {'; '.join(outcome.wrong)}"
        return WRONG, told, "MLX's operations are used instead; please open an issue"
    return OK, f"{told}, all give the same", ""


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
