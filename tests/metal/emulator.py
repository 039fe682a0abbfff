"""Runs a kernel's launch on the CPU: MLX's own generated source, compiled against msl.hpp.

It shows indexing, packing, barriers, loads per element and arithmetic up to the order of sums. It
does not show that Apple's compiler takes the source, nor speed, nor exact bits of exp and the like.
Not emulated: atomics, function constants, textures, grids that are no multiple of the threadgroup,
`threadgroup T&`, and casts between types of threadgroup memory. Not noticed: threads that store to
the same element of an output (but see `Emulated.stores`), and a lane that leaves an operation out
in one turn of a loop and meets the others in the next.

What a kernel must spare the emulator: pointers to inputs and outputs are named by `auto` or a
template's parameter, never by their type.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mtp.kernels.launch import Launch

FIRST_AHEAD, LAST_AHEAD, ROUND_ROBIN = -2, -1, 0
# The two extreme orders, the even one, and 20 at random.
SEEDS = (FIRST_AHEAD, LAST_AHEAD, ROUND_ROBIN, *range(1, 21))
ORDERS = (0, 1, 2)

_RUNTIME = Path(__file__).with_name("msl.hpp")
_FLAGS = (
    *("-std=c++17", "-O2", "-w", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
    *("-ffp-contract=off", "-fsigned-char", "-U_FORTIFY_SOURCE"),
    *("-shared", "-fPIC", "-fvisibility=hidden"),
)
# A thread's variable that nothing was stored to holds -1.7e38 or NaN, not what is hoped for.
_PATTERN = "-ftrivial-auto-var-init=pattern"
_MOST_THREADS = 1024
_SENTINEL = 0xA5


class EmulationError(RuntimeError):
    """The kernel did what it must not: read out of bounds, raced, diverged, ..."""


class BuildError(RuntimeError):
    """The kernel does not compile."""


@dataclass(frozen=True)
class Emulated:
    """What a launch did. loads and stores: uint32 counts per element, by the array's name; a
    0-dimensional input is passed by value, its loads stay 0. barriers: threadgroup barriers passed,
    collectives: simdgroup operations, each summed over the grid."""

    outputs: list[mx.array]
    loads: dict[str, np.ndarray]
    stores: dict[str, np.ndarray]
    barriers: int
    collectives: int


def emulate(launch: Launch, *, order: int = 0, seed: int = ROUND_ROBIN) -> Emulated:
    """Runs the launch.

    order: how simd_sum adds: 0 from lane 0, 1 as a tree, 2 from lane 31.
    seed: which simdgroup goes on at a simdgroup operation: ROUND_ROBIN each in turn, FIRST_AHEAD
    the first that can, LAST_AHEAD the last that can (and lanes and threadgroups backwards), above 0
    simdgroups, lanes and threadgroups at random.

    What no thread stores stays NaN (whole numbers: bytes of 0xA5).
    Raises EmulationError, BuildError, and ValueError for what is not emulated.
    """
    unit = _Unit(trace(launch))
    kernel = launch.kernel
    inputs = {name: _bits(array) for name, array in zip(kernel.inputs, launch.inputs, strict=True)}
    outputs = {
        name: _unwritten(shape, dtype)
        for name, shape, dtype in zip(kernel.outputs, launch.shapes, launch.dtypes, strict=True)
    }
    arrays = inputs | outputs
    for name, array in inputs.items():
        strides = [stride // array.itemsize for stride in array.strides]
        arrays[f"{name}_shape"] = np.array(array.shape, np.int32)
        arrays[f"{name}_strides"] = np.array(strides, np.int64)
        arrays[f"{name}_ndim"] = np.array(array.ndim, np.int32)
    touched = {name: np.zeros(array.shape, np.uint32) for name, array in arrays.items()}
    buffers = [
        _Buffer(name.encode(), array.ctypes.data, touched[name].ctypes.data, array.size)
        for name, array in ((p.name, arrays[p.name]) for p in unit.generated.buffers)
    ]
    stats = _Stats()
    call = _Launch(launch.grid, _threadgroup(launch), order, seed)
    error = _load(unit)((_Buffer * len(buffers))(*buffers), call, stats)
    if error is not None:
        raise EmulationError(f"{kernel.name}, seed {seed}: {error.decode()}")
    return Emulated(
        outputs=[
            _array(outputs[name], dtype)
            for name, dtype in zip(kernel.outputs, launch.dtypes, strict=True)
        ],
        loads={name: touched[name] for name in inputs},
        stores={name: touched[name] for name in outputs},
        barriers=stats.barriers,
        collectives=stats.collectives,
    )


def emulate_all(launch: Launch, *, order: int = 0, seeds: Iterable[int] = SEEDS) -> Emulated:
    """Runs the launch once a seed. Raises EmulationError where two seeds differ in a bit."""
    first: Emulated | None = None
    for seed in seeds:
        emulated = emulate(launch, order=order, seed=seed)
        first = first or emulated
        for name, a, b in zip(launch.kernel.outputs, first.outputs, emulated.outputs, strict=True):
            if _bits(a).tobytes() != _bits(b).tobytes():
                raise EmulationError(
                    f"{launch.kernel.name}: {name} depends on the order: seed {seed}"
                )
    assert first is not None
    return first


def prepare(launches: Iterable[Launch], *, jobs: int = 2) -> None:
    """Builds what `emulate` of these launches needs, several kernels a build: a build's start
    costs more than a small kernel."""
    units = {unit.key: unit for unit in map(_Unit, map(trace, launches))}
    missing = [unit for unit in units.values() if not unit.path.exists()]
    parts = [missing[i::jobs] for i in range(min(jobs, len(missing)))]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(_build, parts))


# MLX's generated source


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: `type` with its address space and `*` or `&`; attribute: `buffer`, or
    the position that it holds."""

    type: str
    name: str
    attribute: str


