"""Loading a pair: find both checkpoints, check them by their headers, and only then read weights.

The order is what the user sees: a typo, a misfit or too little memory ends in one line after
a few kilobytes were read, never after a download.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mtp.engine.calibrate import Calibration
from mlx_mtp.engine.draft_length import AutoLength
from mlx_mtp.errors import LoadError, UsageError
from mlx_mtp.folders import data_folder
from mlx_mtp.kernels.launch import on_metal
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.layers import on_cpu
from mlx_mtp.models.shards import Ranks
from mlx_mtp.models.target import Target
from mlx_mtp.pair import GenerationDefaults, Pair
from mlx_mtp.text.chat import ChatTemplate
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.weights import fit, tuned
from mlx_mtp.weights.checkpoint import Checkpoint, Folder, Progress
from mlx_mtp.weights.find import Found, find_pair
from mlx_mtp.weights.limits import limit_memory, wired_by_others
from mlx_mtp.weights.planned import Model, Planned, plan_drafter, plan_target, shard

DRAFTER_BITS = (0, 4, 6, 8)
SMALL = 1 << 16  # numbers of an array
NO_BOS = "its tokenizer has no BOS token, so prompts begin without one"


def load_pair(
    model: str | None = None,
    *,
    drafter: str | None = "auto",
    revision: str | None = None,
    drafter_revision: str | None = None,
    drafter_bits: int | None = None,
    drafter_device: str | None = None,
    force_fit: bool = False,
    calibrate: bool = True,
    exact: bool = False,
    profile: bool = True,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Pair:
    """A target and its drafter, ready to generate.

    model: a folder, a hub id, a short name (`known.SHORT`), or None for the embedded pair.
    drafter: a folder or a hub id, "auto" to find the one that fits, None for plain decoding.
    drafter_bits: what the drafter is quantised to as it is read: 4, 6 or 8; 0 leaves it as stored;
    None is what was tuned, else 8 on a GPU and 0 on the CPU, where packed weights are slower. A
    drafter that is stored quantised stays as it is.
    drafter_device: "cpu" or "gpu", which the drafter is laid out for; None is the target's.
    force_fit: load even where memory or disk will not do.
    calibrate: on Metal, race the kernels that are not known yet for this model's shapes; else only
    what earlier races gave is used (`engine.calibrate`).
    exact: draft only where that is bit for bit what plain decoding is here (`engine.exact`).
    ranks: read only this rank's part of the target; every rank has the drafter whole.
    profile: go by what `mlx-mtp tune` measured, where that is of this pair on this machine.
    progress: called with (what, bytes done, bytes in all) while weights come in.
    Raises LoadError, PairError, FitError and UsageError, all but the tokenizer's before any weight
    is read; that one loads in a thread beside the weights, and ends their reading when it fails.
    """
    started = time.perf_counter()
    if profile:
        tuned.set_buffers(data_folder(), model)
    here, device = mx.default_device(), _device(drafter_device)
    if drafter_bits not in (None, *DRAFTER_BITS):
        raise UsageError(f"drafter bits are {drafter_bits}; they must be one of {DRAFTER_BITS}")
    if drafter is None and (drafter_bits is not None or drafter_device is not None):
        raise UsageError("drafter bits or a drafter device were given, but no drafter")
    found = find_pair(model, drafter, revision, drafter_revision)
    target, assistant = found.target, found.drafter
    where = target.checkpoint.where("generation_config.json")
    defaults = GenerationDefaults.from_files(found.config, target.checkpoint.generation, where)
    float32 = _float32_pays(target)  # of the whole model: the same on every rank
    shard(target, ranks or Ranks())
    known, known_line = None, None
    # The key takes milliseconds, which most have no profile to compare with.
    if profile and tuned.path_of(data_folder(), target.source.name).exists():
        key = tuned.key_of(found, float32, device.type.name)
        known, known_line = tuned.load(data_folder(), target.source.name, key, drafter_bits)
    planned: list[tuple[Planned[Target] | Planned[Drafter], bool, mx.Device]]
    planned = [(target, float32, here)]
    if assistant is not None:
        with mx.stream(device):
            if known and not assistant.quantized:
                drafter_bits = known.drafter_bits
            drafter_bits = _pack(assistant, drafter_bits)
            own = float32 if device == here else _float32_pays(assistant)
        planned.append((assistant, own, device))
    others = wired_by_others(data_folder() / "wired")
    if not force_fit:
        fit.check(
            [p.nbytes(in_float32) for p, in_float32, _ in planned],
            target.text,
            float32,
            others=others,
            quantized=bool(target.quantized),
            kv_heads=target.module.kv_heads,
        )
        downloads: dict[Path, int] = {}
        for p, *_ in planned:  # both may go to one disk
            size = p.source.to_download(p.files)
            downloads[p.source.disk] = downloads.get(p.source.disk, 0) + size
        for disk, size in downloads.items():
            fit.check_disk(size, disk)
    planned_bytes = sum(p.nbytes(in_float32) for p, in_float32, _ in planned)
    # A tenth of the weights is what activations and allocation take beside them, at the most.
    dtype = mx.float32 if float32 else mx.bfloat16
    headroom = fit.kv_bytes(target.text, dtype, target.module.kv_heads)
    headroom += planned_bytes // 10
    restore_limits, limited = limit_memory(planned_bytes, headroom, data_folder() / "wired")
    try:
        tokenizer, template = _read(planned, target, progress)
    except BaseException:
        restore_limits()
        raise
    if ranks is not None and not ranks.same(_digest(planned)):
        restore_limits()
        raise LoadError(
            "this rank has not loaded what rank 0 has: model, drafter, its options, mlx-mtp and "
            "MLX must be the same on all"
        )
    notices = [
        *found.notices,
        *(notice for p, *_ in planned for notice in p.notices),
        *([limited] if limited else []),
        *([known_line] if known_line else []),
        *([] if tokenizer.bos_id is not None else [f"{target.source.name}: {NO_BOS}"]),
    ]
    calibration = None
    if on_metal():
        calibration = Calibration(data_folder(), calibrate, exact, notices)
        drafter_here = assistant.module if assistant is not None and device == here else None
        calibration.prepare(target.module, drafter_here)
    return Pair(
        target=target.module,
        drafter=None if assistant is None else assistant.module,
        tokenizer=tokenizer,
        template=template,
        defaults=defaults,
        name=target.source.name,
        revision=target.source.revision,
        drafter_name=None if assistant is None else assistant.source.name,
        drafter_revision=None if assistant is None else assistant.source.revision,
        drafter_bits=None if assistant is None else drafter_bits,
        drafter_device=None if assistant is None else device.type.name,
        notices=notices,
        weights_bytes=sum(p.loaded_bytes() for p, *_ in planned),
        memory_limit=None if force_fit else max(fit.device_bytes() - others, 0),
        restore_limits=restore_limits,
        draft_length=AutoLength(known.seconds, acceptance=known.acceptance)
        if known
        else AutoLength(),
        compiled=known.compile if known else None,
        pipelined=known.pipeline if known else None,
        calibration=calibration,
        exact=exact,
        load_s=time.perf_counter() - started,
    )


def _digest(
    planned: Sequence[tuple[Planned[Target] | Planned[Drafter], bool, mx.Device]],
) -> bytes:
    """Of what a pair is: versions, configs, tensors by name, dtype and shape, and the small ones
    that every rank reads whole, by value."""
    told = blake2b(f"{version('mlx-mtp')} {version('mlx')}".encode(), digest_size=32)
    for p, in_float32, _ in planned:
        tensors = sorted((n, part.tensor.dtype, part.shape) for n, part in p.plan.parts.items())
        told.update(repr((p.text, in_float32, tensors, sorted(p.packed))).encode())
        arrays: dict[str, mx.array] = dict(tree_flatten(p.module.parameters()))
        for name, array in sorted(arrays.items()):
            if name.endswith("norm.weight") and "self_attn" not in name and array.size < SMALL:
                told.update(memoryview(cast(Any, array.view(mx.uint8))))
    return told.digest()


def read_drafter(found: Found, bits: int) -> Drafter:
    """The drafter of a pair anew, where it is stored in floats: quantised to so many bits, or 0."""
    assert found.drafter is not None
    _pack(found.drafter, bits)
    found.drafter.read(float32=_float32_pays(found.target))
    return found.drafter.module


def load_target(
    folder: str | Path, *, float32: bool | None = None, ranks: Ranks | None = None
) -> Target:
    """A target alone from a folder, which needs no tokenizer. float32: None decides by device and
    size as `load_pair` does. ranks: read only this one's part. Raises LoadError, UsageError."""
    planned = plan_target(Checkpoint.open(Folder.at(folder)))
    shard(planned, ranks or Ranks())
    return _alone(planned, float32)


def load_drafter(folder: str | Path, *, float32: bool | None = None) -> Drafter:
    """A drafter alone from a folder; see `load_target`. Raises LoadError."""
    return _alone(plan_drafter(Checkpoint.open(Folder.at(folder))), float32)


def _alone(planned: Planned[Model], float32: bool | None) -> Model:
    planned.read(float32=_float32_pays(planned) if float32 is None else float32)
    return planned.module


def _device(asked: str | None) -> mx.Device:
    """Raises UsageError where there is no such device."""
    if asked not in (None, "cpu", "gpu"):
        raise UsageError(f"the drafter device is {asked}; it must be cpu or gpu")
    if asked == "gpu" and not mx.is_available(mx.gpu):
        raise UsageError("the drafter device is gpu, but MLX finds no GPU here")
    return mx.default_device() if asked is None else mx.Device(getattr(mx, asked))


def _read(
    planned: Sequence[tuple[Planned[Target] | Planned[Drafter], bool, mx.Device]],
    target: Planned[Target],
    progress: Progress | None,
) -> tuple[Tokenizer, ChatTemplate | None]:
    """Fetch and read all weights, and beside them the target's tokenizer and template."""
    folder = target.source.fetch(target.files, progress)
    with ThreadPoolExecutor(1) as pool:
        words: Future[tuple[Tokenizer, ChatTemplate | None]] | None = None

        def step(what: str, done: int, total: int) -> None:
            # Parsing holds Python's lock, so it begins where reading is about to let go of it.
            nonlocal words
            words = words or pool.submit(_words, folder, target)
            if words.done():
                words.result()  # an error ends the reading
            if progress is not None:
                progress(what, done, total)

        for p, in_float32, place in planned:
            with mx.stream(place):
                p.read(float32=in_float32, progress=step)
        assert words is not None
        return words.result()


