"""Checks a launch's address spaces with libclang, on the source that MLX generates.

C++ for OpenCL has Metal's model under other names: device is __global, constant __constant,
threadgroup __local, thread __private. The template's arguments become names inside the kernel,
which may be no template there. Types of numbers are checked, too, but functions are only declared,
and loosely: a clean result does not show that Apple's compiler takes the source.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mlx_mtp.kernels.launch import Launch

from .emulator import Generated, trace

_WHOLES = ("int", "uint", "short", "ushort", "char", "uchar", "long", "ulong")
_SCALARS = ("float", "half", "bfloat", "bool", *_WHOLES)
_VECTOR_OF = {"bfloat": "half", "bool": "char"}  # where clang has no vectors of the one
_UNARY = """
    exp exp2 exp10 log log2 log10 log1p expm1 erf sqrt rsqrt sin cos tan tanh sinh cosh atan abs
    fabs floor ceil trunc rint round fract sign popcount clz ctz
"""
_BINARY = "min max pow powr fmod divide mulhi"
_REDUCTIONS = "simd_sum simd_product simd_max simd_min simd_broadcast_first"
_SHUFFLES = "simd_shuffle simd_shuffle_xor simd_shuffle_up simd_shuffle_down simd_broadcast"


def _functions(names: str, parameters: str) -> str:
    return "".join(f"template <class T> T {name}({parameters});\n" for name in names.split())


_NUMBERS = _functions(_UNARY, "T") + _functions(_BINARY, "T, T")
_PRELUDE = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef unsigned char uchar; typedef unsigned short ushort;
typedef unsigned int uint; typedef unsigned long ulong; typedef unsigned long size_t;
typedef char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef uchar uint8_t; typedef ushort uint16_t; typedef uint uint32_t; typedef ulong uint64_t;
typedef __bf16 bfloat; typedef bfloat bfloat16_t; typedef half float16_t;
#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 0x1.fffffep127f
#define M_PI_F 3.14159265f
""" + "".join(
    f"typedef {_VECTOR_OF.get(scalar, scalar)} {scalar}{n}"
    f" __attribute__((ext_vector_type({n})));\n"
    f"template <class... T> {scalar}{n} make_{scalar}{n}(T...);\n"
    for scalar in _SCALARS
    for n in (2, 3, 4)
)
_PRELUDE += f"""
template <class To, class From> To as_type(From);
namespace metal {{
enum class mem_flags {{ mem_none, mem_device, mem_threadgroup }};
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
bool simd_any(bool); bool simd_all(bool);
{_functions(_REDUCTIONS, "T")}{_functions(_SHUFFLES, "T, ushort")}{_NUMBERS}
namespace precise {{ {_NUMBERS} }}
namespace fast {{ {_NUMBERS} }}
{_functions("fma clamp", "T, T, T")}
template <class T> T select(T, T, bool);
template <class T> T extract_bits(T, uint, uint);
template <class T> T insert_bits(T, T, uint, uint);
template <class T> bool isnan(T); template <class T> bool isinf(T);
template <class T> bool isfinite(T);
template <class T> float dot(T, T);
template <class T> struct numeric_limits {{
  static constexpr T max() {{ return T(); }} static constexpr T min() {{ return T(); }}
  static constexpr T lowest() {{ return T(); }} static constexpr T infinity() {{ return T(); }}
  static constexpr T epsilon() {{ return T(); }} static constexpr T quiet_NaN() {{ return T(); }}
}};
template <class T> struct elements_ {{ T first, second; thread T& operator[](int); }};
template <class T, int Columns, int Rows> struct simdgroup_matrix {{
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  thread elements_<T>& thread_elements();
}};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                                   simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                        simdgroup_matrix<B, 8, 8>);
""" + "".join(
    f"template <class T> void simdgroup_load(thread simdgroup_matrix<T, 8, 8>&, const {space} T*,"
    " ulong = 8, ulong2 = 0, bool = false);\n"
    f"template <class T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, {space} T*, ulong = 8,"
    " ulong2 = 0, bool = false);\n"
    for space in ("device", "threadgroup")
)
_PRELUDE += "}\nusing namespace metal;\n"

# clang makes no vector by a call of its name.
_VECTOR = re.compile(rf"\b(({'|'.join(_SCALARS)})[234])\(")
_TARGET = "x86_64"  # has bfloat, which OpenCL's own targets lack; nothing is generated
_EXTENSIONS = (
    "+cl_khr_fp16",
    "-__opencl_c_generic_address_space",
    "-__opencl_c_pipes",
    "-__opencl_c_device_enqueue",
    "-__opencl_c_program_scope_global_variables",
)


@cache
def missing() -> str | None:
    """Why nothing can be checked here; None if it can."""
    try:
        from clang import cindex

        cindex.Index.create()
    except Exception as error:
        return f"no libclang: {error}"
    return None


def check(launch: Launch) -> list[str]:
    """What is wrong, as "header:3: ..." or "source:7: ..." (lines of the kernel's two texts)."""
    from clang.cindex import Diagnostic, Index

    generated = trace(launch)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {
            "kernel.clcpp": _kernel(generated),
            "header": _opencl(generated.header),
            "source": _opencl(generated.body),
            # The front end reads OpenCL's own declarations first; Metal has none of them.
            "opencl-c-base.h": "",
        }
        unit = Index.create().parse(
            str(folder / "kernel.clcpp"),
            args=[
                *("-x", "cl", "-cl-std=CLC++2021", "-cl-single-precision-constant", "-w"),
                *("-target", _TARGET, f"-cl-ext={','.join(_EXTENSIONS)}", f"-I{folder}"),
            ],
            unsaved_files=[(str(folder / file), text) for file, text in files.items()],
        )
        faults = [
            f"{_place(found)}: {found.spelling}"
            for found in unit.diagnostics
            if found.severity >= Diagnostic.Error
        ]
        return faults + [
            f"{_place(variable)}: {variable.spelling} names no address space"
            for variable in _without_space(unit.cursor)
        ]


def _opencl(text: str) -> str:
    text = re.sub(r"^[ \t]*#[ \t]*include.*", "", text, flags=re.M)
    return _VECTOR.sub(r"make_\1(", text)


def _kernel(generated: Generated) -> str:
    names = re.findall(r"(typename|int|bool) (\w+)", generated.template)
    values = generated.arguments.strip("<>").split(", ") if names else []
    template = "".join(
        f"typedef {value} {name}; "
        if kind == "typename"
        else f"constexpr {kind} {name} = {value}; "
        for (kind, name), value in zip(names, values, strict=True)
    )
    parameters = ", ".join(
        # A kernel takes no references there, and no pointers to bool.
        re.sub(r"^const constant (\w+)&", r"const \1", parameter.type).replace("bool*", "uchar*")
        + f" {parameter.name}"
        for parameter in generated.parameters
    )
    return f"""{_PRELUDE}
#include "header"
__kernel void {generated.name}({parameters}) {{
{template}
#include "source"
}}
"""


def _place(found: Any) -> str:
    file = found.location.file
    return f"{Path(file.name).name if file else '?'}:{found.location.line}"


def _without_space(cursor: Any) -> Iterator[Any]:
    """Pointers and references that name no address space, which Metal refuses."""
    from clang.cindex import CursorKind, TypeKind

    for child in cursor.get_children():
        yield from _without_space(child)
        if child.kind not in (CursorKind.VAR_DECL, CursorKind.PARM_DECL):
            continue
        if _place(child).startswith("kernel.clcpp"):
            continue
        if child.type.kind in (TypeKind.POINTER, TypeKind.LVALUEREFERENCE):
            pointee = child.type.get_pointee().spelling
            if not re.search(r"\b(__global|__constant|__local|__private|auto)\b", pointee):
                yield child
