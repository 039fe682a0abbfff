"""`mlx-mtp generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from mlx_mtp.cli.options import (
    DrafterBits,
    DrafterId,
    DrafterRevision,
    DraftLen,
    Exact,
    ForceFit,
    Json,
    KvBits,
    MaxKv,
    MinP,
    Model,
    NoCalibrate,
    NoDrafter,
    Revision,
    Seed,
    System,
    Temp,
    TopK,
    TopP,
    draft_length,
    load,
)
from mlx_mtp.cli.terminal import emit, launched, say, signals
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
    no_drafter: NoDrafter = False,
    force_fit: ForceFit = False,
    draft_len: DraftLen = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate at most. [default: 512]")
    ] = None,
    temp: Temp = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
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
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt, no chat template. [default: off]")
    ] = False,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from this file. [default: none]")
    ] = None,
    kv_bits: KvBits = None,
    max_kv: MaxKv = None,
    drafter_bits: DrafterBits = None,
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
    no_calibrate: NoCalibrate = False,
    exact: Exact = False,
    as_json: Json = False,
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="Print the text at the end. [default: off]")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="No progress, no summary; notices stay. [default: off]"),
    ] = False,
) -> None:
    from mlx_mtp.cli.view import Silent, summarise, view_for
    from mlx_mtp.generation import MAX_TOKENS, Options, low_acceptance, stream

    text = read_prompt(prompt, prompt_file, raw=raw)
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs is shown by --json only: give both")
    options = Options(
        max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        draft_len=draft_length(draft_len),
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
    pair = load(
        model,
        drafter,
        no_drafter,
        draft_len,
        revision,
        drafter_revision,
        drafter_bits,
        drafter_device,
        quiet=quiet,
        force_fit=force_fit,
        calibrate=not no_calibrate,
        exact=exact,
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


def _bias(given: str) -> tuple[int, float]:
    token, _, bias = given.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(f"--logit-bias is {given!r}; it must be ID:BIAS") from None


def read_prompt(argument: str | None, file: Path | None, *, raw: bool) -> str:
    """The prompt by the policy in HELP. Raises UsageError."""
    if launched():
        return "that of rank 0"
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
    if launched() is not None:
        raise UsageError("mlx.launch passes no end of stdin on: give PROMPT or --prompt-file")
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
