"""`mlx-mtp generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from mlx_mtp.cli.options import DrafterId, DrafterRevision, Json, Model, Revision
from mlx_mtp.cli.terminal import emit, say, signals
from mlx_mtp.errors import UsageError

MAX_PROMPT = 64 << 20  # bytes; the longest context of a Gemma 4 is about a megabyte of text
HELP = """Answer PROMPT, or complete it with --raw.

PROMPT is taken as it is: backslashes stay backslashes. Without PROMPT, or with -, it is read from
stdin as UTF-8, and one newline at its end is dropped; --prompt-file is read to the byte. Where the
checkpoint has a chat template, PROMPT is one user turn, thinking off, and control tokens written in
it are plain text. With --raw they are control tokens, and an empty PROMPT is the BOS token alone.

The text goes to stdout, everything else to stderr. On a terminal, tokens that the drafter proposed
and the model accepted are in colour (not with NO_COLOR or TERM=dumb). Values not given come from
the checkpoint's generation_config, then from the defaults below. Exit codes: 0, 2 usage, 3 loading
or memory, 1 anything else, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP."""


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")
    ] = None,
    model: Model = None,
    revision: Revision = None,
    drafter: DrafterId = None,
    drafter_revision: DrafterRevision = None,
    no_drafter: Annotated[
        bool, typer.Option("--no-drafter", help="Decode plainly. [default: off]")
    ] = False,
    force_fit: Annotated[
        bool,
        typer.Option("--force-fit", help="Load although memory may not do. [default: off]"),
    ] = False,
    draft_len: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Drafted tokens a round, bonus not counted, 0..8, or auto: what pays, round by "
            "round. [default: auto]",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate at most. [default: 512]")
    ] = None,
    temp: Annotated[
        float | None,
        typer.Option(help="Temperature, 0 is greedy. [default: generation_config, else 0]"),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Keep the k likeliest tokens, 0 all. [default: generation_config, else 0]"
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Keep the likeliest tokens up to this probability. [default: generation_config, "
            "else 1]"
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Drop tokens below this share of the likeliest one's probability. "
            "[default: generation_config, else 0]"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling, 0 to 2^64 - 1. [default: random]")
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Divide the logits of tokens that prompt or answer hold, 1 is off. [default: "
            "generation_config, else 1]"
        ),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtract this from the logits of tokens in the answer, -2..2.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, once for every use, -2..2.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID:BIAS",
            help="Add BIAS, -100..100, to the logit of token ID; may be repeated. [default: none]",
        ),
    ] = None,
    suppress_token: Annotated[
        list[int] | None,
        typer.Option(help="Never say this token id; may be repeated. [default: none]"),
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Do not end before so many tokens.")] = 0,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: every token's logprob, and those of the N likeliest, 0..20. "
            "[default: off]"
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this text; may be repeated. [default: none]"),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="A system message before the prompt. [default: none]")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt, no chat template. [default: off]")
    ] = False,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from this file. [default: none]")
    ] = None,
    kv_bits: Annotated[
        int | None,
        typer.Option(help="Keep keys and values of full layers in 8 or 4 bits. [default: off]"),
    ] = None,
    max_kv: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and answer at most; longer prompts are refused. [default: the "
            "model's context]"
        ),
    ] = None,
    drafter_bits: Annotated[
        int | None,
        typer.Option(
            help="Quantise the drafter at load to 8, 6 or 4 bits; 0 keeps it as stored. [default: "
            "8 on a GPU, 0 on the CPU]"
        ),
    ] = None,
    drafter_device: Annotated[
        str | None,
        typer.Option(
            metavar="gpu|cpu",
            help="Where the drafter runs. [default: where the target does]",
        ),
    ] = None,
    compile_rounds: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="Compile rounds. [default: on a GPU; needs g++ on a CPU]"
        ),
    ] = None,
    pipeline: Annotated[
        bool | None,
        typer.Option(
            "--pipeline/--no-pipeline",
            help="Start a round before the one before it is read. [default: on a GPU]",
        ),
    ] = None,
    no_calibrate: Annotated[
        bool,
        typer.Option(
            "--no-calibrate",
            help="On Metal, race no kernels at the first load of a model (5 s at most); what "
            "earlier races gave is used. [default: off]",
        ),
    ] = False,
    as_json: Json = False,
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="Print the text at the end. [default: off]")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="No progress, no summary; notices stay. [default: off]"),
    ] = False,
) -> None:
    from mlx_mtp.generation import MAX_TOKENS, Options, low_acceptance, stream

    text = read_prompt(prompt, prompt_file, raw=raw)
    needs = {
        "--drafter": drafter,
        "--drafter-revision": drafter_revision,
        "--draft-len": draft_len not in (None, "0"),
        "--drafter-bits": drafter_bits is not None,
        "--drafter-device": drafter_device,
    }
    for name, given in needs.items():
        if no_drafter and given:
            raise UsageError(f"{name} needs a drafter, which --no-drafter leaves out")
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs is shown by --json only: give both")
    if model is None and (revision or (drafter_revision and not drafter)):
        raise UsageError("a revision needs the --model or the --drafter that it is of")
    options = Options(
        max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        draft_len=_draft_len(draft_len),
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(map(_bias, logit_bias or ())),
        suppress=tuple(suppress_token or ()),
        min_tokens=min_tokens,
        logprobs=logprobs,
        raw=raw,
        system=system,
    )
    # Nothing is drafted with 0, so a drafter that was not asked for need not be loaded.
    plain = no_drafter or (options.draft_len == 0 and drafter is None)

    from mlx_mtp.cli.view import Loading, Silent, human_bytes, summarise, view_for
    from mlx_mtp.weights.load import load_pair

    loading = None if quiet else Loading()
    pair = load_pair(
        model,
        drafter=None if plain else "auto" if drafter is None else drafter,
        revision=revision,
        drafter_revision=drafter_revision,
        drafter_bits=None if plain else drafter_bits,
        drafter_device=None if plain else drafter_device,
        force_fit=force_fit,
        calibrate=not no_calibrate,
        progress=loading,
    )
    if loading is not None:
        loading.close()
    if model is None and not quiet:
        say(
            f"no --model given: this is the demo pair, {human_bytes(pair.weights_bytes)}, which "
            "knows a little Python; --model e2b fetches a real one"
        )
    engine = pair.engine(kv_bits=kv_bits, max_kv=max_kv, compile=compile_rounds, pipeline=pipeline)
    generation = stream(pair, text, options, engine=engine)
    for notice in (*pair.notices, *generation.notices):
        say(notice)
    view = (
        Silent()
        if as_json
        else view_for(
            stream=not no_stream, live=not quiet, draft_len=generation.settings["draft_len"]
        )
    )
    with signals.deferred(view.abandon):
        try:
            for piece in generation:
                view.show(piece)
                if signals.caught is not None:
                    break
            view.show(generation.close())
        finally:
            view.close()
    result = generation.result
    if as_json:
        emit(json.dumps(result.to_dict(), ensure_ascii=False, allow_nan=False) + "\n")
    elif not quiet:
        summarise(result)
    if warning := low_acceptance(result.stats):
        say(warning)


def _draft_len(given: str | None) -> int | None:
    """None for auto. Raises UsageError for what is no number; its range is checked later."""
    if given is None or given == "auto":
        return None
    try:
        return int(given)
    except ValueError:
        raise UsageError(f"--draft-len is {given!r}; it must be 0 to 8, or auto") from None


def _bias(given: str) -> tuple[int, float]:
    token, _, bias = given.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(f"--logit-bias is {given!r}; it must be ID:BIAS") from None


def read_prompt(argument: str | None, file: Path | None, *, raw: bool) -> str:
    """The prompt by the policy in HELP. Raises UsageError."""
    if argument is not None and file is not None:
        raise UsageError("PROMPT and --prompt-file were both given; leave one out")
    if file is not None:
        try:
            with file.open("rb") as opened:
                prompt = _utf8(opened.read(MAX_PROMPT + 1), str(file))
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    elif argument is None or argument == "-":
        prompt = _stdin(asked=argument == "-")
        prompt = prompt.removesuffix("\n").removesuffix("\r") if prompt.endswith("\n") else prompt
    else:
        prompt = argument
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UsageError("PROMPT is not valid UTF-8") from None
    if not prompt.strip() and not raw:
        raise UsageError(
            "the prompt is empty; give some text (with --raw an empty one is BOS only)"
        )
    return prompt


def _stdin(*, asked: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not asked):
        raise UsageError("there is no prompt: give PROMPT, --prompt-file, or pipe one in")
    try:
        return _utf8(sys.stdin.buffer.read(MAX_PROMPT + 1), "stdin")
    except OSError as error:
        raise UsageError(f"stdin cannot be read: {error.strerror}") from None


def _utf8(content: bytes, where: str) -> str:
    if len(content) > MAX_PROMPT:
        raise UsageError(f"{where} holds more than {MAX_PROMPT >> 20} MB, which is no prompt")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not valid UTF-8 (byte {error.start})") from None