@dataclass(frozen=True)
class Generated:
    """The source that MLX would compile for a launch, taken apart. template: the `template <...>`
    line or "", arguments: `<...>` of this launch or ""."""

    header: str
    template: str
    name: str
    parameters: tuple[Parameter, ...]
    body: str
    arguments: str

    @property
    def buffers(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter.attribute == "buffer"]


_SIGNATURE = re.compile(r"(template <[^<>]*>\n)?\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", re.S)
_PARAMETER = re.compile(r"\s*(.+?)\s+(\w+) \[\[(\w+)(?:\(\d+\))?\]\]")


def trace(launch: Launch) -> Generated:
    """The source that MLX generates, with its signature, address spaces and instantiation."""
    sources: list[str] = []

    def look(node: dict[str, Any]) -> None:
        if node.get("name") == "CustomKernel":
            sources.append(node["arguments"][1])

    def run(*inputs: mx.array) -> Sequence[mx.array]:
        return dataclasses.replace(launch, inputs=inputs).run()

    mx.export_function(look, run, *launch.inputs)
    (text,) = sources
    # The body may hold anything, so the signature is looked for where the header ends.
    signature = _SIGNATURE.search(text, len(launch.kernel.header))
    if signature is None:
        raise ValueError(f"{launch.kernel.name}: MLX generated an unknown form:\n{text}")
    template, name, parameters = signature.groups()
    instance = re.search(r"decltype\(\w+(<.*>)\) \w+<.*>;\s*$", text)
    return Generated(
        header=text[: signature.start()],
        template=template or "",
        name=name,
        parameters=tuple(
            Parameter(*found.groups())
            for found in map(_PARAMETER.match, parameters.split(",\n"))
            if found
        ),
        body=launch.kernel.source,
        arguments=instance[1] if instance else "",
    )


# From Metal's words to the runtime's