def _words(folder: Path, target: Planned[Target]) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer and the chat template of a folder. Raises LoadError."""
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > target.text.vocab_size:
        raise LoadError(
            f"{target.checkpoint.where('tokenizer.json')} has {tokenizer.vocab_size} tokens, but "
            f"the model's vocabulary is {target.text.vocab_size}: it belongs to another model"
        )
    tokenizer.most_tokens = target.text.max_position_embeddings
    return tokenizer, ChatTemplate.from_folder(folder)


def _pack(drafter: Planned[Drafter], bits: int | None) -> int:
    """Has the drafter quantised as it is read; returns the bits of its matrices, 0 for floats.
    Raises UsageError where its matrices are packed already, and not in that many bits."""
    stored = [scheme["bits"] for scheme in drafter.quantized.values()]
    if stored:
        if bits and set(stored) != {bits}:
            raise UsageError(
                f"{drafter.source.name} is stored in {max(stored)} bits and is not quantised again "
                f"to {bits}; leave drafter bits away, or name an unquantised drafter"
            )
        return max(stored)
    if bits is None:
        bits = 0 if on_cpu() else 8
    if bits:
        drafter.pack(bits)
    return bits


def _float32_pays(planned: Planned[Model]) -> bool:
    """float32 is exact on the CPU, and faster there than bfloat16, where there is room for it."""
    return on_cpu() and planned.nbytes(float32=True) <= fit.FLOAT32_LIMIT
