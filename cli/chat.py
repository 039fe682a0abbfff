"""`mlx-mtp chat`: questions and answers on a terminal, or through pipes one of each."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_mtp.cli import options
from mlx_mtp.cli.generate import MAX_PROMPT, read_prompt
from mlx_mtp.cli.terminal import launched, say, signals, write_stderr
from mlx_mtp.cli.view import summary_lines, view_for
from mlx_mtp.errors import ContextError, MtpError, UsageError

if TYPE_CHECKING:
    from mlx_mtp.conversation import Conversations
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.generation import Options, Result

HELP = """Chat with a model on a terminal; /help there lists what to type beside text.

Where stdin is no terminal, all of it is one prompt: the answer goes to stdout, and that is all.
Nothing of a chat is kept unless it is asked for: by /save, or the lines you type by --history.
Both are files that only you can read, in ~/.local/share/mlx-mtp/chats, on a Mac
~/Library/Application Support/mlx-mtp/chats, or in $XDG_DATA_HOME. Ctrl-C ends an answer and keeps
what was said; Ctrl-D, or Ctrl-C twice at the prompt, leaves. Exit codes as generate's."""

COMMANDS = """\
/system [TEXT]  the system message from now on; without TEXT none
/think on|off   whether the model thinks before it answers
/draft N|auto   drafted tokens a round
/stats          numbers of the last answer
/save FILE      keep this chat: a name in the folder that --help tells, or a path
/load FILE      go on with a kept chat in place of this one
/clear          forget what was said
/exit           leave, as Ctrl-D does, and Ctrl-C twice

A line that ends in a backslash goes on in the next one. What stands between two lines of three
double quotes is one text, sent as it is. A text that begins with // is sent with one slash.
"""
QUOTES = '"""'
MOST_HISTORY = 1000  # lines


def chat(
    model: options.Model = None,
    revision: options.Revision = None,
    drafter: options.DrafterId = None,
    drafter_revision: options.DrafterRevision = None,
    no_drafter: options.NoDrafter = False,
    force_fit: options.ForceFit = False,
    draft_len: options.DraftLen = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer at most. [default: the room left]")
    ] = None,
    temp: options.Temp = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    system: options.System = None,
    think: Annotated[
        bool, typer.Option("--think", help="Let the model think first. [default: off]")
    ] = False,
    kv_bits: options.KvBits = None,
    max_kv: options.MaxKv = None,
    exact: options.Exact = False,
    history: Annotated[bool, typer.Option(help="Keep the lines you type.")] = False,
) -> None:
    from mlx_mtp.conversation import Conversations
    from mlx_mtp.generation import Options

    how = Options(
        max_tokens=max_tokens,
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        draft_len=options.draft_length(draft_len),
    )
    prompt = None
    if launched() is None and (sys.stdin is None or not sys.stdin.isatty()):
        prompt = read_prompt("" if sys.stdin is None else None, None, raw=True)
        if not prompt.strip():
            raise UsageError("there is no prompt on stdin")
    pair = options.load(
        model,
        drafter,
        no_drafter,
        draft_len,
        revision,
        drafter_revision,
        force_fit=force_fit,
        exact=exact,
    )
    for notice in pair.notices:
        say(notice)
    engine = pair.engine(kv_bits=kv_bits, max_kv=max_kv, cache_bytes=pair.cache_bytes())
    talk = Chat(Conversations(pair), engine, how, system)
    talk.think(think)
    if prompt is not None:
        talk.answer(prompt)
        return
    say(f"this is {pair.name}; /help lists what there is beside text, Ctrl-D leaves")
    with suppress(ImportError):
        import readline  # noqa: F401  from now on `input` edits lines, where Python has it
    with kept_lines() if history else nullcontext():
        converse(talk)