_TYPE = r"[A-Za-z_][\w:]*(?:\s*<[^<>;()]*(?:<[^<>;()]*>[^<>;()]*)?>)?"
_SHARED_POINTER = re.compile(
    rf"(?:\bconst\s+)?\bthreadgroup\s+(?:const\s+)?({_TYPE})\s*(?:\bconst\s*)?\*(?:\s*const\b)?"
)
_SHARED = re.compile(rf"\bthreadgroup\s+({_TYPE})\s+(\w+[^;]*);")
_DECLARATOR = re.compile(r"\s*(\w+)\s*((?:\[[^\[\]]*\]\s*)*)")


def _rewrite(text: str) -> str:
    """Threadgroup memory becomes the runtime's types. Lines keep their numbers."""
    text = re.sub(
        r"//[^\n]*|/\*.*?\*/", lambda found: " " + "\n" * found[0].count("\n"), text, flags=re.S
    )
    text = re.sub(r"^\s*#\s*include[^\n]*", "", text, flags=re.M)
    text = _SHARED_POINTER.sub(r"msl::SharedPointer<\1>", text)
    text = _SHARED.sub(_declare, text)
    left = re.search(r"\bthreadgroup\b[^\n]*", text)
    if left:
        raise ValueError(f"not emulated: {left[0]}")
    return text


def _declare(found: re.Match[str]) -> str:
    """`threadgroup T a[2][3], b[4];`"""
    declared = []
    for declarator in found[2].split(","):
        parts = _DECLARATOR.fullmatch(declarator)
        if parts is None:
            raise ValueError(f"not emulated: {found[0]}")
        sizes = "".join(f", ({size})" for size in re.findall(r"\[([^\[\]]*)\]", parts[2]))
        name = parts[1]
        declared.append(
            f'static msl::Shared<{found[1]}{sizes}> {name}("{name}"); {name}.declare();'
        )
    return " ".join(declared) + "\n" * found[0].count("\n")


class _Unit:
    """A kernel's instantiation in C++, and where its library lies."""

    def __init__(self, generated: Generated) -> None:
        self.generated = generated

    @cached_property
    def key(self) -> str:
        content = repr(self.generated) + _toolchain()
        return hashlib.sha256(content.encode()).hexdigest()[:20]

    @property
    def path(self) -> Path:
        return _folder() / f"{self.key}.so"

    @cached_property
    def cpp(self) -> str:
        generated = self.generated
        parameters, arguments, index = [], [], 0
        for parameter in generated.parameters:
            if parameter.attribute != "buffer":
                parameters.append(f"{parameter.type} {parameter.name}")
                arguments.append(f"msl::{parameter.attribute}()")
                continue
            constant = re.fullmatch(r"const (?:device|constant) (\w+)([*&])", parameter.type)
            written = re.fullmatch(r"device (\w+)\*", parameter.type)
            buffer = f"buffers[{index}]"
            index += 1
            if constant and constant[2] == "*":
                pointer = f"msl::Pointer<const {constant[1]}>"
            elif written:
                pointer = f"msl::Pointer<{written[1]}>"
            elif constant:
                parameters.append(f"{parameter.type} {parameter.name}")
                arguments.append(f"*static_cast<const {constant[1]}*>({buffer}.data)")
                continue
            else:
                raise ValueError(f"not emulated: {parameter.type} {parameter.name}")
            parameters.append(f"{pointer} {parameter.name}")
            arguments.append(f"{pointer}({buffer})")
        return f"""
namespace unit_{self.key} {{
#line 1 "header"
{_rewrite(generated.header)}
{generated.template}static void {generated.name}({", ".join(parameters)}) {{
#line 1 "source"
{_rewrite(generated.body)}
}}
#line 1 "call"
static void body(const msl::Buffer* buffers) {{
  {generated.name}{generated.arguments}({", ".join(arguments)});
}}
}}
extern "C" __attribute__((visibility("default"))) const char* run_{self.key}(
    const msl::Buffer* buffers, const msl::Launch* launch, msl::Stats* stats) {{
  return msl::run(unit_{self.key}::body, buffers, *launch, stats);
}}
"""


# Building and calling


def compiler() -> str | None:
    """The C++ compiler: $CXX, g++ or c++; None if there is none."""
    names = (os.environ.get("CXX"), "g++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@cache
def flags() -> tuple[str, ...]:
    """What the compiler is called with. Raises BuildError where there is none."""
    path = compiler()
    if path is None:
        raise BuildError("no C++ compiler: set CXX, or install g++")
    probe = [path, _PATTERN, "-x", "c++", "-fsyntax-only", "/dev/null"]
    known = subprocess.run(probe, capture_output=True).returncode == 0  # g++ 12, clang 8
    return (path, *_FLAGS, *([_PATTERN] if known else []))


@cache
def _toolchain() -> str:
    version = subprocess.run([flags()[0], "--version"], capture_output=True, text=True).stdout
    return f"{flags()} {version} {_RUNTIME.read_text()}"


@cache
def _folder() -> Path:
    """Where builds are kept; only ours, as code from it is loaded."""
    folder = Path(tempfile.gettempdir()) / f"mlx-mtp-metal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise BuildError(f"{folder} belongs to someone else")
    return folder


def _build(units: Sequence[_Unit]) -> None:
    """One library for all units, found under each one's own name."""
    with tempfile.TemporaryDirectory(dir=_folder()) as name:
        work = Path(name)
        (work / "kernels.cpp").write_text(
            f'#include "{_RUNTIME}"\n' + "".join(unit.cpp for unit in units)
        )
        command = [*flags(), "kernels.cpp", "-o", "kernels.so"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if done.returncode != 0:
            names = ", ".join(unit.generated.name for unit in units)
            errors = [line for line in done.stderr.splitlines() if "error:" in line]
            raise BuildError("\n".join([names, *errors[:8], done.stderr[:2000]]))
        for unit in units:
            os.link(work / "kernels.so", work / unit.path.name)
            os.replace(work / unit.path.name, unit.path)


@cache
def _function(path: Path, key: str) -> Any:
    # PyDLL keeps Python's lock: the runtime of a library runs one launch at a time.
    function = getattr(ctypes.PyDLL(str(path)), f"run_{key}")
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.POINTER(_Buffer), ctypes.POINTER(_Launch), ctypes.POINTER(_Stats)]
    return function


def _load(unit: _Unit) -> Any:
    if not unit.path.exists():
        _build([unit])
    return _function(unit.path, unit.key)


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("touched", ctypes.c_void_p),
        ("size", ctypes.c_long),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("order", ctypes.c_int),
        ("seed", ctypes.c_int),
    )


class _Stats(ctypes.Structure):
    _fields_ = (("barriers", ctypes.c_long), ("collectives", ctypes.c_long))


def _threadgroup(launch: Launch) -> tuple[int, int, int]:
    """As MLX has it: a threadgroup is no larger than the grid."""
    x, y, z = (
        min(group, grid) for group, grid in zip(launch.threadgroup, launch.grid, strict=True)
    )
    if any(grid % group for grid, group in zip(launch.grid, (x, y, z), strict=True)):
        raise ValueError(f"not emulated: grid {launch.grid} of threadgroups {launch.threadgroup}")
    if x * y * z > _MOST_THREADS:
        raise ValueError(f"{x * y * z} threads in a threadgroup, at most {_MOST_THREADS}")
    return x, y, z


def _bits(array: mx.array) -> np.ndarray:
    """bfloat16, which numpy lacks, as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, order="C")


def _unwritten(shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    array = _bits(mx.zeros(shape, dtype))
    if dtype == mx.bfloat16:
        array.fill(0x7FC0)
    elif mx.issubdtype(dtype, mx.floating):
        array.fill(np.nan)
    else:
        array.view(np.uint8).fill(_SENTINEL)
    return array


def _array(bits: np.ndarray, dtype: mx.Dtype) -> mx.array:
    array = mx.array(bits)
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array
