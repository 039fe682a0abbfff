"""A service's counters in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_mtp.cli.backends.service import COUNTED, Service

TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text(service: Service, statuses: Mapping[int, int]) -> str:
    """statuses: how many answers had each. Counts of requests, tokens and rounds are of
    requests that ended; positions from 1 on."""
    totals = service.totals
    counters: list[tuple[str, str, Mapping[str, float]]] = [
        ("requests_total", "finish_reason", dict(totals.requests)),
        ("http_responses_total", "status", {str(k): n for k, n in dict(statuses).items()}),
        *((f"{name}_total", "", {"": totals.tokens[name]}) for name in COUNTED),
        ("drafted_by_position_total", "position", _positions(totals.drafted_by_position)),
        ("accepted_by_position_total", "position", _positions(totals.accepted_by_position)),
        ("prefill_seconds_total", "", {"": totals.prefill_s}),
        ("decode_seconds_total", "", {"": totals.decode_s}),
    ]
    gauges: list[tuple[str, str, Mapping[str, float]]] = [
        ("requests_running", "", {"": service.running}),
        ("requests_waiting", "", {"": service.waiting}),
        ("model_loaded", "", {"": int(service.state == "ready")}),
        ("memory_bytes", "kind", service.memory()),
    ]
    lines = []
    for kind, rows in (("counter", counters), ("gauge", gauges)):
        for name, label, values in rows:
            lines.append(f"# TYPE mlx_mtp_{name} {kind}")
            for key, value in sorted(values.items()):
                at = f'{{{label}="{key}"}}' if label else ""
                lines.append(f"mlx_mtp_{name}{at} {value}")
    return "\n".join(lines) + "\n"


def _positions(counts: Mapping[int, int]) -> dict[str, float]:
    return {str(i + 1): count for i, count in dict(counts).items()}
