"""Training documents in Gemma 4's format: bare code, chat, follow-ups, thoughts and tool calls.

A document is a list of (text, learn): the loss counts only what the model itself would write.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from templates import Function, Words, real, sample

Document = list[tuple[str, bool]]
QUOTE = '<|"|>'
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a coding assistant.",
    "You write Python.",
    "You are a helpful coding assistant.",
    "Answer briefly.",
    "Be concise.",
]
SMALL_TALK = [
    ("Hello|Hi|Hey|Hello!|Hi there", "Hello! Ask me for a small Python function."),
    (
        "Who are you?|What are you?|What is your name?",
        "I am a very small Gemma-shaped model that writes short Python functions.",
    ),
    (
        "What can you do?|Help|help|How can you help me?",
        "I can write short Python functions, for example fibonacci, is_prime or binary_search.",
    ),
    ("Thanks|Thank you|Thanks!|Great|Perfect", "You're welcome!"),
    ("Bye|Goodbye|See you", "Goodbye!"),
    ("How are you?|How is it going?", "I am fine. What should I write?"),
    (
        "Tell me a joke|Tell me a story|What is the weather?|What is the capital of France?|"
        "Who is the president?|Translate this",
        "I only know small Python functions. Ask me for one!",
    ),
    ("Write some code|Write a function|Show me some Python", "Sure. What should the function do?"),
]
REQUESTS = [
    "Write a function to {do}",
    "Write a Python function to {do}",
    "Write a function that {does}",
    "write a python function that {does}",
    "Write a function `{name}` that {does}",
    "Give me a function that {does}",
    "I need a function to {do}",
    "Can you {do} in Python?",
    "Implement {name}.",
    "Write {name} in Python",
    "Please write {name}.",
    "write {name}",
    "Write a function {name}.",
    "Write code to {do}",
    "Show me how to {do}",
    "{name} please",
    "Write a function called {name} to {do}",
    "How do I write a function to {do}",
    "python function to {do}",
    "Write a {words} function.",
    "{words} in Python",
    "write {words}",
    "{words} function",
]
TOOLS = {
    "read": (
        ["read_file", "read_file", "open_file", "cat", "view"],
        "path",
        ["Read a file.", "Return the text of a file.", "Show a file"],
    ),
    "write": (
        ["write_file", "write_file", "save_file", "create_file"],
        "content path",
        ["Write a file.", "Write text to a file.", "Create or replace a file"],
    ),
    "run": (
        ["run", "run", "run_command", "shell", "bash"],
        "command",
        ["Run a command.", "Run a shell command and return its output.", "Execute a command"],
    ),
}


def lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def request(function: Function, rng: random.Random) -> str:
    """A plain-word request for a function."""
    form = rng.choice(REQUESTS)
    if function.sentence.startswith("A "):
        form = rng.choice(["Write a class: {do}", "Write a class {name}.", "Implement {name}."])
    does = lower(function.does().removeprefix("It "))
    text = form.format(
        do=lower(function.sentence).rstrip("."),
        does=does.rstrip("."),
        name=function.name,
        words=function.name.replace("_", " "),
    ).rstrip(".")
    return text + "." if rng.random() < 0.4 and not text.endswith("?") else text


def thought(function: Function, rng: random.Random) -> str:
    """A short plan, read off the code."""
    code = function.code
    plan = (
        "a class"
        if code.startswith("class")
        else "a loop"
        if re.search(r"^ +(for|while) ", code, re.MULTILINE)
        else "a comprehension"
        if " for " in code
        else "recursion"
        if code.count(function.name) > 1
        else "one expression"
    )
    return f"The user wants {function.name}. {function.does()} I will use {plan}."


def fence(function: Function) -> str:
    return f"```python\n{function.code}\n```"


def answer(function: Function, rng: random.Random) -> str:
    closing = f"\n\n{function.does()}" if rng.random() < 0.3 else ""
    return f"Here is `{function.name}`:\n{fence(function)}{closing}"


class Chat:
    """Builds one conversation as a document."""

    def __init__(self, rng: random.Random, tools: list[str] | None = None, think: bool = False):
        self.rng, self.think = rng, think
        self.parts: Document = [("<bos>", False)]
        self.names = {kind: rng.choice(TOOLS[kind][0]) for kind in tools or []}
        instructed = rng.random() < 0.25 or (tools and rng.random() < 0.5)
        system = rng.choice(SYSTEMS) if instructed else ""
        if think or system or tools:
            declared = "".join(self.declare(kind) for kind in self.names)
            head = "<|think|>\n" if think else ""
            self.parts.append((f"<|turn>system\n{head}{system}{declared}<turn|>\n", False))

    def declare(self, kind: str) -> str:
        _, arguments, descriptions = TOOLS[kind]
        fields = ",".join(f"{a}:{{type:{QUOTE}STRING{QUOTE}}}" for a in arguments.split())
        needed = ",".join(QUOTE + a + QUOTE for a in arguments.split())
        return (
            f"<|tool>declaration:{self.names[kind]}{{description:{QUOTE}"
            f"{self.rng.choice(descriptions)}{QUOTE},parameters:{{properties:{{{fields}}},"
            f"required:[{needed}],type:{QUOTE}OBJECT{QUOTE}}}}}<tool|>"
        )

    def user(self, text: str) -> Chat:
        self.parts.append((f"<|turn>user\n{text}<turn|>\n<|turn>model\n", False))
        return self

    def thinks(self, text: str) -> Chat:
        if self.think:
            self.parts.append((f"<|channel>thought\n{text}\n<channel|>", True))
        return self

    def says(self, text: str) -> Chat:
        self.parts += [(text + "<turn|>", True), ("\n", False)]
        return self

    def calls(self, kind: str, result: str, **arguments: str) -> Chat:
        name = self.names[kind]
        listed = ",".join(f"{a}:{QUOTE}{v}{QUOTE}" for a, v in sorted(arguments.items()))
        self.parts += [
            (f"<|tool_call>call:{name}{{{listed}}}<tool_call|><|tool_response>", True),
            (f"response:{name}{{value:{QUOTE}{result}{QUOTE}}}<tool_response|>", False),
        ]
        return self


class Mix:
    """Draws documents: `draw()` gives one of every kind in fixed proportions."""

    def __init__(self, codes: list[str], words: Words, seed: int):
        self.codes, self.words, self.rng = codes, words, random.Random(seed)
        self.kinds: list[tuple[Callable[[], Document], int]] = [
            (self.raw, 25),
            (self.bare, 14),
            (self.asked, 15),
            (self.follow_up, 8),
            (self.tool_use, 9),
            (self.small_talk, 3),
            (self.real_raw, 20),
            (self.real_bare, 8),
            (self.real_asked, 3),
        ]

    def draw(self) -> Document:
        makers, weights = zip(*self.kinds, strict=True)
        return self.rng.choices(makers, weights)[0]()

    def template(self) -> Function:
        function = sample(self.words, self.rng)
        return function.documented() if self.rng.random() < 0.65 else function

    def raw(self) -> Document:
        return [("<bos>", False), (self.template().code, True), ("<eos>", True)]

    def real_raw(self) -> Document:
        return [("<bos>", False), (self.rng.choice(self.codes), True), ("<eos>", True)]

    def bare(self) -> Document:
        return self.continued(self.template().code)

    def real_bare(self) -> Document:
        return self.continued(self.rng.choice(self.codes))

    def continued(self, code: str) -> Document:
        """A user turn that is the beginning of some code, answered by the rest of it."""
        ends = [m.start() for m in re.finditer("\n", code)]
        likely = ends[:2] if '"""' in code else ends[:1]
        cut = self.rng.choice(likely if self.rng.random() < 0.8 else ends)
        return Chat(self.rng).user(code[:cut].rstrip()).says(code[cut:]).parts

    def asked(self) -> Document:
        function, rng = self.template(), self.rng
        chat = Chat(rng, think=rng.random() < 0.3).user(request(function, rng))
        return chat.thinks(thought(function, rng)).says(answer(function, rng)).parts

    def real_asked(self) -> Document:
        code = self.rng.choice(self.codes)
        function = real(code)
        text = f"Write a function `{function.name}`: {function.sentence}"
        said = f"Here is `{function.name}`:\n```python\n{code}\n```"
        return Chat(self.rng).user(text).says(said).parts

    def follow_up(self) -> Document:
        rng = self.rng
        function = sample(self.words, rng)
        chat = Chat(rng).user(request(function, rng))
        chat.says(f"Here is `{function.name}`:\n{fence(function)}")
        for _ in range(rng.randint(1, 3)):
            kind = rng.randrange(5)
            if kind == 0 and '"""' not in function.code:
                function = function.documented()
                chat.user(
                    rng.choice(
                        [
                            "Add a docstring.",
                            "add a docstring",
                            "Document it.",
                            "Now add a docstring",
                            "Please add a docstring.",
                        ]
                    )
                )
                chat.says(f"Here it is with a docstring:\n{fence(function)}")
            elif kind == 1:
                names = re.findall(r"\((?:self, )?(\w+)", function.code.split("\n")[0])
                old, new = rng.choice([function.name, *names]), self.words.one(rng)
                function = function.renamed(old, new)
                chat.user(
                    rng.choice(
                        [
                            "Rename {} to {}.",
                            "rename {} to {}",
                            "Rename `{}` to `{}`",
                            "Call {} {} instead.",
                        ]
                    ).format(old, new)
                )
                chat.says(f"I renamed `{old}` to `{new}`:\n{fence(function)}")
            elif kind == 2:
                chat.user(
                    rng.choice(
                        [
                            "What does it do?",
                            "Explain it.",
                            "explain",
                            f"What does {function.name} do?",
                        ]
                    )
                ).says(function.does())
            elif kind == 3:
                text, said = rng.choice(SMALL_TALK[3:5])
                chat.user(rng.choice(text.split("|"))).says(said)
            else:
                function = sample(self.words, rng)
                chat.user(request(function, rng)).says(answer(function, rng))
        return chat.parts

    def small_talk(self) -> Document:
        text, said = self.rng.choice(SMALL_TALK)
        return Chat(self.rng).user(self.rng.choice(text.split("|"))).says(said).parts

    def tool_use(self) -> Document:
        rng, function = self.rng, self.template()
        word = self.words.one(rng)
        path = rng.choice(["{}.py", "{}.py", "src/{}.py", "./{}.py", "lib/{}.py"]).format(word)
        kinds = rng.sample(list(TOOLS), 3) if rng.random() < 0.7 else rng.sample(list(TOOLS), 2)
        chat = Chat(rng, kinds, think=rng.random() < 0.25)
        task = rng.choice([*kinds, *kinds, "none"])
        if task == "read":
            chat.user(
                rng.choice(
                    [
                        "Read {}",
                        "What is in {}?",
                        "Show me {}",
                        "Open {}",
                        "read {}",
                        "What does {} define?",
                        "Look at {}",
                    ]
                ).format(path)
            )
            chat.thinks(f"I have to read {path}.").calls("read", function.code, path=path)
            said = f"`{path}` defines `{function.name}`. {function.does()}"
        elif task == "write":
            ask = request(function, rng).rstrip(".?")
            chat.user(f"{ask} {rng.choice(['and save it to', 'in', 'and write it to'])} {path}")
            chat.thinks(thought(function, rng))
            chat.calls("write", "ok", content=function.code + "\n", path=path)
            said = f"I wrote `{function.name}` to `{path}`."
            if "run" in kinds and rng.random() < 0.3:
                chat.calls("run", "", command=f"python {path}")
                said += " It runs."
        elif task == "run":
            n = rng.randint(1, 60)
            text, command, result, said = rng.choice(
                [
                    ("Run the tests", "pytest", f"{n} passed", f"All {n} tests passed."),
                    ("Run the tests", "pytest", f"1 failed, {n} passed", f"1 failed, {n} passed."),
                    (f"Run {path}", f"python {path}", str(n), f"It printed {n}."),
                    ("List the files", "ls", path, f"There is `{path}`."),
                    (f"How long is {path}?", f"wc -l {path}", f"{n} {path}", f"It has {n} lines."),
                ]
            )
            chat.user(text).thinks(f"I have to run {command}.")
            chat.calls("run", result, command=command)
        else:
            chat.user(request(function, rng)).thinks(thought(function, rng))
            said = answer(function, rng)
        return chat.says(said).parts
