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
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

from mlx_mtp.errors import MtpError

if TYPE_CHECKING:
    from mlx_mtp.engine.requests import Stats
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.kernels.race import Contest
    from mlx_mtp.pair import Pair
    from mlx_mtp.weights.checkpoint import Progress

OK, WARNING, WRONG, SKIPPED = "ok", "warning", "wrong", "skipped"
HUB_S, KERNELS_S = 4.0, 20.0  # at most
TOKENS, DRAFTS = 48, 4  # of the texts that are compared
LEAST_ACCEPTED = 0.8  # tokens a round
# In bf16 scores of about 30 are apart by steps of 0.125, and several roundings add up.
NEAR_TIE = 0.5
HIDDEN = ["HF_TOKEN", "HF_ENDPOINT", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"]
HIDDEN += ["XDG_CACHE_HOME", "XDG_DATA_HOME"]

Found = tuple[str, str] | tuple[str, str, str]  # as in Check


@dataclass(frozen=True)
class Check:
    """state: OK, WARNING, WRONG or SKIPPED. found, advice: a line each, where there is one."""

    name: str
    state: str
    found: str
    advice: str = ""


def examine(
    model: str | None = None,
    drafter: str | None = None,
    *,
    offline: bool = False,
    progress: Progress | None = None,
) -> Iterator[Check]:
    """All checks, each as soon as it is made; `model` and `drafter` as the commands take them.
    offline: the hub is not asked whether it is there. WAITS for the device."""
    model, drafter = placed(model), placed(drafter)
    clean = anonymous(model, drafter)
    seen: dict[str, str] = {}  # what is wrong -> where it was told

    def once(check: Check) -> Check:
        first = seen.setdefault(check.found, check.name) if check.state == WRONG else check.name
        return check if first == check.name else Check(check.name, SKIPPED, f"see {first}")

    pairs: list[Pair] = []
    stats: list[Stats] = []
    alone: dict[str, Callable[[], Found]] = {
        "machine": machine,
        "python": python,
        "versions": versions,
        "install": install,
        "metal": metal,
        "data folder": data,
        "hub cache": cache,
        "hub": partial(hub, offline),
        "pair": partial(load, pairs, offline, model, drafter=drafter or "auto", progress=progress),
    }
    # Kernels last, for contests leave modules with other ways than they were loaded with.
    of_pair: dict[str, Callable[[Pair], Found]] = {
        "weights": partial(weights, progress=progress),
        "memory": memory,
        "exactness": exactness,
        "texts": partial(texts, stats),
        "acceptance": lambda _: acceptance(stats),
        "kernels": kernels_of,
    }
    for name, look in alone.items():
        yield once(run(name, look, clean))
    try:
        for name, look_at in of_pair.items():
            if pairs:
                yield once(run(name, partial(look_at, pairs[0]), clean))
            else:
                yield Check(name, SKIPPED, "there is no pair to look at")
    finally:
        for pair in pairs:
            pair.restore_limits()


def run(name: str, look: Callable[[], Found], clean: Callable[[str], str]) -> Check:
    try:
        state, *lines = look()
    except MtpError as error:
        state, lines = WRONG, [str(error), "mend this and run doctor again"]
    except Exception as error:
        advice = "open an issue with this report"
        if isinstance(error, ImportError):
            advice = "in the clone of mlx-mtp: .venv/bin/pip install --force-reinstall ."
        state, lines = WRONG, [f"{type(error).__name__}: {error}", advice]
    return Check(name, state, *map(clean, lines))


def placed(model: str | None) -> str | None:
    """A folder's whole path; a hub id or a short name as it is."""
    path = os.path.expanduser(model or "")
    return os.path.abspath(path) if path[:1] in ("/", ".") or os.path.exists(path) else model


def anonymous(*models: str | None) -> Callable[[str], str]:
    """Makes one line of a text and takes out what says whose machine it is, and where those of
    `models` that are `placed` folders lie and how they are called."""
    home = os.path.expanduser("~")
    hidden = [(home, "~"), (os.path.realpath(home), "~")]
    for folder in filter(os.path.isabs, filter(None, models)):
        places = folder, os.path.realpath(folder), os.path.dirname(folder)
        hidden += [(place, "...") for place in places]
    hidden += [(os.path.expanduser(os.environ.get(name, "")), f"${name}") for name in HIDDEN]
    with suppress(OSError, KeyError):
        hidden.append((getpass.getuser(), "USER"))
    hidden += [(platform.node(), "HOST"), (platform.node().partition(".")[0], "HOST")]
    patterns = [
        (re.compile(rf"(?<![^\W_]){re.escape(value)}(?![^\W_])", re.IGNORECASE), name)
        for value, name in sorted(hidden, key=lambda one: -len(one[0]))
        if value not in ("", "~", "/")
    ]
    # The name of a model's tuned profile is made of the model's.
    patterns.insert(0, (re.compile(r"(?<=/tuned/)[\w-]*(?=-[0-9a-f]{8}\.json)"), "*"))

    def clean(text: str) -> str:
        line = " ".join(text.split())
        for pattern, name in patterns:
            line = pattern.sub(name, line)
        return line

    return clean


def machine() -> Found:
    from mlx_mtp.measure.machine import this_machine

    here = this_machine()
    return OK, f"{here.name}, {here.memory / 2**30:.0f} GiB"


def python() -> Found:
    mac = platform.mac_ver()[0]
    system = f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}"
    found = f"{platform.python_version()} for {platform.machine()} on {system}"
    if mac and platform.machine() != "arm64":
        return WRONG, found, "MLX needs a native arm64 Python on Apple silicon: install one"
    return OK, found