@dataclass
class Chat:
    """What was said so far, and the one engine that goes on from it."""

    conversations: Conversations
    engine: Engine
    how: Options
    system: str | None = None
    thinking: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    last: Result | None = None

    def answer(self, text: str) -> None:
        """Raises MtpError, with the chat as it was."""
        from mlx_mtp.conversation import Ask

        asked = [*self.messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        ask = Ask([*system, *asked], thinking=self.thinking)
        turn = self.conversations.start(self.engine, ask, self.how)
        for notice in turn.notices:
            say(notice)
        view = view_for(stream=True, live=True, draft_len=turn.settings["draft_len"])
        with signals.deferred(view.abandon):
            try:
                while not (turn.finish_reason or signals.interrupted or signals.caught):
                    for event in self.engine.step():
                        view.show(turn.take(event))
                if turn.finish_reason is None:
                    view.show(turn.cancel())
            finally:
                self.engine.cancel(turn.request)
                view.close()
        self.last, message = turn.result(), turn.message()
        if message["content"]:
            self.messages = [*asked, message]
        elif signals.caught is None:
            say("nothing was said, so the question is left out of the chat")
        if turn.finish_reason == "length":
            say(f"the answer was cut off after {len(turn.request.tokens)} tokens")

    def command(self, line: str) -> None:
        """Raises UsageError for what there is not, and where it cannot be done."""
        name, *rest = line.split(None, 1)
        argument = rest[0].strip() if rest else ""
        match name:
            case "/help":
                write_stderr(COMMANDS)
            case "/system":
                self.system = argument or None
                say("the system message is set" if argument else "there is no system message now")
            case "/think" if argument in ("on", "off"):
                self.think(argument == "on")
            case "/draft" if argument:
                if self.conversations.pair.drafter is None:
                    raise UsageError("nothing can be drafted: there is no drafter")
                self.how = replace(self.how, draft_len=options.draft_length(argument))
            case "/stats":
                if self.last is None:
                    raise UsageError("nothing was answered yet")
                stats = self.last.stats
                for shown in summary_lines(self.last):
                    say(shown)
                say(f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens were in KV")
            case "/save" if argument:
                self.save(_file(argument))
            case "/load" if argument:
                self.load(_file(argument))
            case "/clear":
                self.messages, self.last = [], None
            case "/think" | "/draft" | "/save" | "/load":
                raise UsageError(f"{name} needs something else behind it; /help says what")
            case _:
                raise UsageError(f"{line.strip()} is no command; /help lists them")

    def think(self, on: bool) -> None:
        if on and "<|channel>" not in self.conversations.pair.tokenizer.control:
            raise UsageError(f"{self.conversations.pair.name} does not know how to think")
        self.thinking = on

    def save(self, path: Path) -> None:
        if not self.messages:
            raise UsageError("nothing was said yet, so there is nothing to save")
        kept = {"system": self.system, "thinking": self.thinking, "messages": self.messages}
        try:
            if path.exists() and not ask(f"{path} exists; write over it? [y/N] ").startswith("y"):
                raise UsageError("not saved")
            _write(path, json.dumps(kept, ensure_ascii=False, indent=1))
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None
        say(f"saved as {path}")

    def load(self, path: Path) -> None:
        from mlx_mtp.text.messages import checked_messages

        try:
            with path.open("rb") as file:
                kept = json.loads(file.read(MAX_PROMPT))
            json.dumps(kept, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise UsageError(f"{path} is no saved chat: it is not JSON") from None
        match kept:
            case {"system": str() | None, "thinking": bool(), "messages": list(messages)}:
                checked_messages(messages, f"{path}: messages")
            case _:
                raise UsageError(f"{path} is no saved chat: system, thinking or messages is wrong")
        self.system, self.thinking, self.messages = kept["system"], kept["thinking"], messages
        self.last = None
        say(f"{len(messages)} messages")


def converse(chat: Chat) -> None:
    """Until the user leaves, or a signal comes."""
    again = False  # Ctrl-C came, and no line since
    while signals.caught is None:
        try:
            text, command = _read()
            again = False
            if command and text.strip() == "/exit":
                return
            if command:
                chat.command(text)
            elif text.strip():
                chat.answer(text)
        except EOFError:
            write_stderr("\n")
            return
        except KeyboardInterrupt:
            write_stderr("\n")
            readline = sys.modules.get("readline")
            if again and not (readline and readline.get_line_buffer()):
                return
            again = True
            say("Ctrl-C again, Ctrl-D or /exit leaves")
        except ContextError as error:
            say(f"{error}; /clear begins anew")
        except MtpError as error:
            say(str(error))
        except UnicodeError:
            say("that is not valid UTF-8")


def ask(prompt: str) -> str:
    """A line of the user's. Raises EOFError, KeyboardInterrupt and UnicodeError."""
    if not sys.stdout.isatty():
        write_stderr(prompt)
        prompt = ""
    with signals.asking():
        line = input(prompt)
    line.encode()
    return line


def _read() -> tuple[str, bool]:
    """A text of one line or several, and whether it is a command."""
    text = ask("> ")
    if text.partition("\n")[0].strip() == QUOTES:
        while "\n" not in text or text.rpartition("\n")[2].strip() != QUOTES:
            text += "\n" + ask("... ")
        return text.partition("\n")[2].rpartition("\n")[0], False
    while text.endswith("\\"):
        text = text[:-1] + "\n" + ask("... ")
    if text.startswith("//"):
        return text[1:], False
    return text, text.startswith("/")


@contextmanager
def kept_lines() -> Iterator[None]:
    """The lines typed in earlier chats, and afterwards those of this one with them."""
    file = _chats() / "history"
    try:
        import readline

        if file.exists():
            readline.read_history_file(file)
    except ImportError:
        raise UsageError("--history needs readline, which this Python was built without") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    try:
        yield
    finally:
        _write(file, "")  # the user's alone before anything is in it
        readline.set_history_length(MOST_HISTORY)
        readline.write_history_file(file)


def _chats() -> Path:
    from mlx_mtp.folders import data_folder

    return data_folder() / "chats"


def _file(name: str) -> Path:
    """A name is one in our folder; with a separator in it, it is a path."""
    if os.sep in name:
        return Path(os.path.expanduser(name))
    return _chats() / f"{name.removesuffix('.json')}.json"


def _write(path: Path, text: str) -> None:
    """A file of mode 0600, whole or not at all; the folder is made. Raises OSError."""
    if path.parent == _chats():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise
