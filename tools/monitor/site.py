"""The answers of the monitor's server: the page, its data, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import resources

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from dataparallel.monitor.readings.metrics import METRICS
from dataparallel.monitor.sample import json_text
from dataparallel.threads import PHASES
from dataparallel.tools.monitor.palette import DARK, LIGHT
from dataparallel.tools.monitor.prometheus import registry_of
from dataparallel.tools.monitor.sample_store import CHARTED, SampleStore
from dataparallel.tools.monitor.server import Request, Response, Route

#: The files of the page, and as what they are sent.
_PAGE = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
    "uPlot.min.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
#: The page's names of the palette's colors.
_COLORS = {"card": "ground", "ink": "ink", "soft": "soft", "accent": "line"}
_JSON = "application/json"


def routes(store: SampleStore, interval: float) -> dict[str, Route]:
    """Return the answers by path; the page asks once per interval."""
    about = {
        "interval": interval,
        "charted": CHARTED,
        "metrics": [[metric.name, metric.unit, metric.meaning] for metric in METRICS],
        "phases": [
            [phase, *map(_both, LIGHT.phases[phase][1:], DARK.phases[phase][1:])]
            for phase in PHASES
        ],
    }
    told = Response(json_text(about).encode(), _JSON)
    page = resources.files("dataparallel.tools.monitor") / "page"
    texts = {name: (page / name).read_bytes() for name in _PAGE}
    texts["page.css"] += _colors().encode()
    files = {name: Response(texts[name], kind) for name, kind in _PAGE.items()}
    files[""] = files.pop("index.html")
    return {
        **{f"/{name}": Route(partial(_same, file), is_public=True) for name, file in files.items()},
        "/metrics": Route(_metrics(registry_of(store))),
        "/api/about": Route(partial(_same, told)),
        "/api/samples": Route(partial(_samples, store)),
    }


def _both(light: str, dark: str) -> str:
    """Return what is one color on light ground and the other one on dark ground, for CSS."""
    return f"light-dark({light}, {dark})"


def _colors() -> str:
    colors = [
        f"--{name}: {_both(getattr(LIGHT, field), getattr(DARK, field))};"
        for name, field in _COLORS.items()
    ]
    return f":root {{ {' '.join(colors)} }}\n"


def _same(answer: Response, request: Request) -> Response:
    return answer


def _metrics(registry: CollectorRegistry) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        return Response(encode(registry), kind)

    return answer


def _samples(store: SampleStore, request: Request) -> Response:
    try:
        time = float(request.query.get("after", "0"))
    except ValueError:
        return Response(
            b"after= is the time of the newest sample that is known, 0 for none\n", status=400
        )
    return Response(store.after(time).encode(), _JSON)