def installed() -> dict[str, str]:
    """Versions by name of what is installed; of several, the one that is imported."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        with suppress(KeyError, AttributeError, TypeError):  # a folder that is half deleted
            if one.version:
                found.setdefault(re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(), one.version)
    return found


def versions() -> Found:
    from packaging.requirements import Requirement

    there, wrong, how = installed(), [], "-U"
    for needed in map(Requirement, metadata.requires("mlx-mtp") or ()):
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            needed.marker, version = None, there.get(needed.name)
            if version and find_spec(needed.name.replace("-", "_")) is None:
                there[needed.name], version = f"{version} without its folder", None
                how = "-U --force-reinstall"
            if version is None or not needed.specifier.contains(version, prereleases=True):
                wrong.append(f'"{needed}"')
    shown = ("mlx-mtp", "mlx", "mlx-lm", "tokenizers", "huggingface-hub")
    found = ", ".join(f"{name} {there.get(name, 'missing')}" for name in shown)
    if wrong:
        return WRONG, f"{found}; needed: {', '.join(wrong)}", f"pip install {how} {' '.join(wrong)}"
    import mlx.core as mx

    if (imported := vars(mx)["__version__"]) != there["mlx"]:
        found += f", but the MLX that is imported is {imported}"
        return WRONG, found, "pip install --force-reinstall mlx"
    return OK, found


def install() -> Found:
    """MLX's backends share file names: of two that lie on top of each other, neither is whole."""
    there = installed()
    found = [name for name in there if re.fullmatch("mlx-(metal|cpu|cuda.*)", name)]
    told = ", ".join(f"{name} {there.get(name, 'missing')}" for name in ("mlx", *found))
    if len(found) > 1 or any(there[name] != there.get("mlx") for name in found):
        told += " lie on top of each other" if len(found) > 1 else " do not belong together"
        extra = "[cuda13]" if any("cuda" in name for name in found) else "[cpu]"
        wanted = "mlx" if "mlx-metal" in found else f"mlx{extra}"
        return WRONG, told, f'pip uninstall -y mlx {" ".join(found)} && pip install "{wanted}"'
    if sys.platform == "linux":
        told += f"; g++, for compiled rounds alone, is {'' if shutil.which('g++') else 'not '}here"
    return OK, told


def metal() -> Found:
    import mlx.core as mx

    from mlx_mtp.weights.fit import gb

    info = mx.device_info()
    if not mx.metal.is_available():
        state = WARNING if sys.platform == "darwin" else SKIPPED
        device = f"{mx.default_device().type.name} ({info.get('device_name', 'unknown')})"
        return state, f"no Metal here, MLX runs on the {device}"
    generation = re.search(r"g(\d+)", str(info["architecture"]))
    return OK, (
        f"{info['device_name']}, {info['architecture']}, GPU generation "
        f"{generation[1] if generation else 'unknown'}, working set "
        f"{gb(int(info['max_recommended_working_set_size']))}, largest buffer "
        f"{gb(int(info['max_buffer_length']))}"
    )


def data() -> Found:
    """What is kept there is read as the program itself does."""
    from mlx_mtp.folders import data_folder
    from mlx_mtp.kernels.profile import DAMAGED, Profile
    from mlx_mtp.kernels.profile import machine as current
    from mlx_mtp.weights import tuned

    folder = data_folder()
    for place in (folder, folder / "tuned", folder / "wired"):
        if (found := writable(place, "XDG_DATA_HOME"))[0] == WRONG:
            return found
    _, ignored = Profile.load(folder)
    files = sorted(folder.glob("tuned/*.json"))
    damaged = [ignored] if ignored else []
    for path in files:
        try:
            _, key = tuned.read(path)
            if not current().items() <= key.items():
                damaged.append(f"{path} is of another machine, MLX or version and is ignored")
        except DAMAGED:
            damaged.append(f"{path} cannot be read and is ignored")
    if damaged:
        state = WRONG if any("cannot be read" in line for line in damaged) else WARNING
        return state, "; ".join(damaged), "delete what is named here"
    return OK, f"{folder}, {len(files)} tuned profiles"


def cache() -> Found:
    from mlx_mtp.weights.checkpoint import cache_root

    return writable(cache_root(), "HF_HOME")


def writable(folder: Path, variable: str) -> Found:
    """Whether something could be written into a folder, which need not exist."""
    at = folder
    while not os.path.lexists(at):
        at = at.parent
    try:
        with TemporaryDirectory(dir=at) as made:
            (Path(made) / "file").write_text("written")
        return OK, str(folder)
    except OSError:
        why = "cannot be written to" if at.is_dir() else "is no folder"
    told = f"{folder}: {at} {why}".removeprefix(f"{at}: ")
    return WRONG, told, f"mend that, or set {variable} to another folder"


def hub(offline: bool) -> Found:
    """Asks for the pinned commit of one published model, without a token."""
    from huggingface_hub import constants, get_session

    from mlx_mtp.weights.known import SHORT

    if offline or constants.HF_HUB_OFFLINE:
        return SKIPPED, "offline"
    endpoint, one = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT, SHORT["e2b"]
    url = f"{endpoint}/api/models/{one.target}/revision/{one.target_revision}"
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(f"answers {get_session().get(url, timeout=HUB_S).status_code}")
        except Exception as error:
            answers.append(f"cannot be reached ({type(error).__name__})")

    # A name's look-up knows no timeout, so it is left behind.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_S)
    answer = (answers or ["is silent"])[0]
    if answer == "answers 200":
        return OK, f"{endpoint} {answer}"
    advice = "models that are not in the cache need it: check network, proxy and HF_ENDPOINT"
    return WARNING, f"{endpoint} {answer}", advice


def load(pairs: list[Pair], offline: bool, model: str | None, **how: Any) -> Found:
    """Puts the pair into `pairs`. Lines of other commands are put as doctor's options are."""
    from mlx_mtp.weights.load import load_pair

    def own(line: str) -> str:
        line = re.sub("; --force-fit .*|--model ", "", line)
        unset, leave = "HF_HUB_OFFLINE is set; unset it", "--offline is given; leave it away"
        return line.replace(unset, leave) if offline else line

    try:
        pair = load_pair(model, calibrate=False, **how)
    except MtpError as error:
        raise MtpError(own(str(error))) from None
    pairs.append(pair)
    dtype = str(pair.target.dtype).removeprefix("mlx.core.")
    told = [f"{pair.name} in {dtype}", pair.drafter_name or "no drafter", *map(own, pair.notices)]
    if pair.drafter is None:
        return WARNING, "; ".join(told), "this is plain decoding: name a drafter with --drafter"
    return OK, "; ".join(told)


def weights(pair: Pair, progress: Progress | None = None) -> Found:
    from mlx.utils import tree_flatten

    from mlx_mtp.weights.checkpoint import LISTING
    from mlx_mtp.weights.verify import check_folder

    again = "fetch or convert the model again"
    for folder in (pair.name, pair.drafter_name):
        listed = (Path(folder or "") / LISTING).is_file()
        if folder and listed and (problems := check_folder(folder, progress).problems):
            return WRONG, "; ".join(problems), again
    tensors = [
        (f"{type(model).__name__.lower()} {name}", weight)
        for model in (pair.target, pair.drafter)
        if model is not None
        for name, weight in tree_flatten(model.parameters())
    ]
    ends = [(name, w.ndim, float(w.max()), float(w.min())) for name, w in tensors]
    infinite = [name for name, _, most, least in ends if not math.isfinite(most + least)]
    empty = [name for name, ndim, most, least in ends if ndim > 1 and most == least == 0]
    for what, bad in (("hold NaN or infinity", infinite), ("are all zero", empty)):
        if bad:
            return WRONG, f"{len(bad)} of {len(tensors)} tensors {what}: {bad[0]}", again
    return OK, f"{len(tensors)} tensors are finite, and no matrix is all zero"


def memory(pair: Pair) -> Found:
    from mlx_mtp.folders import data_folder
    from mlx_mtp.weights.fit import POSITIONS, gb, kv_bytes
    from mlx_mtp.weights.limits import wired_by_others

    limit, taken = pair.memory_limit or 0, pair.weights_bytes
    others = wired_by_others(data_folder() / "wired")
    told = f" ({gb(others)} are wired by other mlx-mtp processes)" if others else ""
    return OK, (
        f"{gb(limit)} for weights and KV{told}, weights take {gb(taken)}, KV of {POSITIONS} "
        f"positions {gb(kv_bytes(pair.target.config.text, pair.target.dtype))}"
    )


