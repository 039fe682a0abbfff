"""A service's counters in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_mtp.cli.backends.service import COUNTED, Service

TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text(service: Service) -> str:
    totals = service.totals
    lines: list[str] = []

    def add(name: str, kind: str, about: str, values: Mapping[str, float], label: str = "") -> None:
        lines.append(f"# HELP mlx_mtp_{name} {about}\n# TYPE mlx_mtp_{name} {kind}")
        for key, value in sorted(values.items()):
            at = f'{{{label}="{key}"}}' if label else ""
            lines.append(f"mlx_mtp_{name}{at} {value}")

    def positions(counts: Mapping[int, int]) -> dict[str, float]:
        return {str(i + 1): count for i, count in dict(counts).items()}

    ended = dict(totals.requests)
    add("requests_total", "counter", "Requests that ended, by how.", ended, "finish_reason")
    for name in COUNTED:
        add(f"{name}_total", "counter", ABOUT[name], {"": totals.tokens[name]})
    for kind, counts in (
        ("drafted", totals.drafted_by_position),
        ("accepted", totals.accepted_by_position),
    ):
        about = f"Tokens {kind}, by their place in a round's draft."
        add(f"{kind}_by_position_total", "counter", about, positions(counts), "position")
    add("prefill_seconds_total", "counter", "Until first tokens.", {"": totals.prefill_s})
    add("decode_seconds_total", "counter", "After first tokens.", {"": totals.decode_s})
    add("requests_running", "gauge", "Requests in the batch.", {"": service.running})
    add("requests_waiting", "gauge", "Requests in the queue.", {"": service.waiting})
    add("model_loaded", "gauge", "1 where weights are loaded.", {"": int(service.state == "ready")})
    add("memory_bytes", "gauge", "As MLX counts it, and of KV.", service.memory(), "kind")
    return "\n".join(lines) + "\n"


ABOUT = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Of them, those whose KV was there already.",
    "completion_tokens": "Tokens of answers.",
    "rounds": "Rounds of drafting and verifying.",
    "drafted": "Tokens drafted.",
    "accepted": "Of them, those the target agreed with.",
}
