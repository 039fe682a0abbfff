"""`mlx-mtp serve`: a model for the programs that speak OpenAI's API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mlx_mtp.cli import options
from mlx_mtp.cli.terminal import LAST_WORDS, end_with_launcher, launched, leave, say
from mlx_mtp.errors import UsageError

HELP = """Answer OpenAI's API over HTTP.

/v1/chat/completions, /v1/completions, /v1/models; /health, /metrics (Prometheus), /openapi.json.
Only this machine may ask, and no web page: see --host, --allow-origin. With MLX_MTP_API_KEY or
--api-key-file clients must send that key, which any --host but loopback's needs. Prompts and keys
are printed nowhere. docs/clients.md has the settings of clients. Exit codes: 2 usage, 3 loading,
130 Ctrl-C, 143 SIGTERM, 129 SIGHUP."""

MOST_KEY = 4096


def serve(
    model: options.Model = None,
    revision: options.Revision = None,
    drafter: options.DrafterId = None,
    drafter_revision: options.DrafterRevision = None,
    no_drafter: options.NoDrafter = False,
    force_fit: options.ForceFit = False,
    draft_len: options.DraftLen = None,
    kv_bits: options.KvBits = None,
    max_kv: options.MaxKv = None,
    drafter_bits: options.DrafterBits = None,
    no_calibrate: options.NoCalibrate = False,
    exact: options.Exact = False,
    cache_gb: options.CacheGb = None,
    parallel: options.Parallel = 4,
    max_queue: options.MaxQueue = 32,
    idle_unload: options.IdleUnload = 15,
    host: Annotated[str, typer.Option(help="Name or address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")
    ] = 8765,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key that clients must send. [default: MLX_MTP_API_KEY, else none]"
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A web page's origin that may ask, as https://example.org; may be repeated. "
            "[default: none]",
        ),
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, max=1024, help="MB of a request at most.")] = 8,
) -> None:
    from mlx_mtp.cli.backends import http
    from mlx_mtp.cli.backends.opening import service

    host = host.strip("[]")
    key = None if launched() else api_key(api_key_file)
    origins = tuple(http.origin(url) for url in allow_origin or ())
    bound = None if launched() else http.listen(host, port, key)
    opened, length = service(
        model,
        revision,
        drafter,
        drafter_revision,
        no_drafter,
        force_fit,
        draft_len,
        kv_bits,
        max_kv,
        drafter_bits,
        no_calibrate,
        exact,
        cache_gb,
        parallel,
        max_queue,
        idle_unload,
    )
    assert bound is not None  # other ranks are still in there
    listening, local = bound
    end_with_launcher()
    settings = http.Settings(
        model, length, host if local else None, key, origins, max_body * 1_000_000
    )
    server, thread = http.start(http.app(opened, settings), listening)
    shown = f"[{host}]" if ":" in host else host
    say(f"listening on http://{shown}:{listening.getsockname()[1]}/v1")
    opened.loaded.wait()
    known = opened.model
    if known is not None:
        drafts = f", drafts by {known.drafter}" if known.drafter else ", no drafter"
        say(f"{known.name} is ready{drafts}, {known.context} tokens of context")
        thread.join()
    server.should_exit = True  # once the requests so far were told
    thread.join(LAST_WORDS)
    # Threads may be in native code, which an ordinary exit would pull the ground from under.
    leave(opened.failed.exit_code if opened.failed is not None else 1)


def api_key(file: Path | None) -> str | None:
    """Raises UsageError."""
    where, text = "MLX_MTP_API_KEY", os.environ.get("MLX_MTP_API_KEY")
    if file is not None:
        where = f"--api-key-file {file}"
        try:
            with file.open("rb") as opened:
                text = opened.read(MOST_KEY + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{where}: {getattr(error, 'strerror', 'no text')}") from None
    if text is None:
        return None
    if len(text) > MOST_KEY:
        raise UsageError(f"{where}: a key has at most {MOST_KEY} characters")
    text = text.strip()
    if not text or not text.isprintable() or " " in text:
        raise UsageError(f"{where} must hold a key: one word of printable characters")
    return text