def exactness(pair: Pair) -> Found:
    from mlx_mtp.engine.exact import probe

    engine = pair.engine()
    try:
        return exact(probe(engine.target, engine.layout, engine.policy.compile))
    finally:
        engine.close()


def exact(differences: dict[int, float]) -> Found:
    """differences: from one-row passes, by rows of a pass."""
    if not all(map(math.isfinite, differences.values())):
        return WRONG, "a verify pass gives numbers that are not finite", "see weights"
    equal = [str(rows - 1) for rows, apart in differences.items() if apart == 0]
    others = [f"{rows - 1}: {apart:.1e}" for rows, apart in differences.items() if apart != 0]
    told = f"draft lengths that are bit-equal to plain decoding: {', '.join(equal) or 'none'}"
    return OK, told + (f"; the others differ by {', '.join(others)}" if others else "")


def texts(stats: list[Stats], pair: Pair) -> Found:
    """Greedy answers to the built-in code prompts, with drafts and with auto against plain ones.
    Adds what drafting took to `stats`."""
    from mlx_mtp.generation import Options, generate
    from mlx_mtp.measure.prompts import prompts
    from mlx_mtp.models.layers import on_cpu

    if pair.drafter is None:
        return SKIPPED, "there is no drafter"
    differences: list[tuple[float, str]] = []
    engine = pair.engine()
    try:
        for number, prompt in enumerate(prompts()["code"], 1):
            plain, *others = (
                generate(
                    pair,
                    prompt,
                    Options(TOKENS, 0.0, draft_len=n, raw=pair.template is None),
                    engine=engine,
                )
                for n in (0, DRAFTS, None)
            )
            stats.append(others[0].stats)
            for how, other in zip((f"{DRAFTS} drafts", "auto"), others, strict=True):
                tokens = enumerate(zip_longest(plain.token_ids, other.token_ids))
                if (at := next((i for i, (a, b) in tokens if a != b), None)) is not None:
                    apart = gap(engine, plain.prompt_token_ids + plain.token_ids[:at])
                    line = f"prompt {number} with {how} at position {at} (scores {apart:.2g} apart)"
                    differences.append((apart, line))
    finally:
        engine.close()
    always = on_cpu() and str(pair.target.dtype).endswith("float32")
    return compared(differences, 0.0 if always else NEAR_TIE)


def compared(differences: list[tuple[float, str]], near_tie: float) -> Found:
    """differences: how far the two best scores are apart where a text is another than by plain
    decoding, and a line that says where."""
    lines = "; ".join(line for _, line in differences)
    if any(not apart <= near_tie for apart, _ in differences):
        found = f"drafting changes the text, not at near-ties: {lines}"
        return WRONG, found, "`mlx-mtp generate --draft-len 0` does not draft; open an issue"
    if differences:
        return OK, f"near-ties fall otherwise than in plain decoding: {lines}"
    return OK, f"greedy texts are the same with draft lengths 0, {DRAFTS} and auto"


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
        return SKIPPED, "nothing was drafted"
    accepted = sum(one.accepted for one in stats) / rounds
    found = f"{accepted:.2f} of {DRAFTS} drafted tokens accepted a round on code"
    if accepted < LEAST_ACCEPTED:
        advice = "`mlx-mtp inspect` names the drafter: it should be this model's own, and whole: "
        advice += "`mlx-mtp verify FOLDER`"
        return WARNING, f"{found}, under {LEAST_ACCEPTED}", advice
    return OK, found


def kernels_of(pair: Pair) -> Found:
    from mlx_mtp.engine.calibrate import attention_site, contest, sites
    from mlx_mtp.engine.kv import KVLayout
    from mlx_mtp.kernels.launch import on_metal

    if not on_metal():
        return SKIPPED, "they run on Metal only"
    found = [attention_site(KVLayout(pair.target.config.text, pair.target.dtype))]
    for model in (pair.target, pair.drafter):
        found += sites(model) if model is not None else ()
    alike = {site.key: site for site in found if site.ways}
    return kernels(partial(contest, [site], n) for site in alike.values() for n in site.rows)


def kernels(contests: Iterable[Callable[[], Contest]]) -> Found:
    """Each kernel against MLX's operations on the same numbers, for KERNELS_S at most."""
    from mlx_mtp.kernels.race import race

    outcome = race(contests, KERNELS_S)
    told = f"{sum(map(len, outcome.wins.values()))} shapes compared with MLX's operations"
    told += f", no time for {outcome.left}" if outcome.left else ""
    if outcome.wrong:
        told += f", wrong: {'; '.join(outcome.wrong)}"
        return WRONG, told, "MLX's operations are used instead; open an issue with this report"
    return OK, f"{told}, all give the same"
